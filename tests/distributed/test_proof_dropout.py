"""Dropout under proofs and where a model recomputes: masks by sample and layer are one device's."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small import Net, job, table
from test_models_as_written import data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.parallel import activation_checkpointing
from phalanx.verify import OneDevice, ReferenceRun
from phalanx.verify.dropout import BySample, MaskPlace
from phalanx.witness.masks import KeyedMasks

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
    return OneDevice.run(dropping(), 4, ReferenceRun(dropout=True))


PLANS = ("pp=2 micro=4 recompute=full", *longer("dp=2 micro=3", "fsdp=2 recompute=full", "pp=2 micro=4", "micro=5"))


@pytest.mark.parametrize("plan", PLANS)
def test_dropout_is_one_devices_on_any_split(plan: str) -> None:
    proof = one_device().prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


def test_recompute_that_draws_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = one_device()
    monkeypatch.setattr(activation_checkpointing, "checkpoint", partial(checkpoint, preserve_rng_state=False))
    assert not reference.prove(Plan.parse("dp=2 recompute=full")).equal


def test_the_plain_loop_has_the_same_rule() -> None:
    ids = (7, 2**40, 0)
    for shape in ((3, 4), (6, 5), (4, 3, 2), (5,)):
        for rate in (0.1, 0.5, 1.0):
            masks = KeyedMasks(seed=5)
            masks.begin(9, list(ids))
            ours = BySample(5).mask(shape, rate, CPU, MaskPlace(9, ids, "a*0/b*1:0"))
            assert torch.equal(torch.from_numpy(masks._factors(list(shape), rate, "a*0/b*1:0")), ours)


class Packed(nn.Module):
    """Drops the tokens that are not padding, packed: nobody says whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        there = x > 0.1
        dropped = torch.zeros(*x.shape, 8).masked_scatter(there.unsqueeze(-1), self.drop(self.first(x[there][:, None])))
        return self.head(dropped.mean(1))


def test_masks_of_no_sample_are_refused_where_the_batch_is_split() -> None:
    reference = OneDevice.run(
        job(model=Packed, data=partial(data, 40), batch=13, epochs=None, steps=4), 4, ReferenceRun(dropout=True)
    )
    assert reference.prove(Plan.parse("single")).equal
    with pytest.raises(RefusedError, match="dropout of drop") as caught:
        reference.prove(Plan.parse("dp=2"))
    assert "without dropout=True" in str(caught.value)


class Positions(nn.Module):
    """Drops positions, which are of no sample, and the same layer's result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 5)
        self.where = nn.Parameter(torch.zeros(11, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x.unsqueeze(-1))) + self.drop(self.where[: x.shape[1]] + 1.0)
        return self.head(self.drop(x).mean(1))


@pytest.mark.parametrize("plan", ["dp=2", *longer("pp=2 micro=3", "micro=5")])
def test_masks_of_no_sample_that_stay_the_same_are_drawn_by_layer(plan: str) -> None:
    reference = OneDevice.run(
        job(model=Positions, data=partial(data, 40), batch=13, epochs=None, steps=2), 2, ReferenceRun(dropout=True)
    )
    proof = reference.prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


class Recomputes(Net):
    """Recomputes each of its layers, with dropout in it or beside it."""

    def __init__(self, *, reentrant: bool = False, preserve: bool = True, inside: float = 0.0, after: float = 0.0):
        super().__init__()
        self.how = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        self.inside, self.after = inside, after

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = F.dropout(checkpoint(self.run, layer, x, **self.how), self.after, self.training)
        return self.head(x)

    def run(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.relu(layer(x)), self.inside, self.training)


def recomputing_job(**how: bool | float) -> px.Job:
    return job(model=partial(Recomputes, **how), epochs=None, steps=3, data=table)


@pytest.mark.parametrize("reentrant", [False, True])
def test_threads_refuse_dropout_that_is_recomputed(reentrant: bool, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="threads") as caught:
        px.fit(recomputing_job(reentrant=reentrant, inside=0.1), "threads=2", folder=tmp_path)
    assert "try: dp=2" in str(caught.value)
    assert caught.value.exit_code == 2
