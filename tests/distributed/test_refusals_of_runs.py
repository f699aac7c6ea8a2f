"""What is refused before a worker starts, or said in words that can be acted upon, where a run could not go right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, autograd, nn
from torch.autograd import grad as grad_by_name
from torch.nn.functional import softplus

import phalanx as px
from phalanx.errors import LossError, PhalanxError, Problem, RefusedError, RunError, SpecError
from phalanx.preflight import supervised_run
from phalanx.train.look_ahead import look


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        point = x.detach().requires_grad_()
        return self.body(point), point


def penalised(output: tuple[Tensor, Tensor], batch: Any) -> px.Loss:
    score, point = output
    if not torch.is_grad_enabled():
        return px.Loss(softplus(-score).sum(), len(score))
    (grad,) = torch.autograd.grad(score.sum(), point, create_graph=True)
    return px.Loss(softplus(-score).sum() + (grad.norm(dim=1) - 1).square().sum(), len(score))


def rows() -> px.Table:
    return px.Table(x=torch.randn(32, 5, generator=torch.Generator().manual_seed(0)))


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {"model": Critic, "data": rows, "loss": penalised, "batch": 8, "steps": 3, **how}
    return px.Job(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **given)


def plain_loss(output: tuple[Tensor, Tensor], batch: Any) -> px.Loss:
    return px.Loss(softplus(-output[0]).sum(), len(output[0]))


def by_backward(score: Tensor, point: Tensor, *, create_graph: bool) -> tuple[Tensor]:
    score.backward(create_graph=create_graph, inputs=[point])
    assert point.grad is not None
    return (point.grad,)


@pytest.mark.parametrize(
    "grad",
    [torch.autograd.grad, lambda *args, **how: autograd.grad(*args, **how), grad_by_name, by_backward],
    ids=["torch.autograd.grad", "autograd.grad", "grad", "backward"],
)
def test_a_gradient_of_a_gradient_over_gathered_parameters(grad: Callable[..., Any], tmp_path: Path) -> None:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> px.Loss:
        score, point = output
        if not torch.is_grad_enabled():
            return px.Loss(softplus(-score).sum(), len(score))
        (slope,) = grad(score.sum(), point, create_graph=True)
        return px.Loss(slope.square().sum(), len(score))

    with pytest.raises(RefusedError, match="gradients of gradients"):
        px.fit(job(loss=loss), "fsdp=2", folder=tmp_path / "refused")
    assert not (tmp_path / "refused" / "events.jsonl").exists()


class Slope(nn.Module):
    """How its score changes with each sample; of ``blocks``, which a plan gathers one by one, or of plain layers."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList(layers) if blocks else nn.Sequential(*layers[0], nn.Linear(5, 5, bias=False))

    def score(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = layer(x)
        return x.sum()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(self.score)(x)


def slope_job(blocks: bool) -> px.Job:
    def loss(output: Tensor, batch: Any) -> px.Loss:
        doubled = torch.func.grad(lambda slope: slope.square().sum())(output)  # of no parameter
        return px.Loss((doubled - 1).square().sum(), len(output))

    return job(model=lambda: Slope(blocks), loss=loss, shuffle=False)


@pytest.mark.parametrize(
    ("blocks", "plan"), [(False, "single"), (False, "fsdp=2"), (False, "fsdp=2 micro=2"), (True, "fsdp=2 zero=2")]
)
def test_a_gradient_that_is_part_of_the_forward(blocks: bool, plan: str, tmp_path: Path) -> None:
    from phalanx.train.build_model import build_model

    run = px.fit(slope_job(blocks), plan, folder=tmp_path / "run")
    model, data, losses = build_model(slope_job(blocks)), rows(), list[float]()
    assert isinstance(model, Slope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        x = torch.stack([data[index]["x"] for index in range(start, start + 8)]).requires_grad_()
        (slope,) = torch.autograd.grad(model.score(x), x, create_graph=True)
        loss = (2 * slope - 1).square().sum() / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert run.losses == pytest.approx(losses, rel=1e-5)


def test_a_gathered_block_within_a_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match=r"blocks run in torch\.func\.grad"):
        px.fit(slope_job(True), "fsdp=2", folder=tmp_path / "refused")
    assert not (tmp_path / "refused" / "events.jsonl").exists()
    monkeypatch.setattr("phalanx.train.look_ahead.LARGEST", 1)  # too large for a look, and no trace follows it
    with pytest.raises(PhalanxError, match=r"blocks run in torch\.func\.grad"):
        px.fit(slope_job(True), "fsdp=2", folder=tmp_path / "begun")


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of one row, which are the same
@pytest.mark.parametrize("plan", ["single", "dp=2 micro=2", "fsdp=2 zero=2"])
def test_a_gradient_of_a_gradient_elsewhere(plan: str, tmp_path: Path) -> None:
    from phalanx.train.build_model import build_model

    run = px.fit(job(shuffle=False), plan, folder=tmp_path / "run")
    model, data, losses = build_model(job()), rows(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        x = torch.stack([data[index]["x"] for index in range(start, start + 8)]).requires_grad_()
        score = model.body(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = softplus(-score).mean() + (grad.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert run.losses == pytest.approx(losses, rel=1e-5)


def test_a_model_too_large_to_run_is_traced_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.look_ahead.LARGEST", 1)
    with pytest.raises(RefusedError, match="gradients of gradients"):
        look(job(), px.Plan.parse("fsdp=2"))
    look(job(), px.Plan.parse("fsdp=2 zero=2"))
    look(job(loss=plain_loss), px.Plan.parse("fsdp=2"))


def test_nothing_to_go_on_from_is_said_in_python(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        px.build(job(), run=tmp_path / "run", resume=True)
    assert f'try: run="{tmp_path / "run"}", resume="auto"' in str(refused.value)


def test_after_the_end_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    step, loader = px.build(job(), run=tmp_path / "run")
    batches = iter(loader)
    step(next(batches))
    step.close()
    with pytest.raises(RunError, match="after the run has ended"):
        step(next(iter(px.build(job())[1])))
    with pytest.raises(RunError, match="a save after the run has ended"):
        step.save()


def test_an_evaluation_within_the_average_is_of_the_average(tmp_path: Path) -> None:
    given = job(average=px.Average(decay=0.5, evaluate=False), evaluate=rows)
    step, loader = px.build(given, run=tmp_path / "run")
    for batch in loader:
        step(batch)
        if step.taken == 2:
            break
    raw = step.evaluate()
    assert step.average is not None
    with step.average.applied():
        averaged, values = step.evaluate(), [one.clone() for one in step.model.parameters()]
    assert averaged.loss != raw.loss
    assert step.evaluate().loss == raw.loss
    module = Critic()
    for one, value in zip(module.parameters(), values, strict=True):
        one.data.copy_(value)
    x = torch.stack([rows()[index]["x"] for index in range(32)])
    assert averaged.loss == pytest.approx(softplus(-module.body(x)).mean().item(), rel=1e-5)
    events = list(px.load(tmp_path / "run").events("evaluate"))
    assert [event["loss"] for event in events] == pytest.approx([raw.loss])
    step.close()


def test_what_refuses_a_run_on_another_number_of_devices_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    run = px.RunSpec(job="job", plan=px.Plan.parse("dp=2"), folder=Path("run"))
    problem = Problem(where="plan.dp", given="2", allowed="1", fix="single")

    def raising(error: Exception) -> Any:
        def looked(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(supervised_run, "look_ahead", looked)
        return supervised_run._looked_at(job(), replace(run))

    with pytest.raises(RefusedError, match=r"plan\.dp"):
        raising(RefusedError([problem]))
    assert not raising(LossError("what the workers say")).looked
