"""What keeps replicas together costs, beyond what computing hides; and the optimizer's step."""

from __future__ import annotations

import numpy as np

from phalanx.forecast.apart import averaged, served
from phalanx.forecast.compressed import averaging, compressed, thin
from phalanx.forecast.compute import Times
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.links import collective
from phalanx.forecast.setting import Setting
from phalanx.forecast.stages import divided, held, stages
from phalanx.forecast.tables import Array, Table


def replicas(costs: Table, times: Times, layouts: Layouts, setting: Setting) -> Array:
    """Seconds of a step in which replicas are brought together, beyond what computing hides."""
    lie = stages(costs, layouts)
    first, last = (np.einsum("kpn,pn->kn", lie.each, each).max(axis=0) for each in (times.before, times.back))
    count = held(costs, layouts, lie)
    late = _reduced(count, first, last, layouts, setting)
    smaller = compressed(layouts)
    if smaller.any():
        late = np.where(smaller, _compressed(count, thin(costs, lie, layouts), last, layouts, setting), late)
    found = np.where(layouts.zero == 3, _sharded(costs, times, layouts, setting), late)
    computing = layouts.micros * (first + last)
    found = found + averaged(count, computing, layouts, setting)
    return np.where(layouts.server > 0, served(count, computing, layouts, setting), found)


def _reduced(count: Array, first: Array, last: Array, layouts: Layouts, setting: Setting) -> Array:
    """Gradients are reduced once a step (``zero`` 0 to 2), behind the last micro-batch's backward; then what was
    stepped in shards is gathered."""
    fabric, habits = setting.fabric, setting.habits
    inner, sharded = layouts.tp * layouts.cp * layouts.ep, layouts.fsdp > 1
    scatter = collective("reduce-scatter", count * habits.sent, layouts.fsdp, inner, fabric)
    gather = collective("all-gather", count * habits.weights, layouts.fsdp, inner, fabric) / habits.reach
    rest = np.where(sharded, count / layouts.fsdp, count)
    reduce = collective("all-reduce", rest * habits.sent, layouts.summed, inner * layouts.fsdp, fabric)
    sent = (np.where(sharded, scatter, 0.0) + reduce) / habits.reach
    if habits.gathers_ahead:
        gather = _beyond(gather, first, habits.overlap)
    return _beyond(sent, last, habits.overlap) + np.where(sharded, gather, 0.0)


def _compressed(count: Array, thin: Array, last: Array, layouts: Layouts, setting: Setting) -> Array:
    """What is sent hides behind backward, as whole gradients do; making it smaller takes the memory's time from it."""
    sent, made = averaging(count, thin, layouts, np.ones_like(count), setting)
    found = _beyond(sent, last, setting.habits.overlap) + made
    return np.where(layouts.summed > 1, found, 0.0)


def _sharded(costs: Table, times: Times, layouts: Layouts, setting: Setting) -> Array:
    """Parameters are gathered, and gradients scattered, block by block behind the block before."""
    fabric, habits = setting.fabric, setting.habits
    exposed = np.zeros_like(layouts.tp)
    inner = layouts.tp * layouts.cp * layouts.ep
    whole = habits.stages_whole & (layouts.pp > 1)  # then it is done once a step, before and after everything
    for index, part in enumerate(costs.parts):
        count = np.zeros_like(exposed)
        for one in part.weights:
            count += (one.elements + one.frozen) / divided(one, layouts)
        gather = collective("all-gather", count * habits.gathered, layouts.fsdp, inner, fabric)
        scatter = collective("reduce-scatter", count * habits.sent, layouts.fsdp, inner, fabric)
        rest = count / layouts.fsdp * habits.sent
        scatter += collective("all-reduce", rest, layouts.summed, inner * layouts.fsdp, fabric)
        gather, scatter = gather / habits.reach, scatter / habits.reach
        ahead = _beyond(gather, times.before[index], habits.overlap)
        back = _beyond(gather + scatter, times.back[index], habits.overlap)
        busy = habits.contention * np.minimum(2 * gather + scatter, times.before[index] + times.back[index])
        share = np.where(part.role == "block", part.count / np.maximum(layouts.pp, 1), 1.0)
        exposed += share * np.where(whole, gather + scatter, layouts.micros * (ahead + back + busy))
    return exposed


def _beyond(sent: Array, computing: Array, overlap: float) -> Array:
    """What of ``sent`` is left when at most ``overlap`` of it hides behind ``computing``, and of that no more."""
    return np.maximum(sent - overlap * computing, sent * (1 - overlap))


def update(costs: Table, layouts: Layouts, setting: Setting) -> Array:
    """The optimizer moves each parameter's gradient, state and value through memory once.

    Where it works on the host, gradients go there and values come back; parameters that live there come for each pass.
    """
    lie = stages(costs, layouts)
    count = held(costs, layouts, lie) / np.where(layouts.zero > 0, layouts.fsdp, 1.0)
    stepped = count * setting.habits.update / (setting.rates.bandwidth * setting.rates.kernels.stream)
    weighty = np.array([float(bool(part.weights)) for part in costs.parts])
    there = np.einsum("kpn,p->kn", lie.each, weighty).max(axis=0)
    copied = count * (setting.habits.sent + setting.habits.weights) / setting.host + 2 * there * setting.bus
    passed = 2 * layouts.micros * (count * setting.habits.weights / setting.host + there * setting.bus)
    stepped = np.where(layouts.server > 0, 0.0, stepped)  # servers do it
    return stepped + np.where(layouts.offload > 0, copied, 0.0) + np.where(layouts.offload == 2, passed, 0.0)
