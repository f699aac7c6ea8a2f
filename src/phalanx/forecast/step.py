"""The time of one optimizer step, by part: stages in their schedule, what keeps replicas together, the update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from phalanx.forecast.compute import KINDS, Times
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.links import Fabric, collective
from phalanx.forecast.pipelines import Lanes, pipeline, simulated
from phalanx.forecast.price import itemsize
from phalanx.forecast.replicas import replicas, update
from phalanx.forecast.setting import Setting
from phalanx.forecast.stages import stages
from phalanx.forecast.tables import Array, Table


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTime:
    """Seconds of a step, by what they go to, on the rank that is busy longest: shape (N,) each.

    Attributes:
        products: matrix products and convolutions.
        attention: fused attention.
        memory: what moves more than it computes.
        recompute: computing activations again.
        launches: waiting for the host to launch kernels.
        exchange: collectives inside the model (``tp``, ``cp``, ``ep``).
        pipeline: waiting for other stages, and for what they send.
        replicas: reducing gradients and gathering parameters, as far as computing does not hide it.
        update: the optimizer.
        stragglers: waiting for the slowest of many nodes.
        rest: per step: data, logging, synchronisation.
    """

    products: Array
    attention: Array
    memory: Array
    recompute: Array
    launches: Array
    exchange: Array
    pipeline: Array
    replicas: Array
    update: Array
    stragglers: Array
    rest: Array

    @property
    def total(self) -> Array:
        """All together."""
        return sum((getattr(self, one.name) for one in fields(self)), np.zeros_like(self.products))


def step_time(costs: Table, times: Times, layouts: Layouts, setting: Setting, events: bool = False) -> StepTime:
    """The step of every candidate; with ``events`` pipelines are run event by event, else priced by formula."""
    lie = stages(costs, layouts)
    forward = np.einsum("kpn,pn->kn", lie.each, times.before)
    backward = np.einsum("kpn,pn->kn", lie.each, times.back)
    weights = np.einsum("kpn,pn->kn", lie.each, times.weights)
    worst = np.where(lie.there > 0, forward + backward, 0.0).argmax(axis=0)
    send = _send(costs, layouts, setting)
    lanes = Lanes(forward=forward, backward=backward, weights=weights, there=lie.there, send=send)
    whole = setting.habits.whole_backwards
    how = {"whole": whole, "recomputes": costs.recomputes}
    total = simulated(lanes, layouts, **how) if events else pipeline(lanes, layouts)

    def of(seconds: Array) -> Array:
        there = np.take_along_axis(lie.each, worst[None, None, :], axis=0)[0]
        return (there * seconds).sum(axis=0) * layouts.micros

    split = {name: of(times.by_kind[at]) for at, name in enumerate(KINDS)}
    exchange = of(times.sent_forward + times.sent_backward)
    again, waiting = of(times.again), of(times.waiting_forward + times.waiting_backward)
    known = sum(split.values(), exchange + again + waiting)
    return StepTime(
        products=split["products"],
        attention=split["attention"],
        memory=split["memory"],
        recompute=again,
        launches=waiting,
        exchange=exchange,
        pipeline=np.maximum(total - known, 0.0),
        replicas=replicas(costs, times, layouts, setting),
        update=update(costs, layouts, setting),
        stragglers=_stragglers(split, again, layouts, setting.fabric),
        rest=np.full_like(total, setting.habits.rest),
    )


def _stragglers(split: dict[str, Array], again: Array, layouts: Layouts, fabric: Fabric) -> Array:
    """All wait for the slowest in every step, and of more nodes the slowest is slower."""
    nodes = np.maximum(layouts.devices / fabric.per_node, 1.0)
    return fabric.wires.jitter * np.log2(nodes) * sum(split.values(), again)


def _send(costs: Table, layouts: Layouts, setting: Setting) -> Array:
    """Seconds to hand one activation to the next stage."""
    entry = next((part.entry for part in costs.parts if part.role == "block"), costs.parts[0].entry)
    size = entry.at(layouts.micro, layouts.length) / layouts.cp * itemsize(setting.precision)
    size = size / np.where((layouts.sequence > 0) | setting.habits.scatter, layouts.tp, 1.0)
    stride = layouts.tp * layouts.cp * layouts.ep * layouts.fsdp * layouts.dp
    core = setting.rates.core
    relay = setting.habits.relay + (core.relayed(layouts.devices) if core else 0.0)
    sent = collective("send", size, np.full_like(size, 2.0), stride, setting.fabric) + relay
    return np.where(layouts.pp > 1, sent, 0.0)
