"""From a model measured at three sizes to its profile: the growth of each number with the samples and the length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config.model_costs import ModelPart, Operation, Profile, Saved, Share, SizeLaw
from phalanx.errors import PhalanxError
from phalanx.trace.blocks import blocks
from phalanx.trace.fake_tensors import refusal
from phalanx.trace.measured import MeasuredModel, MeasuredPart, Op, SavedBytes, Units, measured
from phalanx.trace.standard_models import ModelCall, length_of
from phalanx.trace.tracer import traced

_CLOSE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes a model was measured at: first, with twice the samples, with a part of the length if ``lengths``."""

    samples: int
    length: int
    shorter: int
    lengths: bool = True

    def law(self, values: Sequence[float]) -> SizeLaw:
        value = values[0]
        if not value:
            return SizeLaw(0.0)
        by_samples, by_length = _power(values[1] / value, 2.0), 0.0
        if self.lengths and values[2]:
            by_length = _power(value / values[2], self.length / self.shorter)
        return SizeLaw(value / self.samples**by_samples / self.length**by_length, by_samples, by_length)


def _power(ratio: float, base: float) -> float:
    if ratio <= 0.0:
        return 0.0
    power = log2(ratio) / log2(base)
    return float(round(power)) if abs(power - round(power)) < _CLOSE else power


def profile_of(runs: Sequence[MeasuredModel], sizes: Sizes, notes: Sequence[str] = ()) -> Profile:
    """Return the profile from three measurements; one with a fixed length if the third is missing."""
    first, said = runs[0], list(notes)
    alike = [all(_same(first, other)) for other in runs[1:]]
    if not all(alike):
        said.append(
            "what the model computes changes with the samples or the length: other sizes than traced are a guess"
        )
    pieces = [*first.blocks.values(), *first.around]
    ops = {op.name for piece in pieces for op in piece.forward}
    if recurrent := sorted(name for name in ops if any(word in name for word in ("rnn", "lstm", "gru"))):
        said.append(f"{', '.join(recurrent)} counts as memory traffic only: the products in it are not seen")
    fit = replace(sizes, lengths=len(runs) > 2)
    before, after = (first.around[0], first.around[1:]) if first.turns else (None, [])
    parts: list[ModelPart] = []
    if before is not None:
        parts.append(_part([run.around[0] for run in runs], fit, all(alike)))
    for name, index, count, again in _rows(first):
        parts.append(_part([run.blocks[index] for run in runs], fit, all(alike), name=name, count=count, again=again))
    last = 1 if after else 0
    parts.append(_part([run.around[last] for run in runs], fit, all(alike)))
    return Profile(
        parts=tuple(parts),
        length=sizes.length,
        tied=first.tied,
        recomputes=first.recomputes,
        heads=_fewest([one.heads for one in pieces]),
        experts=_fewest([one.experts for one in pieces]),
        lawful=all(alike) and (len(runs) > 2 or sizes.length == 1),
        notes=tuple(said),
    )


def _same(one: MeasuredModel, other: MeasuredModel) -> list[bool]:
    if one.turns != other.turns or len(one.blocks) != len(other.blocks):
        return [False]
    pairs = [*((one.blocks[key], other.blocks[key]) for key in one.blocks), *zip(one.around, other.around, strict=True)]
    return [_form(first) == _form(second) for first, second in pairs]


def _form(piece: MeasuredPart) -> tuple[object, ...]:
    ops = tuple((op.kind, op.name, op.weights, op.expert) for op in (*piece.forward, *piece.backward))
    return ops, tuple((one.itemsize, one.cheap) for one in piece.saved)


def _rows(run: MeasuredModel) -> list[tuple[str, int, int, bool]]:
    rows: list[tuple[str, int, int, bool]] = []
    for name, index, again in run.turns:
        if rows and rows[-1][1] == index and rows[-1][3] == again:
            rows[-1] = (rows[-1][0], index, rows[-1][2] + 1, again)
        else:
            rows.append((name, index, 1, again))
    return rows


def _part(
    pieces: Sequence[MeasuredPart], fit: Sizes, alike: bool, name: str = "", count: int = 1, again: bool = False
) -> ModelPart:
    first = pieces[0]
    pieces = pieces if alike else [first] * len(pieces)
    return ModelPart(
        name=name or first.name,
        role=first.role,
        count=count,
        forward=tuple(_operation(ops, fit) for ops in zip(*(one.forward for one in pieces), strict=True)),
        backward=tuple(_operation(ops, fit) for ops in zip(*(one.backward for one in pieces), strict=True)),
        weights=() if again else first.weights,
        saved=_saved(list(zip(*(one.saved for one in pieces), strict=True)), fit),
        entry=fit.law([one.entry for one in pieces]),
        working=fit.law([one.working for one in pieces]),
        modules=first.modules,
    )


def _operation(ops: Sequence[Op], fit: Sizes) -> Operation:
    first = ops[0]
    sizes = [fit.law(values) for values in zip(*(op.numbers for op in ops), strict=True)]
    return Operation(
        kind=first.kind,
        name=first.name,
        dims=tuple(sizes[:-2]),
        traffic=sizes[-2],
        fused=sizes[-1],
        share=first.share,
        weights=first.weights,
        causal=first.causal,
        expert=first.expert,
        again=first.again,
        most=first.most,
    )


def _saved(each: Sequence[Sequence[SavedBytes]], fit: Sizes) -> tuple[Saved, ...]:
    groups: dict[tuple[float, float, int, Share, bool, bool, int], float] = {}
    for kept in each:
        one, law = kept[0], fit.law([size.elements for size in kept])
        key = (law.by_samples, law.by_length, one.itemsize, one.share, one.cheap, one.expert, one.most)
        groups[key] = groups.get(key, 0.0) + law.factor
    return tuple(
        Saved(
            elements=SizeLaw(factor, samples, length),
            itemsize=itemsize,
            share=share,
            cheap=cheap,
            expert=expert,
            most=most,
        )
        for (samples, length, itemsize, share, cheap, expert, most), factor in groups.items()
    )


def _fewest(counts: Sequence[int]) -> int:
    return min((count for count in counts if count), default=0)


_SAMPLES = 2  # one sample would let dimensions of 1 pass for others


def measured_at_sizes(call: ModelCall) -> Profile:
    """Return the profile of a model, from traces of 2 and 4 samples, and of half the length."""
    call = replace(call, kwargs=dict(call.kwargs))
    leaves = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    samples = next((one.shape[0] for one in leaves if one.dim()), 1)
    length = call.length or length_of(leaves)
    sizes = Sizes(samples=_SAMPLES, length=length, shorter=max(1, length // 2))
    wanted = [(_SAMPLES, length), (2 * _SAMPLES, length)] + [(_SAMPLES, sizes.shorter)] * (length > 1)
    runs: list[MeasuredModel] = []
    dtype: torch.dtype | None = None if call.values else torch.bfloat16
    try:
        runs.append(_run(call, _ScaledShape(samples, length, *wanted[0]), dtype))
    except Exception:  # a model may mix what it makes itself with its parameters and allow one precision only
        dtype = None
    try:
        for size in wanted[len(runs) : 2]:
            runs.append(_run(call, _ScaledShape(samples, length, *size), dtype))
    except Exception as error:
        raise (error if isinstance(error, PhalanxError) else refusal(error)) from error
    notes: list[str] = []
    try:
        runs += [_run(call, _ScaledShape(samples, length, *size), dtype) for size in wanted[2:]]
    except Exception:
        notes.append(f"it runs with samples of {length} tokens only: other lengths are a guess")
    return replace(profile_of(runs, sizes, notes), repeated=bool(blocks(call.module)))


def _run(call: ModelCall, form: _ScaledShape, dtype: Any) -> MeasuredModel:
    own = next((one.itemsize for one in call.module.parameters() if one.is_floating_point()), 4)
    itemsize = own if dtype is None else dtype.itemsize
    return measured(traced(call, form, dtype), call.module, Units(itemsize=itemsize, samples=form.to_samples))


@dataclass(frozen=True, slots=True)
class _ScaledShape:
    """Input shapes for other numbers of samples and tokens."""

    samples: int
    length: int
    to_samples: int
    to_length: int

    def __call__(self, tensor: Tensor) -> tuple[int, ...]:
        shape = list(tensor.shape)
        if shape and shape[0] == self.samples:
            shape[0] = self.to_samples
        if self.length > 1 and len(shape) > 1:
            mask = len(shape) in (2, 4) and shape[-1] == shape[-2] == self.length
            for dim in (-1, -2) if mask else (1,):
                more = shape[dim] - self.length
                if more in (0, 1):  # a batch may hold one token more: the last target
                    shape[dim] = self.to_length + more
        return tuple(shape)
