"""Memory that is forecast: small cases by hand, the published formula of activations, and what holds for all plans."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from phalanx.config import Plan
from phalanx.forecast import PHALANX, Preset
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.memory import MemoryForecast, memory
from phalanx.trace import ModelPart, Operation, Profile, Saved, Shape, SizeLaw, Weights
from published.subject import NAMED

PLAIN = Preset(name="plain", reserved=1.0)


def needed(
    profile: Profile, *plans: str, batch: int = 8, preset: Preset = PLAIN, precision: str = "fp32"
) -> MemoryForecast:
    layouts = Layouts.of([Plan.parse(text) for text in plans], batch, profile.length)
    return memory(profile, layouts, preset, precision, 8.0)


def layer(inputs: int, outputs: int, count: int = 1) -> ModelPart:
    """A linear layer, of which backward needs the input; 7 numbers a sample come and go."""
    return ModelPart(
        name="layer",
        role="block",
        count=count,
        forward=(_product(SizeLaw(1.0, 1.0), outputs, inputs),),
        weights=(Weights(elements=inputs * outputs, share="inner"), Weights(elements=outputs)),
        entry=SizeLaw(float(inputs), 1.0),
        working=SizeLaw(7.0, 1.0),
    )


def _product(rows: SizeLaw, columns: int, inner: int) -> Operation:
    return Operation(
        kind="matmul", name="mm", dims=(SizeLaw(1.0), rows, SizeLaw(float(columns)), SizeLaw(float(inner)))
    )


MLP = Profile(parts=(layer(9, 20), layer(20, 5)))
NUMBERS = 9 * 20 + 20 + 20 * 5 + 5


def test_an_mlp_of_two_layers_by_hand() -> None:
    found = needed(MLP, "single", batch=32)
    assert found.parameters[0] == found.gradients[0] == 4 * NUMBERS
    assert found.optimizer[0] == 8 * NUMBERS
    assert found.activations[0] == 4 * 32 * (9 + 20)
    assert found.working[0] == 4 * 32 * 7
    # One micro-batch: gradients come as activations go, so that the larger of the two counts.
    assert found.allocated[0] == 12 * NUMBERS + max(4 * NUMBERS, 4 * 32 * (9 + 20 + 7))
    assert found.reserve[0] == 0


def test_gradients_of_the_micro_batch_before_are_there_in_the_next() -> None:
    found = needed(MLP, "single micro=8", batch=32)
    assert found.apart[0] == 0
    assert found.allocated[0] == 16 * NUMBERS + 4 * 8 * (9 + 20 + 7)


@pytest.mark.parametrize(
    ("plan", "parameters", "gradients", "optimizer"),
    [
        ("dp=4", 1, 1, 1),
        ("fsdp=4 zero=1", 1, 4, 4),  # of one micro-batch, whose backward scatters them
        ("fsdp=4 zero=1 micro=1", 1, 1, 4),
        ("fsdp=4 zero=2 micro=1", 1, 4, 4),
        ("fsdp=4 zero=3", 4, 4, 4),
    ],
)
def test_what_each_stage_of_zero_shards(plan: str, parameters: int, gradients: int, optimizer: int) -> None:
    found = needed(MLP, plan, batch=8)
    assert found.parameters[0] == 4 * NUMBERS / parameters
    assert found.gradients[0] == 4 * NUMBERS / gradients
    assert found.optimizer[0] == 8 * NUMBERS / optimizer
    largest = 9 * 20 + 20
    sharded = "zero=3" in plan
    assert found.gathered[0] == (4 * 2 * largest if sharded else 0)
    assert found.communication[0] == (4 * largest if sharded else 0)  # to be scattered


def test_buckets_of_our_own_zero_are_under_way() -> None:
    wide = Profile(parts=(replace(layer(9, 20), weights=(Weights(elements=10**8, largest=10**7, tensors=10),)),))
    for zero in (1, 2):
        on_host = needed(wide, f"fsdp=4 zero={zero}", preset=PHALANX).communication[0]
        on_device = needed(wide, f"fsdp=4 zero={zero}", preset=replace(PHALANX, one_memory=False)).communication[0]
        assert on_device == 4 * 10**7 * (4 + 1 / 4)  # larger than a bucket, it stands alone
        assert on_host == 4 * 10**7 * (6 + 1 / 4)


@pytest.mark.parametrize(
    ("plan", "device"),
    [
        ("single offload=optimizer", 4 + 4),
        ("fsdp=4 zero=1 offload=optimizer", 4 + 1),
        ("fsdp=4 offload=optimizer", 1 + 1),
        ("fsdp=4 offload=parameters", 0),
    ],
)
def test_offloading_leaves_what_is_stepped_to_the_host(plan: str, device: float) -> None:
    """Bytes a parameter: value, gradient and two moments."""
    found = needed(MLP, plan, preset=replace(PLAIN, one_memory=False))
    assert found.parameters[0] + found.gradients[0] + found.optimizer[0] == device * NUMBERS


STACK = Profile(parts=(replace(layer(16, 16, count=8), saved=(Saved(elements=SizeLaw(30.0, 1.0), share="inner"),)),))


@pytest.mark.parametrize(
    ("plan", "under_way"),
    [
        ("pp=4 micro=1 schedule=gpipe", 8 * 2),
        ("pp=4 micro=1", 4 * 2),
        ("pp=4 micro=1 schedule=interleaved", (2 * 3 + 4 + 1) * 1),
        ("pp=4 micro=1 schedule=zero-bubble", 4 * 2),
        ("pp=4 micro=1 schedule=zbv", 4 * 2),
        ("pp=4 micro=1 schedule=dualpipev", 4.5 * 2),
        ("pp=4 micro=4", 2 * 2 * 4),  # no more micro-batches than there are
    ],
)
def test_what_a_schedule_has_under_way(plan: str, under_way: float) -> None:
    assert needed(STACK, plan).activations[0] == 4 * (16 + 30) * under_way


def test_full_recompute_keeps_entries_and_makes_one_block_again() -> None:
    assert needed(STACK, "single recompute=full").activations[0] == 4 * 8 * (8 * 16 + 30)


GPT = Shape(family="gpt", layers=2, hidden=6144, heads=64, vocabulary=51200, length=2048, dropout=0.1)
PAPER = replace(NAMED["megatron-2021"], logits=0.0)


@pytest.mark.parametrize(
    ("plan", "of_one"),
    [
        ("", lambda t, scores: 10 + 24 / t + scores / t),
        ("sequence=true", lambda t, scores: 34 / t + scores / t),
        ("recompute=selective", lambda t, scores: 10 + 24 / t),
        ("sequence=true recompute=selective", lambda t, scores: 34 / t),
        ("recompute=full", lambda t, scores: 2.0),
    ],
)
def test_activations_of_a_layer_are_those_of_the_published_formula(plan: str, of_one: Any) -> None:
    """Korthikanti et al. 2022, table 2: bytes over s b h; measured as what 48 layers keep beyond two."""
    profile = GPT.profile()
    deep = replace(profile, parts=tuple(replace(p, count=48) if p.role == "block" else p for p in profile.parts))
    for tp in (8,) if "sequence" in plan else (1, 8):
        found = [
            needed(one, f"tp={tp} micro=4 {plan}", batch=4, preset=PAPER, precision="bf16") for one in (profile, deep)
        ]
        less, more = (one.activations[0] for one in found)
        assert (more - less) / 46 / (2048 * 4 * 6144) == pytest.approx(of_one(tp, 5 * 64 * 2048 / 6144), rel=0.01)


LLAMA = Shape(family="llama", layers=8, hidden=256, heads=8, kv_heads=4, ffn=512, vocabulary=1024, length=128)
WIDE = replace(LLAMA, hidden=1024, ffn=2816)  # of some buckets, of which a few are whole
AXES = [
    " ".join(words)
    for words in product(
        ("dp=2", "fsdp=2 zero=1", "fsdp=4 zero=3"),
        ("", "tp=2", "tp=2 sequence=true"),
        ("", "pp=2", "pp=4 schedule=interleaved", "pp=2 schedule=gpipe"),
        ("", "recompute=selective", "recompute=full"),
        ("micro=1", "micro=2"),
    )
]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_many_at_once_are_as_each_alone(name: str) -> None:
    profile = LLAMA.profile()
    together = needed(profile, *AXES, batch=64, preset=NAMED[name], precision="bf16")
    for index in range(0, len(AXES), 7):
        alone = needed(profile, AXES[index], batch=64, preset=NAMED[name], precision="bf16")
        for one in fields(MemoryForecast):
            assert getattr(together, one.name)[index] == pytest.approx(getattr(alone, one.name)[0])
    parts = sum(getattr(together, one.name) for one in fields(MemoryForecast) if one.name not in ("start",))
    assert np.maximum(parts, together.start + together.reserve) == pytest.approx(together.reserved)
    peak = together.at_peak()
    assert sum(peak.values()) == pytest.approx(together.reserved)
    assert min(size.min() for size in peak.values()) >= 0
    assert np.all(together.apart <= 0)


PAIRS = [
    ("dp=2", "fsdp=2 zero=1"),
    ("fsdp=2 zero=1", "fsdp=2 zero=2"),
    ("fsdp=2 zero=2", "fsdp=2 zero=3"),
    ("fsdp=2", "fsdp=8"),
    ("tp=2", "tp=4"),
    ("tp=2", "tp=2 sequence=true"),
    ("cp=2", "cp=4"),
    ("micro=4", "micro=2"),
    ("recompute=none", "recompute=selective"),
    ("recompute=selective", "recompute=full"),
    ("pp=2 schedule=gpipe", "pp=2 schedule=1f1b"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_more_shards_never_need_more(precision: str) -> None:
    profile = WIDE.profile()
    for less, more in PAIRS:
        micro = "" if "micro" in less else "micro=2"
        pair = needed(profile, f"{less} {micro}", f"{more} {micro}", batch=64, preset=PHALANX, precision=precision)
        assert pair.reserved[1] <= pair.reserved[0], (less, more)
