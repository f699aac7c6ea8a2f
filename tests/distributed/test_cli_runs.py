"""The command line with real runs: train, resume, prove, bench, worker, demo, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

import phalanx as px
from phalanx.cli import main
from phalanx.events import RunLog, faults

JOBS = """
import time
from dataclasses import replace
import phalanx as px, torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)

class Paced(nn.Linear):
    def forward(self, x):
        time.sleep(0.02 * len(x))  # asleep, so that two of them take no time from each other
        return super().forward(x)

class Fails(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            raise ValueError("my own mistake")
        return super().forward(x)

def data():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

def job():
    print("a job that talks")
    return px.Job(model=lambda: nn.Linear(8, 2), data=data, loss=lambda o, b: px.cross_entropy(o, b[1]),
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=24, epochs=2, evaluate=data,
                  metrics=lambda o, b: {"accuracy": px.accuracy(o, b[1])})

def slow():
    return replace(job(), model=lambda: Slow(8, 2), epochs=100, evaluate=None, metrics=None)

def paced():
    return replace(job(), model=lambda: Paced(8, 2), evaluate=None, metrics=None)

def fails():
    return replace(job(), model=lambda: Fails(8, 2))

def norm():
    return replace(job(), model=lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A job file in an otherwise empty working directory."""
    path = tmp_path / "toy.py"
    path.write_text(JOBS)
    return path


def invoke(*argv: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in argv])


class TestTrain:
    def test_two_processes_as_json(self, toy: Path) -> None:
        result = invoke("train", toy, "-n", 2, "--json", "--explain")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert (answer["plan"], answer["devices"], answer["step"], answer["batch"]) == ("dp=2", 2, 8, 24)
        assert len(answer["peak_bytes"]) == 2
        assert answer["evaluation"]["samples"] == 96
        assert {"name": "plan", "value": "dp=2", "from": "argument"} in answer["settings"]
        assert "a job that talks" in result.stderr
        folder = Path(answer["folder"])
        assert folder == Path("runs/toy-1")
        assert {path.name for path in folder.iterdir()} >= {"run.toml", "plan.toml", "events.jsonl", "checkpoints"}
        assert [fault for event in RunLog(folder).events for fault in faults(event)] == []

        result = invoke("train", toy, "--plan", "single micro=6", "--steps", 3, "--explain", "--run", "out")
        assert result.exit_code == 0, result.output
        for words in ("toy under micro=6", "in 4 micro-batches", "3/3", "loss", "argument"):
            assert words in result.stderr
        for words in ("time per step", "samples/s", "accuracy", "peak memory", "out"):
            assert words in result.stdout

    def test_quiet_says_only_the_result_and_another_batch_brings_the_offer(self, toy: Path) -> None:
        result = invoke("train", toy, "--plan", "single", "--steps", 1, "--quiet")
        assert result.exit_code == 0
        assert result.stderr == ""
        assert "run folder" in result.stdout
        result = invoke("train", toy, "--plan", "single", "--steps", 1, "--batch", 48)
        assert "--lr-scale 2" in result.stderr

    def test_resume_on_another_plan(self, toy: Path) -> None:
        assert invoke("train", toy, "-n", 2, "--steps", 4, "--run", "out", "--batch", 12).exit_code == 0

        refused = invoke("train", toy, "-n", 2, "--steps", 6, "--run", "out")
        assert refused.exit_code == 2
        assert "--resume" in refused.stderr
        assert "rank 0" not in refused.stderr  # nothing of a run that never began

        result = invoke("train", toy, "--plan", "single", "--steps", 6, "--run", "out", "--resume", "--json")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        # the batch is the run's, not the job's
        assert (answer["first_step"], answer["step"], answer["batch"]) == (4, 6, 12)
        assert "goes on from step 4" in result.stderr
        steps = [event["step"] for event in RunLog(Path("out")).events if event["event"] == "step"]
        assert steps == [0, 1, 2, 3, 4, 5]

        done = invoke("train", toy, "--run", "out", "--resume")
        assert done.exit_code == 0
        assert "none left" in done.stdout

    def test_a_failing_worker(self, toy: Path) -> None:
        result = invoke("train", f"{toy}:fails", "-n", 2, "--checkpoint-every", 2, "--run", "out")
        assert result.exit_code == 3
        assert "in step 2" in result.stderr
        assert "ValueError: my own mistake" in result.stderr
        assert f"try: phalanx train {toy}:fails --run out --resume" in result.stderr

    def test_damaged_checkpoints_are_named_and_none_is_recommended(self, toy: Path) -> None:
        assert invoke("train", toy, "--steps", 4, "--checkpoint-every", 2, "--run", "out").exit_code == 0
        _flip(Path("out/checkpoints/step-00000004/state.json"))
        resume = ("train", toy, "--run", "out", "--resume", "--quiet")
        toy.write_text(JOBS.replace("model=lambda: nn.Linear(8, 2)", "model=lambda: Fails(8, 2)"))
        failed = invoke(*resume, "--steps", 8, "--checkpoint-every", 100)
        assert failed.exit_code == 3
        assert "warning: step-00000004 is damaged: " in failed.stderr
        assert "newest checkpoint: step-00000002" in failed.stderr
        _flip(Path("out/checkpoints/step-00000002/state.json"))
        failed = invoke(*resume)
        assert failed.exit_code == 3
        assert "none of the checkpoints in" in failed.stderr
        assert f"try: phalanx train {toy} --run out-1, a new run\n" in failed.stderr
        assert f"phalanx train {toy} --run out --resume --mirror URL" in failed.stderr

    @pytest.mark.parametrize("stop", [SystemExit(75), KeyboardInterrupt()])
    def test_a_request_to_stop_that_comes_as_the_run_ends_stops_nothing(
        self, stop: BaseException, toy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fit, ends = px.fit, True

        def asked_to_stop(*args: Any, **how: Any) -> None:
            if ends:
                fit(*args, **how)
            raise stop

        monkeypatch.setattr("phalanx.api.fit", asked_to_stop)
        argv = ("train", toy, "--run", "out", "--resume", "auto", "--json")
        done = invoke(*argv, "--steps", 2)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["step"] == 2
        assert "--resume" not in done.stderr
        ends = False  # what stands in the log of the end is of the part before
        stopped = invoke(*argv, "--steps", 4)
        assert stopped.exit_code == (75 if isinstance(stop, SystemExit) else 130)
        assert f"try: phalanx train {toy} --run out --resume" in stopped.stderr


def _flip(file: Path) -> None:
    """Change a bit, so that the file has the same length and holds something else."""
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


class TestProve:
    def test_equal_is_0(self, toy: Path) -> None:
        result = invoke("prove", toy, "--plan", "dp=2", "--steps", 3, "--json")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["equal"] is True
        assert answer["largest"]["loss"] <= next(
            check["allowed"] for check in answer["checks"] if check["kind"] == "loss"
        )

    def test_not_equal_is_1(self, toy: Path) -> None:
        result = invoke("prove", f"{toy}:norm", "--plan", "dp=2", "--steps", 2)
        assert result.exit_code == 1, result.output
        for words in ("not equal", "likely cause"):
            assert words in result.stdout
        assert "BatchNorm" in result.stderr  # named before the run

    def test_failed_is_3(self, toy: Path) -> None:
        result = invoke("prove", f"{toy}:fails", "--plan", "dp=2")
        assert result.exit_code == 3
        assert "my own mistake" in result.stderr


def test_bench(toy: Path) -> None:
    result = invoke("bench", f"{toy}:paced", "--plan", "single", "--plan", "dp=2", "--steps", 6, "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["plans"]
    assert (first["plan"], second["plan"]) == ("single", "dp=2")
    # A sample takes 20 ms at least, whoever else computes: one rank gives up to 50 samples/s and two up to 100.
    assert 0 < first["samples_per_second"] <= 50
    assert 0 < second["samples_per_second"] <= 100
    for row in (first, second):  # of 24 samples; a rank's own would be 12
        assert row["samples_per_second"] * row["step_seconds"] == pytest.approx(24, rel=0.2)
    assert second["speed_up"] == pytest.approx(second["samples_per_second"] / first["samples_per_second"])
    assert second["efficiency"] == pytest.approx(second["speed_up"] / 2)
    assert not Path("runs").exists()


def test_demo_from_an_empty_directory() -> None:
    done = invoke("demo", "--devices", 2, "--steps", 4, "--json")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["equal"] is True
    runs = [(run["job"], run["scaled"]["plan"], run["equal"]) for run in answer["runs"]]
    assert runs == [
        ("digits", "single", None),
        ("digits", "dp=2", True),
        ("gpt", "single", None),
        ("gpt", "dp=2", True),
    ]
    assert all(Path(run["folder"], "events.jsonl").exists() for run in answer["runs"])
    assert "computes what one device computes" in done.stderr


def test_ctrl_c(toy: Path) -> None:
    argv = ["train", f"{toy}:slow", "-n", "2", "--run", "out", "--checkpoint-every", "2"]
    process = subprocess.Popen([sys.executable, "-m", "phalanx", *argv], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not Path("out/checkpoints/step-00000002").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=40)  # a step and a checkpoint
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert [event["event"] for event in RunLog(Path("out")).events][-1] == "stopped"
    assert f"try: phalanx train {toy}:slow --run out --resume" in said
    assert "Traceback" not in said
    assert [worker for worker in workers if worker.is_running()] == []
