"""``phalanx sweep`` and ``px.sweep``: each row is the run it would be alone, and a bad one stops none."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import distributed, nn
from torch.nn import functional as F

import phalanx as px
from phalanx.cli import main
from phalanx.errors import SpecError
from phalanx.report.sweep_rows import SweepRow, Yardstick

JOB = """
from test_sweep import made as job
"""


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(1) > 0.3).long()


def table(seed: int) -> px.Table:
    x, label = samples(seed)
    return px.Table(input=x, label=label)


def model(bias: bool) -> nn.Module:
    net = nn.Linear(4, 2, bias=bias)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


calls = 0


def slow_loss(output: torch.Tensor, batch: Any, wait: float) -> torch.Tensor:
    """Where it waits, a worker's later steps wait until the sweep was asked to stop."""
    global calls
    calls += distributed.is_initialized() and distributed.get_backend() == "gloo"
    time.sleep(wait)
    while wait and calls > 3 and not os.path.exists("asked-to-stop"):
        time.sleep(0.01)
    return F.cross_entropy(output, batch["label"])


def made() -> px.Job:
    lr, bias, wait = px.param("lr", 0.1), px.param("bias", True), px.param("wait", 0.0)
    if lr == 7:
        raise ValueError("seven is too much")
    best = px.Best("accuracy", mode="max") if px.param("compared", False) else None
    return px.Job(
        model=lambda: model(bias),
        data=lambda: table(1),
        shuffle=False,
        loss=lambda output, batch: slow_loss(output, batch, wait),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        batch=px.param("batch", 16),
        epochs=2,
        evaluate=lambda: table(2),
        evaluate_every=px.param("every", 0),
        best=best,
        metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["label"])},
    )


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / f"swept_{abs(hash(tmp_path))}.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{JOB}")
    return str(path)


def by_hand(lr: float, bias: bool, steps: int) -> tuple[float, float, float]:
    """Loss of the last step, and loss and accuracy on the held-out samples, by plain PyTorch."""
    net, loss = model(bias), torch.zeros(())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    x, label = samples(1)
    for step in range(steps):
        part = slice(16 * (step % 3), 16 * (step % 3) + 16)
        loss = F.cross_entropy(net(x[part]), label[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, label = samples(2)
    output = net(x)
    right = (output.argmax(1) == label).float().mean()
    return loss.item(), F.cross_entropy(output, label).item(), right.item()


def sweep(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, ["sweep", *words, "--quiet", "--json"])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_each_run_is_that_of_plain_pytorch_and_the_best_comes_first(job: str) -> None:
    plans = ("single", "threads=2")
    words = [word for plan in plans for word in ("--plan", plan)]
    code, told = sweep(job, "--set", "lr=0.1,1", "--set", "bias=false", *words, "--steps", "5")
    assert code == 0
    assert told["combinations"] == len(told["rows"]) == 4
    for row in told["rows"]:
        values = row["values"]
        loss, evaluated, accuracy = by_hand(float(values["lr"]), values["bias"] == "true", steps=5)
        assert row["outcome"] == "done"
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["evaluation"]["loss"] == pytest.approx(evaluated, rel=1e-5)
        assert row["evaluation"]["metrics"]["accuracy"] == pytest.approx(accuracy)
        assert len(px.load(row["folder"]).losses) == 5
    numbers = [row["evaluation"]["loss"] for row in told["rows"]]
    assert numbers == sorted(numbers)
    assert {row["plan"] for row in told["rows"]} == set(plans)
    assert len({row["folder"] for row in told["rows"]}) == 4


def test_a_job_that_names_its_best_is_compared_by_that(job: str) -> None:
    code, told = sweep(job, "--set", "lr=1e-6,0.5", "--set", "compared=true", "--set", "every=2")
    assert code == 0
    assert "most accuracy" in told["best_by"]
    accuracies = [row["evaluation"]["metrics"]["accuracy"] for row in told["rows"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert [row["number"] for row in told["rows"]] == accuracies
    for row in told["rows"]:
        best = px.load(row["folder"]).best
        assert best
        assert row["evaluation"]["step"] == best["step"]


def test_what_cannot_be_trained_is_a_row_with_its_reason_and_the_others_go_on(job: str) -> None:
    code, told = sweep(job, "--set", "lr=7,0.1", "--plan", "tp=3", "--plan", "dp=2", "--steps", "2")
    assert code == 1
    outcomes = {(row["values"]["lr"], row["plan"]): row for row in told["rows"]}
    assert {pair: row["outcome"] for pair, row in outcomes.items()} == {
        ("7", "tp=3"): "refused",
        ("7", "dp=2"): "refused",
        ("0.1", "tp=3"): "refused",
        ("0.1", "dp=2"): "done",
    }
    assert told["rows"][0]["outcome"] == "done"
    assert "seven is too much" in outcomes["7", "dp=2"]["reason"]
    assert "tp=3" in outcomes["0.1", "tp=3"]["reason"]
    assert "; allowed: " in outcomes["0.1", "tp=3"]["reason"]
    assert "; try: " in outcomes["0.1", "tp=3"]["reason"]


def test_a_run_that_fails_says_so_by_the_exit_code(job: str) -> None:
    code, told = sweep(job, "--set", "lr=inf,0.1", "--plan", "dp=2")
    assert code == 3
    assert [row["outcome"] for row in told["rows"]] == ["done", "failed"]
    assert "finite" in told["rows"][1]["reason"] or "nan" in told["rows"][1]["reason"].lower()
    assert told["rows"][1]["folder"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "lr=0.1,fast"], "lr"),
        (["--set", "lr"], "NAME=VALUE,VALUE"),
        (["--set", "lr=1,,2"], "NAME=VALUE,VALUE"),
        (["--set", "lr=1", "--set", "lr=2"], "one --set"),
        (["--plan", "dp=2", "--plan", "dp=2"], "dp=2"),
    ],
)
def test_options_that_are_wrong_are_told_before_anything_runs(
    job: str, words: Sequence[str], said: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, ["sweep", job, *words])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "runs").exists()


def row(name: str, accuracy: float | None, outcome: Any = "done") -> SweepRow:
    evaluation = {"loss": 1.0, "metrics": {"accuracy": accuracy}}
    return SweepRow(values={"name": name}, plan="single", outcome=outcome, loss=accuracy, evaluation=evaluation)


def test_rows_without_a_number_and_those_that_are_not_done_come_last() -> None:
    rows = [row("failed", 0.9, "failed"), row("nan", math.nan), row("none", None), row("low", 0.1), row("high", 0.5)]
    most = [one.values["name"] for one in Yardstick(best=px.Best("accuracy", mode="max")).ranked(rows)]
    assert most == ["high", "low", "nan", "none", "failed"]
    least = [one.values["name"] for one in Yardstick(best=px.Best("accuracy")).ranked(rows)]
    assert least == ["low", "high", "nan", "none", "failed"]
    bare = [dataclasses.replace(one, evaluation=None) for one in rows]
    assert [one.values["name"] for one in Yardstick().ranked(bare)] == ["low", "high", "nan", "none", "failed"]


def test_ctrl_c_keeps_the_table_of_what_ended(job: str, tmp_path: Path) -> None:
    words = ["--set", "wait=0,0.3", "--set", "lr=0.1", "--plan", "dp=2", "--run", "mine", "--json"]
    argv = [sys.executable, "-m", "phalanx", "sweep", job, *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        log = tmp_path / "mine" / "2" / "events.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (log.exists() and '"step"' in log.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        (tmp_path / "asked-to-stop").touch()  # which later steps wait for
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    told = json.loads(stdout)
    assert [(row["values"]["wait"], row["outcome"]) for row in told["rows"]] == [("0", "done"), ("0.3", "stopped")]
    assert told["rows"][0]["evaluation"]["metrics"]["accuracy"] == pytest.approx(by_hand(0.1, True, steps=6)[2])
    assert told["combinations"] == 2


def test_each_row_in_python_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    values, plans = {"lr": [0.5, 0.05], "bias": [True]}, ["single"]
    found = px.sweep(made, values, plans, steps=5, folder=tmp_path / "runs", watch=False)
    assert len(found) == found.combinations == 2
    for row in found:
        loss, evaluated, _ = by_hand(steps=5, **row.values)
        assert row.outcome == "done", row.reason
        assert row.evaluation
        assert row.loss == pytest.approx(loss, rel=1e-5)
        assert row.evaluation["loss"] == pytest.approx(evaluated, rel=1e-5)
        assert len(px.load(str(row.folder)).losses) == 5
    assert {(row.values["lr"], row.plan) for row in found} == {(lr, plan) for lr in values["lr"] for plan in plans}
    numbers = [row.evaluation["loss"] for row in found if row.evaluation]
    assert numbers == sorted(numbers)
    assert found.best is found[0]
    shown = found.to_dataframe()
    assert list(shown["evaluated_loss"]) == list(shown["number"]) == numbers
    assert list(shown["lr"]) == [row.values["lr"] for row in found]
    assert "best first: least loss" in str(found)


WRONG: list[tuple[Any, Any, str]] = [
    ({"lrr": [1.0, 2.0]}, [], "lrr"),
    ({"lr": ["fast"]}, [], "a number"),
    ({"lr": 0.1}, [], "a list of one value or more"),
    ({"lr": []}, [], "a list of one value or more"),
    ({"lr": [0.1, 0.1]}, [], "once"),
    ({"lr": [None]}, [], "a bool, int, float or str"),
    ({"l r": [1.0]}, [], "l r"),
    ([("lr", [1.0])], [], "by name"),
    ({}, [], "values"),
    ({}, "dp=2", "a list of plans"),
    ({}, [2], "a list of plans"),
    ({}, ["dp=2", "dp=2"], "once"),
    ({}, ["dp=two"], "dp"),
]


def test_what_is_written_wrong_is_told_before_anything_runs(tmp_path: Path) -> None:
    for values, plans, said in WRONG:
        with pytest.raises(SpecError, match=said):
            px.sweep(made, values, plans, folder=tmp_path / "runs")
        assert not (tmp_path / "runs").exists(), (values, plans)
