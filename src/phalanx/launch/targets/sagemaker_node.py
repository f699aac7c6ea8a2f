"""torchrun's agent in a container of a SageMaker job: ``python -m phalanx.launch.targets.sagemaker_node``.

Its inputs are below ``/opt/ml``: hosts (``input/config``), code and run file (``input/data/code``), whose checksums are
in the request. Agents meet on the first host. SageMaker asks a job to stop, and takes spot capacity back, by SIGTERM to
this process, the container's first, two minutes before SIGKILL. The file ``output/failure`` becomes the job's
``FailureReason``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.config import RunSpec
from phalanx.device_kinds import interface_variables
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.events.log import RunLog, last_failure
from phalanx.files import read_json
from phalanx.launch.addresses import LOOPBACK
from phalanx.launch.reaper import SAVED, adopt_orphans, await_orphans
from phalanx.launch.runfile import absolute
from phalanx.launch.targets.code_pack import check_digest, unpack
from phalanx.launch.targets.launch_folder import run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words
from phalanx.launch.targets.sagemaker import CODE, CODE_CHANNEL, ROOT, RUN

_PORT = 29400
_FLUSH = 5.0  # seconds for the workers' last output
_REASON = 1024  # bytes of a failure that SageMaker keeps
_FIX = "phalanx launch JOB --to sagemaker, which writes it"


def main(root: Path = ROOT) -> int:
    """Run the agent of this host, and write a failure below ``root``.

    Returns 0 if the run has ended, ``SAVED`` if it was asked to stop, 2 for wrong input, else another code.
    """
    signal.signal(signal.SIGTERM, _leave)  # the first process of a container hears only signals it handles
    try:
        hosts, here, interface = _hosts(root)
        run = unpacked(root)
        if len(hosts) > 1 and interface in (name for _, name in socket.if_nameindex()):
            for variable in interface_variables():
                os.environ.setdefault(variable, interface)
        code = _run_agent(root, run, hosts, here)
        failure = "" if code in (0, SAVED) else _failure(run)
    except PhalanxError as error:
        print(error, file=sys.stderr, flush=True)
        code, failure = error.exit_code, str(error)
    except Exception as error:
        traceback.print_exc()
        code, failure = 1, f"{type(error).__name__}: {error}"
    if failure:
        with suppress(OSError):
            (root / "output").mkdir(parents=True, exist_ok=True)
            (root / "output" / "failure").write_text(failure.encode()[:_REASON].decode(errors="ignore"))
    return code


def unpacked(root: Path) -> RunSpec:
    """Unpack the code into ``phalanx/code``, and write the run file beside it. Returns the run, with its paths here.

    Raises:
        SpecError: the run file is wrong.
        RunError: code or run file are not those of the launch.
    """
    told = _config(root, "hyperparameters")
    channel, code = root / "input" / "data" / CODE_CHANNEL, _runfile(root).with_name("code")
    for name in (CODE, RUN):
        if not (channel / name).is_file():
            raise RunError(f"{channel / name} is not there\n    try: {_FIX}")
        check_digest(channel / name, str(told.get(f"{name}-sha256", "")))
    shutil.rmtree(code, ignore_errors=True)  # of an earlier start in this container
    unpack(channel / CODE, code)
    os.chdir(code)  # the job is named from there
    given = run_from(channel / RUN, _FIX)
    run = absolute(replace(given, folder=root / given.folder))
    _runfile(root).write_text(run.to_toml())
    return run


def _config(root: Path, name: str) -> dict[str, Any]:
    return read_json(root / "input" / "config" / f"{name}.json", where="SageMaker", fix=_FIX)


def _hosts(root: Path) -> tuple[list[str], int, str]:
    """Return the hosts, the index of this one, and the network interface between them."""
    told = _config(root, "resourceconfig")
    return told["hosts"], told["hosts"].index(told["current_host"]), str(told.get("network_interface_name", ""))


def _run_agent(root: Path, run: RunSpec, hosts: list[str], here: int) -> int:
    meeting = f"{hosts[0] if len(hosts) > 1 else LOOPBACK}:{_PORT}"
    meets = meeting_options(meeting, start="phalanx", rank=here)  # no other job reaches these hosts
    options, cores = {"max-restarts": str(run.restarts), **meets}, len(os.sched_getaffinity(0))
    place, runfile = NodePlace(name=hosts[here], nodes=len(hosts), cores=cores, options=options), _runfile(root)
    adopt_orphans()
    try:
        return be_agent(run, place, worker_words(runfile, runfile.parent, marked=True))
    finally:
        await_orphans(_FLUSH)  # the container ends with this process, and with it those that copy the workers' output


def _runfile(root: Path) -> Path:
    return root / "phalanx" / RUN


def _failure(run: RunSpec) -> str:
    with suppress(SpecError, OSError):
        if error := last_failure(RunLog(run.folder).events):
            at = "" if error.get("step") is None else f", step {error['step']}"
            return f"rank {error['rank']}{at}: {error['message']}"
    return "a worker ended without an error of its own: phalanx logs has what it printed last"


def _leave(*_: object) -> None:
    """End at once, as modules being imported may catch an exception: without workers nothing has to be saved."""
    os._exit(SAVED)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
