"""Dropout under plans: ranks that share samples drop the same elements, all others drop their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial, wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS
from torch import Tensor, nn
from torch.nn import functional

import phalanx as px
from law_rows import longer
from phalanx.parallel import activation_checkpointing
from phalanx.parallel.rng_streams import OwnStream, stream
from phalanx.train import grad_accumulation

OWN, SHARED, REPEATED = "each rank its own, once", "the same on all ranks, once", "each rank its own, twice"
LAWS = [
    ("dp=2 micro=3", OWN),
    ("tp=2", SHARED),
    ("tp=2 sequence=true", OWN),
    ("dp=2 recompute=full", REPEATED),
    *longer(("fsdp=2", OWN), ("cp=2", OWN), ("pp=2 recompute=full", REPEATED)),
]


def masks_of(plan: str, folder: Path, patch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Train two steps; return by rank how often each mask was drawn."""
    plain, marks = functional.dropout, folder / "masks"
    marks.mkdir()

    @wraps(plain)  # whose name has a rule for slices
    def noted(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        found = plain(input, p, training, inplace)
        # torch calls this once more for the local part of a slice
        if training and dist.is_initialized() and type(found) is Tensor and found.device.type == "cpu":
            digest = blake2b((found != 0).numpy().tobytes(), digest_size=16).hexdigest()
            with (marks / str(dist.get_rank())).open("a") as file:
                file.write(f"{digest}\n")
        return found

    def model() -> nn.Module:
        built: Any = MODELS["own GPT"]().model()
        for block in built.blocks:
            # recomputation stops at the last tensor that backward needs, which is to come after dropout
            block.down = nn.Sequential(block.down, nn.Dropout(0.5), nn.LayerNorm(32))
        return built

    patch.setattr(functional, "dropout", noted)
    px.fit(replace(MODELS["own GPT"](), model=model, steps=2), plan, folder=folder / "run", check="off")
    return [Counter(file.read_text().split()) for file in sorted(marks.iterdir())]


def broken(law: str, ranks: list[Counter[str]]) -> bool:
    first, second = ranks
    times = 2 if law == REPEATED else 1
    alike = first == second if law == SHARED else not first & second
    return not (first and second and alike and {*first.values(), *second.values()} == {times})


@pytest.mark.parametrize(("plan", "law"), LAWS)
def test_masks(plan: str, law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not broken(law, masks_of(plan, tmp_path, monkeypatch))


def words(*chosen: int | None) -> Any:
    """The seed of a forward, from other words than step, micro-batch and part."""

    def other(seed: int, *given: int) -> int:
        return stream(seed, *(word if one is None else one for word, one in zip(given, chosen, strict=True)))

    return other


def by_rank(seed: int, *given: int) -> int:
    return stream(seed, *given, dist.get_rank())


ANEW = partial(activation_checkpointing.checkpoint, preserve_rng_state=False)
FAULTS: dict[str, tuple[str, str, Any, str, Any]] = {
    "every rank draws the same": ("dp=2 micro=3", OWN, grad_accumulation, "stream", words(None, None, 0)),
    "recompute draws anew": ("dp=2 recompute=full", REPEATED, activation_checkpointing, "checkpoint", ANEW),
    "ranks of tp draw unlike": ("tp=2", SHARED, grad_accumulation, "stream", by_rank),
    "frozen": ("dp=2 micro=3", OWN, grad_accumulation, "stream", words(0, None, None)),
    "micro-batches draw the same": ("dp=2 micro=3", OWN, grad_accumulation, "stream", words(None, 0, None)),
}


@pytest.mark.parametrize("fault", [*list(FAULTS)[:2], *longer(*list(FAULTS)[2:])])
def test_a_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, law, where, name, what = FAULTS[fault]
    monkeypatch.setattr(where, name, what)
    assert broken(law, masks_of(plan, tmp_path, monkeypatch))


def test_slices_draw_their_own() -> None:
    drawn = []
    for rank in range(2):
        torch.manual_seed(0)
        axis: Any = type("Axis", (), {"rank": rank, "size": 2})()
        with OwnStream(torch.device("cpu"), [axis]):
            drawn.append(torch.rand(8))
    assert not torch.equal(*drawn)
