"""Runs of ``phalanx train`` under faults: what strikes, what comes after it, and that losses are seen.

The command is forked from this process, which has imported torch, in place of a new interpreter: most of what a start
takes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import pytest
from inject import Looks

from chaos import Chaos, train_command
from chaos.injector import InjectedRun
from phalanx.checkpoint.writing import FileContent
from phalanx.cli import main
from phalanx.errors import RunError
from phalanx.events import RunLog

LOOKS = Looks()  # of who strikes at what the run has done
JOB = '''
import sys
sys.path.insert(0, {small!r})
import torch
import phalanx as px
import small
from dataclasses import replace
from pathlib import Path
from small import Net
from test_chaos import LOOKS

def job(**how):
    """Whose steps wait for who strikes to see the one before, whatever keeps it: one look may have begun already."""
    given = small.job(**how)
    return replace(given, loss=lambda *of: (LOOKS.wait(2), given.loss(*of))[1])

def forgets():
    """Each time it is begun its learning rate is another."""
    Path("begun").open("a").write("x")
    lr = 1e-3 * Path("begun").stat().st_size
    return job(optimizer=lambda params: torch.optim.AdamW(params, lr=lr))

def fails():
    def data():
        raise ValueError("my own mistake")
    return job(data=data)
'''


class ForkedCommand:
    """``phalanx ...`` in a fork of this process; what is used of ``subprocess.Popen``."""

    def __init__(self, argv: list[str], *, stdout: IO[bytes], **_: Any) -> None:
        temporary = argv[1].removeprefix("TMPDIR=")
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(stdout.fileno(), descriptor)
            os.environ["TMPDIR"] = tempfile.tempdir = temporary
            sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
            sys.argv = ["phalanx", *argv[argv.index("phalanx") + 1 :]]
            code: Any = 1
            try:
                code = main()
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code if isinstance(code, int) else 1)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


@pytest.fixture(autouse=True)
def _forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forking:
        DEVNULL, Popen = subprocess.DEVNULL, ForkedCommand

    monkeypatch.setattr(train_command, "subprocess", Forking)


@pytest.fixture(autouse=True)
def _no_run_outruns_who_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps wait to be seen, and its saves take longer than it takes to find out which process is which rank."""
    take, write = InjectedRun._take_events, FileContent.write

    def take_events(run: InjectedRun) -> None:
        take(run)
        LOOKS()

    def write_slowly(content: FileContent, path: Path) -> Any:
        time.sleep(0.03)
        return write(content, path)

    monkeypatch.setattr(InjectedRun, "_take_events", take_events)
    monkeypatch.setattr(FileContent, "write", write_slowly)


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB.format(small=str(Path(__file__).parents[1] / "distributed")))
    return str(path)


def test_kills_lose_nothing_under_shards(job: str, tmp_path: Path) -> None:
    """Of a rank in a step and within a save, of all ranks, of the launcher, of everything."""
    chaos = Chaos(job, "fsdp=2", folder=tmp_path / "chaos", steps=60, checkpoint_every=4)
    verdict = chaos.run(
        [
            *("SIGKILL rank 1 step 6", "SIGKILL rank 0 save 3", "SIGKILL rank 1 save 3"),
            *("SIGKILL launcher step 14", "SIGKILL everything save 4"),
        ]
    )
    assert verdict.nothing_lost, verdict
    assert len(verdict.struck) == 5, verdict
    saves = [one for one in verdict.outcomes if " save " in one.fault]
    begun_at = [int(one.what.rpartition(" ")[2]) for one in saves]
    for planned, begun, one in zip((12, 12, 16), begun_at, saves, strict=True):  # or in the next, where it was quicker
        assert one.saving is not None
        assert one.saving >= planned, verdict
        assert one.saving % 4 == 0
        assert begun in (one.saving - 4, one.saving), verdict  # the other rank publishes what was whole already
    assert any(begun < (one.saving or 0) for begun, one in zip(begun_at, saves, strict=True)), verdict
    assert all(one.next_step is not None for one in verdict.outcomes)
    assert verdict.lives == 6
    assert verdict.weights is not None
    assert (verdict.weights.differing, verdict.weights.allowed) == (0, 0.0)
    assert verdict.weights.tensors > 8  # the optimizer's, too
    assert "nothing was lost" in str(verdict)
    starts = [one for one in RunLog(tmp_path / "chaos/disturbed-1/run").events if one["event"] == "start"]
    assert [one["world_size"] for one in starts] == [2] * 6


@pytest.mark.long
def test_what_stands_for_a_moment_goes_on_and_what_is_asked_to_end_begins_again(job: str, tmp_path: Path) -> None:
    chaos = Chaos(job, "dp=2", folder=tmp_path / "chaos", steps=90, checkpoint_every=3)
    verdict = chaos.run(["SIGSTOP rank 1 step 15 for 0.2s", "SIGTERM step 40"])
    assert verdict.nothing_lost, verdict
    stood, ended = (one.what for one in verdict.struck)
    assert stood == "the run went on"
    assert ended.startswith("exit code 75, begun again"), verdict


def test_a_flipped_bit_in_the_newest_checkpoint_loses_nothing(job: str, tmp_path: Path) -> None:
    chaos = Chaos(job, "dp=2", folder=tmp_path / "chaos", steps=24, checkpoint_every=3)
    verdict = chaos.run(["flip tensors step 16"])  # two saves are whole then, even if a third has only begun
    assert verdict.nothing_lost, verdict
    (outcome,) = verdict.outcomes
    damaged, begun = (int(re.findall(r"step[- ](\d+)", text)[0]) for text in (outcome.damaged, outcome.what))
    assert begun < damaged, "it went on from the one before"
    assert not outcome.believed


def test_what_is_lost_is_seen(job: str, tmp_path: Path) -> None:
    chaos = Chaos(f"{job}:forgets", "dp=2", folder=tmp_path / "chaos", steps=6, checkpoint_every=2)
    verdict = chaos.run(["SIGKILL rank 0 step 3"])
    assert verdict.samples is not None
    assert (verdict.nothing_lost, len(verdict.struck), verdict.samples.lost) == (False, 1, 0)
    assert "tensors of the final checkpoint" in verdict.lost[0]
    assert "SIGKILL rank 0 step 3: in step" in str(verdict)


def test_a_job_that_fails_by_itself(job: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)the run fails without any fault.*my own mistake"):
        Chaos(f"{job}:fails", "dp=2", folder=tmp_path / "chaos").undisturbed()
