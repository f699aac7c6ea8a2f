"""Faults that leave losses and first gradients right, or nearly so: each is found unequal, with its cause in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, job, rows
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.comm import local
from phalanx.parallel.compression import codecs
from phalanx.parallel.parameter_server.update import Shard, Update
from phalanx.parallel.threads import ThreadsLayout
from phalanx.train import mesh_stepper
from phalanx.train.grad_accumulation import GradAccumulation
from phalanx.train.parameter_server.gradient_worker import Worker
from phalanx.train.step import Step
from phalanx.verify import Proof, parity


def split() -> bool:
    """Whether this is a rank of the plan, and not the one device that it is compared with."""
    return dist.is_initialized() and dist.get_world_size() > 1


def on_rank_1() -> bool:
    return split() and dist.get_rank() == 1


def unequal(plan: str, given: px.Job | None = None, steps: int = 3) -> Proof:
    proof = px.prove(given or MODELS["own GPT"](), plan, steps=steps)
    assert not proof.equal
    assert proof.first
    return proof


def after_update(monkeypatch: pytest.MonkeyPatch, change: Callable[[Step], None], step: int | None = None) -> None:
    def update(self: Step, batch: Any, totals: Any) -> Any:
        metrics = right(self, batch, totals)
        if on_rank_1() and step in (None, batch.step):
            with torch.no_grad():
                change(self)
        return metrics

    right = Step.update
    monkeypatch.setattr(Step, "update", update)


def scaled(times: float) -> Callable[[Step], None]:
    def change(step: Step) -> None:
        for tensor in step.layout.module.parameters():
            local(tensor).mul_(times)

    return change


@pytest.mark.parametrize("plan", ["fsdp=2 zero=1", *longer("dp=2 tp=2")])
def test_a_copy_that_is_changed_after_the_last_step(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after_update(monkeypatch, scaled(3.0), step=2)
    proof = unequal(plan)
    assert "after the last step" in proof.first
    assert "copies of" in proof.first
    assert "on ranks " in proof.first


def test_a_state_of_the_optimizer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(step: Step) -> None:
        for state in step.optimizer.state.values():
            state["exp_avg"].mul_(1.5)

    after_update(monkeypatch, change, step=2)
    proof = unequal("dp=2")
    assert ".exp_avg on ranks 0 and 1" in proof.first
    assert "state" in proof.cause


class Counting(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].sum().detach()
        return self.layer(x)


def test_a_buffer_that_differs_by_rank() -> None:
    given = job(Counting, rows(), lambda output, batch: nn.functional.cross_entropy(output, batch["y"]))
    proof = unequal("dp=2", given)
    assert "the buffer seen" in proof.first
    assert "seen" in proof.cause
    assert "forward" in proof.cause


def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Step, batch: Any, totals: Any) -> Any:
        for tensor in self.layout.parameters.values() if split() else ():
            if tensor.grad is not None:
                local(tensor.grad).mul_(2)
        return right(self, batch, totals)

    right = Step.update
    monkeypatch.setattr(Step, "update", update)


@pytest.mark.parametrize("clip", [0.01, *longer(1e6)])
def test_gradients_doubled_before_the_update(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    doubled(monkeypatch)
    proof = unequal("dp=2", replace(MODELS["own GPT"](), clip=clip))
    assert "norm is" in proof.first if clip == 0.01 else "that the optimizer was given in step 0" in proof.first
    assert "between backward and the update" in proof.cause


def too_large(monkeypatch: pytest.MonkeyPatch, times: float, first: int = 0) -> None:
    def correction(self: Any, totals: Any) -> Any:
        found = right(self, totals)
        wrong = split() and self._step.progress.step >= first
        return times * (1.0 if found is None else found) if wrong else found

    right = GradAccumulation.correction
    monkeypatch.setattr(GradAccumulation, "correction", correction)


@pytest.mark.parametrize(("model", "precision"), longer(("own GPT", "bf16"), ("MLP", "fp16")))
def test_two_percent_in_half_precision(model: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    too_large(monkeypatch, 1.02)
    proof = unequal(f"dp=2 precision={precision}", MODELS[model](), steps=2)
    assert "in step 0" in proof.first
    assert "weighted by the wrong count" in proof.cause


def test_a_few_percent_from_a_later_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    too_large(monkeypatch, 1.05, first=2)
    proof = unequal("dp=2 precision=bf16", MODELS["own GPT"]())
    assert proof.first.startswith("all gradients in step 2: ")
    scale = next(check for check in proof.checks if check.first)
    assert scale.largest == pytest.approx(0.05, rel=0.1)


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, times: float) -> torch.Tensor:
        ctx.times = times
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.times, None


class Adapted(nn.Module):
    """A frozen layer and an adapter of low rank, half of which starts at zero: the other half has no gradient at first.

    On rank 1 what then comes back to that half is ``times`` what it should be.
    """

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times
        self.base = nn.Linear(16, 5)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, 16))
        self.b = nn.Parameter(torch.zeros(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = Faulty.apply(self.a, self.times) if on_rank_1() and self.training else self.a
        return self.base(x) + x @ a.T @ self.b.T


def adapted(lr: float, times: float) -> px.Job:
    return job(
        lambda: Adapted(times),
        rows(),
        lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
    )


@pytest.mark.parametrize(("times", "lr"), [(1.01, 1e-9), *longer((0.0, 1e-3), (-1.0, 1e-6))])
def test_a_gradient_that_is_there_from_the_second_step_on_and_wrong(times: float, lr: float) -> None:
    proof = unequal("dp=2", adapted(lr, times))
    assert proof.first.startswith("the gradient of a in step 1")
    assert "the gradient of a is there from step 1 on" in proof.cause


def test_a_small_gradient_that_is_right() -> None:
    proof = px.prove(adapted(1e-9, 1.0), "dp=2", steps=3)
    assert proof.equal, proof.first
    assert proof.not_compared == []


def test_a_buffer_that_differs_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica's buffers are right; the second's are not brought up to date."""

    def stepped(self: ThreadsLayout) -> None:
        kept = [tensor.clone() for tensor in self.modules[1].buffers()]
        right(self)
        for tensor, before in zip(self.modules[1].buffers(), kept, strict=True):
            tensor.copy_(before)

    right = ThreadsLayout.stepped
    monkeypatch.setattr(ThreadsLayout, "stepped", stepped)
    given = job(Counting, rows(), lambda output, batch: nn.functional.cross_entropy(output, batch["y"]))
    proof = unequal("threads=2", replace(given, evaluate=None))
    assert proof.first.startswith("copies of the buffer seen on threads 0 and 1 differ")


def test_a_worker_of_servers_with_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def land(self: Worker) -> None:
        right(self)
        with torch.no_grad():
            parameter = next(iter(self._layout.parameters.values()))
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, 9.0)))

    right = Worker._land
    monkeypatch.setattr(Worker, "_land", land)
    proof = unequal("dp=2 server=1")
    assert proof.first.startswith("copies of ")
    assert " and the servers differ" in proof.first


def test_gradients_that_a_server_clips_to_another_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Shard, update: Update) -> None:
        right(self, replace(update, scale=1.5 * update.scale))

    right = Shard.apply
    monkeypatch.setattr(Shard, "apply", apply)
    proof = unequal("dp=2 server=2")
    assert "that the optimizer was given in step 0" in proof.first
    assert "changed between backward and the update: 1.5 × one device's" in proof.cause


class Nested(nn.Module):
    """Branches within branches, each behind a gate that starts at zero: the last has a gradient from step 3 on."""

    def __init__(self, times: float = 1.0, spare: bool = False) -> None:
        super().__init__()
        self.times = times
        self.head, self.inner = nn.Linear(16, 5), nn.Linear(16, 5)
        self.outer, self.middle = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.gates = nn.ParameterList(torch.zeros(()) for _ in range(3))
        if spare:
            self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        inner = Faulty.apply(inner, self.times) if on_rank_1() and self.training else inner
        first, second, third = self.gates
        return self.head(x) + first * (self.outer + second * (self.middle + third * inner))


def nested(**how: Any) -> px.Job:
    given = {name: how.pop(name) for name in ("times", "spare") if name in how}
    return job(
        lambda: Nested(**given),
        rows(),
        lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **{"clip": None} | how,
    )


def test_more_steps_are_taken_until_every_parameter_has_had_a_gradient() -> None:
    proof = px.prove(nested(), "dp=2 micro=2", steps=1)
    assert proof.equal, proof.first
    assert (proof.asked, proof.steps, len(proof.losses)) == (1, 4, 4)
    assert proof.late is not None
    assert proof.late[0].startswith("inner.")
    assert proof.late[1] == 3
    assert not proof.never


def test_a_gradient_that_comes_after_the_steps_asked_for_is_compared() -> None:
    proof = px.prove(nested(times=2.0), "dp=2", steps=1)
    assert not proof.equal
    assert proof.first.startswith("the gradient of inner.")
    assert " in step 3, by " in proof.first
    assert "is there from step 3 on" in proof.cause


def test_what_never_has_a_gradient_is_said_after_as_many_steps_again() -> None:
    proof = px.prove(nested(spare=True, unused="allow"), "dp=2", steps=5)
    assert proof.equal, proof.first
    assert (proof.steps, proof.never) == (10, ["spare"])
    assert proof.steps == parity.most_steps(5)


def test_rates_are_those_of_the_steps_asked_for() -> None:
    one = parity.OneDevice.run(nested(schedule=px.Schedule(decay="linear", warmup_steps=1)), 3)
    rates = [step.rates["head.weight"] for step in one._record.steps]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.0])
    assert one.prove(px.Plan.parse("dp=2")).equal


def test_phalanx_on_one_device_goes_on_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "why_not", lambda job: "for a test")
    proof = px.prove(nested(), "dp=2", steps=1)
    assert proof.reference.startswith("Phalanx on one device")
    assert proof.equal, proof.first
    assert (proof.steps, proof.never) == (5, [])


@pytest.mark.parametrize("resume", [True, False])
def test_what_a_resume_loses_is_found_where_the_run_is_resumed(resume: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(path: Any, given: px.Job, assembly: Any) -> None:
        right(path, given, assembly)
        if on_rank_1():
            for state in assembly.optimizer.state.values():
                local(state["exp_avg"]).mul_(2.0)

    right = mesh_stepper.restore
    monkeypatch.setattr(mesh_stepper, "restore", lossy)
    proof = px.prove(MODELS["MLP"](), "fsdp=2", steps=3, resume=resume)
    assert proof.equal == (not resume)
    assert proof.first.startswith("after a resume at step 1: " if resume else "")
    assert ("without a stop has this right" in proof.cause) == resume


@pytest.mark.parametrize("biased", [True, False])
def test_a_codec_that_rounds_downwards_is_told_from_one_that_rounds(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(flat: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor) -> None:
        right(flat, scale, levels)
        levels.sub_((levels > -127).to(levels.dtype))  # a level less

    right = codecs._encode
    if biased:
        monkeypatch.setattr(codecs, "_encode", encode)
    cause = unequal("dp=2 compress=int8").cause
    assert ("look at how the codec rounds" in cause) == biased
    assert ("does not promise" in cause) != biased
