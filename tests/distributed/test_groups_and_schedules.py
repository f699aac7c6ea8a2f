"""Parameter groups by pattern, clipping, and schedules of the rate: under every plan those of a loop by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from loops import forbid_workers
from small import BATCH, Blocks, Net, fit, job, table
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler

import phalanx as px
from law_rows import longer
from phalanx.checkpoint import latest, read_state
from phalanx.errors import PhalanxError, RefusedError, SpecError

GROUP_PLANS = (
    *("single", "dp=2", "threads=2", "fsdp=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "fsdp=2 zero=3 offload=optimizer"),
    *("tp=2", "pp=2 micro=8", "dp=2 server=1"),
)
GROUP_STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(9, 16), nn.Linear(16, 9), nn.LayerNorm(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a head, which is in one stage of a pipeline only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    made = Model()
    if next(made.parameters()).device.type != "meta":
        made.load_state_dict(GROUP_START)
    return made


torch.manual_seed(3)
GROUP_START = {name: value.clone() for name, value in Model().state_dict().items()}


def by_dimensions(params: Any) -> Any:
    return AdamW(px.no_decay(params, 0.5, {"head.*": {"lr": 3e-2, "betas": (0.5, 0.9)}}), lr=1e-2)


def dimensions_by_hand(module: nn.Module) -> Any:
    blocks, head = list(module.blocks.parameters()), {"lr": 3e-2, "betas": (0.5, 0.9)}
    made = [
        {"params": [one for one in blocks if one.dim() > 1], "weight_decay": 0.5},
        {"params": [one for one in blocks if one.dim() == 1], "weight_decay": 0.0},
        {"params": [module.get_parameter("head.weight")], "weight_decay": 0.5, **head},
        {"params": [module.get_parameter("head.bias")], "weight_decay": 0.0, **head},
    ]
    return AdamW(made, lr=1e-2)


def rate(step: int) -> float:
    return 1.0 - step / 10


def values_by_hand(
    optimizer: Callable[[nn.Module], Any],
    *,
    schedule: Callable[[int], float] = rate,
    clip: Callable[[nn.Module], Any] = lambda module: None,
) -> dict[str, torch.Tensor]:
    """What plain PyTorch makes of it."""
    module, data = model(), table().__getitems__(list(range(len(table()))))
    made = optimizer(module)
    scheduler = lr_scheduler.LambdaLR(made, schedule)
    starts = [*range(0, len(data["x"]), BATCH)] * 2
    for start in starts[:GROUP_STEPS]:
        made.zero_grad()
        x, y = (data[key][start : start + BATCH] for key in ("x", "y"))
        nn.functional.cross_entropy(module(x), y).backward()
        clip(module)
        made.step()
        scheduler.step()
    return module.state_dict()


def run(plan: str, folder: Path, optimizer: Any = by_dimensions, *, steps: int = GROUP_STEPS, **how: Any) -> px.Run:
    given = {"model": model, "shuffle": False, "epochs": None, "schedule": rate, "inputs": lambda batch: batch["x"]}
    return fit(plan, folder, optimizer=optimizer, **{**given, "steps": steps, **how})


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("plan", ["dp=2 server=2", *longer(*GROUP_PLANS)])
def test_every_plan_trains_as_groups_by_hand(plan: str, tmp_path: Path) -> None:
    same(run(plan, tmp_path / "run").state_dict(), values_by_hand(dimensions_by_hand))


@pytest.mark.parametrize("plans", ["pp=2 micro=8, fsdp=2", "fsdp=2 zero=1, tp=2", *longer("dp=2, pp=2 micro=8")])
def test_a_run_goes_on_under_another_plan(plans: str, tmp_path: Path) -> None:
    first, then = plans.split(", ")
    run(first, tmp_path / "run", steps=3)
    same(run(then, tmp_path / "run", resume=True).state_dict(), values_by_hand(dimensions_by_hand))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(9, 9, bias=False)
        self.middle = nn.ModuleList([nn.Linear(9, 9) for _ in range(2)])
        self.output = nn.Linear(9, 9)
        self.output.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for one in self.middle:
            x = torch.relu(one(x))
        return self.output(x)


@pytest.mark.parametrize("plan", ["pp=2 micro=8", *longer("fsdp=2")])
def test_a_tied_weight_has_the_name_that_the_model_gives_it_first(plan: str, tmp_path: Path) -> None:
    def optimizer(params: Any) -> Any:
        return SGD(px.groups(params, {"*.weight": {"lr": 0.2}, "embedding.*": {"lr": 0.0}}), lr=0.1)

    weight = run("single", tmp_path / "first", optimizer, model=Tied, steps=1).state_dict()["embedding.weight"]
    found = run(plan, tmp_path / "run", optimizer, model=Tied, steps=4).state_dict()
    assert torch.equal(found["embedding.weight"], weight)
    same(found, run("single", tmp_path / "single", optimizer, model=Tied, steps=4).state_dict())


def test_groups_keep_their_place_in_checkpoints_of_pipelines(tmp_path: Path) -> None:
    """Two groups of equal options stay two, and one that is nobody's on a stage keeps its own options."""

    def optimizer(params: Any) -> Any:
        found = px.groups(params, {"head.*": {"lr": 3e-2}, "*.bias": {"lr": 1e-2}, "head.bias": {"lr": 5e-2}})
        made = AdamW(found, lr=1e-2)
        return made, lr_scheduler.LambdaLR(made, rate)

    saved = run("pp=2 micro=8", tmp_path / "run", optimizer, steps=2, schedule=px.Schedule())
    groups = _groups(saved)
    assert [group["options"]["initial_lr"] for group in groups] == [1e-2, 3e-2, 1e-2, 5e-2]
    assert [len(group["parameters"]) for group in groups] == [6, 1, 6, 1]
    then = run("pp=2 micro=8", tmp_path / "run", optimizer, steps=4, schedule=px.Schedule(), resume=True)
    assert [group["options"]["lr"] for group in _groups(then)] == pytest.approx([6e-3, 18e-3, 6e-3, 3e-2])
    again = run("dp=2", tmp_path / "run", optimizer, steps=6, schedule=px.Schedule(), resume=True)
    same(again.state_dict(), values_by_hand(lambda module: optimizer(module.named_parameters())[0]))


def _groups(run: px.Run) -> list[dict[str, Any]]:
    folder = latest(run.folder / "checkpoints")
    assert folder is not None
    return read_state(folder)["optimizer"]["groups"]


@pytest.mark.parametrize(
    ("plan", "patterns", "words"),
    [
        ("single", {"*.bais": {"lr": 1.0}}, r"'\*.bais'.*near are .*bias"),
        ("dp=2", {"head.*": {"lr": 1.0}, "*": {"lr": 0.1}}, "'head.*', of whose names none is left"),
        ("pp=2 micro=8", {"head.*": {"weight_decya": 1.0}}, "'weight_decya'.*weight_decay"),
        ("dp=2 server=1", {"head.*": 0.1}, "'head.*': 0.1"),
    ],
)
def test_what_fits_nothing_is_refused_before_a_worker_starts(
    plan: str, patterns: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan != "single":
        forbid_workers(monkeypatch)
    with pytest.raises(PhalanxError, match=f"(?s){words}"):
        run(plan, tmp_path / "run", lambda params: AdamW(px.groups(params, patterns), lr=1e-2))


def test_it_serves_plain_pytorch_too() -> None:
    made = px.no_decay(model().named_parameters(), 0.1)
    assert [(group["weight_decay"], len(group["params"])) for group in made] == [(0.1, 5), (0.0, 9)]
    with pytest.raises(PhalanxError, match="parameters without names"):
        px.groups(model().parameters(), {"*": {}})
    with pytest.raises(PhalanxError, match=r"weight_decay|-0\.1"):
        px.no_decay(model().named_parameters(), -0.1)


CLIPS = {
    "norm": px.Clip(norm=0.3),
    "value": px.Clip(value=0.02),
    "inf": px.Clip(norm=0.05, norm_type=math.inf),
    "group": px.Clip(norm=0.2, per="group"),
    "inf group": px.Clip(norm=0.04, norm_type=math.inf, per="group"),
}


def in_three(params: Any) -> Any:
    return SGD(px.groups(params, {"head.*": {"lr": 0.2}, "blocks.0.*": {"momentum": 0.5}}), lr=0.5, momentum=0.9)


def sets(module: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each group, by hand."""
    named = dict(module.named_parameters())
    return [[one for name, one in named.items() if name.startswith(key)] for key in ("blocks.1", "head", "blocks.0")]


def in_three_by_hand(module: nn.Module) -> Any:
    second, head, first = sets(module)
    groups = [{"params": second}, {"params": head, "lr": 0.2}, {"params": first, "momentum": 0.5}]
    return SGD(groups, lr=0.5, momentum=0.9)


def clipped_by_hand(how: px.Clip) -> dict[str, torch.Tensor]:
    """With torch's own functions; some of what is clipped by itself is above the limit."""
    counts = set[int]()

    def clip(module: nn.Module) -> None:
        if how.value is not None:
            above = sum(int((one.grad.abs() > how.value).sum()) for one in module.parameters() if one.grad is not None)
            nn.utils.clip_grad_value_(module.parameters(), how.value)
        else:
            limit = how.norm or 0.0
            each = sets(module) if how.per == "group" else [list(module.parameters())]
            norms = [float(nn.utils.clip_grad_norm_(one, limit, norm_type=how.norm_type)) for one in each]
            above = sum(norm > limit for norm in norms)
        counts.add(above)

    found = values_by_hand(in_three_by_hand, schedule=lambda step: 1.0, clip=clip)
    assert counts != {0}, "nothing is clipped"
    return found


def clipped(plan: str, folder: Path, how: str, optimizer: Any = in_three, **more: Any) -> dict[str, torch.Tensor]:
    return run(plan, folder, optimizer, clip=CLIPS[how], schedule=px.Schedule(), **more).state_dict()


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("single micro=5", "value"),
        ("fsdp=2 zero=1", "group"),
        ("tp=2", "inf group"),
        ("dp=2 server=2", "value"),
        *longer(("fsdp=2 zero=2", "inf group"), ("fsdp=2 zero=3 offload=optimizer", "norm"), ("pp=2 micro=8", "norm")),
    ],
)
def test_every_plan_clips_as_torch_does(plan: str, how: str, tmp_path: Path) -> None:
    same(clipped(plan, tmp_path / "run", how), clipped_by_hand(CLIPS[how]))


@pytest.mark.parametrize(
    ("plan", "how"), [("pp=2 micro=8", "inf"), *longer(("tp=2", "group"), ("single precision=fp16", "group"))]
)
def test_clipping_is_proven(plan: str, how: str) -> None:
    one = job(model=model, inputs=lambda batch: batch["x"], optimizer=in_three, clip=CLIPS[how])
    proof = px.prove(one, plan, steps=4)
    assert proof.equal, proof


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "clip"),
        ({"norm": 1.0, "value": 1.0}, "clip"),
        ({"norm": 0.0}, "clip.norm"),
        ({"value": math.inf}, "clip.value"),
        ({"norm": 1.0, "norm_type": 1.0}, "clip.norm_type"),
        ({"norm": 1.0, "per": "layer"}, "clip.per"),
        ({"value": 1.0, "per": "group"}, "clip.per"),
    ],
)
def test_a_clip_that_says_nothing_clear_is_an_error(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        px.Clip(**given)
    assert [problem.where for problem in caught.value.problems] == [field]


def test_clips_that_a_plan_cannot_have_are_refused(tmp_path: Path) -> None:
    for how in ("inf", "group"):
        with pytest.raises(PhalanxError, match=r"job\.clip"):
            clipped("dp=2 server=1", tmp_path / how, how)


STEPS = 8


def adamw(schedule: Callable[[Any], lr_scheduler.LRScheduler], **how: Any) -> Callable[[Any], Any]:
    def optimizer(params: Any) -> Any:
        made = AdamW(params, lr=1e-2, **how)
        return made, schedule(made)

    return optimizer


def sequential(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
        [3],
    )


SCHEDULERS: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "sequential": sequential,
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=STEPS),  # moves betas as well
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 1e-3, 1e-2, step_size_up=3, cycle_momentum=False),
}


def rates_by_hand(schedule: Callable[[Any], lr_scheduler.LRScheduler], steps: int = STEPS) -> list[tuple[float, Any]]:
    """Rate and betas of each step in a loop as torch's documentation has it."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = AdamW([weight], lr=1e-2)
    scheduler, found = schedule(optimizer), list[tuple[float, Any]]()
    for _ in range(steps):
        (group,) = optimizer.param_groups
        found.append((group["lr"], group["betas"]))
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    return found


def rates(run: px.Run) -> list[float]:
    return [event["lr"] for event in run.events("step")]


@pytest.mark.parametrize(
    "plan", ["dp=2 sync=local every=2", *longer("fsdp=2 zero=3 micro=8", "pp=2 micro=8", "single", "dp=2", "tp=2")]
)
def test_the_rates_are_those_of_a_plain_loop(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", model=Blocks, inputs=lambda batch: batch["x"], optimizer=adamw(sequential))
    expected = [rate for rate, _ in rates_by_hand(sequential)]
    assert rates(run) == expected
    assert len(set(expected)) > 4


@pytest.mark.parametrize("name", ["one cycle", *longer("sequential", "cyclic")])
def test_a_run_that_goes_on_under_another_plan_has_the_rates_it_would_have_had(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"optimizer": adamw(SCHEDULERS[name])}
    whole = fit("single", tmp_path / "whole", **how)
    fit("fsdp=2 zero=3", tmp_path / "parts", epochs=None, steps=3, **how)
    fit("pp=2 micro=8", tmp_path / "parts", resume=True, epochs=None, steps=5, **how)
    parts = fit("dp=2", tmp_path / "parts", resume=True, **how)
    assert rates(parts) == rates(whole) == [rate for rate, _ in rates_by_hand(SCHEDULERS[name])]
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("plan", ["dp=2", *longer("single", "fsdp=2 zero=3 micro=8", "tp=2", "pp=2 micro=8")])
def test_groups_and_one_that_moves_betas_are_proven(plan: str) -> None:
    def optimizer(params: Any) -> Any:
        made = by_dimensions(params)
        return made, lr_scheduler.OneCycleLR(made, max_lr=[0.1, 0.05, 0.1, 0.05], total_steps=STEPS)

    proof = px.prove(job(model=model, inputs=lambda batch: batch["x"], optimizer=optimizer), plan, steps=4)
    assert proof.equal, proof


class TestPlateau:
    HOW: ClassVar[dict[str, Any]] = {
        "optimizer": lambda params: (
            made := SGD(params, lr=0.5),
            lr_scheduler.ReduceLROnPlateau(made, factor=0.5, patience=0),
        ),
        "evaluate": lambda: table(23, 1),
        "evaluate_every": 1,
    }

    @staticmethod
    def rates_by_hand() -> list[float]:
        """The rates of a loop by hand over the batches of one epoch that is not shuffled."""
        torch.manual_seed(0)
        data, held_out, model = table(), table(23, 1), Net()
        optimizer = SGD(model.parameters(), lr=0.5)
        scheduler, found = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), list[float]()
        model.load_state_dict(START)
        every, there = data.__getitems__(list(range(len(data)))), held_out.__getitems__(list(range(23)))
        for start in (*range(0, len(data), BATCH), *range(0, len(data), BATCH)):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            x, y = (every[key][start : start + BATCH] for key in ("x", "y"))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                scheduler.step(float(nn.functional.cross_entropy(model(there["x"]), there["y"])))
        return found

    @staticmethod
    def model() -> nn.Module:
        model = Net()
        if next(model.parameters()).device.type != "meta":
            model.load_state_dict(START)
        return model

    @pytest.mark.parametrize("every", [0, 1])  # 1: a checkpoint comes before the evaluation after its step
    def test_an_evaluation_beside_a_checkpoint_counts_once(self, every: int, tmp_path: Path) -> None:
        how = {**self.HOW, "checkpoint_every": every, "shuffle": False, "model": self.model}
        for steps in (2, 3, 6):
            fit("single", tmp_path / "parts", resume=steps > 2, epochs=None, steps=steps, **how)
        assert rates(fit("dp=2", tmp_path / "parts", resume=True, **how)) == self.rates_by_hand()

    def test_it_follows_the_metric_of_best_and_is_proven(self) -> None:
        def optimizer(params: Any) -> Any:
            made = SGD(params, lr=0.5)
            return made, lr_scheduler.ReduceLROnPlateau(made, mode="max", factor=0.5, patience=0)

        how = {**self.HOW, "optimizer": optimizer, "best": px.Best("accuracy", mode="max")}
        metrics = lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])}  # noqa: E731
        proof = px.prove(job(metrics=metrics, **how), "dp=2", steps=6)
        assert proof.equal, proof


torch.manual_seed(3)
START = {name: value.clone() for name, value in Net().state_dict().items()}
_other = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
_plateau = lambda one: lr_scheduler.ReduceLROnPlateau(one, mode="max")  # noqa: E731
_step = lambda one: lr_scheduler.StepLR(one, 1)  # noqa: E731


class Unsaved(lr_scheduler.StepLR):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, 1)
        self.where = Path()


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("dp=2", {"optimizer": adamw(lambda _: lr_scheduler.StepLR(_other, 1))}, "another optimizer than the AdamW"),
        ("dp=2", {"optimizer": lambda params: (SGD(params, lr=0.1), 3)}, r"\(SGD, int\)"),
        ("dp=2", {"optimizer": adamw(_step), "schedule": px.Schedule(warmup_steps=3)}, "StepLR and Schedule"),
        ("dp=2 server=1", {"optimizer": adamw(_step)}, "StepLR under "),
        ("dp=2", {"optimizer": adamw(lr_scheduler.ReduceLROnPlateau)}, "evaluate_every"),
        ("dp=2", {"optimizer": adamw(_plateau), "evaluate": table, "evaluate_every": 2}, "mode='max'.*loss"),
        ("dp=2", {"optimizer": adamw(Unsaved)}, "at where"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_a_worker_starts(
    plan: str, how: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_workers(monkeypatch)
    with pytest.raises((RefusedError, SpecError), match=f"(?s)job.optimizer.*{words}"):
        fit(plan, tmp_path / "run", **how)


def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    fit("single", tmp_path / "run", epochs=None, steps=2, optimizer=adamw(_step))
    with pytest.raises(PhalanxError, match="StepLR, this is SequentialLR"):
        fit("single", tmp_path / "run", resume=True, optimizer=adamw(sequential))


def test_a_loop_of_ones_own() -> None:
    with pytest.raises(PhalanxError, match="fits no trainable parameter"):
        px.build(job(optimizer=lambda params: SGD(px.groups(params, {"haed.*": {"lr": 1.0}}), lr=0.1)))
    with pytest.raises(RefusedError, match="ReduceLROnPlateau for a loop of one's own"):
        px.build(job(**TestPlateau.HOW))
    step, loader = px.build(job(optimizer=adamw(sequential)))
    assert [step(batch).lr for batch in loader] == [rate for rate, _ in rates_by_hand(sequential)]
