"""Activations: what each part keeps from forward to backward, and what it needs beyond that while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.forecast.flight import Ranks
from phalanx.forecast.habits import Habits
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.price import itemsize
from phalanx.forecast.tables import Array
from phalanx.profile import Part, Saved


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept:
    """Bytes on each kind of rank: shape (3, N) each.

    Attributes:
        saved: from forward to backward, of all micro-batches under way.
        working: beyond that, in the part that needs most; what a block computes anew is among it.
    """

    saved: Array
    working: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bytes:
    """Of one part and one micro-batch: shape (N,) each."""

    entry: Array
    saved: Array
    dear: Array
    scores: Array
    working: Array


def kept(parts: Sequence[Part], layouts: Layouts, habits: Habits, lie: Ranks, precision: str) -> Kept:
    """Activations of every candidate under its recomputation."""
    saved, working = np.zeros_like(lie.there), np.zeros_like(lie.there)
    for index, part in enumerate(parts):
        one = _bytes(part, layouts, habits, precision)
        stays, anew = _recomputed(part, one, layouts, habits)
        saved += lie.holds[:, index] * lie.flight[:, index] * stays
        working = np.maximum(working, np.where(lie.holds[:, index] > 0, one.working + anew, 0.0))
    return Kept(saved=saved, working=working)


def _recomputed(part: Part, one: _Bytes, layouts: Layouts, habits: Habits) -> tuple[Array, Array]:
    """Bytes that stay, and bytes that a backward makes again."""
    everything = one.entry + one.saved + one.scores
    if part.role != "block":
        return everything, np.zeros_like(everything)
    if habits.selective == "attention":
        some, again = one.entry + one.saved, one.scores
    elif habits.selective == "alternate":
        some, again = (everything + one.entry) / 2, everything - one.entry
    else:
        some = one.entry + one.dear
        again = np.maximum(everything - some, 0.0)
    stays = np.select([layouts.recompute == 2, layouts.recompute == 1], [one.entry, some], everything)
    anew = np.select([layouts.recompute == 2, layouts.recompute == 1], [everything - one.entry, again], 0.0)
    return stays, anew


def _bytes(part: Part, layouts: Layouts, habits: Habits, precision: str) -> _Bytes:
    samples, length = layouts.micro, layouts.length / layouts.cp
    none, size = np.zeros_like(samples), itemsize(precision)
    entry = part.entry.at(samples, length) * size / _divided("tokens", layouts)
    whole = none + 1e-9
    saved = none
    for one in part.saved:
        plain = none + one.elements.at(samples, length) * (one.itemsize or size)
        whole, saved = whole + plain, saved + plain / _divided(one.share, layouts)
    shared = np.where(whole > 1, saved / whole, 1.0)
    working = none + part.working.at(samples, length) * size * shared
    norms = sum("norm" in operation.name for operation in part.forward)
    saved = saved + norms * habits.norms_kept * part.entry.at(samples, length) / _divided("tokens", layouts)
    if part.role == "after" and habits.logits:
        logits = _logits(part, samples, length)
        saved = saved - _of_logits(part.saved, samples, length, size) / layouts.tp
        gathered = (layouts.tp > 1) & (habits.logits_whole > 0)
        working = logits * np.where(gathered, habits.logits_whole, habits.logits / layouts.tp)
    dear = _results(part, layouts, 2 if habits.selective == "second" else 1) * size
    return _Bytes(entry=entry, saved=saved, dear=dear, scores=_scores(part, layouts, habits), working=working)


def _results(part: Part, layouts: Layouts, stride: int) -> Array:
    """Elements of the results of attention and of every ``stride``-th product, which selective recompute keeps."""
    found, length, products = np.zeros_like(layouts.micro), layouts.length / layouts.cp, 0
    for operation in part.forward:
        if operation.kind == "memory":
            continue
        sizes = [size.at(layouts.micro, length) for size in operation.dims]
        if operation.kind == "attention":
            elements = sizes[0] * sizes[1] * sizes[3] * sizes[5]
        else:
            elements = sizes[0] * sizes[1] * sizes[2] if products % stride == 0 else 0.0
            products += 1
        share = {"column": "inner", "row": "tokens"}.get(operation.share, operation.share)
        found = found + elements / _divided(share, layouts)
    return found


def _divided(share: str, layouts: Layouts) -> Array:
    if share == "inner":
        return layouts.tp
    if share == "tokens":
        return np.where(layouts.sequence > 0, layouts.tp, 1.0)
    return np.ones_like(layouts.tp)


def _scores(part: Part, layouts: Layouts, habits: Habits) -> Array:
    """Bytes of attention's scores, softmax and its dropout (Korthikanti et al. 2022, section 4.1)."""
    found = np.zeros_like(layouts.tp)
    if habits.attention == "fused":
        return found
    for operation in part.forward:
        if operation.kind == "attention":
            batch, heads, _, queries, keys, _ = (
                size.at(layouts.micro, layouts.length) + found for size in operation.dims
            )
            found = found + batch * heads * queries / layouts.cp * keys / layouts.tp * habits.scores_kept
    return found


def _logits(part: Part, samples: Array, length: Array) -> Array:
    """Elements of the widest product's result in the last part."""
    found = np.zeros_like(samples)
    for operation in part.forward:
        if operation.kind == "matmul":
            batch, rows, columns, _ = (size.at(samples, length) + np.zeros_like(samples) for size in operation.dims)
            found = np.maximum(found, batch * rows * columns)
    return found


def _of_logits(saved: Sequence[Saved], samples: Array, length: Array, size: float) -> Array:
    found = np.zeros_like(samples)
    for one in saved:
        if one.share == "inner":
            found = found + one.elements.at(samples, length) * (one.itemsize or size)
    return found
