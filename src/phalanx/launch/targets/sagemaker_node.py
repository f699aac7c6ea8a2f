"""torchrun's agent in a container of a SageMaker job: ``python -m phalanx.launch.targets.sagemaker_node``.

It finds all it needs below ``/opt/ml``: who it is (``input/config``), code and run file (``input/data/code``), which it
holds against the checksums of the request. Agents meet on the first host. SageMaker asks a job to stop, and takes spot
capacity back, by SIGTERM to this process, the container's first, and ends the container two minutes later: the agent
has its workers save. What went wrong stands in ``output/failure``, which becomes the job's ``FailureReason``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from phalanx.config import RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import interface_variables
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.events.log import last_failure, read
from phalanx.files import read_json
from phalanx.launch.addresses import LOOPBACK
from phalanx.launch.code_files import digest_of
from phalanx.launch.reaper import SAVED, adopt_orphans, await_orphans
from phalanx.launch.runfile import absolute
from phalanx.launch.targets.code_pack import unpack
from phalanx.launch.targets.launch_folder import run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words
from phalanx.launch.targets.sagemaker_request import CODE, CODE_CHANNEL, ROOT, RUN

_PORT = 29400
_FLUSH = 5.0  # seconds for what workers printed last
_REASON = 1024  # bytes that SageMaker keeps of what went wrong
_FIX = "phalanx launch JOB --to sagemaker, which writes it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerHosts:
    """The hosts of the job, and which of them this is.

    Attributes:
        hosts: by name; agents meet at the first.
        here: the number of this one among them.
        interface: the network interface between them.
    """

    hosts: tuple[str, ...]
    here: int
    interface: str

    @classmethod
    def read(cls, root: Path) -> Self:
        """As SageMaker has written it.

        Raises:
            SpecError: it cannot be read.
        """
        path = root / "input" / "config" / "resourceconfig.json"
        told = read_json(path, where="SageMaker", fix=_FIX)
        try:
            hosts = tuple(str(host) for host in told["hosts"])
            here = hosts.index(str(told["current_host"]))
            return cls(hosts=hosts, here=here, interface=str(told.get("network_interface_name", "")))
        except (KeyError, TypeError, ValueError, AttributeError):
            allowed = "hosts, and current_host, which is one of them"
            raise SpecError.of("SageMaker", f"{path} with {told}", allowed, _FIX) from None

    @property
    def meeting(self) -> str:
        """Where agents meet."""
        return f"{self.hosts[0] if len(self.hosts) > 1 else LOOPBACK}:{_PORT}"


def main(root: Path = ROOT) -> int:
    """Be the agent of this host. Returns the container's exit code, and leaves word of a failure below ``root``.

    0: the run has ended. ``SAVED``: it was asked to stop. Else it failed: 2 where something was written wrong.
    """
    signal.signal(signal.SIGTERM, _leave)  # the first process of a container has no other answer to it than this
    try:
        hosts = ContainerHosts.read(root)
        run = unpacked(root)
        code = _be_agent(root, run, hosts)
        if code not in (0, SAVED):
            _leave_word(root, _what_failed(run, root))
        return code
    except PhalanxError as error:
        print(error, file=sys.stderr, flush=True)
        _leave_word(root, str(error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        _leave_word(root, f"{type(error).__name__}: {error}")
        return 1


def unpacked(root: Path) -> RunSpec:
    """Unpack the code into ``phalanx/code``, and write the run file beside it. Returns the run, with its paths here.

    Raises:
        SpecError: the run file is wrong.
        RunError: code or run file are not what was handed over.
    """
    told = read_json(root / "input" / "config" / "hyperparameters.json", where="SageMaker", fix=_FIX)
    asked = told if isinstance(told, dict) else {}
    channel, code = root / "input" / "data" / CODE_CHANNEL, _runfile(root).with_name("code")
    for name in (CODE, RUN):
        if not (channel / name).is_file():
            raise RunError(f"{channel / name} is not there\n    try: {_FIX}")
    shutil.rmtree(code, ignore_errors=True)  # of an earlier start in this container
    unpack(channel / CODE, str(asked.get(f"{CODE}-sha256", "")), code)
    if (found := digest_of(channel / RUN)) != asked.get(f"{RUN}-sha256"):
        raise RunError(f"{channel / RUN} is not what was handed over: its SHA-256 is {found}\n    try: {_FIX}")
    os.chdir(code)  # what the job names is named from there
    given = run_from(channel / RUN, _FIX)
    run = absolute(replace(given, folder=root / given.folder))
    _runfile(root).write_text(run.to_toml())
    return run


def _be_agent(root: Path, run: RunSpec, there: ContainerHosts) -> int:
    if len(there.hosts) > 1 and there.interface in (name for _, name in socket.if_nameindex()):
        for name in interface_variables():
            os.environ.setdefault(name, there.interface)
    start = "phalanx"  # no other job reaches these hosts
    meets = meeting_options(there.meeting, start=start, rank=there.here)
    place = NodePlace(
        name=there.hosts[there.here],
        nodes=len(there.hosts),
        cores=len(os.sched_getaffinity(0)),
        options={"max-restarts": str(run.restarts), **meets},
    )
    runfile = _runfile(root)
    adopt_orphans()
    try:
        return be_agent(run, place, worker_words(runfile, runfile.parent, marked=True))
    finally:
        await_orphans(_FLUSH)  # with this process the container ends, and with it what copies what workers printed


def _runfile(root: Path) -> Path:
    return root / "phalanx" / RUN


def _what_failed(run: RunSpec, root: Path) -> str:
    """The error that the run's log tells of, or else what a rank here printed last."""
    with suppress(SpecError, OSError):
        if error := last_failure(read(run.folder / EVENTS)):
            at = "" if error.get("step") is None else f", step {error['step']}"
            return f"rank {error['rank']}{at}: {error['message']}"
    last: dict[str, list[str]] = {}
    for path in sorted(_runfile(root).parent.glob("rank-*.log")):
        lines = path.read_text(errors="replace").strip().splitlines()
        last[path.stem] = lines[-12:]
    said = {name: lines for name, lines in last.items() if any(re.search(r"Error|error|Killed", one) for one in lines)}
    name, lines = next(iter((said or last).items()), ("", []))
    return "\n".join([f"{name} printed last:", *lines]) if lines else "a worker ended without a word"


def _leave_word(root: Path, text: str) -> None:
    """Leave what went wrong where SageMaker looks for it: the first lines, as long as it keeps them."""
    with suppress(OSError):
        (root / "output").mkdir(parents=True, exist_ok=True)
        (root / "output" / "failure").write_text(text.encode()[:_REASON].decode(errors="ignore"))


def _leave(*_: object) -> None:
    """Before the agent has workers there is nothing to save; what is being imported may catch all that is raised."""
    os._exit(SAVED)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
