"""Proofs with dropout on: masks by sample and layer are one device's, and what drops otherwise is found."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import job
from test_models_as_written import data
from torch import Tensor, nn

import phalanx as px
from phalanx.spec import Plan
from phalanx.verify import OneDevice
from phalanx.verify.dropout import BySample, _Place

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Attention that drops weights, by torch's function, and a residual that drops by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unsqueeze(1).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        return x + self.drop(self.out(attended.squeeze(1)))


class Dropping(nn.Module):
    """Drops before, in and between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(1, 8), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x.unsqueeze(-1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(F.dropout(x.mean(1), 0.5, self.training))


def dropping() -> px.Job:
    return job(model=Dropping, data=partial(data, 40), batch=13, epochs=None, steps=4)


@cache
def one_device() -> OneDevice:
    return OneDevice.run(dropping(), 4, dropout=True)


PLANS = ("dp=2", "dp=2 micro=3", "fsdp=2 recompute=full", "pp=2 micro=4", "pp=2 micro=4 recompute=full", "micro=5")


@pytest.mark.parametrize("plan", PLANS)
def test_dropout_is_one_devices_on_any_split(plan: str) -> None:
    proof = one_device().prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


def test_dropout_is_on() -> None:
    without = OneDevice.run(dropping(), 1)
    assert without._record.losses[0] != pytest.approx(one_device()._record.losses[0], rel=1e-3)


def on_a_rank(rank: int | None) -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and rank in (None, dist.get_rank())


def test_the_same_masks_on_both_replicas_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = BySample._keys

    def same(self: BySample, shape: Any, place: _Place) -> Any:
        ids = tuple(range(len(place.ids))) if on_a_rank(None) else place.ids
        return keys(self, shape, _Place(place.step, ids, place.layer, place.call))

    reference = one_device()
    monkeypatch.setattr(BySample, "_keys", same)
    assert not reference.prove(Plan.parse("dp=2")).equal


def test_a_rank_that_does_not_drop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    times = BySample._times

    def off(self: BySample, input: Tensor, *rest: Any) -> Tensor:
        return input if on_a_rank(1) else times(self, input, *rest)

    reference = one_device()
    monkeypatch.setattr(BySample, "_times", off)
    assert not reference.prove(Plan.parse("dp=2")).equal


def test_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BySample.mask
    reference = one_device()
    monkeypatch.setattr(BySample, "mask", lambda *args: mask(*args) * (1.001 if on_a_rank(0) else 1.0))
    assert not reference.prove(Plan.parse("dp=2")).equal


class TestMasks:
    """Statistics of what is drawn: bounds are five standard deviations of a binomial."""

    def test_the_share_that_is_kept(self) -> None:
        for rate in (0.1, 0.5, 0.9):
            mask = BySample(0).mask((64, 32, 16), rate, CPU, _Place(0, tuple(range(64)), "layer", 0))
            kept, count = int((mask > 0).sum()), mask.numel()
            assert abs(kept - (1 - rate) * count) <= 5 * (count * rate * (1 - rate)) ** 0.5
            assert torch.equal(mask.unique(), torch.tensor([0.0, 1.0]) / (1 - rate))

    def test_masks_differ_between_samples_steps_layers_calls_and_seeds(self) -> None:
        def drawn(seed: int = 0, step: int = 0, sample: int = 7, layer: str = "a", call: int = 0) -> Tensor:
            return BySample(seed).mask((1, 4096), 0.5, CPU, _Place(step, (sample,), layer, call)) > 0

        base = drawn()
        assert torch.equal(base, drawn())
        for other in (drawn(seed=1), drawn(step=1), drawn(sample=8), drawn(layer="b"), drawn(call=1)):
            assert abs(int((other == base).sum()) - 2048) <= 5 * 32  # as often alike as two coins

    def test_a_mask_does_not_depend_on_who_else_is_there(self) -> None:
        def drawn(shape: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
            return BySample(0).mask(shape, 0.5, CPU, _Place(0, ids, "layer", 0))

        whole = drawn((4, 3, 5), (9, 2, 7, 4))
        assert torch.equal(whole[2:], drawn((2, 3, 5), (7, 4)))
        assert torch.equal(whole.flatten(0, 1), drawn((12, 5), (9, 2, 7, 4)))
        assert torch.equal(whole.transpose(0, 1), drawn((3, 4, 5), (9, 2, 7, 4)))
