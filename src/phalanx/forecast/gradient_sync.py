"""The cost of keeping replicas equal, beyond the part hidden by computing: sums, averaging, servers, compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from phalanx.config.sync import Compression
from phalanx.forecast.kernels import DeviceSetting, Times, widths
from phalanx.forecast.layouts import DILOCO, NESTEROV, Layouts, Texts
from phalanx.forecast.network import collective, seconds
from phalanx.forecast.operation_arrays import Array, OperationArrays
from phalanx.forecast.pipeline import StageCounts, held, parameters_held
from phalanx.placement.collective_bytes import Elements, add_up, elements, gather, gathers, reductions, scatter
from phalanx.placement.step_traffic import once_a_step, tied_copy, unit_by_unit, with_second_forward


def replicas(costs: OperationArrays, times: Times, layouts: Layouts, setting: DeviceSetting, lie: StageCounts) -> Array:
    """Return seconds of a step for synchronising replicas, beyond the part hidden by computing."""
    first, last = (np.einsum("kpn,pn->kn", lie.each, each).max(axis=0) for each in (times.before, times.back))
    count = parameters_held(costs, layouts, lie)
    late = _reduced(held(costs.profile, lie.each, layouts.mesh), first, last, layouts, setting)
    smaller = compressed(layouts)
    if smaller.any():
        late = np.where(smaller, _compressed(count, thin(costs, lie, layouts), last, layouts, setting), late)
    found = np.where(layouts.zero == 3, _sharded(costs, times, layouts, setting, lie), late)
    computing = layouts.micros * (first + last)
    found = found + averaged(count, layouts, setting)
    return np.where(layouts.server > 0, server_time(count, computing, layouts, setting), found)


def _reduced(units: Sequence[Elements], first: Array, last: Array, layouts: Layouts, setting: DeviceSetting) -> Array:
    """Price ``zero`` 1 and 2: gradients are reduced behind the backward, then stepped shards are gathered.

    Under ``zero=2`` they are reduced behind each micro-batch's backward, else behind the last.
    """
    preset = setting.preset
    again, sent = (each.max(axis=0) for each in _there_and_back(units, layouts, setting))
    if preset.gathers_ahead:
        again = _beyond(again, first, preset.overlap)
    _, _, stepped = gathers(layouts.mesh)
    return reductions(layouts.mesh) * _beyond(sent, last, preset.overlap) + stepped * again


def _compressed(count: Array, thin: Array, last: Array, layouts: Layouts, setting: DeviceSetting) -> Array:
    """Price compressed gradients: sending hides behind backward, but compression takes memory bandwidth from it."""
    sent, made = averaging(count, thin, layouts, np.ones_like(count), setting)
    found = _beyond(sent, last, setting.preset.overlap) + made
    return np.where(layouts.alike > 1, found, 0.0)


def _sharded(costs: OperationArrays, times: Times, layouts: Layouts, setting: DeviceSetting, lie: StageCounts) -> Array:
    """Price ``zero=3``: parameters are gathered and gradients scattered block by block, behind the block before.

    A rank with a single block hides none of it.
    """
    preset, mesh = setting.preset, with_second_forward(costs.profile, layouts.mesh)
    once = preset.stages_whole & (layouts.pp > 1)  # before and after everything
    before, behind, _ = gathers(mesh)  # gradients are scattered as often as parameters are gathered for a backward
    counts = list(np.moveaxis(lie.each, 1, 0))

    def at_once(there: Array, back: Array) -> Array:
        return np.where(once, there + back, (before + behind) * there + reductions(mesh) * back)

    whole = at_once(*_there_and_back(held(costs.profile, lie.each, mesh), layouts, setting))
    exposed = np.zeros_like(lie.there)
    for one, count in tied_copy(costs.profile, counts):
        exposed += count * at_once(*_there_and_back(elements([(one, 1)], mesh), layouts, setting))
    for index, part in enumerate(costs.parts):
        there, back = _there_and_back(elements(((one, 1) for one in part.weights), mesh), layouts, setting)
        ahead = _beyond(there, times.before[index], preset.overlap)
        after = _beyond(there + back, times.back[index], preset.overlap)
        busy = preset.contention * np.minimum(2 * there + back, times.before[index] + times.back[index])
        exposed += lie.each[:, index] * np.where(once, there + back, before * ahead + behind * (after + busy))
    several = unit_by_unit(costs.profile, counts)
    return np.where(several, exposed, whole).max(axis=0)


def completed(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting, lie: StageCounts, norm: bool) -> Array:
    """Return seconds of gradients' once-a-step exchanges after the last gradient; ``norm``: with their norm."""
    wide, counts = widths(setting.preset, setting.precision, layouts.zero), list(np.moveaxis(lie.each, 1, 0))
    made = once_a_step(costs.profile, counts, layouts.mesh, wide, norm=norm)
    found = sum((seconds(one, layouts.mesh, setting.fabric) for one in made), np.zeros_like(lie.there))
    return found.max(axis=0)


def _there_and_back(units: Sequence[Elements], layouts: Layouts, setting: DeviceSetting) -> tuple[Array, Array]:
    mesh, preset = layouts.mesh, setting.preset
    wide = widths(preset, setting.precision, layouts.zero)
    shards = ("fsdp", "cp") if preset.shards_over_cp else ("fsdp",)
    there, back = np.zeros_like(layouts.tp), np.zeros_like(layouts.tp)
    for unit in units:
        gathered, scattered, added = (
            seconds(one(unit, wide, mesh, shards), mesh, setting.fabric) for one in (gather, scatter, add_up)
        )
        there, back = there + gathered, back + scattered + added
    return there / preset.reach, back / preset.reach


def _beyond(sent: Array, computing: Array, overlap: float) -> Array:
    """Return the part of ``sent`` left over: at most ``overlap`` of ``computing``, and of ``sent``, hides."""
    return np.maximum(sent - overlap * computing, sent * (1 - overlap))


def update(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting, lie: StageCounts) -> Array:
    """Return seconds of the optimizer, which moves each parameter's gradient, state and value through memory once.

    On the host, gradients are sent there and values come back; parameters that live there are sent for each pass.
    """
    count = parameters_held(costs, layouts, lie) / np.where(layouts.zero > 0, layouts.fsdp, 1.0)
    stepped = count * setting.preset.update / (setting.rates.bandwidth * setting.rates.kernels.stream)
    weighty = np.array([float(bool(part.weights)) for part in costs.parts])
    there = np.einsum("kpn,p->kn", lie.each, weighty).max(axis=0)
    copied = count * (setting.preset.sent + setting.preset.weights) / setting.host + 2 * there * setting.bus
    passed = 2 * layouts.micros * (count * setting.preset.weights / setting.host + there * setting.bus)
    stepped = np.where(layouts.server > 0, 0.0, stepped)  # servers do it
    return stepped + np.where(layouts.offload > 0, copied, 0.0) + np.where(layouts.offload == 2, passed, 0.0)


_FULL = 4.0
"""Bytes of an element that is summed, left out or averaged, of the copy it is compared with, of the outer momentum."""

_READ = 17.0
"""Bytes a server moves to read an element and add it."""


def compressed(layouts: Layouts) -> Array:
    """Return True for each plan with compression: shape (N,)."""
    return layouts.compress != "none"


def message(layouts: Layouts) -> Array:
    """Return bytes of one rank's message for each averaged element."""
    return _each(layouts.compress, lambda one: one.facts.bytes * (one.amount if one.facts.way == "gathered" else 1))


def averaging(count: Array, thin: Array, layouts: Layouts, inner: Array, setting: DeviceSetting) -> tuple[Array, Array]:
    """Return seconds to average ``count`` elements over ``dp``, on the wire and in memory.

    Uncompressed ones take one all-reduce, others the ways of ``CodecFacts``; PowerSGD sums ``thin`` elements.
    ``inner``: the distance between the ranks of ``dp``.
    """
    fabric, dp = setting.fabric, layouts.dp
    size = count * message(layouts)
    chunks, gathered, is_thin = (
        _each(layouts.compress, lambda one, way=way: one.facts.way == way) > 0 for way in ("chunks", "gathered", "thin")
    )
    to_all = collective("all-gather", np.where(gathered, dp, 1.0) * size, dp, inner, fabric)
    two = collective("all-to-all", size, dp, inner, fabric) + to_all
    summed = collective("all-reduce", np.where(is_thin, thin, count) * _FULL, dp, inner, fabric)
    wire = np.select([chunks, gathered], [two, to_all], summed)
    moved = count * _each(layouts.compress, lambda one: one.facts.averaged)
    return wire / setting.preset.reach, moved / (setting.rates.bandwidth * setting.rates.kernels.stream)


def pushed(count: Array, layouts: Layouts, setting: DeviceSetting) -> tuple[Array, Array]:
    """Return seconds for a worker to encode ``count`` elements, and for a server's host to read all workers'."""
    encode = count * _each(layouts.compress, lambda one: one.facts.pushed)
    read = np.where(compressed(layouts), count * _READ * layouts.dp, 0.0)
    return encode / (setting.rates.bandwidth * setting.rates.kernels.stream), read / setting.processor


def fed_back(layouts: Layouts) -> Array:
    """Return bytes of kept compression losses a parameter, on a device."""
    there = _each(layouts.compress, lambda one: _FULL if one.facts.feeds_back else 0.0)
    return np.where((layouts.sync > 0) | (layouts.server > 0), 0.0, there)


def thin(costs: OperationArrays, lie: StageCounts, layouts: Layouts) -> Array:
    """Return the elements summed by PowerSGD: two thin matrices for each parameter, as if square and of mean size.

    Source: Vogels et al., "PowerSGD", 2019, section 3: r (n + m) of n m elements, the least if n = m.
    """
    rank = _each(layouts.compress, lambda one: one.amount if one.facts.way == "thin" else 0.0)
    each = np.zeros((len(costs.parts), len(rank)))
    for index, part in enumerate(costs.parts):
        for one in part.weights:
            size = one.elements / max(one.tensors, 1)
            each[index] += one.tensors * np.minimum(2 * rank * np.sqrt(size), size)
    found: Array = np.einsum("kpn,pn->kn", lie.each, each).max(axis=0)
    return found


def _each(texts: Texts, value: Callable[[Compression], float]) -> Array:
    found = np.full(len(texts), value(Compression.parse("none")))
    for text in np.unique(texts[texts != "none"]).tolist():
        found[texts == text] = value(Compression.parse(text))
    return found


_OUTER, _MOMENTUM = 28.0, 8.0
"""Bytes moved for a parameter: to take the difference from the copy (12), to step the copy by the average of them and
begin from it again (16); and to read and write the outer momentum."""

_ADDED = 12.0
"""Bytes a server moves to add a parameter's gradient to that of the workers before."""


def averaged(count: Array, layouts: Layouts, setting: DeviceSetting) -> Array:
    """Return seconds of a step for averaging ``count`` parameters of a rank over ``dp`` now and then.

    Computing hides none of it. Local SGD: Stich, "Local SGD converges fast and communicates little", 2019, algorithm 1;
    the outer step: Douillard et al., "DiLoCo", 2023, algorithm 1.
    """
    if not layouts.sync.any():
        return np.zeros_like(count)
    mine = count / layouts.fsdp
    sent, made = averaging(mine, mine, layouts, layouts.inner, setting)
    moved = _OUTER + np.where(layouts.outer == NESTEROV, _MOMENTUM, 0.0)
    outer = mine * moved / (setting.rates.bandwidth * setting.rates.kernels.stream)
    each = sent + made + np.where(layouts.sync == DILOCO, outer, 0.0)
    return np.where(layouts.sync > 0, each / layouts.every, 0.0)


def kept_apart(layouts: Layouts) -> Array:
    """Return bytes a parameter in host memory: the common starting copy, and the outer optimizer's momentum."""
    momentum = np.where(layouts.outer == NESTEROV, _FULL, 0.0)
    return np.where(layouts.sync > 0, _FULL + momentum, 0.0)


def server_time(count: Array, computing: Array, layouts: Layouts, setting: DeviceSetting) -> Array:
    """Return seconds of a worker's step beyond its computing, because servers hold the ``count`` parameters.

    Each worker pushes its gradients and pulls parameters. Each way takes the time of the slower of its link and its
    part of the servers' links. A worker with ``staleness`` has that many rounds pending beside its current one. In the
    long run no worker is faster than the busiest link or processor of the servers.

    Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014; Ho et al., "More
    effective distributed ML via a stale synchronous parallel parameter server", 2013.
    """
    preset, ahead = setting.preset, layouts.staleness
    size = np.where(compressed(layouts), message(layouts), preset.sent)
    push, pull = _way(count * size, layouts, setting), _way(count * preset.weights, layouts, setting)
    encode, read = pushed(count, layouts, setting)
    once = np.where(ahead > 0, preset.update * layouts.dp, preset.update + _ADDED * layouts.dp)
    hosts = np.minimum(np.maximum(layouts.server, 1.0), _nodes(layouts, setting))
    step = count * once / (setting.processor * hosts) + read / hosts
    busiest = np.maximum(np.maximum(push, pull), step)
    turn = (computing + encode + push + step + pull) / (ahead + 1)
    return np.maximum(np.maximum(np.maximum(busiest, turn), computing + encode) - computing, 0.0)


def _nodes(layouts: Layouts, setting: DeviceSetting) -> Array:
    return np.maximum(np.ceil(layouts.devices / setting.fabric.per_node), 1.0)


def _way(size: Array, layouts: Layouts, setting: DeviceSetting) -> Array:
    """Return the seconds in which all workers send ``size`` bytes to the servers, or receive as many.

    Over the network, servers on a node share its adapters, as do workers. Within a node, a server receives at the rate
    of one device's link to the host.
    """
    fabric, servers, workers = setting.fabric, np.maximum(layouts.server, 1.0), layouts.dp
    if fabric.wires.lines:
        one = collective("send", size, np.full_like(size, 2.0), np.ones_like(size), fabric)
        return one * np.maximum(workers / servers, 1.0)
    nodes, network = _nodes(layouts, setting), fabric.node * fabric.wires.between
    near = nodes == 1
    mine = np.where(near, setting.host, np.minimum(setting.host, network / np.minimum(fabric.per_node, workers)))
    theirs = np.where(near, setting.host * servers, network * np.minimum(servers, nodes))
    start = np.where(near, fabric.wires.start, fabric.wires.start_between)
    return start + np.maximum(size / mine, workers * size / theirs)
