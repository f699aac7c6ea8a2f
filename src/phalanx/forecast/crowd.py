"""A step on CPU cores that were measured: how its parts change where processes share them, and its fixed parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.forecast.cores import Core
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.stages import Stages, held, stages
from phalanx.forecast.step import StepTime
from phalanx.forecast.tables import Array, Table

_PACKED = {0: (8.0, 0.0), 1: (24.0, 10.0), 2: (24.0, 10.0), 3: (32.0, 14.0)}
"""Bytes a parameter that are copied into and out of buckets each step, and fresh bytes for them, by ZeRO stage."""

_ADDED = 12.0  # bytes moved to add a parameter's gradient to that of the micro-batches before


def on_cores(step: StepTime, costs: Table, layouts: Layouts, core: Core, *, cores: int, optimizer: str) -> StepTime:
    """``step`` with the constants of ``core`` for what comes once a step, and with its processes on so many cores."""
    lie = stages(costs, layouts)
    whole = held(costs, layouts, lie)
    stepped = whole / np.where(layouts.zero > 0, layouts.fsdp, 1.0)
    tensors = np.maximum(_tensors(costs, lie), 1.0)
    update = core.stepping(optimizer, stepped, tensors, layouts.returned)
    # by the time that a gradient is added to again, all others have passed through the cache
    added = (layouts.micros - 1) * core.moving(_ADDED * whole)
    inner = layouts.tp * layouts.cp * layouts.ep
    known = replace(
        step,
        update=update,
        memory=step.memory + added,
        exchange=step.exchange * _others(inner, layouts.devices, cores),
        replicas=step.replicas * _others(np.maximum(layouts.summed, layouts.fsdp), layouts.devices, cores)
        + _packing(whole, layouts, core),
        rest=core.fixed(layouts.devices) if core.rest else step.rest,
    )
    return crowded(known, layouts.devices, cores, core)


def crowded(step: StepTime, processes: Array, cores: int, core: Core) -> StepTime:
    """The step where ``processes`` compute on ``cores``, from that where each has a machine to itself.

    Up to as many as the cores, arithmetic and traffic slow down on the way to what was measured with all of them busy.
    Beyond, each has cores/processes of one; what waits for another process leaves its core to those that do not, so
    that a pipeline is idle only as far as its way is longer than the turns. Exchanges were measured in the crowd of
    those that take part: see ``_others`` for one that is larger.
    """
    turns = np.maximum(processes / cores, 1.0)
    filled = np.clip((processes - 1) / (cores - 1), 0.0, 1.0) if cores > 1 else np.ones_like(processes)
    arithmetic = 1 + filled * (core.busy - 1)
    traffic = 1 + filled * (core.busy_stream - 1)
    alone = step.products + step.attention + step.memory + step.recompute
    heavier = np.where(step.products + step.attention > step.memory, arithmetic, traffic)
    beside = (step.products + step.attention) * arithmetic + step.memory * traffic + step.recompute * heavier
    slower = np.divide(beside, alone, out=np.ones_like(beside), where=alone > 0)
    path = (alone + step.pipeline) * slower
    return replace(
        step,
        products=step.products * arithmetic * turns,
        attention=step.attention * arithmetic * turns,
        memory=step.memory * traffic * turns,
        recompute=step.recompute * heavier * turns,
        pipeline=np.maximum(path - beside * turns, 0.0),
        update=step.update * traffic * turns,
    )


def _others(ranks: Array, processes: Array, cores: int) -> Array:
    """By how much longer an exchange of ``ranks`` takes where other groups of ``processes`` are on the same cores."""
    return np.maximum(processes / cores, 1.0) / np.maximum(np.minimum(ranks, processes) / cores, 1.0)


def _packing(whole: Array, layouts: Layouts, core: Core) -> Array:
    """Seconds to copy gradients and parameters between tensors and what is sent."""
    sharded = layouts.fsdp > 1
    found = np.zeros_like(whole)
    for zero, (copied, fresh) in _PACKED.items():
        seconds = whole * (copied / core.far + fresh * core.fresh)
        found = np.where(np.where(sharded, layouts.zero, 0) == zero, seconds, found)
    return np.where(layouts.summed * layouts.fsdp > 1, found, 0.0)


def _tensors(costs: Table, lie: Stages) -> Array:
    """Tensors of parameters on the rank that holds most."""
    counts = [float(sum(weights.tensors for weights in part.weights)) for part in costs.parts]
    return np.einsum("kpn,p->kn", lie.each, np.array(counts)).max(axis=0)
