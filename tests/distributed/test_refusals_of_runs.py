"""Refusals and warnings before a run, after a look at the model or without one, and what trains beside them."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from loops import torchrun
from small import Net, fit
from torch import Tensor, autograd, nn
from torch.autograd import grad as grad_by_name
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import OneCycleLR

import phalanx as px
from longer import longer
from phalanx.config import Plan
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.errors import PhalanxError, Problem, RefusedError, RunError
from phalanx.train.build_model import build_model
from phalanx.train.look_ahead import look, refusals


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


@pytest.mark.parametrize(
    ("blocks", "plan"), [(False, "fsdp=2 micro=2"), (True, "fsdp=2 zero=2"), *longer((False, "single"))]
)
def test_a_gradient_that_is_part_of_the_forward(blocks: bool, plan: str, tmp_path: Path) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model.score(x), x, create_graph=True)
        return (2 * slope - 1).square().sum() / 8

    run = px.fit(slope_job(blocks), plan, folder=tmp_path / "run")
    assert run.losses == pytest.approx(by_hand(slope_job(blocks), loss), rel=1e-5)


def test_a_gathered_block_within_a_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match=r"blocks run in torch\.func\.grad"):
        px.fit(slope_job(True), "fsdp=2", folder=tmp_path / "refused")
    assert not (tmp_path / "refused" / "events.jsonl").exists()
    monkeypatch.setattr("phalanx.train.look_ahead.LARGEST", 1)  # too large for a look, and no trace follows it
    with pytest.raises(PhalanxError, match=r"blocks run in torch\.func\.grad"):
        px.fit(slope_job(True), "fsdp=2", folder=tmp_path / "begun")


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of one row, which are the same
@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("single", "dp=2 micro=2")])
def test_a_gradient_of_a_gradient_elsewhere(plan: str, tmp_path: Path) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        score = model.body(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return softplus(-score).mean() + (grad.norm(dim=1) - 1).square().mean()

    run = px.fit(job(shuffle=False), plan, folder=tmp_path / "run")
    assert run.losses == pytest.approx(by_hand(job(), loss), rel=1e-5)


def test_a_model_too_large_to_run_is_traced_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.look_ahead.LARGEST", 1)
    with pytest.raises(RefusedError, match="gradients of gradients"):
        look(job(), px.Plan.parse("fsdp=2"))
    look(job(), px.Plan.parse("fsdp=2 zero=2"))
    look(job(loss=plain_loss), px.Plan.parse("fsdp=2"))


def test_after_the_end_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    step, loader = px.build(job(), run=tmp_path / "run")
    batches = iter(loader)
    step(next(batches))
    step.close()
    with pytest.raises(RunError, match="after the run has ended"):
        step(next(iter(px.build(job())[1])))
    with pytest.raises(RunError, match="save after"):
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


def gpt() -> px.Job:
    return gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=1)


def of_fit(text: str, folder: Path) -> list[Problem]:
    try:
        px.fit(gpt(), text, folder=folder)
    except RefusedError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "text", ["tp=5", "cp=3 attention=alltoall", "ep=2", "pp=2 split=nonsense", "dp=9", *longer("tp=3", "cp=5", "pp=7")]
)
def test_what_a_look_says_is_what_fit_does(text: str, tmp_path: Path) -> None:
    assert of_fit(text, tmp_path / "run") == refusals(gpt(), Plan.parse(text))


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
    "SyncBatchNorm alone": ("single", {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2))}),
    "SyncBatchNorm over the global batch": (
        "fsdp=2",
        {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2)), "batch_statistics": "global"},
    ),
    "SparseAdam": ("dp=2", {"model": Words, "optimizer": sparse_adam}),
    "a schedule as long as the run": ("dp=2", {"optimizer": one_cycle(6)}),
    "a generator once": ("dp=2", {"data": samples, "epochs": 1}),
}


@pytest.mark.parametrize("case", [*list(FINE)[::2], *longer(*list(FINE)[1::2])])
def test_what_is_right_beside_it_trains(case: str, tmp_path: Path) -> None:
    plan, changed = FINE[case]
    run = px.fit(small_job(**changed), plan, folder=tmp_path / "run")
    assert len(run.losses) == (3 if "once" in case else 6)


SCRIPT = """
import sys
import torch
import phalanx as px
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        counts = labels >= 0
        return {"loss": (self.layer(x)[:, 0] - labels)[counts].square().mean()}


def data():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return px.Table(x=x, labels=torch.where(torch.arange(16) % 2 > 0, x.sum(1).abs(), -1.0))


def job(count):
    return px.Job(model=Own, data=data, loss=px.model_loss(count=count), inputs=lambda batch: dict(batch),
                  optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=8, steps=2)


if __name__ == "__main__":
    px.fit(job(lambda batch: len(batch["labels"])), "dp=2", watch=False)
"""


def own() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT, found)
    return found


def test_a_loop_of_ones_own_refuses_a_loss_that_does_not_add_up() -> None:
    make = own()["job"]
    with pytest.raises(RefusedError, match=r"px\.model_loss"):
        px.build(make(lambda batch: len(batch["labels"])), "single micro=4")
    px.build(make(lambda batch: (batch["labels"] >= 0).sum()), "single micro=4")


def test_torchrun_refuses_a_loss_that_does_not_add_up(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun(tmp_path)
    assert done.returncode != 0
    assert "px.model_loss()" in done.stderr


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


def test_an_average_within_itself_is_the_same_average() -> None:
    given = small.job(average=px.Average(decay=0.5), evaluate=lambda: small.table(8), steps=4, epochs=None)
    step, loader = px.build(given)
    for batch in loader:
        step(batch)
    average = step.average
    assert average is not None
    with average.applied():
        within = step.evaluate().loss
        with pytest.raises(RunError, match="averaged weights"):
            step(batch)
    assert step.evaluate().loss == within


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


def test_a_function_that_looks_on_is_called_and_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = list[int]()
    made = small.job(model=lambda: nn.Sequential(nn.Dropout(0.5), Net()), inputs=lambda batch: batch["x"], epochs=1)
    with caplog.at_level(logging.WARNING, "phalanx"):
        px.fit(made, "dp=2", folder=tmp_path / "run", forecast="none", watch=lambda: looks.append(1))
        said = [record.message for record in caplog.records]
        px.fit(made, "dp=2", folder=tmp_path / "quiet", forecast="none", watch=False)
    assert looks
    assert any("differs from one device: dropout draws other" in one for one in said)
    assert len(caplog.records) == len(said)
