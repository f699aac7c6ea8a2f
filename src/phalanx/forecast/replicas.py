"""What keeps replicas together costs, beyond what computing hides; and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.forecast.apart import averaged, served
from phalanx.forecast.compressed import averaging, compressed, thin
from phalanx.forecast.compute import Times
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.links import collective
from phalanx.forecast.setting import Setting
from phalanx.forecast.stages import Stages, divided, held, stages
from phalanx.forecast.tables import Array, Table
from phalanx.profile import Part

_KINDS = (False, True)
"""Whether parameters are of experts."""


def replicas(costs: Table, times: Times, layouts: Layouts, setting: Setting) -> Array:
    """Seconds of a step in which replicas are brought together, beyond what computing hides."""
    lie = stages(costs, layouts)
    first, last = (np.einsum("kpn,pn->kn", lie.each, each).max(axis=0) for each in (times.before, times.back))
    count = held(costs, layouts, lie)
    late = _reduced(costs, lie, first, last, layouts, setting)
    smaller = compressed(layouts)
    if smaller.any():
        late = np.where(smaller, _compressed(count, thin(costs, lie, layouts), last, layouts, setting), late)
    found = np.where(layouts.zero == 3, _sharded(costs, times, layouts, setting), late)
    computing = layouts.micros * (first + last)
    found = found + averaged(count, computing, layouts, setting)
    return np.where(layouts.server > 0, served(count, computing, layouts, setting), found)


def _reduced(costs: Table, lie: Stages, first: Array, last: Array, layouts: Layouts, setting: Setting) -> Array:
    """Gradients are reduced once a step (``zero`` 0 to 2), behind the last micro-batch's backward; then what was
    stepped in shards is gathered."""
    habits = setting.habits
    sent, gather = np.zeros_like(first), np.zeros_like(first)
    for experts in _KINDS:
        there, back = _there_and_back(held(costs, layouts, lie, experts=experts), layouts, setting, experts=experts)
        sent, gather = sent + back, gather + there
    if habits.gathers_ahead:
        gather = _beyond(gather, first, habits.overlap)
    return _beyond(sent, last, habits.overlap) + np.where(layouts.fsdp > 1, gather, 0.0)


def _compressed(count: Array, thin: Array, last: Array, layouts: Layouts, setting: Setting) -> Array:
    """What is sent hides behind backward, as whole gradients do; making it smaller takes the memory's time from it."""
    sent, made = averaging(count, thin, layouts, np.ones_like(count), setting)
    found = _beyond(sent, last, setting.habits.overlap) + made
    return np.where(layouts.alike > 1, found, 0.0)


def _sharded(costs: Table, times: Times, layouts: Layouts, setting: Setting) -> Array:
    """Parameters are gathered, and gradients scattered, block by block behind the block before; of a model without
    repeated blocks all at once, behind nothing."""
    habits = setting.habits
    exposed = np.zeros_like(layouts.tp)
    whole = habits.stages_whole & (layouts.pp > 1)  # then it is done once a step, before and after everything
    if not costs.repeated:
        counts = [sum((part.count * _elements(part, layouts, one) for part in costs.parts), exposed) for one in _KINDS]
        gather, scatter = _all_there_and_back([one / np.maximum(layouts.pp, 1) for one in counts], layouts, setting)
        return np.where(whole, gather + scatter, layouts.micros * (2 * gather + scatter))
    for index, part in enumerate(costs.parts):
        gather, scatter = _all_there_and_back([_elements(part, layouts, one) for one in _KINDS], layouts, setting)
        ahead = _beyond(gather, times.before[index], habits.overlap)
        back = _beyond(gather + scatter, times.back[index], habits.overlap)
        busy = habits.contention * np.minimum(2 * gather + scatter, times.before[index] + times.back[index])
        share = np.where(part.role == "block", part.count / np.maximum(layouts.pp, 1), 1.0)
        exposed += share * np.where(whole, gather + scatter, layouts.micros * (ahead + back + busy))
    return exposed


def _elements(part: Part, layouts: Layouts, experts: bool) -> Array:
    """Of such a part's parameters on a rank, before sharding: those of experts, or the others."""
    each = [(one.elements + one.frozen) / divided(one, layouts) for one in part.weights if one.expert is experts]
    return sum(each, np.zeros_like(layouts.tp))


def _all_there_and_back(counts: Sequence[Array], layouts: Layouts, setting: Setting) -> tuple[Array, Array]:
    each = [_there_and_back(one, layouts, setting, experts=two) for one, two in zip(counts, _KINDS, strict=True)]
    return each[0][0] + each[1][0], each[0][1] + each[1][1]


def _there_and_back(count: Array, layouts: Layouts, setting: Setting, *, experts: bool) -> tuple[Array, Array]:
    """Seconds to gather so many elements, and to bring their gradients together; none where there are none."""
    fabric, habits = setting.fabric, setting.habits
    gathered = np.where(layouts.zero == 3, habits.gathered, habits.weights)
    over_cp = layouts.cp if habits.shards_over_cp else np.ones_like(layouts.cp)
    shards, inner = layouts.fsdp * over_cp, layouts.tp * layouts.cp * layouts.ep / over_cp
    gather = collective("all-gather", count * gathered, shards, inner, fabric)
    scatter = collective("reduce-scatter", count * habits.sent, shards, inner, fabric)
    copies = layouts.summed / over_cp / (layouts.ep if experts else 1.0)
    # neighbours are the ranks of cp and ep; those of dp stand a whole replica apart
    near = np.minimum(copies / layouts.alike, np.maximum(fabric.per_node / layouts.tp, 1.0))
    near = near * np.maximum(fabric.per_node / (inner * shards), 1.0)
    scatter += collective("all-reduce", count / shards * habits.sent, copies, fabric.per_node / near, fabric)
    some = count > 0
    return np.where(some, gather / habits.reach, 0.0), np.where(some, scatter / habits.reach, 0.0)


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
