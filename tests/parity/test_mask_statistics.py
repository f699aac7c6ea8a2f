"""What a run's own masks show where a proof compares without dropout; each fault planted here passes all else."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import DROPPING
from torch import Tensor

from law_rows import longer
from phalanx.config import Plan
from phalanx.parallel import activation_checkpointing
from phalanx.parallel.context import attention, flash_block
from phalanx.parallel.local_shards import elementwise_ops
from phalanx.parallel.local_shards.tensor import RULES
from phalanx.parallel.rng_streams import stream
from phalanx.train import grad_accumulation
from phalanx.verify import OneDevice
from phalanx.verify.mask_recording import Draw
from phalanx.verify.mask_statistics import bound, statistics_of
from phalanx.verify.parity import Proof


@cache
def one_device(model: str) -> OneDevice:
    return OneDevice.run(DROPPING[model](), 2)


def proof(model: str, plan: str) -> Proof:
    return one_device(model).prove(Plan.parse(plan))


SOUND = [
    ("MLP", "dp=2 server=1", 0, 0),
    ("own GPT", "tp=2 sequence=true recompute=full", 1, 1),
    *longer(("own GPT", "cp=2", 1, 1)),  # the ring computes weights again in backward
    *longer(("MLP", "threads=2", 0, 0), ("MLP", "dp=2 micro=3", 0, 0), ("MLP", "pp=2 micro=4 recompute=full", 0, 1)),
    *longer(("MLP", "fsdp=2 recompute=selective", 0, 1), ("own GPT", "cp=2 attention=alltoall recompute=full", 1, 1)),
]


@pytest.mark.parametrize(("model", "plan", "copies", "again"), SOUND)
def test_a_sound_run_is_measured(model: str, plan: str, copies: int, again: int) -> None:
    found = proof(model, plan)
    assert found.equal, f"{found.first}\n{found.cause}"
    check = found.checks[-1]
    assert check.kind == "dropout"
    assert 0 < check.largest <= check.allowed
    assert "masks" in found.dropout
    assert ("0 copies" in found.dropout) == (not copies)
    assert ("0 drawn again" in found.dropout) == (not again)
    assert found.to_dict()["dropout"] == found.dropout


def words(*chosen: int | None) -> Any:
    """The seed of what a forward draws, from other words than step, micro-batch and part."""

    def other(seed: int, *given: int) -> int:
        return stream(seed, *(word if one is None else one for word, one in zip(given, chosen, strict=True)))

    return other


def by_rank(seed: int, *given: int) -> int:
    return stream(seed, *given, dist.get_rank())


def drops_less(func: Any, args: Any, kwargs: Any) -> Any:
    return elementwise_ops.dropped(func, args, {**kwargs, "p": kwargs["p"] * 0.7})


def without_scale(func: Any, args: Any, kwargs: Any) -> Any:
    return elementwise_ops.dropped(func, args, kwargs) * (1 - kwargs["p"])


def backward(kernel: flash_block.UnfusedAttention, tile: flash_block.Tile, *rest: Tensor) -> Any:
    return BACKWARD(kernel, replace(tile, seed=tile.seed + 1), *rest)


BACKWARD = flash_block.UnfusedAttention.backward
CHECKPOINT = activation_checkpointing.checkpoint
ALL_SAME = words(None, None, 0)
FROZEN = words(0, None, None)
MICRO = words(None, 0, None)


SAME, OTHER, AGAIN = "same elements", "other elements", "in backward"
FAULTS: dict[str, tuple[str, str, Any, str, Any, str, str]] = {
    "every rank draws the same": ("MLP", "dp=2", grad_accumulation, "stream", ALL_SAME, SAME, "rank's part"),
    "frozen": ("MLP", "dp=2", grad_accumulation, "stream", FROZEN, SAME, "frozen"),
    "micro-batches draw the same": ("MLP", "micro=5", grad_accumulation, "stream", MICRO, SAME, "micro-batch"),
    "ranks of tp draw unlike": ("own GPT", "tp=2", grad_accumulation, "stream", by_rank, OTHER, "share samples"),
    "ranks of cp draw unlike": ("own GPT", "cp=2", grad_accumulation, "stream", by_rank, OTHER, "share samples"),
    "slices draw the same": (
        *("own GPT", "tp=2 sequence=true", attention, "OwnStream", lambda *_: nullcontext()),
        *(SAME, "random stream"),
    ),
    "recompute draws anew": (
        *("MLP", "dp=2 recompute=full", activation_checkpointing, "checkpoint"),
        *(partial(CHECKPOINT, preserve_rng_state=False), AGAIN, "recompute"),
    ),
    "the ring draws anew": (
        *("own GPT", "cp=2", flash_block.UnfusedAttention, "backward", backward),
        *(AGAIN, "recompute"),
    ),
}
OFTEN = ("every rank draws the same", "ranks of tp draw unlike", "recompute draws anew")


def planted(monkeypatch: pytest.MonkeyPatch, found: tuple[Any, ...]) -> Proof:
    model, plan, where, name, what, *_ = found
    one_device(model)
    monkeypatch.setattr(where, name, what)
    return proof(model, plan)


@pytest.mark.parametrize("fault", [*OFTEN, *longer(*(one for one in FAULTS if one not in OFTEN))])
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted(monkeypatch, FAULTS[fault])
    assert not found.equal
    assert [check.kind for check in found.checks if check.first] == ["dropout"], "something else had found it"
    assert FAULTS[fault][5] in found.first
    assert FAULTS[fault][6] in found.cause


RATES: dict[str, tuple[Any, str]] = {
    "a rate that is another": (drops_less, "not"),
    "no scale": (without_scale, "scale"),
    "no dropout": (lambda func, args, kwargs: args[0], "drew no mask"),
}


@pytest.mark.parametrize("fault", ["no scale", *longer("a rate that is another", "no dropout")])
def test_a_rate_that_is_not_kept_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_device("own GPT")
    rule, said = RATES[fault]
    monkeypatch.setitem(RULES, "dropout", rule)
    found = proof("own GPT", "tp=2 sequence=true")
    assert not found.equal
    assert said in found.first


def draw(**how: Any) -> dict[str, Any]:
    given = {"step": 0, "ids": "1,2", "layer": ("a", "a*0:0"), "part": "", "rate": 0.5, "elements": 1000}
    found = {"dropped": 500, "scaled": True, "digest": "d", "start": "d", "again": False}
    return {name: getattr(Draw(**{**given, **found, **how}), name) for name in Draw.__slots__}


class TestJudged:
    def test_the_bound_holds_for_what_is_random(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for rate, size in ((0.1, 50), (0.5, 1000), (0.01, 10000)):
            counts = (torch.rand(2000, size, generator=generator) < rate).sum(1).double()
            assert float((counts - rate * size).abs().max()) <= bound(rate, size)
        assert bound(0.5, 10**6) <= 6.6 * 500, "the bound says nothing"

    def test_a_share_beyond_it_is_not_equal(self) -> None:
        off = int(bound(0.5, 1000)) + 1
        assert not statistics_of([{"draws": [draw(dropped=499 + off)]}], 2).check.first
        assert "not 50.00%" in statistics_of([{"draws": [draw(dropped=500 + off)]}], 2).check.first

    def test_a_scale_that_is_not(self) -> None:
        assert "scale" in statistics_of([{"draws": [draw(scaled=False)]}], 2).check.first

    def test_short_masks_may_be_the_same(self) -> None:
        both = [draw(start=""), draw(start="", step=1)]
        assert not statistics_of([{"draws": both}], 2).check.first
        assert statistics_of([{"draws": [draw(), draw(step=1)]}], 2).check.first
