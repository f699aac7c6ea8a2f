"""What comes to a run from outside: a second run in its folder, a full disk, links, a reader that goes away."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from small import LENGTH, fit, job, table

import phalanx as px
from law_rows import longer
from phalanx import checkpoint
from phalanx.cli import main
from phalanx.config import RunSpec
from phalanx.config.run_files import RUN_FILES
from phalanx.errors import PhalanxError, SpecError, WorkerError
from phalanx.events import RunLog
from phalanx.launch.runfile import RunFolder

TOY = """
import time
from dataclasses import replace
import phalanx as px, torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)

def data():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

def job():
    return px.Job(model=lambda: nn.Linear(8, 2), data=data, loss=lambda o, b: px.cross_entropy(o, b[1]),
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=24, epochs=2)

def slow():
    return replace(job(), model=lambda: Slow(8, 2), epochs=100)

def seeded():
    return replace(job(), seed=7)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def invoke(*argv: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in argv])


def train(toy: Path, *more: object) -> Result:
    return invoke("train", toy, "--run", "out", "--plan", "single", "--no-forecast", "--quiet", *more)


def settings() -> dict[str, str]:
    return {name: Path("out", name).read_text() for name in ("run.toml", "plan.toml", "events.jsonl")}


def tried(text: str) -> list[str]:
    (line,) = re.findall(r"try: (.*)", text)
    return shlex.split(line)


class TestRefused:
    def test_another_batch_and_what_the_error_says_to_try(self, toy: Path) -> None:
        assert train(toy, "--steps", 2, "--batch", 12).exit_code == 0
        before = settings()
        result = train(toy, "--resume", "--batch", 24, "--steps", 4)
        assert result.exit_code == 2
        assert "batch: 12 there, 24 now" in result.stderr
        assert settings() == before
        again = train(toy, *tried(result.stderr), "--steps", 4)
        assert again.exit_code == 0, again.stderr
        assert train(toy, "--resume", "--steps", 5).exit_code == 0, "and what the run file says still works"

    def test_another_plan_or_job(self, toy: Path) -> None:
        """The last is seen by a worker alone: the checkpoint fits the job by its identity, and not by its tensors."""
        assert train(toy, "--steps", 2).exit_code == 0
        before = settings()
        for argv in (["--plan", "dp=25"], ["--plan", "pp=9"]):
            assert train(toy, "--resume", "--steps", 4, *argv).exit_code == 2
        seeded = invoke("train", f"{toy}:seeded", "--run", "out", "--resume", "--plan", "single")
        assert seeded.exit_code == 2
        toy.write_text(toy.read_text().replace("nn.Linear(8, 2), data", "nn.Linear(8, 16), data"))
        assert settings() == before
        assert train(toy, "--resume", "--steps", 4).exit_code != 0
        assert {name: before[name] for name in ("run.toml", "plan.toml")} == {
            name: Path("out", name).read_text() for name in ("run.toml", "plan.toml")
        }


class TestOneWriter:
    @pytest.fixture
    def owner(self, toy: Path) -> Iterator[subprocess.Popen[bytes]]:
        argv = ["train", f"{toy}:slow", "--run", "out", "--plan", "single", "--checkpoint-every", "1", "--no-forecast"]
        command = [sys.executable, "-m", "phalanx", *argv, "--steps", "500"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not Path("out/checkpoints/step-00000001").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()
        process.wait()

    def test_a_second_training_is_refused(self, toy: Path, owner: subprocess.Popen[bytes]) -> None:
        for more in ([], ["--resume"]):
            result = invoke("train", f"{toy}:slow", "--run", "out", "--plan", "single", "--steps", "500", *more)
            assert result.exit_code == 2
            assert re.search(rf"another training goes on: process {owner.pid} on ", result.stderr)
            assert result.stderr.count("error") == 1
        pruned = invoke("checkpoint", "prune", "out", "--keep", "1")
        assert (pruned.exit_code, f"process {owner.pid}" in pruned.stderr) == (2, True)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        newest = checkpoint.latest(Path("out/checkpoints"))
        assert newest is not None
        steps = int(newest.name.removeprefix("step-")) + 2
        result = invoke("train", f"{toy}:slow", "--run", "out", "--resume", "--steps", steps, "--quiet")
        assert result.exit_code == 0, result.output
        number = json.loads(Path("out/writer.json").read_text())["number"]
        assert number == 2

    def test_a_run_that_lost_its_folder_writes_no_settings(self, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from phalanx.train.run_recorder import RunRecorder

        start = RunRecorder.start

        def taken(recorder: RunRecorder, *given: Any, **how: Any) -> None:
            other = {"number": 9, "identity": "another's", "host": "elsewhere", "pid": 1, "since": 1.0}
            Path("out/writer.json").write_text(json.dumps(other))
            start(recorder, *given, **how)

        monkeypatch.setattr(RunRecorder, "start", taken)
        result = train(toy, "--steps", 2)
        assert result.exit_code == 3
        assert "taken over by process 1 on elsewhere" in result.stderr
        assert not Path("out/run.toml").exists()


class FullDisk:
    """``os.write`` as on a disk that is full for files of some names, for so many writes after the first few."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, after: int, times: int) -> None:
        self._name, self._after, self._times, self._write = name, after, times, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, content: Any) -> int:
        if self._name in os.readlink(f"/proc/self/fd/{file}"):
            self._after -= 1
            if self._after < 0 and self._times > 0:
                self._times -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(file, content)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
class TestFullDisk:
    @pytest.mark.parametrize("times", [10**9, *longer(2)])
    def test_under_the_event_log_ends_no_run(
        self, times: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        FullDisk(monkeypatch, "events.jsonl", after=3, times=times)
        run = fit("single", "run")
        assert checkpoint.latest(run.folder / "checkpoints") is not None
        said = capfd.readouterr().err
        assert "cannot be written: No space left on device" in said
        assert "Traceback" not in said
        if times == 2:
            assert [event["step"] for event in run.events("step")] == list(range(8))
        else:
            assert "events of the run are not in run/events.jsonl" in said

    def test_under_the_ledger_is_one_error_when_a_checkpoint_needs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FullDisk(monkeypatch, "/ledger/", after=0, times=10**9)
        with pytest.raises(WorkerError) as caught:
            fit("single", "run", checkpoint_every=3)
        text = str(caught.value)
        assert re.search(r"the sample ledger .* cannot be written: No space left on device", text)
        assert text.count("No space left") == 1
        assert "Traceback" not in text
        assert "try: free space there" in text
        assert caught.value.exit_code == 3


def test_no_entry_of_a_run_folder_may_be_a_link(tmp_path: Path) -> None:
    for name in RUN_FILES:
        run = RunSpec(job="small", plan=px.Plan(), folder=tmp_path / f"run of {name}")
        run.folder.mkdir()
        (run.folder / name).symlink_to(tmp_path / "victim")
        with pytest.raises(PhalanxError, match="a symbolic link"), RunFolder(run) as entered:
            entered.prepare()
        assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "checkpoints", "ledger/00000000-rank00000.bin"])
def test_nothing_outside_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    run = fit("single", "run", steps=2, epochs=None)
    entry, victim = run.folder / name, tmp_path / "victim"
    entry.rename(victim)
    entry.symlink_to(victim)

    def content() -> dict[str, bytes]:
        files = victim.rglob("*") if victim.is_dir() else [victim]
        return {str(path): path.read_bytes() for path in files if path.is_file()}

    before = content()
    if name.startswith("ledger/"):  # of a part of the run that begins there anew
        for path in (run.folder / "checkpoints").iterdir():
            path.rename(tmp_path / path.name)
        (run.folder / "run.toml").unlink()
    with pytest.raises(PhalanxError, match="a symbolic link"):
        fit("single", "run", steps=4, epochs=None, resume=not name.startswith("ledger/"))
    assert content() == before


def unusable() -> px.Table:
    columns = table()[range(LENGTH)]
    return px.Table(x=columns["x"] * float("nan"), y=columns["y"])


def test_all_that_a_run_writes_is_looked_at_before(toy: Path) -> None:
    """With accidents, servers, a forecast, a best evaluation and TensorBoard: no name but those of the table."""
    with pytest.raises(WorkerError):
        fit("dp=2", "run", data=unusable)
    argv = ["train", toy, "--run", "all", "--plan", "dp=2 server=1", "--epochs", "1", "--tensorboard", "--quiet"]
    done = invoke(*argv)
    assert done.exit_code == 0, done.output
    fit("single", "best", steps=2, epochs=None, evaluate=table, evaluate_every=1, best=px.Best())
    there = {path.name for folder in ("run", "all", "best") for path in Path(folder).iterdir()}
    assert there == {*RUN_FILES} - {
        ".secret",
        "launch",
    }  # of torchrun's workers, while they read it; of a launch elsewhere


@pytest.mark.parametrize("closed", ["both", *longer("stdout", "stderr")])
def test_a_reader_that_has_seen_enough_ends_no_run(toy: Path, closed: str) -> None:
    """``phalanx train ... | head -1``, and both streams of a terminal that is gone."""
    toy.write_text(toy.read_text().replace("def job():", "def job():\n    print('a job that talks', flush=True)"))
    argv = [sys.executable, "-m", "phalanx", "train", str(toy), "--run", "out", "-n", "2", "--no-forecast"]
    reading, writing = os.pipe()
    os.close(reading)
    to = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    for stream in ("stdout", "stderr"):
        if closed in (stream, "both"):
            to[stream] = writing
    done = subprocess.run(argv, check=False, timeout=100, **to)
    os.close(writing)
    assert done.returncode == 0
    assert [event["step"] for event in RunLog(Path("out")).events if event["event"] == "end"] == [8]
    assert b"Traceback" not in (done.stderr or b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "phalanx", "devices"]
        done = subprocess.run(argv, check=False, stdout=full, stderr=subprocess.PIPE, timeout=100)
    assert done.returncode == 3
    assert done.stderr == b"error: not all of the output could be written: No space left on device\n"


class TestWrongArguments:
    def test_are_one_error_before_anything_runs(self) -> None:
        px_: Any = px
        calls: list[tuple[str, Callable[[], Any]]] = [
            *(("plan", lambda: px_.fit(job(), 5)), ("job", lambda: px_.fit(None)), ("job", lambda: px_.fit(job))),
            *(("folder", lambda: px_.fit(job(), folder=5)), ("run", lambda: px_.fit(job(), run=5))),
            *(("launcher", lambda: px_.fit(job(), launcher=None)), ("cores", lambda: px_.fit(job(), cores=0))),
            *(("job", lambda: px_.build(5)), ("plan", lambda: px_.build(job(), 2.5))),
            *(("job", lambda: px_.prove(5, "dp=2")), ("plan", lambda: px_.prove(job(), None))),
            ("steps", lambda: px_.prove(job(), "dp=2", steps="x")),
            ("against", lambda: px_.prove(job(), "dp=2", against=5)),
            *(("job", lambda: px_.forecast(5, "dp=2", "8xH100")), ("plan", lambda: px_.forecast(job(), 5, "8xH100"))),
            ("cluster", lambda: px_.forecast(job(), "dp=2", 5)),
            *(("job", lambda: px_.plan(None, "8xH100")), ("cluster", lambda: px_.plan(job(), None))),
        ]
        for where, call in calls:
            with pytest.raises(SpecError) as caught:
                call()
            assert (caught.value.problems[0].where, caught.value.exit_code) == (where, 2)
