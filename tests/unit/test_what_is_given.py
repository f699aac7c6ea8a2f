"""What is given in place of a model, data, a sampler, a plan or an output is named as what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.checkpoint.export import refuse_target
from phalanx.data.map_style import is_stream
from phalanx.errors import LossError, SpecError
from phalanx.train.build_model import build_model

X, Y = torch.zeros(20, 3), torch.zeros(20, dtype=torch.long)


class Splits(dict[str, Any]):
    """As ``DatasetDict`` of datasets."""


class Columns(list[int]):
    column_names = ("a", "b")


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 2),
        "data": lambda: px.Table(input=X, label=Y),
        "loss": lambda output, batch: px.cross_entropy(output, batch["label"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 10,
        "epochs": 1,
    }
    return px.Job(**{**given, **how})


@pytest.mark.parametrize(
    ("data", "given", "fix"),
    [
        ("train.csv", "a str, 'train.csv'", "px.Table(**columns)"),
        ({"input": X, "label": Y}, "a dict of input, label", "px.Table(**columns)"),
        (Splits(train=Columns([1]), test=Columns([2])), "a Splits of train, test", "splits['train']"),
        ((X, Y), "a tuple of 2 arrays of 20 rows each", "px.Table(input=inputs, label=labels)"),
        ((X.numpy(), Y.numpy()), "a tuple of 2 arrays of 20 rows each", "px.Table(input=inputs, label=labels)"),
        (pandas.DataFrame({"a": [1, 2]}), "a DataFrame, whose [i] is a column", "frame[name].to_numpy()"),
    ],
)
def test_data_without_samples(data: Any, given: str, fix: str) -> None:
    with pytest.raises(SpecError) as refused:
        is_stream(data)
    (problem,) = refused.value.problems
    assert (problem.where, problem.given) == ("job.data", given)
    assert fix in problem.fix


def test_an_evaluation_set_without_samples() -> None:
    with pytest.raises(SpecError, match=r"job\.evaluate: given a dict of x; (?s:.*)try: evaluate=lambda: px\.Table"):
        is_stream({"x": X}, "job.evaluate")


@pytest.mark.parametrize("data", [[X[0], X[1]], (X[:2], Y[:2]), {0: X[0], 1: X[1]}, X, np.zeros((4, 2))])
def test_data_that_have_samples(data: Any) -> None:
    assert not is_stream(data)


def test_data_without_samples_are_named_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"job\.data: given a str, 'train\.csv'"):
        px.fit(job(data=lambda: "train.csv"), "dp=2", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: job(sampler=lambda epoch: [1]), "job.sampler"),
        (lambda: px.Sampler(lambda seed, epoch: [1], by_batch=True), "px.Sampler"),
        (lambda: px.Sampler(lambda epoch: [1]), "px.Sampler"),
    ],
)
def test_a_sampler_of_other_arguments(make: Callable[[], Any], where: str) -> None:
    with pytest.raises(SpecError, match="one that can be called with seed, epoch") as refused:
        make()
    assert refused.value.problems[0].where == where


def test_a_sampler_that_takes_what_it_is_called_with() -> None:
    job(sampler=lambda seed, epoch, more=0: [1])
    px.Sampler(lambda *given: [1], by_batch=True)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own import
def test_a_compiled_model() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(SpecError, match=r"a model in torch\.compile(?s:.*)compile=true in the plan"):
        build_model(job(model=lambda: torch.compile(net)))


@pytest.mark.parametrize(
    ("output", "fix"),
    [((X, Y), "px.cross_entropy(output[0], "), ({"a": 1, "out": X}, "px.cross_entropy(output['out'], ")],
)
def test_an_output_that_holds_the_logits(output: Any, fix: str) -> None:
    with pytest.raises(LossError) as refused:
        px.cross_entropy(output, Y)
    assert fix in str(refused.value)


def test_a_number_of_a_plan_in_quotes() -> None:
    with pytest.raises(SpecError, match="given dp='2'; allowed: a whole number"):
        px.Plan(dp="2")  # pyright: ignore[reportArgumentType]


def test_a_plan_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(px.Plan.parse("dp=2 micro=5").to_toml())
    run = px.fit(job(), str(tmp_path / "plan.toml"), folder=tmp_path / "run", forecast="none")
    assert str(run.plan) == "dp=2 micro=5"
    with pytest.raises(SpecError, match=r"plan: given .*none\.toml"):
        px.fit(job(), str(tmp_path / "none.toml"))


def test_a_forecast_is_printed_in_a_few_lines() -> None:
    found = px.forecast(job(), "dp=2", "2xH100")
    first, second, third, *notes = str(found).splitlines()
    assert first.startswith("dp=2 on 2xH100")
    assert " a step (" in second
    assert " samples/s" in second
    assert third.endswith("of memory: fits")
    assert all(note.startswith("note: ") for note in notes)


def test_what_a_model_is_written_to(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"target: given .*a\.pt, (?s:.*)try: .*a\.safetensors"):
        refuse_target(tmp_path / "a.pt")
    (tmp_path / "there").mkdir()
    with pytest.raises(SpecError) as refused:
        refuse_target(tmp_path / "there")
    (problem,) = refused.value.problems
    assert (problem.where, problem.fix) == ("target", str(tmp_path / "there-1"))
