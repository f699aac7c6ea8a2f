"""Metrics that are computed once from all samples: what they come to under every plan, by hand on the trained model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics
from models import MODELS
from small import Blocks, fit, table
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.errors import LossError, PhalanxError, RunError, SpecError

F1 = torchmetrics.F1Score(task="binary")
AUC = torchmetrics.AUROC(task="binary")
LEFT = 41


class Scorer(Blocks):
    def __init__(self) -> None:
        super().__init__(outputs=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze(-1)


def rows(length: int = 103, seed: int = 0) -> px.Table:
    given = table(length, seed)
    return px.Table(x=given.columns["x"], y=(given.columns["y"] > 2).long())


def metrics(output: torch.Tensor, batch: Any) -> dict[str, Any]:
    scores, labels = output.sigmoid(), batch["y"]
    right = ((scores > 0.5) == (labels == 1)).double()
    return {
        "f1": px.torchmetric(F1, scores, labels),
        "auc": px.torchmetric(AUC, scores, labels),
        "ordered": px.Metric(rows={"scores": scores, "labels": labels}, compute=ordered),
        "table": px.Metric(
            sums={"hits": right.sum(), "all": len(labels)}, compute=lambda hits, all: {"right": hits / all}
        ),
        "accuracy": px.Loss(right.sum(), len(labels)),
    }


def ordered(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """What depends on the order in which the rows come."""
    return float((scores.double() * torch.arange(1, len(scores) + 1)).sum() + labels[-1])


HOW: dict[str, Any] = {
    "model": Scorer,
    "data": rows,
    "inputs": lambda batch: batch["x"],
    "loss": lambda output, batch: nn.functional.binary_cross_entropy_with_logits(output, batch["y"].float()),
    "evaluate": lambda: rows(LEFT, seed=1),
    "metrics": metrics,
    "evaluate_every": 2,
}


def by_hand(run: px.Run) -> dict[str, float]:
    """Of the trained model on all rows in one go: F1 and the share of pairs in the right order, written out."""
    model, given = run.model().eval(), rows(LEFT, seed=1).columns
    with torch.no_grad():
        scores, labels = model(given["x"]).sigmoid(), given["y"]
    said, true = scores > 0.5, labels == 1
    pairs = scores[true].unsqueeze(1) > scores[~true].unsqueeze(0)
    right = float((said == true).double().mean())
    return {
        "f1": 2 * int((said & true).sum()) / (int(said.sum()) + int(true.sum())),
        "auc": float(pairs.double().mean()),
        "ordered": ordered(scores, labels),
        "table.right": right,
        "accuracy": right,
    }


PLANS = ("dp=2 micro=3", "pp=2 micro=5")
OTHERS = ("tp=2", "threads=2", "single", "fsdp=2", "fsdp=2 zero=1", "dp=2 tp=2", "dp=4", "dp=2 sync=local every=2")


@pytest.mark.parametrize("plan", [*PLANS, *longer(*OTHERS)])
def test_they_are_computed_from_all_samples_in_order(plan: str) -> None:
    run = fit(plan, "run", **HOW)
    found = run.evaluation
    assert found["metrics"] == pytest.approx(by_hand(run), rel=1e-5)


@pytest.mark.parametrize("plan", ["dp=2 micro=3", *longer("fsdp=2", "pp=2")])
def test_a_proof_holds_them_against_one_device(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = px.Job(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=32, steps=2, **HOW)
    assert px.prove(given, plan, steps=2).equal
    from phalanx.train.evaluation_sums import EvaluationSums

    right = EvaluationSums.add

    def in_any_order(self: EvaluationSums, found: Any, first: int, **how: Any) -> None:
        right(self, found, -first, **how)

    monkeypatch.setattr(EvaluationSums, "add", in_any_order)
    proof = px.prove(given, plan, steps=2)
    assert not proof.equal
    assert "ordered" in proof.first


def test_the_best_and_the_end_follow_from_them() -> None:
    run = fit("dp=2", "run", **HOW, best=px.Best("auc", mode="max"))
    assert run.best["metrics"]["auc"] == max(event["metrics"]["auc"] for event in run.events("evaluate"))


def test_rows_are_refused_where_a_rank_has_a_part_of_each() -> None:
    def measured(output: Any, batch: Any) -> dict[str, Any]:
        return {"firsts": px.Metric(rows={"first": batch["input_ids"][:, 0]}, compute=lambda first: first.sum())}

    given = replace(MODELS["own GPT"](), evaluate=MODELS["own GPT"]().data, metrics=measured)
    with pytest.raises(PhalanxError, match="metric 'firsts' collects rows"):
        px.fit(given, "cp=2", folder="run")


BAD = {
    "no tensor": (px.Metric(sums={"a": "text"}, compute=float), "'a' is a str; px.Metric takes tensors"),
    "no rows": (px.Metric(rows={"a": torch.tensor(1.0)}, compute=float), "has no dimension"),
    "an empty tensor": (px.Metric(sums={"a": torch.ones(0)}, compute=lambda a: a), r"a Tensor of shape \[0\]"),
    "a text": (px.Metric(sums={"a": torch.ones(2)}, compute=lambda a: {"x": "y"}), "compute gives a str"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_named(name: str) -> None:
    given, words = BAD[name]
    with pytest.raises((LossError, RunError), match=words):
        fit("single", "run", **{**HOW, "metrics": lambda output, batch: {"wrong": given}})


def test_a_tensor_is_a_number_of_each_cell() -> None:
    given = px.Metric(sums={"a": torch.tensor([[1, 2], [3, 4]])}, compute=lambda a: a)
    found = fit("single", "run", **{**HOW, "metrics": lambda output, batch: {"cells": given}}).evaluation
    assert found is not None
    assert [*found["metrics"]][-4:] == [f"cells.{row}.{column}" for row in (0, 1) for column in (0, 1)]


def test_what_is_wrong_of_itself_is_said_at_once() -> None:
    with pytest.raises(SpecError, match=r"metric\.compute.*None"):
        px.Metric(compute=None, sums={"a": 1})
    with pytest.raises(SpecError, match="neither sums nor rows"):
        px.Metric(compute=float)
    with pytest.raises(SpecError, match="names that sums does not have"):
        px.Metric(compute=float, sums={"a": 1}, rows={"a": 1})
    with pytest.raises(LossError, match=r"px\.torchmetric takes a metric of torchmetrics, not a int"):
        px.torchmetric(3)
    with pytest.raises(LossError, match="'max_value' of MaxMetric is neither added up nor joined"):
        px.torchmetric(torchmetrics.MaxMetric(), torch.ones(3))
    assert math.isfinite(AUC(torch.tensor([0.1, 0.9]), torch.tensor([0, 1])))


def by_places(output: torch.Tensor, batch: Any) -> dict[str, Any]:
    """Sums that keep the dimensions along which ``tp`` and ``cp`` cut: tokens, and classes."""
    return {
        "tokens": px.Metric(sums={"each": output.double().square().sum((0, 2))}, compute=weighed),
        "classes": px.Metric(sums={"each": output.double().square().sum((0, 1))}, compute=weighed),
    }


def weighed(each: torch.Tensor) -> float:
    return float((each * torch.arange(1, len(each) + 1)).sum())


@pytest.mark.parametrize("plan", ["cp=2", *longer("tp=2", "tp=2 sequence=true", "dp=2 tp=2")])
def test_sums_keep_dimensions_that_a_plan_cuts(plan: str) -> None:
    given = replace(MODELS["own GPT"](), steps=2, epochs=None, evaluate=MODELS["own GPT"]().data, metrics=by_places)
    alone, cut = (
        px.fit(given, one, folder=f"run-{number}", forecast="none") for number, one in enumerate(("single", plan))
    )
    assert cut.evaluation["metrics"] == pytest.approx(alone.evaluation["metrics"], rel=1e-4)
