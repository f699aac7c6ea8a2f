"""The best evaluation of a run, and a job's own functions that are called with the events of its run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small import fit, job, table

import phalanx as px
from longer import longer
from phalanx.cli import main
from phalanx.errors import SpecError, WorkerError

# Labels are random, so that what is learned of 103 samples is soon worse for others.
HOW: dict[str, Any] = {
    "evaluate": lambda: table(64, seed=1),
    "evaluate_every": 4,
    "metrics": lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])},
    "optimizer": lambda params: torch.optim.AdamW(params, lr=3e-2),
    "epochs": 30,
}


def evaluated(run: px.Run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events("evaluate")}


def loss_of(model: torch.nn.Module) -> float:
    """Of the evaluation data, by plain PyTorch."""
    columns = table(64, seed=1).columns
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(columns["x"]), columns["y"]).item()


@pytest.mark.parametrize(
    "plan", ["pp=2", "dp=2 sync=local every=4", "dp=2 server=1", *longer("single", "dp=2", "fsdp=2")]
)
def test_a_run_ends_early_and_keeps_the_best(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", best=px.Best(patience=3), **HOW)
    losses = evaluated(run)
    best = min(losses, key=lambda step: losses[step])
    (early,) = run.events("ended_early")
    assert early["step"] == max(losses) == best + 3 * 4 < 120
    assert (early["best"], early["evaluations"], early["value"]) == (best, 3, losses[best])
    (end,) = run.events("end")
    assert end["step"] == early["step"]
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run/checkpoints").iterdir())
    assert steps == [best, early["step"]], "the best and the last"
    assert loss_of(run.model(step="best")) == pytest.approx(losses[best], rel=1e-5)
    assert loss_of(run.model()) == pytest.approx(losses[early["step"]], rel=1e-5)


def test_a_resumed_run_ends_where_it_would_have(tmp_path: Path) -> None:
    best = px.Best("accuracy", mode="max", patience=4)
    whole = fit("dp=2", tmp_path / "whole", best=best, **HOW)
    (end,) = whole.events("ended_early")
    first = {**HOW, "epochs": None, "steps": end["step"] - 8}
    fit("dp=2", tmp_path / "parts", best=best, **first)
    told = json.loads((tmp_path / "parts/best.json").read_text())
    assert told["evaluations"].pop()[0] == end["step"] - 8  # as if it had ended between its save and its evaluation
    (tmp_path / "parts/best.json").write_text(json.dumps(told))
    parts = fit("fsdp=2", tmp_path / "parts", resume=True, best=best, **HOW)
    assert list(parts.events("ended_early"))[-1]["step"] == end["step"]
    assert evaluated(parts) == pytest.approx(evaluated(whole), rel=1e-5)
    assert json.loads((tmp_path / "parts/best.json").read_text())["step"] == end["best"]
    again = fit("dp=2", tmp_path / "parts", resume=True, best=best, **HOW)
    assert list(again.events("end"))[-1]["step"] == end["step"], "it has ended, and takes no further step"
    assert len(again.losses) == end["step"]


def test_without_patience_it_runs_to_its_end_and_keeps_the_best(tmp_path: Path) -> None:
    run = fit("dp=2 micro=3", tmp_path / "run", best=px.Best(), **{**HOW, "epochs": 10})
    losses = evaluated(run)
    best = min(losses, key=lambda step: losses[step])
    assert list(run.events("ended_early")) == []
    assert best < 40 == max(losses)
    assert loss_of(run.model(step="best")) == pytest.approx(losses[best], rel=1e-5)
    prune = ["checkpoint", "prune", str(run.folder), "--keep", "1"]
    pruned = CliRunner().invoke(main, prune)
    assert pruned.exit_code == 0, pruned.output
    assert run.checkpoint("best").name == f"step-{best:08d}"
    (tmp_path / "run/best.json").write_text('{"step": 1}')
    with pytest.raises(SpecError, match=r"best\.json"):
        run.checkpoint("best")
    refused = CliRunner().invoke(main, prune)
    assert refused.exit_code == 2, refused.output
    assert "best.json" in refused.stderr
    assert run.checkpoint(best).is_dir(), "nothing is deleted where it is not known what is the best"


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 server=1"])
def test_a_metric_that_is_not_there_is_named(plan: str, tmp_path: Path) -> None:
    with pytest.raises((SpecError, WorkerError), match=r"best\.metric: given 'acuracy'(.|\n)*loss, accuracy"):
        fit(plan, tmp_path / "run", best=px.Best("acuracy", mode="max"), **HOW)


@pytest.mark.parametrize(
    ("made", "where"),
    [
        (lambda: job(**{**HOW, "best": "loss"}), "job.best"),
        (lambda: job(**{**HOW, "best": px.Best(patience=2), "evaluate_every": 0}), "best.patience"),
        (lambda: job(best=px.Best()), "job.best"),
        (lambda: px.Best(metric=""), "best.metric"),
        (lambda: px.Best(mode="largest"), "best.mode"),  # pyright: ignore[reportArgumentType]
        (lambda: px.Best(patience=0), "best.patience"),
        (lambda: px.Best(min_delta=-1.0), "best.min_delta"),
    ],
)
def test_what_cannot_be(made: Callable[[], Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        made()
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.fix


JOB = """
import sys
sys.path.insert(0, {small!r})
import phalanx as px
import small

def job():
    return small.job(callbacks={{"end": lambda event: open("called", "a").write(f"{{event['step']}} ")}})

def best():
    how = dict(evaluate=small.table, evaluate_every=1, best=px.Best(mode="max", patience=1))
    return small.job(callbacks={{"step": lambda event: open("called", "w")}}, **how)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB.format(small=str(Path(__file__).parent)))
    return path


def test_a_bench_measures_steps_alone(job_file: Path) -> None:
    argv = ["bench", f"{job_file}:best", "--plan", "single", "--steps", "4", "--json"]
    done = CliRunner().invoke(main, argv)
    assert done.exit_code == 0, done.output
    assert not Path("called").exists()


Event = dict[str, Any]


class TestCallbacks:
    @pytest.mark.parametrize("plan", ["dp=2", "dp=2 server=1", *longer("single")])
    def test_they_are_called_once_a_run_with_every_event_of_their_name(self, plan: str, tmp_path: Path) -> None:
        steps, ends = list[Event](), list[Event]()
        run = fit(plan, tmp_path / "run", callbacks={"step": steps.append, "end": ends.append})
        assert steps == list(run.events("step"))
        assert len(steps) == 8
        assert ends == list(run.events("end"))

    def test_what_an_earlier_part_of_the_run_did_is_no_news(self, tmp_path: Path) -> None:
        fit("dp=2", tmp_path / "run", epochs=None, steps=3)
        steps = list[int]()
        fit("dp=2", tmp_path / "run", resume=True, callbacks={"step": lambda event: steps.append(event["step"])})
        assert steps == [3, 4, 5, 6, 7]

    def test_one_that_raises_is_named_and_left_out_and_the_run_goes_on(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "__stderr__", sys.stderr)
        calls, others = list[int](), list[int]()

        def raises(event: Event) -> None:
            calls.append(event["step"])
            raise KeyError("accuracy")

        callbacks = {"step": raises, "checkpoint": lambda event: others.append(event["step"])}
        run = fit("dp=2", tmp_path / "run", checkpoint_every=4, callbacks=callbacks)
        assert (calls, others) == ([0], [4, 8])
        assert len(run.losses) == 8
        said = capfd.readouterr().err
        assert said.count("the callback of step") == 1
        assert f"{__file__}:" in said
        assert "KeyError: 'accuracy'" in said

    @pytest.mark.parametrize("callbacks", [{"evaluation": print}, {"step": "print"}, [print]])
    def test_what_cannot_be_is_refused_before_anything_starts(self, callbacks: Any, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"job\.callbacks: given"):
            px.fit(job(callbacks=callbacks), "dp=2", folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("launcher", ["torchrun", *longer("none")])
    def test_the_command_calls_them_too(self, launcher: str, job_file: Path) -> None:
        command = [sys.executable, "-m", "phalanx", "train", "job.py", "--plan", "dp=2", "--quiet", "--no-forecast"]
        more = [] if launcher == "none" else ["--launcher", launcher]
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert Path("called").read_text() == "8 "
