"""``px.sweep``: each row is what plain PyTorch comes to with its values, under every plan; a bad one stops none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import SpecError

PLANS = ["single", "dp=2", "fsdp=2"]
JOB = """
from test_sweep_in_python import made as job
"""


def table(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(1) > 0.3).float()


def rows(seed: int) -> px.Table:
    x, y = table(seed)
    return px.Table(input=x, y=y)


def model(width: int) -> nn.Module:
    first, second = nn.Linear(4, width), nn.Linear(width, 1)
    for layer in (first, second):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second)


def made() -> px.Job:
    lr, width, decayed = px.param("lr", 0.1), px.param("width", 4), px.param("decayed", False)
    if lr == 7:
        raise ValueError("seven is too much")
    return px.Job(
        model=lambda: model(width),
        data=lambda: rows(1),
        shuffle=False,
        loss=lambda output, batch: px.mse(output[:, 0], batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, weight_decay=0.1 if decayed else 0.0),
        batch=16,
        epochs=2,
        evaluate=lambda: rows(2),
    )


def by_hand(lr: float, width: int, decayed: bool, steps: int) -> tuple[float, float]:
    """Loss of the last step, and that on the held-out samples, by plain PyTorch."""
    net, loss = model(width), torch.zeros(())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=0.1 if decayed else 0.0)
    x, y = table(1)
    for step in range(steps):
        part = slice(16 * (step % 3), 16 * (step % 3) + 16)
        loss = (net(x[part])[:, 0] - y[part]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = table(2)
    return loss.item(), (net(x)[:, 0] - y).square().mean().item()


@pytest.fixture(params=["function", "path"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "function":
        return made
    path = tmp_path / f"job_{abs(hash(tmp_path))}.py"
    path.write_text(JOB)
    return path


def test_each_row_is_that_of_plain_pytorch_under_every_plan(job: Any, tmp_path: Path) -> None:
    values = {"lr": [0.5, 0.05], "width": [2, 4], "decayed": [True]}
    found = px.sweep(job, values, PLANS, steps=5, folder=tmp_path / "runs", watch=False)
    assert len(found) == found.combinations == 12
    for row in found:
        loss, evaluated = by_hand(steps=5, **row.values)
        assert row.outcome == "done", row.reason
        assert row.evaluation
        assert row.loss == pytest.approx(loss, rel=1e-5)
        assert row.evaluation["loss"] == pytest.approx(evaluated, rel=1e-5)
        assert len(px.load(str(row.folder)).losses) == 5
    assert {(row.values["lr"], row.values["width"], row.plan) for row in found} == {
        (lr, width, plan) for lr in values["lr"] for width in values["width"] for plan in PLANS
    }
    numbers = [row.evaluation["loss"] for row in found if row.evaluation]
    assert numbers == sorted(numbers)
    assert found.best is found[0]
    told = found.to_dataframe()
    assert list(told["evaluated_loss"]) == list(told["number"]) == numbers
    assert list(told["lr"]) == [row.values["lr"] for row in found]
    assert "best first: least loss" in str(found)


def test_what_cannot_be_trained_is_a_row_and_the_others_go_on(job: Any, tmp_path: Path) -> None:
    found = px.sweep(job, {"lr": [7.0, 0.1]}, ["tp=3", "single"], steps=1, folder=tmp_path / "runs", watch=False)
    outcomes = {(row.values["lr"], row.plan): row.outcome for row in found}
    assert outcomes[0.1, "single"] == found[0].outcome == "done"
    assert outcomes[0.1, "tp=3"] == "refused"
    assert {row.outcome for row in found if row.values["lr"] == 7} <= {"refused", "failed"}
    assert any("seven is too much" in row.reason for row in found)


@pytest.mark.parametrize(
    ("values", "plans", "said"),
    [
        ({"lrr": [1.0, 2.0]}, [], "does not declare"),
        ({"lr": ["fast"]}, [], "a number, as its default"),
        ({"lr": 0.1}, [], "a list of one value or more"),
        ({"lr": []}, [], "a list of one value or more"),
        ({"lr": [0.1, 0.1]}, [], "each value once"),
        ({"lr": [None]}, [], "a bool, int, float or str"),
        ({"l r": [1.0]}, [], "names that the job declares"),
        ([("lr", [1.0])], [], "lists of values by name"),
        ({}, [], "values to try, plans to try, or both"),
        ({}, "dp=2", "a list of plans"),
        ({}, [2], "a list of plans"),
        ({}, ["dp=2", "dp=2"], "each plan once"),
        ({}, ["dp=two"], "dp"),
    ],
)
def test_what_is_written_wrong_is_told_before_anything_runs(
    values: Mapping[str, Sequence[Any]], plans: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        px.sweep(made, values, plans, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_job_that_is_made_already_is_refused() -> None:
    with pytest.raises(SpecError, match="the function that makes it"):
        px.sweep(made(), {"lr": [0.1]})  # pyright: ignore[reportArgumentType]


def test_a_function_that_never_makes_a_job_is_raised(tmp_path: Path) -> None:
    def broken() -> px.Job:
        raise ValueError("nothing here")

    with pytest.raises(ValueError, match="nothing here"):
        px.sweep(broken, plans=["single"], folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="which holds something"):
        px.sweep(made, {"lr": [0.1]}, folder=tmp_path)


def test_jobs_that_compare_by_unlike_numbers_are_no_sweep() -> None:
    def unlike() -> px.Job:
        best = px.Best(px.param("by", "loss"), mode="min")
        return px.Job(
            model=lambda: torch.nn.Linear(3, 2),
            data=lambda: px.Table(x=torch.zeros(8, 3)),
            loss=lambda output, batch: output.mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batch=4,
            epochs=1,
            evaluate=lambda: px.Table(x=torch.zeros(8, 3)),
            best=best,
        )

    with pytest.raises(SpecError, match=r"job\.best: given values that change by which number"):
        px.sweep(unlike, {"by": ["loss", "accuracy"]}, ["single"])
