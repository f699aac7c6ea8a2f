"""Runs of ``phalanx train`` under faults: what strikes, what comes after it, and that losses are seen.

The command is forked from this process, which has imported torch, in place of a new interpreter: most of what a start
takes. docs/how-to/try-a-job-under-faults.md starts it as users do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner
from inject import Looks

from law_rows import longer
from phalanx.checkpoint.writing import FileContent
from phalanx.cli import main
from phalanx.events import read
from phalanx.verify.chaos import Chaos, train_command
from phalanx.verify.chaos.injector import InjectedRun

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
    starts = [one for one in read(tmp_path / "chaos/disturbed-1/run/events.jsonl") if one["event"] == "start"]
    assert [one["world_size"] for one in starts] == [2] * 6


@pytest.mark.long
def test_what_goes_wrong_within_a_rank_and_around_it(job: str, tmp_path: Path) -> None:
    chaos = Chaos(job, "dp=2", folder=tmp_path / "chaos", steps=180, checkpoint_every=3)
    verdict = chaos.run(
        [
            *("exception rank 1 step 4", "clock rank 0 step 10", "SIGSTOP rank 1 step 15 for 0.2s"),
            *("slow-disk ranks save 6 for 0.2s", "full-disk rank 0 save 7", "SIGTERM step 40"),
        ]
    )
    assert verdict.nothing_lost, verdict
    assert len(verdict.struck) == 6, verdict
    words = {one.fault.split()[0]: one.what for one in verdict.outcomes}
    assert "begun again" in words["exception"]
    assert words["SIGTERM"].startswith("exit code 75, begun again"), verdict
    assert words["clock"] == words["SIGSTOP"] == words["slow-disk"] == "the run went on"


def test_a_flipped_bit_in_the_newest_checkpoint_loses_nothing(job: str, tmp_path: Path) -> None:
    chaos = Chaos(job, "dp=2", folder=tmp_path / "chaos", steps=24, checkpoint_every=3)
    verdict = chaos.run(["flip tensors step 16"])  # two saves are whole then, even if a third has only begun
    assert verdict.nothing_lost, verdict
    (outcome,) = verdict.outcomes
    damaged, begun = (int(re.findall(r"step[- ](\d+)", text)[0]) for text in (outcome.damaged, outcome.what))
    assert begun < damaged, "it went on from the one before"
    assert not outcome.believed


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "try-a-job-under-faults.md"
SHOWN = re.findall(r"^\$ phalanx (chaos train\.py .*)$", PAGE.read_text(), flags=re.MULTILINE)
FEWER = {"--kills 50": "--kills 2", "--faults 30": "--faults 2"}


@pytest.mark.parametrize("shown", longer(*SHOWN))
def test_commands_of_the_page_that_take_long_run_with_smaller_numbers(shown: str, job: str) -> None:
    for text, fewer in FEWER.items():
        shown = shown.replace(text, fewer)
    argv = shlex.split(shown.replace("train.py", job))
    done = CliRunner().invoke(main, [*argv, "--steps", "24", "--checkpoint-every", "4", "--run", "chaos"])
    assert done.exit_code == 0, done.output


def test_what_is_lost_is_seen(job: str) -> None:
    argv = ["chaos", f"{job}:forgets", "--plan", "dp=2", "--steps", "6", "--checkpoint-every", "2", "--at"]
    done = CliRunner().invoke(main, [*argv, "SIGKILL rank 0 step 3", "--run", "chaos", "--json"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert (told["nothing_lost"], told["struck"], told["samples"]["lost"]) == (False, 1, 0)
    assert "tensors of the final checkpoint" in told["lost"][0]
    assert "SIGKILL rank 0 step 3: in step" in done.stderr


def test_a_job_that_fails_by_itself(job: str) -> None:
    done = CliRunner().invoke(main, ["chaos", f"{job}:fails", "--plan", "dp=2", "--kills", "1", "--run", "chaos"])
    assert done.exit_code == 3, done.output
    assert "the run fails without any fault" in done.stderr
    assert "my own mistake" in done.stderr
