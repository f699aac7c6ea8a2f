"""How often a step makes the host wait for an accelerator, counted on a stand-in whose work is done late.

The stand-in computes with the host's cores. It has a stream, as CUDA has: what is copied to the host may be read once
the event behind it has come, and the device is as far behind the host as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx as px
from law_rows import longer
from phalanx.device_kinds import host
from phalanx.errors import GradientError, LossError
from phalanx.train import loss as losses
from phalanx.train import metrics as numbers_of_a_step

READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}
SAMPLES, BATCH = 48, 8


class Queue:
    """A stream: events in the order in which they were recorded; all up to ``done`` have come.

    ``waits`` has, of each wait, how many events were queued behind the one that was waited for.
    """

    def __init__(self) -> None:
        self.recorded, self.done = 0, 0
        self.waits: list[int] = []
        self.lists = 0  # calls of tolist() on tensors of the device


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.place = queue, 0

    def record(self, stream: Any = None) -> None:
        self.queue.recorded += 1
        self.place = self.queue.recorded

    def query(self) -> bool:
        return self.place <= self.queue.done

    def synchronize(self) -> None:
        self.queue.waits.append(self.queue.recorded - self.place)
        self.queue.done = max(self.queue.done, self.place)


class Reads(TorchDispatchMode):
    """Counts what reads a value of a tensor of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in READS and not from_host(args[0]):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


on_host: list[torch.Tensor] = []


def from_host(tensor: torch.Tensor) -> bool:
    return any(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in on_host)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """The host's cores are an accelerator with one stream."""
    queue, kind = Queue(), type(host())
    towards_host, tolist = numbers_of_a_step.towards_host, torch.Tensor.tolist

    def copied(*given: Any) -> Any:
        numbers, norm, ready = towards_host(*given)
        on_host.append(numbers)
        return numbers, norm, ready

    def listed(tensor: torch.Tensor) -> Any:
        queue.lists += not from_host(tensor)
        return tolist(tensor)

    for name, value in {"streams": True, "on_host": False, "event": lambda self, **_: Event(queue)}.items():
        monkeypatch.setattr(kind, name, value)
    monkeypatch.setattr(kind, "current_stream", lambda self, device: None)
    monkeypatch.setattr("phalanx.train.step.towards_host", copied)
    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    yield queue
    on_host.clear()


def data(bad: int | None = None) -> px.Table:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        inputs[bad * BATCH : (bad + 1) * BATCH] = math.inf
    return px.Table(input=inputs, label=torch.arange(SAMPLES) % 3)


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def job(optimizer: Any = OPTIMIZERS["adamw"], *, bad: int | None = None, **how: Any) -> px.Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    return px.Job(
        model=model,
        data=lambda: data(bad),
        loss=lambda output, batch: px.cross_entropy(output, batch["label"]),
        optimizer=optimizer,
        batch=BATCH,
        epochs=1,
        shuffle=False,
        **how,
    )


def steps(made: px.Job, plan: str, **how: Any) -> Iterator[Any]:
    """Each step's metrics; before the first come step and loader."""
    step, loader = px.build(made, px.Plan.parse(plan), **how)
    yield step
    for batch in loader:
        yield step(batch)


@pytest.mark.parametrize(
    ("optimizer", "how", "plan"),
    [
        ("adamw", {}, "single"),
        ("adam", {"clip": 1.0}, "micro=4"),
        ("sgd", {"clip": 1.0}, "micro=4 precision=bf16"),
        *longer(("sgd", {}, "single"), ("adamw", {"clip": 1.0}, "micro=4 precision=bf16")),
    ],
)
def test_one_wait_a_step_and_none_for_the_step_just_queued(
    optimizer: str, how: dict[str, Any], plan: str, queue: Queue
) -> None:
    taken = steps(job(OPTIMIZERS[optimizer], **how), plan)
    next(taken), next(taken)  # the first step looks for parameters without a gradient
    queue.lists = 0
    for _ in range(4):
        queue.waits.clear()
        with Reads() as reads:
            next(taken)
        assert reads.found == []
        assert queue.waits == [1]  # for the step before, while one step is queued
    assert queue.lists == 0
    assert len(list(taken)) == 1


class Casts(TorchDispatchMode):
    """Counts casts of fp32 tensors of the shape of a weight to bf16."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to = (kwargs or {}).get("dtype")
        self.found += func.name().startswith("aten::_to_copy") and to is torch.bfloat16 and args[0].shape == (3, 8)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("plan", "casts"), [("micro=8", 1), ("micro=2", 1), ("micro=2 recompute=full", 8)])
def test_autocast_casts_a_weight_once_a_step(plan: str, casts: int) -> None:
    taken = steps(job(), f"{plan} precision=bf16")
    next(taken), next(taken)
    for _ in range(2):
        with Casts() as seen:
            next(taken)
        assert seen.found == casts


def test_a_compiled_plan_compiles_the_loss(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.Size] = []

    def summed(logits: torch.Tensor, *given: Any) -> torch.Tensor:
        compiled.append(logits.shape)
        return losses._summed(logits, *given)

    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(losses, "_compiled", lambda: summed)
    for compiles, shapes in ((False, []), (True, [torch.Size([BATCH, 3])])):
        monkeypatch.setattr(type(host()), "compiles", compiles)
        taken = steps(job(), "compile=true")
        next(taken), next(taken)
        assert compiled == shapes
    assert compiled
    assert losses._compiles.get() is False


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_loss_is_the_loss(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.compile(losses._summed, backend="aot_eager")
    monkeypatch.setattr(losses, "_compiled", lambda: graph)
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    found: list[tuple[float, torch.Tensor]] = []
    for wanted in (False, True):
        with losses.compiled_losses() if wanted else nullcontext():
            loss = px.next_token_loss(logits, torch.arange(10).view(2, 5) % 7)
        (grad,) = torch.autograd.grad(loss.sum, logits)
        found.append((loss.sum.item(), grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-7)


@pytest.mark.parametrize("how", [{"on_nonfinite": "skip"}, {"spike": 8.0}])
def test_a_run_that_may_go_on_without_a_step_waits_for_it(how: dict[str, Any], queue: Queue, tmp_path: Path) -> None:
    run = px.RunSpec(folder=tmp_path / "run", job="job.py", plan=px.Plan.parse("single"), **how)
    taken = steps(job(), "single", run=run)
    next(taken), next(taken)
    queue.waits.clear()
    next(taken)
    assert queue.waits == [0]


@pytest.mark.parametrize(("optimizer", "bad"), [("adamw", 0), ("adam", 5), ("sgd", 2)])
def test_a_number_that_is_not_finite_stops_before_it_is_in_the_weights(optimizer: str, bad: int, queue: Queue) -> None:
    taken = steps(job(OPTIMIZERS[optimizer], bad=bad), "single")
    step = next(taken)
    for _ in range(bad):
        next(taken)
    before = [one.detach().clone() for one in step.model.parameters()]
    with pytest.raises(LossError, match=f"the loss of step {bad}") as told:
        list(taken)
    assert all(map(torch.equal, before, step.model.parameters()))
    assert "the batch" in str(told.value)  # it says where the number comes from
    assert (step.progress.step, step.progress.samples) == (bad, bad * BATCH)


def test_a_gradient_alone_that_is_not_finite_stops(queue: Queue) -> None:
    class Root(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + (input * 0 * self.weight.sum()).sum(-1, keepdim=True).abs().sqrt()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Root(6, 3)

    taken = steps(px.Job(**{**vars_of(job()), "model": model}), "single")
    step = next(taken)
    before = [one.detach().clone() for one in step.model.parameters()]
    with pytest.raises(GradientError, match="the gradient of step 0 is not finite"):
        list(taken)
    assert all(map(torch.equal, before, step.model.parameters()))


def vars_of(made: px.Job) -> dict[str, Any]:
    return {name: getattr(made, name) for name in ("model", "data", "loss", "optimizer", "batch", "epochs", "shuffle")}


def test_no_checkpoint_and_no_evaluation_of_a_step_that_was_not_checked(queue: Queue, tmp_path: Path) -> None:
    taken = steps(job(bad=2), "single", run=tmp_path / "run", checkpoint_every=3)
    with pytest.raises(LossError, match="the loss of step 2 is nan"):
        list(taken)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


CHOSEN = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "for loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "not fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=False),
    "lr a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "not torch's": lambda params: torch.optim.RMSprop(params, lr=0.1),
}


@pytest.mark.parametrize("optimizer", CHOSEN)
def test_an_optimizer_that_cannot_skip_on_the_device_is_waited_for(optimizer: str, queue: Queue) -> None:
    taken = steps(job(CHOSEN[optimizer]), "single")
    step = next(taken)
    next(taken)
    queue.waits.clear()
    next(taken)
    assert queue.waits == [0]
    assert not any(group.get("fused") for group in step.optimizer.param_groups)


class Late(nn.Module):
    """Uses a layer from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.calls = nn.Linear(6, 3), nn.Linear(6, 3), 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(input) + (self.second(input) if self.calls > 3 else 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_may_get_its_first_gradient_late(optimizer: str, queue: Queue) -> None:
    made = vars_of(job(OPTIMIZERS[optimizer])) | {"model": Late, "unused": "allow"}
    assert len(list(steps(px.Job(**made), "single"))) == 1 + SAMPLES // BATCH


@pytest.mark.parametrize("with_run", [False, True])
def test_a_loop_that_is_left_checks_its_last_step_as_it_closes(with_run: bool, queue: Queue, tmp_path: Path) -> None:
    step, loader = px.build(job(bad=2), px.Plan(), run=tmp_path / "run" if with_run else None)
    for batch in loader:
        if step(batch).step == 2:
            break
    with pytest.raises(LossError, match="the loss of step 2 is nan"):
        step.close()


@pytest.mark.parametrize("plan", ["precision=fp16", "precision=fp16 micro=4"])
def test_fp16_is_checked_before_the_update(plan: str, queue: Queue) -> None:
    taken = steps(job(), plan)
    next(taken), next(taken)
    queue.waits.clear()
    next(taken)
    assert queue.waits == [0]
