"""The time of one optimizer step, by part, on devices of one kind, and on cores shared by processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.config import Cluster, Group
from phalanx.errors import Problem, RefusedError
from phalanx.forecast.gradient_sync import completed, replicas, update
from phalanx.forecast.kernels import KINDS, DeviceSetting, Times, compute, widths
from phalanx.forecast.layouts import Layouts, Whole, Work, for_time
from phalanx.forecast.network import Fabric, seconds
from phalanx.forecast.operation_arrays import Array, OperationArrays, by_field, table
from phalanx.forecast.pipeline import Lanes, StageCounts, parameters_held, pipeline, simulated, stages
from phalanx.forecast.presets import PHALANX, Preset
from phalanx.forecast.rates import Core, Rates, rates
from phalanx.placement.collective_bytes import hidden_states
from phalanx.placement.collective_bytes import stages as handed
from phalanx.placement.step_traffic import rows_of_whole_batch, with_second_forward


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTime:
    """Seconds of a step, by part, on the busiest rank: shape (N,) each."""

    products: Array  # matrix products and convolutions
    attention: Array  # fused attention
    memory: Array  # operations that move more than they compute
    recompute: Array  # computing activations again
    launches: Array  # waiting for the host to launch kernels
    exchange: Array  # collectives inside the model (``tp``, ``cp``, ``ep``)
    pipeline: Array  # waiting for other stages and their messages
    replicas: Array  # reducing gradients and gathering parameters, as far as computing does not hide it
    update: Array  # the optimizer
    stragglers: Array  # waiting for the slowest of many nodes
    rest: Array  # per step: data, logging, synchronisation

    @property
    def total(self) -> Array:
        return sum((getattr(self, one.name) for one in fields(self)), np.zeros_like(self.products))


def step_time(
    costs: OperationArrays, times: Times, layouts: Layouts, setting: DeviceSetting, lie: StageCounts, events: bool
) -> StepTime:
    """Return the step of every candidate; ``events`` simulates pipelines, else a formula prices them."""
    forward = np.einsum("kpn,pn->kn", lie.each, times.before)
    backward = np.einsum("kpn,pn->kn", lie.each, times.back)
    weights = np.einsum("kpn,pn->kn", lie.each, times.weights)
    worst = np.where(lie.there > 0, forward + backward, 0.0).argmax(axis=0)
    sent = lie.sent * _send(costs, layouts, setting)
    lanes = Lanes(forward=forward + sent[0], backward=backward + sent[1], weights=weights, there=lie.there)
    how = {"whole": setting.preset.whole_backwards, "recomputes": costs.profile.recomputes}
    total = simulated(lanes, layouts, **how) if events else pipeline(lanes, layouts)

    def of(seconds: Array) -> Array:
        there = np.take_along_axis(lie.each, worst[None, None, :], axis=0)[0]
        return (there * seconds).sum(axis=0) * layouts.micros

    split = {name: of(times.by_kind[at]) for at, name in enumerate(KINDS)}
    exchange, again, waiting = of(times.exchange), of(times.again), of(times.waiting)
    known = sum(split.values(), exchange + again + waiting)
    mesh, share = with_second_forward(costs.profile, layouts.mesh), np.ceil(layouts.samples - 1e-9)
    rows = (seconds(one, mesh, setting.fabric) for one in rows_of_whole_batch(costs.profile, share, mesh))
    return StepTime(
        products=split["products"],
        attention=split["attention"],
        memory=split["memory"],
        recompute=again + of(times.before) * mesh.twice,
        launches=waiting,
        exchange=sum(rows, exchange),
        pipeline=np.maximum(total - known, 0.0),
        replicas=replicas(costs, times, layouts, setting, lie),
        update=update(costs, layouts, setting, lie),
        stragglers=_stragglers(split, again, layouts, setting.fabric),
        rest=np.full_like(total, setting.preset.rest),
    )


def _stragglers(split: dict[str, Array], again: Array, layouts: Layouts, fabric: Fabric) -> Array:
    """Return the seconds spent waiting for the slowest node, which is slower the more nodes there are."""
    nodes = np.maximum(layouts.devices / fabric.per_node, 1.0)
    return fabric.wires.jitter * np.log2(nodes) * sum(split.values(), again)


def _send(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting) -> Array:
    wide = widths(setting.preset, setting.precision, layouts.zero)
    message = handed(hidden_states(costs.parts), layouts.mesh, wide, layouts.micro, layouts.length)
    if setting.preset.scatter:
        message = replace(message, size=message.size / np.where(layouts.sequence > 0, 1.0, layouts.tp))
    core = setting.rates.core
    relay = setting.preset.relay + (core.relayed(layouts.devices) if core else 0.0)
    sent = seconds(message, layouts.mesh, setting.fabric) + relay
    return np.where(layouts.pp > 1, sent, 0.0)


_PACKED = {0: (8.0, 0.0), 1: (24.0, 10.0), 2: (24.0, 10.0), 3: (32.0, 14.0)}
"""Bytes a parameter that are copied into and out of buckets each step, and fresh bytes for them, by ZeRO stage."""

_ADDED = 12.0  # bytes moved to add a parameter's gradient to that of the micro-batches before


def on_cores(
    step: StepTime, costs: OperationArrays, layouts: Layouts, core: Core, *, cores: int, optimizer: str
) -> StepTime:
    """Return ``step`` with the constants of ``core`` for once-a-step work, and its processes on this many cores."""
    lie = stages(costs, layouts)
    whole = parameters_held(costs, layouts, lie)
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
    """Return the step of ``processes`` on ``cores``, from the step with a machine for each process.

    Up to as many as the cores, arithmetic and traffic slow down towards the measurement with all of them busy. Beyond,
    each has cores/processes of one. A waiting process leaves its core to others, so that a pipeline is idle only as far
    as its way is longer than the turns. Exchanges were measured in the crowd of their own group: see ``_others`` for a
    larger one.
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
    return np.maximum(processes / cores, 1.0) / np.maximum(np.minimum(ranks, processes) / cores, 1.0)


def _packing(whole: Array, layouts: Layouts, core: Core) -> Array:
    sharded = layouts.fsdp > 1
    found = np.zeros_like(whole)
    for zero, (copied, fresh) in _PACKED.items():
        seconds = whole * (copied / core.far + fresh * core.fresh)
        found = np.where(np.where(sharded, layouts.zero, 0) == zero, seconds, found)
    return np.where(layouts.summed * layouts.fsdp > 1, found, 0.0)


def _tensors(costs: OperationArrays, lie: StageCounts) -> Array:
    counts = [float(sum(weights.tensors for weights in part.weights)) for part in costs.parts]
    return np.einsum("kpn,p->kn", lie.each, np.array(counts)).max(axis=0)


_PROCESSOR = 100e9
"""Bytes/s at which a host steps parameters: about half of eight channels of DDR4-3200 (204.8 GB/s); no figure of the
catalog."""
_NEAR, _FAR = 3.4e-6, 14e-6
"""Seconds of latency, by the catalog, of the links (NVLink) and networks (InfiniBand) that constants were fitted on: by
what a cluster states beyond them each hop takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastInput:
    """The input of forecasts for layouts."""

    work: Work
    cluster: Cluster
    precision: str  # computed in
    preset: Preset = PHALANX


def on_one_kind(scene: ForecastInput, layouts: Layouts, group: Group, events: bool = False) -> StepTime:
    """Return the step of every candidate of ``layouts`` on devices like those of ``group``; equal ones are priced once.

    ``events`` simulates pipelines event by event, in milliseconds each; by default a formula prices them.

    Raises:
        RefusedError: if those devices do not compute in the precision.
    """
    if scene.precision not in group.device.peak:
        given = f"precision={scene.precision} on {group.device.name}"
        allowed = ", ".join(group.device.peak)
        raise RefusedError([Problem(where="plan.precision", given=given, allowed=allowed, fix="precision=fp32")])
    costs, setting = table(scene.work.profile, scene.preset.balances), _setting(scene, group)
    layouts = for_time(scene.work.unlike, layouts)
    unlike, alike = _unlike(layouts)
    few = compute(costs, layouts.take(unlike), setting)
    each = by_field([few], lambda arrays: arrays[0][..., alike])
    lie = stages(costs, layouts)
    step = step_time(costs, each, layouts, setting, lie, events)
    norm = scene.work.norm or scene.precision == "fp16"  # which looks for overflows by it
    step = replace(step, replicas=step.replicas + completed(costs, layouts, setting, lie, norm))
    core = setting.rates.core
    if core is None:
        return step
    cores = group.host.cores or group.per_node
    step = on_cores(step, costs, layouts, core, cores=cores, optimizer=scene.work.optimizer)
    return replace(step, update=np.where(layouts.server > 0, 0.0, step.update))


def _setting(scene: ForecastInput, group: Group) -> DeviceSetting:
    speeds, link, preset = rates(group.device), group.host.link, scene.preset
    return DeviceSetting(
        rates=speeds,
        bus=link.latency if link else 0.0,
        fabric=_fabric(group, scene.cluster, speeds),
        # on cores, what reduces takes them from what computes
        preset=replace(preset, overlap=0.0) if speeds.core else preset,
        precision=scene.precision,
        host=link.bandwidth if link else speeds.bandwidth,
        processor=speeds.bandwidth if group.device.kind == "cpu" else _PROCESSOR,
    )


def _fabric(group: Group, cluster: Cluster, speeds: Rates) -> Fabric:
    wires = speeds.wires
    wires = replace(
        wires,
        hop=max(0.0, wires.hop + (group.link.latency if group.link else _NEAR) - _NEAR),
        hop_between=max(0.0, wires.hop_between + cluster.network.latency - _FAR),
    )
    return Fabric(
        inside=group.link.bandwidth if group.link else group.device.bandwidth / 4,
        node=cluster.network.bandwidth,
        per_node=group.per_node,
        wires=wires,
        socket=max(group.host.slots, group.per_node) // 2 or 1,
    )


def _unlike(layouts: Layouts) -> tuple[Whole, Whole]:
    shared = (layouts.tp, layouts.sequence, layouts.cp, layouts.ep, layouts.returned)
    keys = (layouts.micro, layouts.length, *shared, layouts.recompute, layouts.attention, layouts.zero == 3)
    codes = np.zeros(len(layouts.tp), dtype=np.int64)
    for key in keys:
        values, found = np.unique(key, return_inverse=True)
        codes = codes * len(values) + found
    _, first, alike = np.unique(codes, return_index=True, return_inverse=True)
    return first.astype(np.int64), alike.astype(np.int64)
