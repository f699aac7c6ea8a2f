"""Refusals and warnings before a run, after a look at the model or without one, and what trains beside them."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import fit
from torch import Tensor, nn
from torch.autograd import grad as grad_by_name
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import OneCycleLR

import phalanx as px
from law_rows import longer
from phalanx.errors import PhalanxError, RefusedError
from phalanx.train.build_model import build_model


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


@pytest.mark.parametrize("grad", [torch.autograd.grad, *longer(grad_by_name)])
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


def by_hand(given: px.Job, loss_of: Callable[..., Tensor]) -> list[float]:
    """Losses of plain PyTorch on one device over three batches."""
    model, data, losses = build_model(given), rows(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        loss = loss_of(model, torch.stack([data[index]["x"] for index in range(start, start + 8)]).requires_grad_())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def slope_job(blocks: bool) -> px.Job:
    def loss(output: Tensor, batch: Any) -> px.Loss:
        doubled = torch.func.grad(lambda slope: slope.square().sum())(output)  # of no parameter
        return px.Loss((doubled - 1).square().sum(), len(output))

    return job(model=lambda: Slope(blocks), loss=loss, shuffle=False)


def test_a_gathered_block_within_a_gradient(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match=r"blocks run in torch\.func\.grad"):
        px.fit(slope_job(True), "fsdp=2", folder=tmp_path / "begun")


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of one row, which are the same
@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("single", "dp=2 micro=2")])
def test_a_gradient_of_a_gradient_elsewhere(plan: str, tmp_path: Path) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        score = model.body(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return softplus(-score).mean() + (grad.norm(dim=1) - 1).square().mean()

    run = px.fit(job(shuffle=False), plan, folder=tmp_path / "run", forecast="none")
    assert run.losses == pytest.approx(by_hand(job(), loss), rel=1e-5)


def table() -> px.Table:
    return px.Table(input=torch.linspace(-1, 1, 96 * 4).view(96, 4), label=torch.arange(96) % 2)


def small_job(**changed: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "data": table,
        "loss": lambda output, batch: px.cross_entropy(output, batch["label"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 32,
        "epochs": 2,
    }
    return px.Job(**{**given, **changed})


def samples() -> Iterator[dict[str, Any]]:
    for number in range(96):
        yield {"input": torch.ones(4) * number, "label": number % 2}


def one_cycle(steps: int) -> Any:
    def optimizer(params: Any) -> Any:
        made = torch.optim.SGD(params, lr=0.1)
        return made, OneCycleLR(made, 0.1, total_steps=steps)

    return optimizer


def sparse_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(params)


def collected(output: Any, batch: Any) -> dict[str, Any]:
    return {"right": px.Metric(sums={"right": output.sum()}, compute=lambda right: right)}


BEFORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a best metric that nothing gives": ("dp=2", {"evaluate": table, "best": px.Best("acc")}, "best.metric.*'acc'"),
    "in one process": ("single", {"evaluate": table, "best": px.Best("acc")}, "best.metric.*'acc'"),
    "a computed metric with servers": ("dp=2 server=1", {"evaluate": table, "metrics": collected}, "with servers"),
    "lazy layers": ("dp=2", {"model": lambda: nn.LazyLinear(2)}, "weight"),
    "SyncBatchNorm": (
        "fsdp=2",
        {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2))},
        "SyncBatchNorm",
    ),
    "SparseAdam": ("dp=2", {"optimizer": sparse_adam}, "SparseAdam .*weight, bias"),
    "a short schedule": ("single", {"optimizer": one_cycle(3)}, "OneCycleLR for 3 steps"),
    "a generator": ("dp=2", {"data": samples}, "a generator.* 2 epochs"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_refused_before_the_folder_is_made(case: str, tmp_path: Path) -> None:
    plan, changed, message = BEFORE[case]
    plan += " device=cpu" if case == "SyncBatchNorm" else ""
    with pytest.raises(PhalanxError, match=message) as raised:
        px.fit(small_job(**changed), plan, folder=tmp_path / "run")
    assert raised.value.exit_code == RefusedError.exit_code
    assert not (tmp_path / "run").exists()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)

    def forward(self, label: torch.Tensor) -> torch.Tensor:
        return self.words(label)


FINE: dict[str, tuple[str, dict[str, Any]]] = {
    "a best metric of a dict": (
        "single",
        {
            "evaluate": table,
            "best": px.Best("of.one"),
            "metrics": lambda output, batch: {
                "of": px.Metric(sums={"n": torch.tensor(float(len(output)))}, compute=lambda n: {"one": n / (n > 2)})
            },
        },
    ),
    "SyncBatchNorm over the global batch": (
        "dp=2",
        {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2)), "batch_statistics": "global"},
    ),
    "SparseAdam": ("dp=2", {"model": Words, "optimizer": sparse_adam}),
    "a schedule as long as the run": ("single", {"optimizer": one_cycle(6)}),
    "a generator once": ("dp=2", {"data": samples, "epochs": 1}),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_right_beside_it_trains(case: str, tmp_path: Path) -> None:
    plan, changed = FINE[case]
    run = px.fit(small_job(**changed), plan, folder=tmp_path / "run", forecast="none")
    assert len(run.losses) == (3 if "once" in case else 6)


class Normed(nn.Module):
    """Its first parameter is a matrix; a stage may begin with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)) for _ in range(4)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def by_appearance(params: Any) -> torch.optim.Optimizer:
    """Groups in the order in which their first parameter comes: not that of the model, on some stage."""
    groups: dict[bool, list[Any]] = defaultdict(list)
    named = list(params.named()) if hasattr(params, "named") else []
    every = [one for _, one in named] if named else list(params)
    for one in sorted(every, key=lambda one: len(every) % 3 * one.ndim):
        groups[one.ndim > 1].append(one)
    return torch.optim.SGD([{"params": group} for group in groups.values()], lr=0.1)


@pytest.mark.parametrize("scheduled", [False, True])
def test_groups_in_another_order_on_a_stage_are_refused(scheduled: bool, tmp_path: Path) -> None:
    def optimizer(params: Any) -> Any:
        made = by_appearance(params)
        if not scheduled:
            return made
        return made, torch.optim.lr_scheduler.LambdaLR(made, [lambda step: 1.0, lambda step: 0.5])

    how: dict[str, Any] = {} if scheduled else {"clip": px.Clip(norm=0.5, per="group")}
    with pytest.raises(PhalanxError, match="in another order on a stage"):
        fit("pp=2", tmp_path / "run", model=Normed, optimizer=optimizer, steps=2, epochs=None, **how)


WARNED = """
import sys
sys.path.insert(0, {small!r})
import phalanx as px
from small import Net, job
from torch import nn

made = job(model=lambda: nn.Sequential(nn.Dropout(0.5), Net()), inputs=lambda batch: batch["x"], epochs=1)
run = {begin}(made, "dp=2 micro=64", folder="run", forecast="none", keep=1)
getattr(run, "wait", lambda: run)()
print(len(run.losses))
"""


@pytest.mark.parametrize("begin", ["px.start", *longer("px.fit")])
def test_a_script_whose_output_is_no_terminal_says_what_differs(begin: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WARNED.format(small=str(Path(__file__).parent), begin=begin))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4", done.stderr
    assert "differs from one device: dropout draws other random numbers" in done.stderr
    assert done.stderr.count("micro=64 splits nothing") == 1
