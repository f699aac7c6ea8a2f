"""``phalanx train`` as a user runs it: a program of its own, begun, begun again after it has died, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from phalanx.config import Plan
from phalanx.launch.reaper import die_with


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """What is trained, and how far.

    Attributes:
        job: where the job is, as ``phalanx train`` takes it.
        steps: optimizer steps of the whole run.
        checkpoint_every: steps between checkpoints.
        options: further options of ``phalanx train``.
    """

    job: str
    plan: Plan
    steps: int
    checkpoint_every: int
    options: tuple[str, ...] = ()

    def start(self, folder: Path, log: Path, *, restarts: int) -> subprocess.Popen[bytes]:
        """Begin the run in ``folder``, or go on with it; what it prints goes to the end of ``log``.

        It ends with this process, however that ends. Temporary files go to ``tmp`` beside the log.
        """
        temporary = log.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        argv = ["env", f"TMPDIR={temporary}", *self._argv(folder), "--resume", "auto", "--restarts", str(restarts)]
        with log.open("ab") as output:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )

    def _argv(self, folder: Path) -> list[str]:
        words = ["--plan", str(self.plan), "--steps", str(self.steps), "--run", str(folder)]
        words += ["--checkpoint-every", str(self.checkpoint_every), "--no-forecast", "--quiet", *self.options]
        return [sys.executable, "-m", "phalanx", "train", self.job, *words]
