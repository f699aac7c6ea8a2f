"""Clusters on this machine: a Slurm with its own munge, of two nodes and three in a partition; a Ray of two nodes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from launched import free_ports, until

if find_spec("ray"):  # before any test: it sets variables of its own
    import ray.job_submission  # noqa: F401

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
# cred_expire is how long a job that is queued again waits, 6 s or more.
CONFIGURATION = """\
ClusterName=phalanx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
FirstJobId={first}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge={remembered}
SlurmdTimeout=120
PartitionName=cpu Nodes=n[1-2] Default=YES MaxTime=1-00:00:00 State=UP
PartitionName=three Nodes=n[1-3] MaxTime=1-00:00:00 State=UP
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=4000
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=16 RealMemory=4000
"""


def lacking() -> str:
    """Why no cluster can be had here; empty where one can."""
    if os.geteuid():
        return "Slurm's daemons need root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    return f"not installed: {', '.join(missing)} (packages slurm-wlm and munge)" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up; this process's environment leads Slurm's commands to it."""

    folder: Path

    def start_node(self, node: str) -> None:
        _run("slurmd", "-N", node)

    def bring_back(self, node: str) -> None:
        self.start_node(node)
        with suppress(subprocess.CalledProcessError):  # it is taken back by itself as soon as it answers
            _run("scontrol", "update", f"nodename={node}", "state=resume")

    def set_time_limit(self, job: int, minutes: int) -> bool:
        """Whether Slurm took it: not while it puts the job back into its queue."""
        with suppress(subprocess.CalledProcessError):
            return _run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}") == ""
        return False

    def lose_node(self, node: str) -> None:
        """As when it loses its power: everything on it is gone at once, and Slurm finds out."""
        for process in self._processes():
            with suppress(psutil.Error):
                files = [Path(file.path).name for file in process.open_files()]
                if process.environ().get("SLURMD_NODENAME") == node or f"slurmd-{node}.log" in files:
                    process.kill()
        _run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def jobs(self) -> str:
        """A line for each job in the queue: its number and its state."""
        return _run("squeue", "--noheader", "--format=%i %T").strip()

    def processes_with(self, text: str) -> list[psutil.Process]:
        """Processes of jobs in whose command line it stands."""
        found = []
        for process in self._processes():
            with suppress(psutil.Error):
                found += [process] if text in " ".join(process.cmdline()) else []
        return found

    def end(self) -> None:
        """End all jobs and daemons, and whatever is left of them."""
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            _run("scancel", "--signal=KILL", "--full", "--user=root")
            _run("scancel", "--user=root")
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()
        until(lambda: not self._processes(), 60, "all processes of the cluster are gone")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ().get("SLURM_CONF") == str(self.folder / "slurm.conf")
                own = own or process.cwd() == str(self.folder)  # slurmstepd writes its title over its environment
                if own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@contextmanager
def slurm_cluster(*, remembered: int = 300) -> Iterator[Cluster]:
    """Within, a cluster is up, which knows of a job that has ended for ``remembered`` seconds, 2 or more."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-slurm-"))
    before = dict(os.environ)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    cluster = Cluster(folder)
    try:
        _start(folder, remembered)
        for node in ("n1", "n2", "n3"):
            cluster.start_node(node)
        asked = ("sinfo", "--noheader", "--partition=three", "--format=%t %D")
        until(lambda: _run(*asked).split() == ["idle", "3"], 60, "all nodes are up")
        yield cluster
    finally:
        cluster.end()
        os.environ.clear()
        os.environ.update(before)


def _start(folder: Path, remembered: int) -> None:
    munge = folder / "munge"
    for path in (munge, folder / "state"):
        path.mkdir(mode=0o700)
    (munge / "key").write_bytes(secrets.token_bytes(1024))
    (munge / "key").chmod(0o400)
    ports = free_ports(4)
    first = 1 + secrets.randbelow(19_000)  # jobs meet at a port by their number, and other clusters are on this machine
    given = {"host": socket.gethostname(), "folder": folder, "ports": ports, "first": first}
    text = CONFIGURATION.format(**given, remembered=remembered)
    (folder / "slurm.conf").write_text(text)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    _run("munged", "--force", *(f"--{option}={munge / name}" for option, name in files.items()))
    _run("slurmctld", "-c")


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))


def _run(name: str, *words: str) -> str:
    """What the program prints. Of a daemon the outputs are files: it would hold a pipe open."""
    program = _program(name)
    assert program
    with tempfile.TemporaryFile("w+") as out:
        done = subprocess.run(
            [program, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=90, check=False
        )
        out.seek(0)
        said = out.read()
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, [name, *words], said)
    return said


CPUS = 4  # of each node
_FASTER = {  # than a cluster between machines: how soon a node that is silent counts as lost
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_prestart_worker_first_driver": "0",  # of as many processes as there are CPUs, for nobody
}


_OF = "PHALANX_TEST_RAY"


def lacking_for_ray() -> str:
    """Return why no cluster can be had here; empty if one can."""
    missing = [name for name in ("ray", "aiohttp_cors", "opencensus") if not find_spec(name)]
    return f"not installed: {', '.join(missing)} (ray[default])" if missing else ""


class RayCluster:
    """A head and nodes that join it. A variable of each process says of which cluster and node it is."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-ray-"))
        self.port, self.dashboard = free_ports(2)
        self._nodes = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    def start_head(self) -> None:
        words = ("--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}", f"--temp-dir={self.folder}")
        self._start(*words, f"--ray-client-server-port={free_ports(1)[0]}")

    def start_node(self) -> int:
        return self._start(f"--address=127.0.0.1:{self.port}")

    def _start(self, *words: str) -> int:
        resources = (f"--num-cpus={CPUS}", "--num-gpus=0", "--object-store-memory=80000000")
        agent = f"--dashboard-agent-listen-port={free_ports(1)[0]}"
        ports = ("--min-worker-port=0", "--max-worker-port=0", agent)  # two nodes of a machine would take the same
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
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
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
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
    cluster = RayCluster()
    try:
        cluster.start_head()
        cluster.start_node()
        until(lambda: _listens(cluster.dashboard), 120, "the dashboard answers")
        yield cluster
    finally:
        cluster.end()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
