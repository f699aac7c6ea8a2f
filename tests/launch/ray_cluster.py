"""A Ray cluster of two nodes on this machine: ``with ray_cluster() as cluster``."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
from launched import free_ports, until

CPUS = 4  # of each node
_FASTER = {  # than a cluster between machines: how soon a node that is silent counts as lost
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_prestart_worker_first_driver": "0",  # of as many processes as there are CPUs, for nobody
}


_OF = "PHALANX_TEST_RAY"
_COVERED = 'mount -t tmpfs none "$0" && exec "$@"'  # an empty folder in place of one, for what runs there alone


def lacking_for_ray() -> str:
    """Why no cluster can be had here; empty where one can."""
    return "" if find_spec("ray") else "not installed: ray"


def covers() -> bool:
    """Whether nodes can be kept here from seeing a folder."""
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
    return bool(shutil.which("unshare")) and not subprocess.run(words, capture_output=True, check=False).returncode


class RayCluster:
    """A head and nodes that join it. A variable of each process says of which cluster and node it is.

    Attributes:
        head_only: a folder that the head alone sees, where ``covers``; on the others it is empty.
        covers: whether that can be had.
        scratch: where its processes have what is temporary.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-ray-"))
        self.head_only, self.scratch, self.covers = self.folder / "head-only", self.folder / "scratch", covers()
        self.head_only.mkdir()
        self.scratch.mkdir()
        self.port, self.client_port = free_ports(2)
        self._nodes = 0

    @property
    def address(self) -> str:
        """As ``--to`` has it, of the client's server."""
        return f"ray://127.0.0.1:{self.client_port}"

    @property
    def node_address(self) -> str:
        """The same from one of its nodes."""
        return f"ray:127.0.0.1:{self.port}"

    def start_head(self) -> None:
        words = ("--head", f"--port={self.port}", f"--ray-client-server-port={self.client_port}")
        self._start(*words, "--include-dashboard=false", f"--temp-dir={self.folder}")

    def start_node(self) -> int:
        """Returns its number."""
        return self._start(f"--address=127.0.0.1:{self.port}")

    def _start(self, *words: str) -> int:
        resources = (f"--num-cpus={CPUS}", "--num-gpus=0", "--object-store-memory=80000000")
        ports = ("--min-worker-port=0", "--max-worker-port=0")  # any: two nodes of a machine would take the same
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        if self.covers and "--head" not in words:
            ray = ["unshare", "--mount", "sh", "-c", _COVERED, str(self.head_only), *ray]
        number, self._nodes = self._nodes, self._nodes + 1
        log = self.folder / f"node-{number}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                [*ray, *words, *resources, *ports, "--disable-usage-stats"],
                env={
                    **os.environ,
                    **_FASTER,
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "HOME": str(self.folder),
                    "TMPDIR": str(self.scratch),
                    _OF: self._mark(number),
                },
                cwd=self.folder,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                timeout=180,
                check=False,
            )
        assert not done.returncode, log.read_text()
        return number

    def _mark(self, number: int | None) -> str:
        return f"{self.folder}:{'' if number is None else number}"

    def lose(self, number: int | None) -> None:
        """The node, or each, is gone, with all that runs there, as when it loses its power."""
        for process in self.processes(number):
            with suppress(psutil.Error):
                process.kill()

    def processes(self, number: int | None = None, word: str = "") -> list[psutil.Process]:
        """Those of a node, or of all, and of what runs there, in whose command line ``word`` stands."""
        found = set[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_OF, "").startswith(self._mark(number)):
                    found |= {process, *process.children(recursive=True)}  # Ray's workers write over their environment
        return [process for process in found if _runs(process) and word in _line(process)]

    def end(self) -> None:
        """End all of it."""
        until(self._killed, 60, "all processes of the cluster are gone")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _killed(self) -> bool:
        left = self.processes()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return not left


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Within, a cluster is up."""
    cluster = RayCluster()
    try:
        cluster.start_head()
        cluster.start_node()
        until(lambda: _listens(cluster.client_port), 120, "the head takes clients")
        yield cluster
    finally:
        cluster.end()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
