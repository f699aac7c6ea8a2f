"""Runs ``phalanx`` commands in forks of one process that has imported all there is, which is most of what they take.

``python forked.py`` reads a JSON line a command (``argv``, ``folder``, ``output``, ``patience``) and answers each with
its exit code; 124 where it did not end in time. ``-c`` and a text are Python's. ``Forked`` is the other end.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Forked:
    """A process to fork commands from, until ``close``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, argv: Sequence[str], folder: Path, *, patience: float) -> tuple[int, str]:
        """Exit code and output of ``phalanx``, or of ``python -c``, with these arguments in ``folder``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = folder / ".output"
        asked = {"argv": list(argv), "folder": str(folder), "output": str(output), "patience": patience}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return code, output.read_text()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Answer one command after the other."""
    import sklearn.datasets  # noqa: F401  what examples read
    import torch

    torch.set_num_threads(1)
    get_over_with()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _become(asked)
        print(_waited(child, asked["patience"]), flush=True)


def get_over_with() -> None:
    """Load and do what is slow the first time, in a process to fork from: once for all that are forked from it.

    Loaded is what a run loads when it first needs it. Done is a step of a sharded model, and a look at one to be split:
    the first operations on fakes and shards have torch build its tables.
    """
    import numpy.ma  # noqa: F401  what np.unique loads
    import torch._dynamo  # noqa: F401

    import phalanx

    left_out = ("phalanx.demo.jobs", "phalanx.__main__", "phalanx.train.keras.")  # the last: loads Keras, if it can
    for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
        if not module.name.startswith(left_out):
            importlib.import_module(module.name)
    _first_operations()


def _first_operations() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from phalanx.config import Plan
    from phalanx.demo.jobs.gpt import gpt_job
    from phalanx.train.look_ahead import preview
    from phalanx.train.refusals import rank_0

    job = gpt_job(layers=1, width=16, heads=2, context=8, batch=4, steps=1)
    with torch.random.fork_rng(devices=[]):
        with rank_0(Plan.parse("fsdp=2")):
            model = job.model()
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.zeros((1, 8), dtype=torch.long)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        preview(job, Plan.parse("tp=2 sequence=true"))


def _waited(child: int, patience: float) -> int:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _become(asked: Mapping[str, Any]) -> None:
    """Be the command, as a new interpreter would."""
    os.setsid()
    os.chdir(asked["folder"])
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((0, nothing), (1, output), (2, output)):
        os.dup2(there, here)
    sys.argv = ["phalanx", *asked["argv"]]
    sys.path[0] = str(Path(sys.executable).parent)
    code: Any = 1
    try:
        if asked["argv"][0] == "-c":
            sys.argv, sys.path[0] = ["-c"], ""
            exec(asked["argv"][1], {"__name__": "__main__"})
            code = 0
        else:
            from phalanx.cli import main

            code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
