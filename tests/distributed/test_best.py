"""The best evaluation: its checkpoint stays, a run may end early by it, a resume knows it; under each kind of plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small import fit, job, table

import phalanx as px
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
PLANS = ["single", "dp=2", "fsdp=2", "dp=2 sync=local every=4", "dp=2 server=1"]


def evaluated(run: px.Run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events("evaluate")}


def loss_of(model: torch.nn.Module) -> float:
    """Of the evaluation data, by plain PyTorch."""
    data = table(64, seed=1)
    samples = [data[index] for index in range(64)]
    x, y = (torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in ("x", "y"))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_ends_early_and_keeps_the_best(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", best=px.Best(patience=3), **HOW)
    losses = evaluated(run)
    best = min(losses, key=lambda step: losses[step])
    (early,) = run.events("ended_early")
    assert early["step"] == max(losses) == best + 3 * 4 < 120
    assert (early["best"], early["evaluations"]) == (best, 3)
    assert early["value"] == losses[best]
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
    (tmp_path / "copy").write_text((tmp_path / "parts/best.json").read_text())
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
    run = fit("dp=2", tmp_path / "run", best=px.Best(), **{**HOW, "epochs": 10})
    losses = evaluated(run)
    best = min(losses, key=lambda step: losses[step])
    assert list(run.events("ended_early")) == []
    assert best < 40 == max(losses)
    assert loss_of(run.model(step="best")) == pytest.approx(losses[best], rel=1e-5)
    pruned = CliRunner().invoke(main, ["checkpoint", "prune", str(run.folder), "--keep", "1"])
    assert pruned.exit_code == 0, pruned.output
    assert run.checkpoint("best").name == f"step-{best:08d}"
    (tmp_path / "run/best.json").write_text('{"step": 1}')
    with pytest.raises(SpecError, match=r"best\.json, which is damaged"):
        run.checkpoint("best")
    refused = CliRunner().invoke(main, ["checkpoint", "prune", str(run.folder), "--keep", "1"])
    assert refused.exit_code == 2, refused.output
    assert "best.json, which is damaged" in refused.stderr
    assert run.checkpoint(best).is_dir(), "nothing is deleted where it is not known what is the best"


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 server=1"])
def test_a_metric_that_is_not_there_is_named(plan: str, tmp_path: Path) -> None:
    with pytest.raises((SpecError, WorkerError), match=r"best\.metric: given 'acuracy'(.|\n)*loss, accuracy"):
        fit(plan, tmp_path / "run", best=px.Best("acuracy", mode="max"), **HOW)


BENCHED = """
import sys
sys.path.insert(0, {small!r})
import phalanx as px
import small

def job():
    how = dict(evaluate=small.table, evaluate_every=1, best=px.Best(mode="max", patience=1))
    return small.job(callbacks={{"step": lambda event: open("called", "w")}}, **how)
"""


def test_a_bench_measures_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(BENCHED.format(small=str(Path(__file__).parent)))
    done = CliRunner().invoke(main, ["bench", "job.py", "--plan", "single", "--steps", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert not Path("called").exists()


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ({"best": "loss"}, "job.best"),
        ({"best": px.Best(patience=2), "evaluate_every": 0}, "best.patience"),
        ({"evaluate": None, "metrics": None, "evaluate_every": 0, "best": px.Best()}, "job.best"),
    ],
)
def test_what_cannot_be(how: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(**{**HOW, **how})
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ({"metric": ""}, "metric"),
        ({"mode": "largest"}, "mode"),
        ({"patience": 0}, "patience"),
        ({"min_delta": -1.0}, "min_delta"),
    ],
)
def test_wrong_numbers(how: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        px.Best(**how)
    assert [problem.where for problem in caught.value.problems] == [f"best.{where}"]
    eval(caught.value.problems[0].fix, {"px": px})
