"""Parameter groups by pattern: under every plan, and where a run goes on under another, those of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BATCH, fit, job, table
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import phalanx as px
from phalanx.checkpoint import latest, read_state
from phalanx.errors import PhalanxError

PLANS = (
    "single",
    "dp=2",
    "threads=2",
    "fsdp=2",
    "fsdp=2 zero=1",
    "fsdp=2 zero=2",
    "fsdp=2 zero=3 offload=optimizer",
    "tp=2",
    "pp=2 micro=8",
    "dp=2 server=1",
    "dp=2 server=2",
)
STEPS = 6


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
        made.load_state_dict(START)
    return made


torch.manual_seed(3)
START = {name: value.clone() for name, value in Model().state_dict().items()}


def by_pattern(params: Any) -> Any:
    patterns = {"*.bias": {"weight_decay": 0.0}, "*norm*": {"weight_decay": 0.0}, "head.*": {"lr": 3e-2}}
    return AdamW(px.groups(params, patterns), lr=1e-2, weight_decay=0.5)


def by_dimensions(params: Any) -> Any:
    return AdamW(px.no_decay(params, 0.5, {"head.*": {"lr": 3e-2, "betas": (0.5, 0.9)}}), lr=1e-2)


def patterns_by_hand(module: nn.Module) -> Any:
    named = dict(module.named_parameters())
    head = [named.pop("head.weight"), named.pop("head.bias")]
    norms = [named.pop(name) for name in list(named) if "norm" in name]
    biases = [named.pop(name) for name in list(named) if name.endswith("bias")]
    assert len(norms) == 4
    assert len(biases) == 4
    rest = {"params": list(named.values())}
    still = [{"params": biases, "weight_decay": 0.0}, {"params": norms, "weight_decay": 0.0}]
    return AdamW([rest, *still, {"params": head, "lr": 3e-2}], lr=1e-2, weight_decay=0.5)


def dimensions_by_hand(module: nn.Module) -> Any:
    blocks, head = list(module.blocks.parameters()), {"lr": 3e-2, "betas": (0.5, 0.9)}  # pyright: ignore
    made = [
        {"params": [one for one in blocks if one.dim() > 1], "weight_decay": 0.5},
        {"params": [one for one in blocks if one.dim() == 1], "weight_decay": 0.0},
        {"params": [module.get_parameter("head.weight")], "weight_decay": 0.5, **head},
        {"params": [module.get_parameter("head.bias")], "weight_decay": 0.0, **head},
    ]
    return AdamW(made, lr=1e-2)


FORMS = {"patterns": (by_pattern, patterns_by_hand), "dimensions": (by_dimensions, dimensions_by_hand)}


def rate(step: int) -> float:
    return 1.0 - step / 10


def plain(optimizer: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    """What plain PyTorch makes of it."""
    module, data = model(), table().__getitems__(list(range(len(table()))))
    made = optimizer(module)
    schedule = LambdaLR(made, rate)
    starts = [*range(0, len(data["x"]), BATCH)] * 2
    for start in starts[:STEPS]:
        made.zero_grad()
        x, y = (data[key][start : start + BATCH] for key in ("x", "y"))
        nn.functional.cross_entropy(module(x), y).backward()
        made.step()
        schedule.step()
    return module.state_dict()


def run(plan: str, folder: Path, optimizer: Any = by_pattern, *, steps: int = STEPS, **how: Any) -> px.Run:
    given = {"model": model, "shuffle": False, "epochs": None, "schedule": rate, "inputs": lambda batch: batch["x"]}
    return fit(plan, folder, optimizer=optimizer, **{**given, "steps": steps, **how})


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_as_groups_by_hand(plan: str, form: str, tmp_path: Path) -> None:
    ours, by_hand = FORMS[form]
    same(run(plan, tmp_path / "run", ours).state_dict(), plain(by_hand))


@pytest.mark.parametrize("plans", ["dp=2, pp=2 micro=8", "pp=2 micro=8, fsdp=2", "fsdp=2 zero=1, tp=2"])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_under_another_plan(plans: str, form: str, tmp_path: Path) -> None:
    first, then = plans.split(", ")
    ours, by_hand = FORMS[form]
    run(first, tmp_path / "run", ours, steps=3)
    same(run(then, tmp_path / "run", ours, resume=True).state_dict(), plain(by_hand))


class Tied(nn.Module):
    """The first layer's weight is the last one's."""

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


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "pp=2 micro=8"])
def test_a_tied_weight_has_the_name_that_the_model_gives_it_first(plan: str, tmp_path: Path) -> None:
    def optimizer(params: Any) -> Any:
        return SGD(px.groups(params, {"*.weight": {"lr": 0.2}, "embedding.*": {"lr": 0.0}}), lr=0.1)

    weight = run("single", tmp_path / "first", optimizer, model=Tied, steps=1).state_dict()["embedding.weight"]
    found = run(plan, tmp_path / "run", optimizer, model=Tied, steps=4).state_dict()
    assert torch.equal(found["embedding.weight"], weight)
    same(found, run("single", tmp_path / "single", optimizer, model=Tied, steps=4).state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2 zero=2", "tp=2", "pp=2 micro=8"])
def test_groups_are_proven(plan: str, form: str) -> None:
    proof = px.prove(
        job(model=model, inputs=lambda batch: batch["x"], optimizer=FORMS[form][0], schedule=rate), plan, steps=4
    )
    assert proof.equal, proof


def test_groups_keep_their_place_in_checkpoints_of_pipelines(tmp_path: Path) -> None:
    """Two groups of equal options stay two, and one that is nobody's on a stage keeps its own options."""

    def optimizer(params: Any) -> Any:
        found = px.groups(params, {"head.*": {"lr": 3e-2}, "*.bias": {"lr": 1e-2}, "head.bias": {"lr": 5e-2}})
        made = AdamW(found, lr=1e-2)
        return made, LambdaLR(made, rate)

    saved = run("pp=2 micro=8", tmp_path / "run", optimizer, steps=2, schedule=px.Schedule())
    groups = _groups(saved)
    assert [group["options"]["initial_lr"] for group in groups] == [1e-2, 3e-2, 1e-2, 5e-2]
    assert [len(group["parameters"]) for group in groups] == [6, 1, 6, 1]
    then = run("pp=2 micro=8", tmp_path / "run", optimizer, steps=4, schedule=px.Schedule(), resume=True)
    assert [group["options"]["lr"] for group in _groups(then)] == pytest.approx([6e-3, 18e-3, 6e-3, 3e-2])
    again = run("dp=2", tmp_path / "run", optimizer, steps=6, schedule=px.Schedule(), resume=True)
    whole = run("single", tmp_path / "whole", optimizer, schedule=px.Schedule())
    same(again.state_dict(), whole.state_dict())


def _groups(run: px.Run) -> list[dict[str, Any]]:
    folder = latest(run.folder / "checkpoints")
    assert folder is not None
    return read_state(folder)["optimizer"]["groups"]


@pytest.mark.parametrize("plan", ["single", "dp=2", "pp=2 micro=8", "dp=2 server=1"])
@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"*.bais": {"lr": 1.0}}, r"the pattern '\*.bais', which fits no trainable parameter.*near are .*bias"),
        ({"head.*": {"lr": 1.0}, "*": {"lr": 0.1}}, "the pattern 'head.*', of whose names none is left to it"),
        ({"head.*": {"weight_decya": 1.0}}, "the option 'weight_decya'.*AdamW does not read.*weight_decay"),
        ({"head.*": 0.1}, "'head.*': 0.1"),
    ],
)
def test_what_fits_nothing_is_refused_before_a_worker_starts(
    plan: str, patterns: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.launch.local import LocalLauncher

    def started(*_: Any) -> Any:
        raise AssertionError("a worker was started")

    if plan != "single":
        monkeypatch.setattr(LocalLauncher, "start", started)
    with pytest.raises(PhalanxError, match=f"(?s){words}"):
        run(plan, tmp_path / "run", lambda params: AdamW(px.groups(params, patterns), lr=1e-2))


def test_a_loop_of_ones_own_is_refused_too() -> None:
    with pytest.raises(PhalanxError, match="fits no trainable parameter"):
        px.build(job(optimizer=lambda params: SGD(px.groups(params, {"haed.*": {"lr": 1.0}}), lr=0.1)))


def test_it_serves_plain_pytorch_too() -> None:
    made = px.no_decay(model().named_parameters(), 0.1)
    assert [(group["weight_decay"], len(group["params"])) for group in made] == [(0.1, 5), (0.0, 9)]
    with pytest.raises(PhalanxError, match="parameters without names"):
        px.groups(model().parameters(), {"*": {}})
    with pytest.raises(PhalanxError, match="a number, 0 or more"):
        px.no_decay(model().named_parameters(), -0.1)
