"""A split that is broken on purpose is found unequal, and the cause that is named is the one that was planted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models import MODELS, job, rows
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.comm import Place
from phalanx.parallel import ddp, split
from phalanx.parallel.local_shards import axis, matmul_ops
from phalanx.train import assembly, grad_accumulation, step
from phalanx.verify import OneDevice, Proof


class Block(nn.Module):
    """A linear layer whose outputs are split and one whose inputs are, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def residual() -> px.Job:
    return job(Residual, rows(), lambda output, batch: nn.functional.cross_entropy(output, batch["y"]))


@cache
def one_residual() -> OneDevice:
    return OneDevice.run(residual(), 2)


@cache
def one_gpt() -> OneDevice:
    return OneDevice.run(MODELS["own GPT"](), 2)


@pytest.fixture(autouse=True, scope="module")
def _references_before_a_fault() -> None:
    one_residual()
    one_gpt()


def unequal(plan: str, one: OneDevice | px.Job) -> Proof:
    proof = one.prove(px.Plan.parse(plan)) if isinstance(one, OneDevice) else px.prove(one, plan, steps=2)
    assert not proof.equal
    assert proof.first
    return proof


def added_up(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    total = matmul_ops.total

    def added(tensor: torch.Tensor, axis: Any) -> torch.Tensor:
        if axis.group is None:  # a dry run that looks for a split is left alone
            return total(tensor, axis)
        for _ in range(times):
            tensor = total(tensor.clone(), axis)
        return tensor

    monkeypatch.setattr(matmul_ops, "total", added)


def test_a_row_split_layer_that_is_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    added_up(monkeypatch, 0)
    assert unequal("tp=2", one_residual()).cause.startswith(
        "a missing all-reduce: the output of blocks.0.down is the first"
    )


def test_a_sum_over_ranks_that_is_added_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    added_up(monkeypatch, 2)
    cause = unequal("tp=3", one_residual()).cause
    assert cause.startswith("a doubled all-reduce: the output of blocks.0.down is the first")
    assert "3 × one device's" in cause


def backward(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    def added(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone(memory_format=torch.contiguous_format)
        for _ in range(times):
            grad = ctx.axis.add_up(grad)
        return grad, None

    monkeypatch.setattr(axis._Shared, "backward", staticmethod(added))


@pytest.mark.parametrize(("times", "words"), [(0, "a missing all-reduce in"), *longer((2, "a doubled all-reduce in"))])
def test_gradients_added_up_another_number_of_times(times: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward(monkeypatch, times)
    cause = unequal("tp=2", one_residual()).cause
    assert cause.startswith(f"{words} backward: the gradient that comes back to the output of blocks.1.norm")
    assert "while that of blocks.1.up is right" in cause


def test_norms_whose_gradients_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: Any) -> None:
        self._replicas.finish()

    monkeypatch.setattr(split.SplitLayout, "finish", finish)
    proof = unequal("tp=2 sequence=true", one_gpt())
    assert "are not added up over tp: each rank has that of its own tokens only, and they add up" in proof.cause
    wrong = [one.name for one in proof.gradients if one.beyond]
    assert all("norm" in name or name.endswith("bias") for name in wrong)
    assert "gradients of blocks.0.norm_1.weight, " in proof.cause


def test_gradients_that_are_not_reduced_over_dp_beside_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.parallel.replica_group import Whole

    monkeypatch.setattr(Whole, "finish", lambda self: None)
    cause = unequal("dp=2 tp=2", one_residual()).cause
    assert "a missing synchronisation" in cause
    assert "ranks of dp have different gradients" in cause


def reborn(monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]) -> None:
    def other(job: px.Job, plan: px.Plan, place: Place, device: Any, **how: Any) -> Any:
        built = build(job, plan, place, device, **how)
        if place.rank in ranks:
            torch.manual_seed(99)
            for tensor in built.layout.parameters.values():
                if tensor.dim() > 1:
                    nn.init.normal_(tensor.data, std=0.02)
        return built

    build = assembly.build
    monkeypatch.setattr("phalanx.train.mesh_stepper.build", other)


def test_a_stage_with_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    reborn(monkeypatch, (1,))
    proof = unequal("pp=2 micro=7", one_residual())
    assert proof.cause.startswith("stage 1 of the pipeline (rank")
    assert "other initial values" in proof.cause
    assert {one.where for one in proof.gradients if one.name.startswith("head")} == {"stage 1"}


def test_a_slice_with_another_seed_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(job: px.Job, plan: px.Plan, place: Place, device: Any, **how: Any) -> Any:
        built = build(job, plan, place, device, **how)
        if place.rank == 1:
            built.layout.parameters["blocks.1.up.weight"].data.mul_(2)
        return built

    build = assembly.build
    monkeypatch.setattr("phalanx.train.mesh_stepper.build", other)
    proof = unequal("tp=2", one_residual())
    assert "blocks.1.up.weight in rows 32:64, which rank 1 holds" in proof.cause


def moe(times_count: bool) -> px.Job:
    """A router's z-loss beside the cross entropy: a mean, or a sum to be divided like the rest."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(16, 16)
            self.router = nn.Linear(16, 4, bias=False)
            self.experts = Experts()
            self.head = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.embed(x)
            logits = self.router(x)
            weight, chosen = logits.softmax(-1).topk(2, dim=-1)
            return self.head(x + self.experts(x, chosen, weight)), logits

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)

        def forward(self, x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            found = torch.zeros_like(x)
            for expert, matrix in enumerate(self.weight):
                row, slot = torch.where(chosen == expert)
                found = found.index_add(0, row, torch.tanh(x[row] @ matrix) * weight[row, slot].unsqueeze(-1))
            return found

    def loss(output: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> px.Loss:
        main = px.cross_entropy(output[0], batch["y"])
        beside = output[1].logsumexp(-1).square()
        return px.Loss(main.sum + (0.1 * beside.sum() if times_count else beside.mean()), main.count)

    return job(Mixture, rows(), loss)


def test_an_auxiliary_loss_that_every_rank_counts() -> None:
    cause = unequal("ep=2 micro=1", moe(times_count=False)).cause
    assert cause.startswith("an auxiliary loss is counted another number of times than once: the gradient of router")
    assert "holds 14 × one device's, once per rank and micro-batch" in cause


def test_an_auxiliary_loss_that_is_divided_like_the_rest_is_equal() -> None:
    assert px.prove(moe(times_count=True), "ep=2", steps=2).equal


def test_causes_of_every_plan_are_named_under_a_split_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_samples(self: Any, totals: torch.Tensor) -> float:
        if self._exact:
            return 1.0
        return 1.03 * self._divided_by * self._step.layout.divisor / self._batch.samples

    monkeypatch.setattr(grad_accumulation.GradAccumulation, "correction", by_samples)
    given = residual()
    summed = replace(given, loss=lambda output, batch: px.cross_entropy(output, batch["y"]))
    assert "weighted by the wrong count" in unequal("tp=2", summed).cause


def test_the_same_samples_on_two_replicas_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = assembly.Lane.of
    monkeypatch.setattr(assembly.Lane, "of", lambda plan, rank: replace(right(plan, rank), first=0))
    cause = unequal("dp=2 tp=2", one_residual()).cause
    assert "identical samples on two ranks" in cause
    assert "was on ranks 0 and 2 in step 0" in cause


def test_other_samples_on_two_ranks_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = assembly.Loader

    def other(data: Any, job: px.Job, lane: Any, **how: Any) -> Any:
        alone = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return loader(data, job if alone else replace(job, seed=5), lane, **how)

    monkeypatch.setattr(assembly, "Loader", other)
    assert "other samples on two ranks of one replica: ranks 0 and 1" in unequal("tp=2", one_residual()).cause


@pytest.mark.parametrize(("divisor", "words"), [(1, "A mean of means"), *longer((4, "a sum where a mean was meant"))])
def test_a_wrong_divisor(divisor: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp.DdpLayout, "divisor", property(lambda self: divisor))
    proof = unequal("dp=2", MODELS["MLP"]())
    assert words in proof.cause
    assert "the number of replicas" in proof.cause


def test_clipping_by_a_local_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(held: Any, **_: Any) -> torch.Tensor:
        grads = [tensor.grad for tensor in held.parameters.values() if tensor.grad is not None]
        grads = [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads]
        return torch.stack([grad.norm() for grad in grads]).norm()

    monkeypatch.setattr(step, "global_norm", local)
    clipped = replace(MODELS["MLP"](), clip=0.01, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    assert "clipping by a local norm" in unequal("fsdp=2", clipped).cause


def test_a_plan_that_promises_no_equality_says_what_bounds_the_difference() -> None:
    plan = "dp=2 sync=diloco every=2"
    proof = unequal(plan, MODELS["MLP"]())
    assert proof.largest["gradient"] < 1e-5
    assert proof.first.startswith("the loss of step 1")
    assert "does not promise one device's result (exact: no)" in proof.cause
    assert px.Plan.parse(plan).bound in proof.cause
