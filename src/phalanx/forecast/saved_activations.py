"""Activations: the bytes each part keeps from forward to backward, and the micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.config.model_costs import EVERY
from phalanx.config.plan import Schedule
from phalanx.forecast.kernels import itemsize
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.operation_arrays import Array
from phalanx.forecast.pipeline import by_pipeline, on_ranks
from phalanx.forecast.presets import Preset
from phalanx.placement.collective_bytes import elements
from phalanx.placement.schedules import SCHEDULES as PIPELINE_SCHEDULES
from phalanx.trace import ModelPart, Profile, Saved, SizeLaw

_STREAM_NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedActivations:
    """Bytes on each kind of rank: shape (3, N) each."""

    saved: Array  # the most from forward to backward, of all micro-batches under way, what is computed anew among it
    working: Array  # beyond that when both together are most


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bytes:
    """Bytes of one part and one micro-batch: shape (N,) each; ``dear`` is kept by selective recompute."""

    entry: Array
    saved: Array
    dear: Array
    scores: Array
    working: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Micro:
    """One micro-batch on a rank; laws not traced at two lengths are assumed to grow with the tokens."""

    samples: Array
    tokens: Array
    scale: Array
    size: float
    wider: Array

    @classmethod
    def of(cls, profile: Profile, layouts: Layouts, preset: Preset, precision: str) -> _Micro:
        tokens, one = layouts.length / layouts.cp, np.ones_like(layouts.micro)
        size = itemsize(precision)
        cast = preset.autocast and precision != "fp32"
        return cls(
            samples=layouts.micro,
            tokens=tokens if profile.lawful else one * profile.length,
            scale=one if profile.lawful else tokens / profile.length,
            size=size,
            wider=np.where(cast & (layouts.zero != 3), 4.0 - size, 0.0),
        )

    def count(self, law: SizeLaw) -> Array:
        grown: Array = law.at(self.samples, self.tokens) * self.scale
        return grown


def saved_activations(
    profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks, precision: str
) -> SavedActivations:
    """Return activations of every candidate under its recomputation, at the backward of the largest part."""
    micro = _Micro.of(profile, layouts, preset, precision)
    every = [_bytes(part, micro, layouts, preset) for part in profile.parts]
    stays, anew = zip(
        *(_recomputed(part, one, layouts, preset) for part, one in zip(profile.parts, every, strict=True)), strict=True
    )
    under_way = sum((lie.holds[:, at] * lie.in_flight[:, at] * one for at, one in enumerate(stays)), 0 * lie.there)
    of_one = [lie.holds[:, at] * one for at, one in enumerate(stays)]
    saved, together = np.zeros_like(lie.there), np.zeros_like(lie.there)
    for index, part in enumerate(profile.parts):
        later = {"before": ("block", "after"), "block": ("after",), "after": ()}[part.role]
        gone = sum((of_one[at] for at, one in enumerate(profile.parts) if one.role in later), 0 * lie.there)
        here = np.where(lie.holds[:, index] > 0, under_way - gone + anew[index], 0.0)
        saved = np.maximum(saved, here)
        together = np.maximum(together, np.where(lie.holds[:, index] > 0, here + every[index].working, 0.0))
    saved = np.maximum(saved, under_way)
    return SavedActivations(saved=saved, working=np.maximum(together - saved, 0.0))


def _recomputed(part: ModelPart, one: _Bytes, layouts: Layouts, preset: Preset) -> tuple[Array, Array]:
    everything = one.entry + one.saved + one.scores
    if part.role != "block":
        return everything, np.zeros_like(everything)
    if preset.selective == "attention":
        some, again = one.entry + one.saved, one.scores
    elif preset.selective == "alternate":
        some, again = (everything + one.entry) / 2, everything - one.entry
    else:
        some = one.entry + one.dear
        again = np.maximum(everything - some, 0.0)
    chosen = [layouts.recompute == 2, layouts.recompute == 1]
    return np.select(chosen, [one.entry, some], everything), np.select(chosen, [everything - one.entry, again], 0.0)


def _bytes(part: ModelPart, micro: _Micro, layouts: Layouts, preset: Preset) -> _Bytes:
    stream = micro.count(part.entry)
    entry = stream * (micro.size + micro.wider) / _divided("tokens", layouts)
    saved, whole = np.zeros_like(stream), np.full_like(stream, 1e-9)
    for one in part.saved:
        plain = micro.count(one.elements) * (one.itemsize or micro.size)
        times = _times(part, one, layouts, preset)
        whole, saved = whole + plain, saved + plain * times / _divided(one.share, layouts, one.most)
    working = micro.count(part.working) * micro.size * np.where(whole > 1, saved / whole, 1.0)
    if part.role == "after" and preset.logits:
        saved = saved - _cut(part, micro) / layouts.tp
        gathered = (layouts.tp > 1) & (preset.logits_whole > 0)
        working = _logits(part, micro) * np.where(gathered, preset.logits_whole, preset.logits / layouts.tp)
    dear = _results(part, micro, layouts, 2 if preset.selective == "second" else 1) * micro.size
    return _Bytes(
        entry=entry,
        saved=saved + _by_norms(part, stream, micro, layouts, preset) + _by_casts(part, micro, layouts, preset),
        dear=dear,
        scores=_scores(part, micro, layouts, preset),
        working=working,
    )


def _times(part: ModelPart, one: Saved, layouts: Layouts, preset: Preset) -> Array:
    twice = preset.logits_twice and part.role == "after" and one.share == "inner"
    return np.where((_divided("inner", layouts, one.most) > 1) & twice, 2.0, 1.0)


def _by_norms(part: ModelPart, stream: Array, micro: _Micro, layouts: Layouts, preset: Preset) -> Array:
    norms = sum(any(name in operation.name for name in _STREAM_NORMS) for operation in part.forward)
    each = preset.norms_kept + np.where(norms > 1, micro.wider * (norms - 1) / max(norms, 1), 0.0)
    found = norms * stream * each / _divided("tokens", layouts)
    if preset.gathers_kept:
        found = found + norms * stream * micro.size * (1 - 1 / _divided("tokens", layouts))
    return found


def _by_casts(part: ModelPart, micro: _Micro, layouts: Layouts, preset: Preset) -> Array:
    found = np.zeros_like(micro.wider)
    if part.role == "before":
        return found
    for one in elements(((one, 1) for one in part.weights), layouts.mesh):
        found = found + np.where(micro.wider > 0, one.learn * micro.size, 0.0)
    for one in part.saved:
        if part.role == "after" and one.share == "inner" and not one.itemsize:
            times = _times(part, one, layouts, preset) / _divided("inner", layouts, one.most)
            found = found + micro.count(one.elements) * micro.wider * times
    return found


def _results(part: ModelPart, micro: _Micro, layouts: Layouts, stride: int) -> Array:
    found, products = np.zeros_like(layouts.micro), 0
    for operation in part.forward:
        if operation.kind == "memory":
            continue
        sizes = [size.at(micro.samples, micro.tokens) for size in operation.dims]
        if operation.kind == "attention":
            elements = sizes[0] * sizes[1] * sizes[3] * sizes[5]
        else:
            elements = sizes[0] * sizes[1] * sizes[2] if products % stride == 0 else 0.0
            products += 1
        share = {"column": "inner", "row": "tokens"}.get(operation.share, operation.share)
        found = found + elements * micro.scale / _divided(share, layouts, operation.most)
    return found


def _divided(share: str, layouts: Layouts, most: int = EVERY) -> Array:
    if share == "inner":
        return np.where(layouts.tp <= most, layouts.tp, 1.0)
    if share == "tokens":
        return np.where(layouts.sequence > 0, layouts.tp, 1.0)
    return np.ones_like(layouts.tp)


def _scores(part: ModelPart, micro: _Micro, layouts: Layouts, preset: Preset) -> Array:
    """Return bytes of attention's scores, softmax and dropout (Korthikanti et al. 2022, section 4.1)."""
    found = np.zeros_like(layouts.tp)
    if preset.attention == "fused":
        return found
    for operation in part.forward:
        if operation.kind == "attention":
            batch, heads, _, queries, keys, _ = (size.at(micro.samples, micro.tokens) for size in operation.dims)
            elements = batch * heads * queries * keys * layouts.cp * micro.scale
            found = found + elements / _divided("inner", layouts, operation.most) * preset.scores_kept
    return found


def _logits(part: ModelPart, micro: _Micro) -> Array:
    found = np.zeros_like(micro.samples)
    for operation in part.forward:
        if operation.kind == "matmul":
            batch, rows, columns, _ = (size.at(micro.samples, micro.tokens) for size in operation.dims)
            found = np.maximum(found, batch * rows * columns * micro.scale)
    return found


def _cut(part: ModelPart, micro: _Micro) -> Array:
    found = np.zeros_like(micro.samples)
    for one in part.saved:
        if one.share == "inner":
            found = found + micro.count(one.elements) * (one.itemsize or micro.size)
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranks:
    """The first, second and last rank of a pipeline, one of which needs most memory."""

    holds: Array  # how many of each part lie there: shape (3, parts, N)
    in_flight: Array  # micro-batches for which each part keeps activations at the peak: shape (3, parts, N)
    there: Array  # 1 if there is such a rank: shape (3, N)


def ranks(profile: Profile, layouts: Layouts, preset: Preset) -> Ranks:
    """Return the parts on these ranks; zero-bubble schedules run ahead of 1F1B as the preset says (2:

    Qi et al., ZB-H2).
    """
    pp, parts, ahead = layouts.pp, profile.parts, preset.ahead
    holds = on_ranks(parts, profile.length, layouts, preset.balances, lambda between: between[0])

    def in_flight(schedule: Schedule, ranks: int, stages: int, micros: int) -> list[float]:
        held = PIPELINE_SCHEDULES[schedule].in_flight
        return [held(place, ranks, stages, micros, ahead) for place in (0, min(1, ranks - 1), ranks - 1)]

    under_way = np.where(pp > 1, by_pipeline(layouts, in_flight, layouts.micros), 1.0)
    flight = np.repeat(under_way[:, None, :], len(parts), axis=1)
    all_forwards_first = layouts.scheduled(lambda one: one.filling == "two phases")
    for index, part in enumerate(parts):
        if part.role == "after":
            flight[:, index] = np.where(all_forwards_first, flight[:, index], 1.0)
    return Ranks(holds=holds, in_flight=flight, there=np.stack([np.ones_like(pp), pp > 2, pp > 1]).astype(float))
