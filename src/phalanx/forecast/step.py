"""The time of one optimizer step, by part: stages in their schedule, what keeps replicas together, the update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from phalanx.forecast.compute import KINDS, Times
from phalanx.forecast.habits import Habits
from phalanx.forecast.layouts import SCHEDULES, Layouts
from phalanx.forecast.links import Fabric, collective
from phalanx.forecast.price import itemsize
from phalanx.forecast.rates import Rates
from phalanx.forecast.schedule import Pipeline, duration
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """How parts lie on the ranks of ``pp``.

    Attributes:
        each: for every part, how many of it the busiest kind of rank holds: first, middle, last: shape (3, parts, N).
        there: how many ranks of each kind there are: shape (3, N).
    """

    each: Array
    there: Array


def stages(costs: Table, layouts: Layouts) -> Stages:
    """Blocks are dealt evenly; what comes before them lies on the first rank, what comes after on the last."""
    pp, parts = layouts.pp, costs.parts
    each = np.zeros((3, len(parts), len(pp)))
    blocks = sum(part.count for part in parts if part.role == "block")
    share = np.where(pp > 1, np.ceil(blocks / np.maximum(pp, 1) - 1e-9) / max(blocks, 1), 1.0)
    for index, part in enumerate(parts):
        if part.role == "block":
            each[:, index] = part.count * share
        elif part.role == "before":
            each[0, index] = part.count
            each[2, index] = np.where(pp == 1, part.count, 0)
        else:
            each[2, index] = part.count
            each[0, index] = np.where(pp == 1, part.count, 0)
    there = np.stack([np.ones_like(pp), np.maximum(pp - 2, 0), np.where(pp > 1, 1.0, 0.0)])
    return Stages(each=each, there=there)


def step_time(
    costs: Table,
    times: Times,
    layouts: Layouts,
    rates: Rates,
    fabric: Fabric,
    habits: Habits,
    precision: str,
    events: bool = False,
) -> StepTime:
    """The step of every candidate; with ``events`` pipelines are run event by event, else priced by formula."""
    lie = stages(costs, layouts)
    forward = np.einsum("kpn,pn->kn", lie.each, times.before)
    backward = np.einsum("kpn,pn->kn", lie.each, times.back)
    weights = np.einsum("kpn,pn->kn", lie.each, times.weights)
    present = lie.there > 0
    send = _send(costs, layouts, fabric, habits, precision)
    busy = np.where(present, forward + backward, 0.0)
    worst = busy.argmax(axis=0)
    micros = layouts.micros
    run = simulated if events else pipeline
    total = run(forward, backward, weights, lie.there, layouts, send)

    def of(seconds: Array) -> Array:
        held = np.take_along_axis(lie.each, worst[None, None, :], axis=0)[0]
        return (held * seconds).sum(axis=0) * micros

    split = {name: of(times.by_kind[at]) for at, name in enumerate(KINDS)}
    exchange = of(times.sent_forward + times.sent_backward)
    again, waiting = of(times.again), of(times.waiting_forward + times.waiting_backward)
    known = sum(split.values(), exchange + again + waiting)
    late = replicas(costs, times, layouts, fabric, habits, lie)
    return StepTime(
        products=split["products"],
        attention=split["attention"],
        memory=split["memory"],
        recompute=again,
        launches=waiting,
        exchange=exchange,
        pipeline=np.maximum(total - known, 0.0),
        replicas=np.where(layouts.zero == 3, _sharded(costs, times, layouts, fabric, habits), late),
        update=update(costs, layouts, rates, habits, lie),
        stragglers=_stragglers(split, again, layouts, fabric),
        rest=np.full_like(total, habits.rest),
    )


def _stragglers(split: dict[str, Array], again: Array, layouts: Layouts, fabric: Fabric) -> Array:
    """All wait for the slowest in every step, and of more nodes the slowest is slower."""
    nodes = np.maximum(layouts.devices / fabric.per_node, 1.0)
    return fabric.wires.jitter * np.log2(nodes) * sum(split.values(), again)


def pipeline(forward: Array, backward: Array, weights: Array, there: Array, layouts: Layouts, send: Array) -> Array:
    """Seconds from the first forward to the last backward, from the times of first, middle and last ranks.

    1F1B and interleaving: Narayanan et al. 2021, section 2.2; zero bubble: Qi et al. 2024, table 2; each with ranks
    that take different times: the slowest is never idle but for the way of one micro-batch through the others.
    """
    micros, pp, v = layouts.micros, layouts.pp, np.maximum(layouts.stages, 1)
    there_now = there > 0
    one = forward + backward + 2 * send * np.where(pp > 1, v, 0)
    slowest = np.where(there_now, one, 0).max(axis=0)
    through = (one * there).sum(axis=0)
    plain = micros * slowest + (through - slowest)
    found = plain
    kind = layouts.schedule
    gpipe = (micros - 1) * (
        np.where(there_now, forward + send, 0).max(axis=0) + np.where(there_now, backward + send, 0).max(axis=0)
    ) + ((forward + backward + 2 * send) * there).sum(axis=0)
    found = np.where(kind == SCHEDULES.index("gpipe"), gpipe, found)
    interleaved = micros * slowest + (through - slowest) / v
    found = np.where(kind == SCHEDULES.index("interleaved"), interleaved, found)
    hidden = (np.maximum(through - slowest - 2 * (weights * there).sum(axis=0) * (pp - 1) / np.maximum(pp, 1), 0)) / v
    zero = micros * slowest + hidden
    for name in ("zero-bubble", "zbv", "dualpipev"):
        found = np.where(kind == SCHEDULES.index(name), zero, found)
    return np.where(pp > 1, found, micros * slowest)


def simulated(forward: Array, backward: Array, weights: Array, there: Array, layouts: Layouts, send: Array) -> Array:
    """As ``pipeline``, by running every candidate's schedule event by event; what is alike is run once."""
    known: dict[Pipeline, float] = {}
    found = np.zeros_like(layouts.pp)
    for at, ranks in enumerate(layouts.pp.astype(int)):
        where = [0, *[1] * (ranks - 2), 2][:ranks]
        chunks = max(int(layouts.stages[at]), 1)
        one = Pipeline(
            schedule=SCHEDULES[int(layouts.schedule[at])] if ranks > 1 else "gpipe",
            ranks=int(ranks),
            chunks=chunks if ranks > 1 else 1,
            micros=int(layouts.micros[at]),
            forward=tuple(float(forward[kind, at] + chunks * send[at]) for kind in where),
            inputs=tuple(float(backward[kind, at] - weights[kind, at] + chunks * send[at]) for kind in where),
            weights=tuple(float(weights[kind, at]) for kind in where),
            send=0.0,
        )
        if one not in known:
            known[one] = duration(one)
        found[at] = known[one]
    return found


def _send(costs: Table, layouts: Layouts, fabric: Fabric, habits: Habits, precision: str) -> Array:
    """Seconds to hand one activation to the next stage."""
    entry = next((part.entry for part in costs.parts if part.role == "block"), costs.parts[0].entry)
    size = entry.at(layouts.micro, layouts.length) / layouts.cp * itemsize(precision)
    size = size / np.where((layouts.sequence > 0) | habits.scatter, layouts.tp, 1.0)
    stride = layouts.tp * layouts.cp * layouts.ep * layouts.fsdp * layouts.dp
    sent = collective("send", size, np.full_like(size, 2.0), stride, fabric) + habits.relay
    return np.where(layouts.pp > 1, sent, 0.0)


def held(costs: Table, layouts: Layouts, lie: Stages) -> Array:
    """Parameters on the rank that holds most, before ``fsdp`` shards them."""
    each = np.zeros((len(costs.parts), len(layouts.tp)))
    for index, part in enumerate(costs.parts):
        for weights in part.weights:
            by = np.where(weights.share == "inner", layouts.tp, 1.0) * np.where(weights.expert, layouts.ep, 1.0)
            each[index] += (weights.elements + weights.frozen) / by
    return np.einsum("kpn,pn->kn", lie.each, each).max(axis=0)


def replicas(costs: Table, times: Times, layouts: Layouts, fabric: Fabric, habits: Habits, lie: Stages) -> Array:
    """What gradients and parameters take to be brought together, beyond what backward hides (``zero`` 0 to 2)."""
    count = held(costs, layouts, lie)
    inner = layouts.tp * layouts.cp * layouts.ep
    sharded = layouts.fsdp > 1
    scatter = collective("reduce-scatter", count * habits.sent, layouts.fsdp, inner, fabric)
    gather = collective("all-gather", count * habits.weights, layouts.fsdp, inner, fabric)
    rest = np.where(sharded, count / layouts.fsdp, count)
    reduce = collective("all-reduce", rest * habits.sent, layouts.dp, inner * layouts.fsdp, fabric)
    last = np.einsum("kpn,pn->kn", lie.each, times.back).max(axis=0)
    grads, gather = (np.where(sharded, scatter, 0.0) + reduce) / habits.reach, gather / habits.reach
    return np.maximum(grads - habits.overlap * last, grads * (1 - habits.overlap)) + np.where(sharded, gather, 0.0)


def _sharded(costs: Table, times: Times, layouts: Layouts, fabric: Fabric, habits: Habits) -> Array:
    """Parameters are gathered block by block, forward and backward, and gradients scattered: hidden behind the block
    before, so that of each pair the longer counts."""
    exposed = np.zeros_like(layouts.tp)
    inner = layouts.tp * layouts.cp * layouts.ep
    for index, part in enumerate(costs.parts):
        by = [np.where(one.share == "inner", layouts.tp, 1.0) for one in part.weights]
        count = sum((one.elements / cut for one, cut in zip(part.weights, by, strict=True)), np.zeros_like(exposed))
        gather = collective("all-gather", count * habits.gathered, layouts.fsdp, inner, fabric)
        scatter = collective("reduce-scatter", count * habits.sent, layouts.fsdp, inner, fabric)
        scatter += collective(
            "all-reduce", count / layouts.fsdp * habits.sent, layouts.dp, inner * layouts.fsdp, fabric
        )
        gather, scatter = gather / habits.reach, scatter / habits.reach
        share = np.where(part.role == "block", part.count / np.maximum(layouts.pp, 1), 1.0)
        ahead = np.maximum(gather - habits.overlap * times.before[index], gather * (1 - habits.overlap))
        back = np.maximum(
            gather + scatter - habits.overlap * times.back[index], (gather + scatter) * (1 - habits.overlap)
        )
        busy = habits.contention * np.minimum(2 * gather + scatter, times.before[index] + times.back[index])
        each = layouts.micros * (ahead + back + busy)
        whole = habits.stages_whole & (layouts.pp > 1)  # then it is done once a step, before and after everything
        exposed += share * np.where(whole, gather + scatter, each)
    return exposed


def update(costs: Table, layouts: Layouts, rates: Rates, habits: Habits, lie: Stages) -> Array:
    """The optimizer moves each parameter's gradient, state and value through memory once."""
    count = held(costs, layouts, lie) / np.where(layouts.zero > 0, layouts.fsdp, 1.0)
    return count * habits.update / (rates.bandwidth * rates.kernels.stream)
