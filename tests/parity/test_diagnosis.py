"""A split that is broken on purpose is found unequal, and the cause that is named is the one that was planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import MODELS, job, rows
from torch import nn

import phalanx as px
from phalanx.comm import Place
from phalanx.parallel import ddp
from phalanx.train import assembly, grad_accumulation, step


def unequal(plan: str, model: str = "MLP") -> Any:
    proof = px.prove(MODELS[model](), plan, steps=3)
    assert not proof.equal
    assert proof.first
    return proof


def test_the_same_samples_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = assembly.Lane.of
    monkeypatch.setattr(assembly.Lane, "of", lambda plan, rank: replace(right(plan, rank), first=0))
    assert "identical samples on two ranks" in unequal("dp=2").cause


def test_gradients_that_are_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(ddp: Any, device: Any, micros: Any, work: Any) -> None:
        with ddp.no_sync():
            for index, micro in enumerate(micros):
                work.run(ddp, device, micro, index == len(micros) - 1)

    monkeypatch.setattr(ddp, "accumulate", alone)
    assert "missing synchronisation" in unequal("dp=2").cause


@pytest.mark.parametrize(("divisor", "words"), [(1, "A mean of means"), (4, "a sum where a mean was meant")])
def test_a_wrong_divisor(divisor: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp.DdpLayout, "divisor", property(lambda self: divisor))
    proof = unequal("dp=2")
    assert words in proof.cause
    assert "the number of replicas" in proof.cause


def test_a_mean_over_the_wrong_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_samples(self: Any, totals: torch.Tensor) -> float:
        if self._exact:
            return 1.0
        return self._divided_by * self._step.layout.divisor / self._batch.samples

    monkeypatch.setattr(grad_accumulation.GradAccumulation, "correction", by_samples)
    assert "weighted by the wrong count" in unequal("dp=2", "own GPT").cause


def test_clipping_by_a_local_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(held: Any, **_: Any) -> torch.Tensor:
        grads = [tensor.grad for tensor in held.parameters.values() if tensor.grad is not None]
        grads = [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads]
        return torch.stack([grad.norm() for grad in grads]).norm()

    monkeypatch.setattr(step, "global_norm", local)
    monkeypatch.setitem(MODELS, "clipped", lambda: _clipped(0.01))
    assert "clipping by a local norm" in unequal("fsdp=2", "clipped").cause


def test_one_parameter_that_only_one_rank_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def hooked(job: px.Job, plan: px.Plan, place: Place, device: Any, **how: Any) -> Any:
        built = build(job, plan, place, device, **how)
        if place.rank == 1:
            next(iter(built.layout.parameters.values())).data.mul_(1.001)
        return built

    build = assembly.build
    monkeypatch.setattr("phalanx.train.mesh_stepper.build", hooked)
    assert "hold different values of gain" in unequal("dp=2").cause


def test_batch_normalisation_is_named() -> None:
    batch_norm = job(
        lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        rows(),
        lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        inputs=lambda batch: batch["x"],
    )
    said: list[str] = []
    proof = px.prove(batch_norm, "dp=2", steps=2, say=said.append)
    assert not proof.equal
    assert "BatchNorm" in proof.cause
    assert any("BatchNorm" in note for note in said)


def test_dropout_is_off_and_said() -> None:
    said: list[str] = []
    assert px.prove(MODELS["HF GPT-2"](), "dp=2", steps=2, say=said.append).equal
    assert any("dropout is switched off" in note for note in said)


def _clipped(limit: float) -> px.Job:
    from dataclasses import replace

    return replace(MODELS["MLP"](), clip=limit, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))


@pytest.mark.parametrize("plan", ["dp=2 sync=local every=3", "dp=2 sync=diloco outer=sgd", "dp=2 sync=diloco every=2"])
def test_a_plan_that_promises_no_equality_says_what_bounds_the_difference(plan: str) -> None:
    proof = unequal(plan)
    assert proof.largest["gradient"] < 1e-5
    assert proof.first.startswith("the loss of step 1")
    assert "does not promise one device's result (exact: no)" in proof.cause
    assert px.Plan.parse(plan).bound in proof.cause
