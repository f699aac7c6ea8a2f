"""Forecasts: the step time, memory and energy of plans on a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from phalanx.config import Cluster, Plan
from phalanx.forecast.layouts import Layouts, Work
from phalanx.forecast.memory import MemoryForecast, on_hosts
from phalanx.forecast.operation_arrays import Array, by_field
from phalanx.forecast.presets import PHALANX, Preset
from phalanx.forecast.step_time import ForecastInput, StepTime
from phalanx.forecast.uncertainty import SAFE, assumed, interval, runs_out, uncut, unpriced
from phalanx.forecast.unequal_devices import device_shares, memory_of, step_of
from phalanx.placement.limits import not_run_yet
from phalanx.units import show_bytes, show_count, show_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The forecast of one plan.

    Attributes:
        plan: the plan.
        cluster: as text.
        seconds: of one optimizer step, by part (see ``StepTime``).
        low: lower bound on seconds; four of five similar plans are between ``low`` and ``high``.
        high: see ``low``.
        basis: the evidence for ``low`` and ``high``.
        memory: bytes at the peak on the fullest rank, by part (see ``MemoryForecast``).
        parts: the same, each at its own peak.
        allocated: bytes of tensors at the peak.
        reserved: bytes the allocator then holds.
        room: bytes a process can use.
        start: bytes of tensors before the first step, when values are made; ``allocated`` is no less.
        samples: in one step.
        tokens: in one sample.
        flops: of the model in one step, without recomputation.
        peak: FLOP/s of all devices in the plan's precision.
        host: bytes that a node's ranks keep in its host's memory.
        host_room: bytes of that memory; infinite if unknown.
        unrun: the reason why ``train`` does not run it yet, or "".
        watts: the most that all devices draw; 0 if unknown.
        notes: remarks for the reader.
    """

    plan: Plan
    cluster: str
    seconds: dict[str, float]
    low: float
    high: float
    basis: str = ""
    memory: dict[str, float]
    parts: dict[str, float]
    allocated: float
    reserved: float
    room: float
    samples: int
    tokens: int
    flops: float
    peak: float
    host: float = 0.0
    host_room: float = math.inf
    unrun: str = ""
    watts: float = 0.0
    start: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the first three lines of ``phalanx forecast``."""
        verdict = "fits" if self.fits else "does not fit"
        time = f"{show_seconds(self.step)} a step ({show_seconds(self.low)} to {show_seconds(self.high)})"
        rate = f"{show_count(self.throughput)} samples/s, {', '.join(self.limits)}"
        kept = f"{show_bytes(self.reserved)} of {show_bytes(self.room)} of memory: {verdict}"
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{self.plan} on {self.cluster}", f"{time}, {rate}", kept, *notes])

    @property
    def step(self) -> float:
        """Return the seconds of one optimizer step."""
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        """Return True if the fullest rank and its host have enough memory."""
        return self.missing <= 0

    @property
    def missing(self) -> float:
        """Return the bytes it lacks, on the device or the host; 0 or less if it fits."""
        return max(self.reserved - self.room, self.host - self.host_room)

    @property
    def runs_out(self) -> float:
        """Return the chance that the forecast of its fitting is wrong."""
        return runs_out(self.reserved, self.room)

    @property
    def safe(self) -> bool:
        """Return True if it fits with a margin: it runs out of memory at most one time in ten."""
        return self.reserved <= SAFE * self.room

    @property
    def throughput(self) -> float:
        """Return the samples per second of all devices."""
        return self.samples / self.step

    @property
    def mfu(self) -> float:
        """Return model FLOP/s over the peak: Chowdhery et al., "PaLM", 2022, appendix B."""
        return self.flops / self.step / self.peak

    @property
    def limits(self) -> tuple[str, ...]:
        """Return the bounds: the largest shares of the step, and the largest part of memory."""
        ranked = sorted(self.seconds.items(), key=lambda one: -one[1])
        shares = [f"{100 * seconds / self.step:.0f} % {name}" for name, seconds in ranked if seconds > 0.05 * self.step]
        largest = max(self.memory, key=lambda name: self.memory[name], default="")
        return (*shares, f"memory: {largest}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sweep:
    """The forecasts of many plans at once: shape (N,) each, in the order of ``plans``."""

    plans: tuple[Plan, ...]
    step: StepTime  # seconds by part
    memory: MemoryForecast  # bytes by part
    room: Array  # bytes a process can use, on the kind of device that comes nearest to them
    samples: Array  # in a step, of a rank of ``dp`` on each kind of device; 0 if none lies there: shape (kinds, N)

    @property
    def fits(self) -> Array:
        """Return 1 for each plan that fits, else 0."""
        return (self.memory.reserved <= self.room).astype(float)


def sweep(work: Work, plans: Sequence[Plan], cluster: Cluster, preset: Preset = PHALANX) -> Sweep:
    """Forecast the step and memory of every plan on ``cluster``; each uses as many devices as it needs."""
    at: dict[str, list[int]] = {}
    for index, plan in enumerate(plans):
        at.setdefault(plan.precision, []).append(index)
    parts = [_of_one_precision(work, [plans[index] for index in indices], cluster, preset) for indices in at.values()]
    order = np.argsort(np.concatenate([np.array(indices) for indices in at.values()])).astype(np.int64)

    def joined(each: list[Array]) -> Array:
        return np.concatenate(each, axis=-1)[..., order]

    return Sweep(
        plans=tuple(plans),
        step=by_field([part.step for part in parts], joined),
        memory=by_field([part.memory for part in parts], joined),
        room=joined([part.room for part in parts]),
        samples=joined([part.samples for part in parts]),
    )


def _of_one_precision(work: Work, plans: Sequence[Plan], cluster: Cluster, preset: Preset) -> Sweep:
    scene = ForecastInput(work=work, cluster=cluster, precision=plans[0].precision, preset=preset)
    out = device_shares(scene, Layouts.of(plans, work.batch, work.tokens))
    needed, room = memory_of(scene, out)
    each = np.stack([one.samples * one.fsdp * one.ep for one in out.layouts])
    return Sweep(
        plans=tuple(plans),
        step=step_of(scene, out, events=True),
        memory=needed,
        room=room,
        samples=np.where(out.there, each, 0.0),
    )


def times(
    work: Work, layouts: Layouts, cluster: Cluster, precision: str, preset: Preset = PHALANX, events: bool = False
) -> StepTime:
    """Return the step of every candidate of ``layouts``, on the slowest kind of device.

    ``events`` simulates pipelines event by event, in milliseconds each; by default a formula prices them.
    """
    scene = ForecastInput(work=work, cluster=cluster, precision=precision, preset=preset)
    return step_of(scene, device_shares(scene, layouts), events)


def forecast(work: Work, plan: Plan, cluster: Cluster, preset: Preset = PHALANX) -> Forecast:
    """Return the forecast of one plan on ``cluster``."""
    return forecasts(work, [plan], cluster, preset)[0]


def forecasts(work: Work, plans: Sequence[Plan], cluster: Cluster, preset: Preset = PHALANX) -> tuple[Forecast, ...]:
    """Return the forecasts of ``plans`` on ``cluster``, in their order."""
    found = sweep(work, plans, cluster, preset)
    flops = work.profile.flops(1, work.tokens) * work.batch
    made, hosts = list[Forecast](), on_hosts(work, plans, cluster, preset)
    for index, plan in enumerate(plans):
        seconds = {one.name: float(getattr(found.step, one.name)[index]) for one in fields(StepTime)}
        spans = [interval(seconds, group.device, preset, plan) for group in cluster.groups]
        made.append(
            Forecast(
                plan=plan,
                cluster=str(cluster),
                seconds=seconds,
                low=min(one.low for one in spans),
                high=max(one.high for one in spans),
                basis=max(spans, key=lambda one: one.high).basis,
                memory={name: float(size[index]) for name, size in found.memory.at_peak().items()},
                parts={one.name: float(getattr(found.memory, one.name)[index]) for one in fields(MemoryForecast)},
                allocated=float(found.memory.allocated[index]),
                reserved=float(found.memory.reserved[index]),
                room=float(found.room[index]),
                samples=work.batch,
                tokens=work.tokens,
                flops=flops,
                peak=_peak(cluster, plan),
                host=float(hosts.needed[index]),
                host_room=float(hosts.room[index]),
                unrun=not_run_yet(plan, cluster),
                watts=_watts(cluster, plan),
                start=float(found.memory.start[index]),
                notes=(
                    *work.profile.notes,
                    *assumed(plan, cluster, found.samples[:, index].tolist()),
                    *unpriced(plan, cluster, work.batch),
                    *uncut(plan, work.profile.heads),
                ),
            )
        )
    return tuple(made)


def _peak(cluster: Cluster, plan: Plan) -> float:
    each = [
        (group.devices, group.device.peak.get(plan.precision, max(group.device.peak.values())))
        for group in cluster.groups
    ]
    return plan.devices * sum(count * peak for count, peak in each) / sum(count for count, _ in each)


def _watts(cluster: Cluster, plan: Plan) -> float:
    each = [(group.devices, group.device.power or 0.0) for group in cluster.groups]
    return plan.devices * sum(count * watts for count, watts in each) / sum(count for count, _ in each)
