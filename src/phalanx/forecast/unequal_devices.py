"""Devices of several kinds: the samples of each, and the slowest one, which a step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.config import Cluster, Group
from phalanx.config.sync import AUTO, split_by_weight, weights
from phalanx.forecast.layouts import Layouts, for_memory
from phalanx.forecast.memory import MemoryForecast, memory
from phalanx.forecast.operation_arrays import Array, picked
from phalanx.forecast.step_time import ForecastInput, StepTime, on_one_kind

_ROUNDS = 4
_APART = ("replicas", "stragglers", "rest")
"""Parts of a step that all wait for together."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceShares:
    """Layouts as seen by each kind of device."""

    groups: tuple[Group, ...]  # one of each kind
    layouts: tuple[Layouts, ...]  # with the samples of its ranks
    there: npt.NDArray[np.bool_]  # whether a layout has a rank of that kind at all: shape (kinds, N)


def device_shares(scene: ForecastInput, layouts: Layouts) -> DeviceShares:
    """Return the samples of the global batch for ranks on each kind of device.

    Even shares are the same for all. Weights go to ranks of ``dp``, which are placed on the groups in order. ``auto``
    gives each kind samples by its speed at its last share, a few times over, and takes the best, within each rank's
    memory.
    """
    groups = kinds(scene.cluster, scene.precision)
    there = np.ones((len(groups), len(layouts.dp)), dtype=bool)
    uneven = np.flatnonzero(layouts.shares != "")
    if not len(uneven):
        return DeviceShares(groups=groups, layouts=(layouts,) * len(groups), there=there)
    some = layouts.take(uneven)
    counts = _counts(groups, some)
    samples = np.stack([layouts.samples] * len(groups))
    samples[:, uneven] = _given(some, counts)
    auto = some.shares == AUTO
    if auto.any():
        samples[:, uneven[auto]] = _by_speed(scene, groups, some.take(auto), counts[:, auto])
    there[:, uneven] = counts > 0
    return DeviceShares(groups=groups, layouts=tuple(layouts.having(one) for one in samples), there=there)


def kinds(cluster: Cluster, precision: str) -> tuple[Group, ...]:
    """Return the groups of ``cluster`` if devices differ; else the first group of the slowest."""
    if len({group.device.name for group in cluster.groups}) > 1:
        return cluster.groups
    return (min(cluster.groups, key=lambda group: group.device.peak.get(precision, 0.0)),)


def step_of(scene: ForecastInput, dealt_out: DeviceShares, events: bool = False) -> StepTime:
    """Return the step of every layout on the slowest kind of device, which all others wait for."""
    each = [
        on_one_kind(scene, one, group, events) for group, one in zip(dealt_out.groups, dealt_out.layouts, strict=True)
    ]
    total = np.where(dealt_out.there, np.stack([one.total for one in each]), -np.inf)
    return picked(each, total.argmax(axis=0))


def memory_of(scene: ForecastInput, dealt_out: DeviceShares) -> tuple[MemoryForecast, Array]:
    """Return the memory of every layout on the kind of device closest to its limit, and that limit: bytes, (N,)."""
    each = [_memory(scene, one) for one in dealt_out.layouts]
    rooms = np.array([float(group.device.room) for group in dealt_out.groups])
    full = np.stack([one.reserved for one in each]) - rooms[:, None]
    worst = np.where(dealt_out.there, full, -np.inf).argmax(axis=0)
    return picked(each, worst), rooms[worst]


def _memory(scene: ForecastInput, layouts: Layouts) -> MemoryForecast:
    here = any(group.device.kind == "cpu" for group in scene.cluster.groups)
    preset = replace(scene.preset, one_memory=here)
    layouts = for_memory(scene.work.unlike, layouts)
    return memory(scene.work.profile, layouts, preset, scene.precision, scene.work.state)


def _counts(groups: Sequence[Group], layouts: Layouts) -> npt.NDArray[np.int64]:
    inner = layouts.inner
    ends = np.cumsum([group.devices for group in groups]).astype(float)
    before = [np.minimum(np.ceil(end / inner), layouts.dp) for end in (0.0, *ends[:-1])]
    return np.diff(np.stack([*before, layouts.dp]), axis=0).astype(np.int64)


def _given(layouts: Layouts, counts: npt.NDArray[np.int64]) -> Array:
    found = np.stack([layouts.samples] * len(counts))
    for at, text in enumerate(layouts.shares):
        each = weights(str(text))
        if each:
            samples = np.array(split_by_weight(int(layouts.batch[at]), each)) / (layouts.fsdp * layouts.ep)[at]
            ends = np.cumsum(counts[:, at])
            for kind, (end, count) in enumerate(zip(ends, counts[:, at], strict=True)):
                found[kind, at] = samples[end - count : end].max(initial=0.0) or found[kind, at]
    return found


def _by_speed(scene: ForecastInput, groups: Sequence[Group], layouts: Layouts, counts: npt.NDArray[np.int64]) -> Array:
    there, inner = counts > 0, layouts.fsdp * layouts.ep
    caps = np.stack([_most(scene, layouts, float(group.device.room)) for group in groups]) * inner
    samples = np.stack([layouts.samples] * len(groups))
    best, least = samples, np.full(len(inner), np.inf)
    for _ in range(_ROUNDS):
        seconds = np.stack(
            [_busy(scene, layouts.having(one), group) for one, group in zip(samples, groups, strict=True)]
        )
        fits = (~there | (np.ceil(samples - 1e-9) * inner <= caps)).all(axis=0)
        longest = np.where(fits, np.where(there, seconds, 0.0).max(axis=0), np.inf)
        best = np.where((longest < least) | ~np.isfinite(least), samples, best)
        least = np.minimum(least, longest)
        speeds = samples * inner / seconds
        samples = np.stack(
            [
                _shared(int(layouts.batch[at]), speeds[:, at], counts[:, at], caps[:, at], int(inner[at])) / inner[at]
                for at in range(len(inner))
            ],
            axis=1,
        )
    return best


def _busy(scene: ForecastInput, layouts: Layouts, group: Group) -> Array:
    step = on_one_kind(scene, layouts, group)
    return step.total - sum((getattr(step, name) for name in _APART), np.zeros_like(step.rest))


def _most(scene: ForecastInput, layouts: Layouts, room: float) -> Array:
    low, high = np.ones_like(layouts.batch), layouts.batch
    while (low < high).any():
        middle = np.ceil((low + high) / 2)
        fits = _memory(scene, layouts.having(middle)).reserved <= room
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        high = np.maximum(low, high)
    return low


def _shared(batch: int, speeds: Array, counts: npt.NDArray[np.int64], caps: Array, least: int) -> Array:
    """Return samples of the largest rank of ``dp``, by kind: by speed, none above its memory cap if possible."""
    part, free, left = np.zeros_like(speeds), counts > 0, float(batch)
    while free.any():
        rate = max(left, 0.0) / float((counts * speeds)[free].sum())
        over = free & (speeds * rate > caps)
        if not over.any():
            part[free] = speeds[free] * rate
            break
        part[over] = caps[over]
        left -= float((counts * caps)[over].sum())
        free &= ~over
    ranks = np.array(split_by_weight(batch, np.repeat(part, counts).tolist()))
    while ranks.min() < least < ranks.max():
        ranks[ranks.argmin()] += 1
        ranks[ranks.argmax()] -= 1
    ends = np.cumsum(counts)
    return np.array([float(ranks[end - one : end].max(initial=0)) for end, one in zip(ends, counts, strict=True)])
