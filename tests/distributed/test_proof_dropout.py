"""Dropout under proofs and where a model recomputes: masks by sample and layer are one device's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import Net, job, table
from test_models_as_written import data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from longer import longer
from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.parallel import activation_checkpointing
from phalanx.verify import OneDevice, ReferenceRun
from phalanx.verify.dropout import BySample, MaskPlace
from phalanx.verify.witness.masks import KeyedMasks

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
    return OneDevice.run(dropping(), 4, ReferenceRun(dropout=True))


PLANS = ("dp=2 micro=3", "pp=2 micro=4 recompute=full", *longer("fsdp=2 recompute=full", "pp=2 micro=4", "micro=5"))


@pytest.mark.parametrize("plan", PLANS)
def test_dropout_is_one_devices_on_any_split(plan: str) -> None:
    proof = one_device().prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


def on_a_rank(rank: int | None) -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and rank in (None, dist.get_rank())


def same_on_both(keys: Any) -> Any:
    def same(self: BySample, shape: Any, place: MaskPlace) -> Any:
        ids = tuple(range(len(place.ids))) if on_a_rank(None) else place.ids
        return keys(self, shape, MaskPlace(place.step, ids, place.layer))

    return same


FAULTS: dict[str, Any] = {
    "_keys": same_on_both,
    "_times": lambda times: lambda self, input, *rest: input if on_a_rank(1) else times(self, input, *rest),
    "mask": lambda mask: lambda *args: mask(*args) * (1.001 if on_a_rank(0) else 1.0),
}


@pytest.mark.parametrize("method", FAULTS)
def test_other_masks_on_a_rank_are_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = one_device()
    monkeypatch.setattr(BySample, method, FAULTS[method](getattr(BySample, method)))
    assert not reference.prove(Plan.parse("dp=2")).equal


def test_what_phalanx_draws_on_one_device_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BySample.mask
    monkeypatch.setattr(BySample, "mask", lambda *args: mask(*args) * 1.001)
    reference = OneDevice.run(dropping(), 1, ReferenceRun(dropout=True))
    assert reference.reference == "a plain PyTorch loop"
    assert not reference.prove(Plan()).equal


class Recomputing(Dropping):
    """Recomputes its layers by itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x.unsqueeze(-1)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)  # pyright: ignore
        return self.head(F.dropout(x.mean(1), 0.5, self.training))


@cache
def recomputing(*, reentrant: bool) -> OneDevice:
    made = replace(dropping(), model=partial(Recomputing, reentrant=reentrant))
    return OneDevice.run(made, 4, ReferenceRun(dropout=True))


@pytest.mark.parametrize(
    ("plan", "reentrant"),
    [
        ("pp=2 micro=4", False),
        ("fsdp=2", True),
        *longer(("dp=2 micro=3", False), ("single", True), ("pp=2 micro=4 schedule=gpipe", True), ("fsdp=2", False)),
    ],
)
def test_a_model_that_recomputes_by_itself(plan: str, reentrant: bool) -> None:
    proof = recomputing(reentrant=reentrant).prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    drops_alike = one_device()._record.losses
    assert recomputing(reentrant=reentrant)._record.losses == pytest.approx(drops_alike, rel=1e-5)


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


def test_a_mask_worked_out_by_hand() -> None:
    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key, g = 0, 0x9E3779B97F4A7C15
    for word in (5, 9, crc32(b"a*0:0"), 1 + 7):
        key = mix((key + g + word) % 2**64)
    kept = [(mix((key // 2 + (i + 1) * g) % 2**64) >> 40) >= round(0.3 * 2**24) for i in range(40)]
    mask = BySample(5).mask((1, 40), 0.3, CPU, MaskPlace(9, (7,), "a*0:0"))
    assert (mask[0] > 0).tolist() == kept


class TestMasks:
    """Statistics of what is drawn: bounds are five standard deviations of a binomial."""

    def test_the_share_that_is_kept(self) -> None:
        for rate in (0.1, 0.5, 0.9):
            mask = BySample(0).mask((64, 32, 16), rate, CPU, MaskPlace(0, tuple(range(64)), "layer:0"))
            kept, count = int((mask > 0).sum()), mask.numel()
            assert abs(kept - (1 - rate) * count) <= 5 * (count * rate * (1 - rate)) ** 0.5
            assert torch.equal(mask.unique(), torch.tensor([0.0, 1.0]) / (1 - rate))

    def test_masks_differ_between_samples_steps_layers_calls_and_seeds(self) -> None:
        def drawn(seed: int = 0, step: int = 0, sample: int = 7, layer: str = "a", call: int = 0) -> Tensor:
            return BySample(seed).mask((1, 4096), 0.5, CPU, MaskPlace(step, (sample,), f"{layer}:{call}")) > 0

        base = drawn()
        assert torch.equal(base, drawn())
        for other in (drawn(seed=1), drawn(step=1), drawn(sample=8), drawn(layer="b"), drawn(call=1)):
            assert abs(int((other == base).sum()) - 2048) <= 5 * 32  # as often alike as two coins

    def test_a_mask_does_not_depend_on_who_else_is_there(self) -> None:
        def drawn(shape: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
            return BySample(0).mask(shape, 0.5, CPU, MaskPlace(0, ids, "layer:0"))

        whole = drawn((4, 3, 5), (9, 2, 7, 4))
        assert torch.equal(whole[2:], drawn((2, 3, 5), (7, 4)))
        assert torch.equal(whole.flatten(0, 1), drawn((12, 5), (9, 2, 7, 4)))
        assert torch.equal(whole.transpose(0, 1), drawn((3, 4, 5), (9, 2, 7, 4)))


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


def test_a_plan_that_compiles_is_refused_before_anything_runs() -> None:
    with pytest.raises(RefusedError, match="compile") as caught:
        px.prove(dropping(), "dp=2 compile=true", dropout=True)
    assert 'plan="dp=2"' in str(caught.value)


class Positions(nn.Module):
    """Drops positions, which are of no sample, and the same layer's result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 5)
        self.where = nn.Parameter(torch.zeros(11, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x.unsqueeze(-1))) + self.drop(self.where[: x.shape[1]] + 1.0)
        return self.head(self.drop(x).mean(1))


@pytest.mark.parametrize("plan", ["pp=2 micro=3", *longer("dp=2", "micro=5")])
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
            x = F.dropout(checkpoint(self.run, layer, x, **self.how), self.after, self.training)  # pyright: ignore
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


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("threads=2", {"reentrant": True, "after": 0.1}),
        ("threads=2", {"reentrant": False, "inside": 0.1, "preserve": False}),
        *longer(("threads=2", {}), ("dp=2", {"inside": 0.1})),
    ],
)
def test_recomputing_without_shared_random_numbers_trains(plan: str, how: dict[str, Any], tmp_path: Path) -> None:
    assert len(px.fit(recomputing_job(**how), plan, folder=tmp_path).losses) == 3
