"""Replicas that are not brought together by summing gradients in every step: averaging now and then, and servers."""

from __future__ import annotations

import numpy as np

from phalanx.forecast.compressed import averaging, compressed, message, pushed
from phalanx.forecast.layouts import DILOCO, NESTEROV, Layouts
from phalanx.forecast.links import collective
from phalanx.forecast.setting import Setting
from phalanx.forecast.tables import Array

_FULL = 4.0
"""Bytes of a parameter that is averaged, of the copy it is compared with, and of the outer momentum."""

_OUTER, _MOMENTUM = 28.0, 8.0
"""Bytes moved for a parameter: to take the difference from the copy (12), to step the copy by the average of them and
begin from it again (16); and to read and write the outer momentum."""

_ADDED = 12.0
"""Bytes a server moves to add a parameter's gradient to that of the workers before."""


_LATE = 5.0
"""Steps behind which a fragment's averaging may hide, if the next one's turn does not come sooner."""


def averaged(count: Array, computing: Array, layouts: Layouts, setting: Setting) -> Array:
    """Seconds of a step for averaging ``count`` parameters of a rank over ``dp`` once every so many steps.

    Nothing hides it where all are averaged at once; of several fragments each hides behind the ``computing`` of the
    next steps. Local SGD: Stich, "Local SGD converges fast and communicates little", 2019, algorithm 1; the outer
    step: Douillard et al., "DiLoCo", 2023, algorithm 1.
    """
    if not layouts.sync.any():
        return np.zeros_like(count)
    inner = layouts.tp * layouts.cp * layouts.ep * layouts.fsdp
    mine = count / layouts.fsdp
    sent, made = averaging(mine, mine, layouts, inner, setting)
    moved = _OUTER + np.where(layouts.outer == NESTEROV, _MOMENTUM, 0.0)
    outer = mine * moved / (setting.rates.bandwidth * setting.rates.kernels.stream)
    hidden = np.minimum(_LATE, layouts.every // layouts.fragments) * computing
    late = np.where(layouts.fragments > 1, np.maximum(sent - hidden * layouts.fragments, 0.0), sent)
    each = late + made + np.where(layouts.sync == DILOCO, outer, 0.0)
    return np.where(layouts.sync > 0, each / layouts.every, 0.0)


def kept_apart(layouts: Layouts) -> Array:
    """Bytes a parameter takes in host memory: the copy that replicas began from, and the outer optimizer's momentum."""
    momentum = np.where(layouts.outer == NESTEROV, _FULL, 0.0)
    return np.where(layouts.sync > 0, _FULL + momentum, 0.0)


def served(count: Array, computing: Array, layouts: Layouts, setting: Setting) -> Array:
    """Seconds that a worker's step is longer than its computing because servers hold the ``count`` parameters.

    Each worker pushes its gradients and pulls parameters. Both ways take what the slower of its link and its part of
    the servers' links takes. A worker that may be ``staleness`` steps ahead has so many such rounds under way beside
    the one that it computes; in the long run nobody is faster than the busiest link or processor of the servers.

    Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014; Ho et al., "More
    effective distributed ML via a stale synchronous parallel parameter server", 2013.
    """
    habits, ahead = setting.habits, layouts.staleness
    size = np.where(compressed(layouts), message(layouts), habits.sent)
    push, pull = _way(count * size, layouts, setting), _way(count * habits.weights, layouts, setting)
    encode, read = pushed(count, layouts, setting)
    once = np.where(ahead > 0, habits.update * layouts.dp, habits.update + _ADDED * layouts.dp)
    hosts = np.minimum(np.maximum(layouts.server, 1.0), _nodes(layouts, setting))
    step = count * once / (setting.processor * hosts) + read / hosts
    busiest = np.maximum(np.maximum(push, pull), step)
    turn = (computing + encode + push + step + pull) / (ahead + 1)
    return np.maximum(np.maximum(np.maximum(busiest, turn), computing + encode) - computing, 0.0)


def _nodes(layouts: Layouts, setting: Setting) -> Array:
    return np.maximum(np.ceil(layouts.devices / setting.fabric.per_node), 1.0)


def _way(size: Array, layouts: Layouts, setting: Setting) -> Array:
    """Seconds until all workers have sent ``size`` bytes to the servers, or have got as many.

    Over the network, servers on one node share its adapters, as do the workers of one; within a node, a server takes in
    what one device's link to the host carries.
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
