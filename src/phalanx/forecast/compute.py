"""What one micro-batch takes in each part of the model: computing, and the exchanges that stand between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.forecast.kernels import Priced, Setting, itemsize, price
from phalanx.forecast.layouts import ATTENTIONS, Layouts
from phalanx.forecast.network import Collective, Fabric, collective
from phalanx.forecast.operation_arrays import Array, Table
from phalanx.forecast.presets import Preset

KINDS = ("products", "attention", "memory")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Times:
    """Seconds of one micro-batch in each part of the model (one of its count): shape (parts, N) each.

    Attributes:
        forward: computing, in the forward.
        inputs: the backward but for what yields only weights' gradients.
        weights: that.
        again: recomputing, inside the backward.
        sent_forward: exchanges that stand in the forward's way.
        sent_backward: and in the backward's.
        waiting_forward: the device waits for the host to launch.
        waiting_backward: likewise.
        by_kind: of computing: shape (kinds, parts, N), see ``KINDS``.
    """

    forward: Array
    inputs: Array
    weights: Array
    again: Array
    sent_forward: Array
    sent_backward: Array
    waiting_forward: Array
    waiting_backward: Array
    by_kind: Array

    @property
    def before(self) -> Array:
        """All of the forward."""
        return self.forward + self.sent_forward + self.waiting_forward

    @property
    def back(self) -> Array:
        """All of the backward."""
        return self.inputs + self.weights + self.again + self.sent_backward + self.waiting_backward


def compute(costs: Table, layouts: Layouts, setting: Setting) -> Times:
    """The times of every part under every candidate."""
    rates, fabric, preset, precision = setting.rates, setting.fabric, setting.preset, setting.precision
    priced = price(costs, layouts.shapes, setting)
    count = len(costs.parts)
    late = costs.backward & costs.weights
    forward, inputs, weights = (
        _summed(priced.seconds, costs, rows, count) for rows in (~costs.backward, costs.backward & ~late, late)
    )
    again = _again(costs, priced, layouts, preset, forward)
    joined = _joins(costs, layouts, fabric, precision) * (1 - preset.overlap_tensor)
    around = _around(costs, layouts, fabric, precision, priced)
    anew = np.where(layouts.recompute == 2, 1.0, 0.0) * _blocks(costs)
    sent_forward = joined[0] + around[0]
    sent_backward = joined[1] + around[1] + anew * sent_forward
    each = rates.kernels.host * preset.launches
    ahead, back = (_launches(costs, rows, count)[:, None] * each for rows in (~costs.backward, costs.backward))
    rows = _summed(np.ones_like(priced.seconds), costs, costs.row & costs.matmul & ~costs.backward, count)
    apart = rates.wires.far * rows * (layouts.tp > fabric.socket)
    ahead, back = ahead + apart, back + apart
    return Times(
        forward=forward,
        inputs=inputs,
        weights=weights,
        again=again,
        sent_forward=sent_forward,
        sent_backward=sent_backward,
        waiting_forward=np.maximum(ahead - forward - sent_forward, 0.0),
        waiting_backward=np.maximum(back + anew * ahead - inputs - weights - again - sent_backward, 0.0),
        by_kind=np.stack(
            [_summed(priced.seconds, costs, rows, count) for rows in (costs.matmul, costs.attention, costs.memory)]
        ),
    )


def _blocks(costs: Table) -> Array:
    return np.array([part.role == "block" for part in costs.parts], dtype=float)[:, None]


def _summed(seconds: Array, costs: Table, rows: npt.NDArray[np.bool_], count: int) -> Array:
    """Sums over the operations in ``rows``, by part."""
    chosen = (costs.part[None, :] == np.arange(count)[:, None]) & rows[None, :]
    return chosen.astype(float) @ seconds


def _launches(costs: Table, rows: npt.NDArray[np.bool_], count: int) -> Array:
    return np.bincount(costs.part[rows], minlength=count).astype(float)


def _again(costs: Table, priced: Priced, layouts: Layouts, preset: Preset, forward: Array) -> Array:
    """What the backward computes anew, of the blocks."""
    count = len(costs.parts)
    blocks = _blocks(costs)
    if preset.selective == "attention":
        some = _summed(priced.seconds, costs, costs.attention & ~costs.backward, count)
    elif preset.selective == "alternate":
        some = forward / 2
    else:
        some = _summed(priced.seconds, costs, costs.memory & ~costs.backward, count)
        if preset.selective == "second":
            some = some + _summed(priced.seconds, costs, costs.matmul & ~costs.backward, count) / 2
    recompute = layouts.recompute
    return blocks * np.where(recompute == 2, forward, np.where(recompute == 1, some, 0.0))


_PAIR: tuple[Collective, Collective] = ("all-gather", "reduce-scatter")


def _joins(costs: Table, layouts: Layouts, fabric: Fabric, precision: str) -> Array:
    """Exchanges of ``tp``, forward and backward: one where the results of a row-parallel product are added up.

    With the stream cut along the tokens an all-gather and a reduce-scatter take the place of each all-reduce: the same
    bytes (Korthikanti et al., "Reducing Activation Recomputation", 2022, section 4.2.2), and the same time, unless
    both were measured.
    """
    both: list[Array] = []
    one = np.ones_like(layouts.tp)
    for backward in (False, True):
        parts: list[Array] = []
        for index, part in enumerate(costs.parts):
            mine = costs.part == index
            rows = float((mine & costs.row & costs.matmul & ~costs.backward).sum())
            if part.role == "before" and not backward:
                rows += any(weights.share == "inner" for weights in part.weights)
            if part.role == "after" and backward:
                rows += bool((mine & costs.column & costs.matmul).any())
            entry = part.entry if part.role != "before" else costs.parts[min(1, len(costs.parts) - 1)].entry
            size = entry.at(layouts.micro, layouts.length) / layouts.cp * itemsize(precision)
            joined = collective("all-reduce", size * one, layouts.tp, one, fabric)
            if fabric.wires.measured:
                pair = [collective(kind, size * one, layouts.tp, one, fabric) for kind in _PAIR]
                joined = np.where(layouts.sequence > 0, pair[0] + pair[1], joined)
            parts.append(rows * joined)
        both.append(np.stack(parts))
    return np.stack(both)


def _around(costs: Table, layouts: Layouts, fabric: Fabric, precision: str, priced: Priced) -> Array:
    """Exchanges of ``cp`` and ``ep``, forward and backward, as far as computing does not hide them.

    Keys and values go around a ring while attention computes (Liu et al., "Ring Attention", 2023), or are gathered
    before it; queries, keys, values and results change from tokens to heads and back (Jacobs et al., "DeepSpeed
    Ulysses", 2023); experts' tokens go out and come back (Lepikhin et al., "GShard", 2020). Only a ring is hidden.
    """
    count, size = len(costs.parts), itemsize(precision)
    shape = (2, count, len(layouts.tp))
    found = np.zeros(shape)
    shapes = layouts.shapes
    stride = layouts.tp
    for backward in (False, True):
        at = costs.attention & (costs.backward == backward)
        if at.any() and (layouts.cp > 1).any():
            dims = [laws.at(shapes.samples, shapes.length) for laws in costs.dims]
            cut = np.where(costs.inner[:, None], layouts.tp, 1.0)
            kept = 2 * dims[0] * dims[2] * dims[4] * dims[5] * size / cut
            asked = 2 * dims[0] * dims[1] * dims[3] * dims[5] * size / cut
            moved = (2.0 if backward else 1.0) * _summed(kept, costs, at, count)
            among = layouts.cp * np.ones((count, 1)), stride * np.ones((count, 1)), fabric
            gathered = collective("all-gather", moved, *among)
            turned = 4 * collective("all-to-all", _summed(kept + asked, costs, at, count) / 4 / layouts.cp, *among)
            ring = np.maximum(gathered - _summed(priced.seconds, costs, at, count), 0.1 * gathered)
            kinds = [layouts.attention == ATTENTIONS.index(name) for name in ("alltoall", "gather")]
            found[int(backward)] += np.where(layouts.cp > 1, np.select(kinds, [turned, gathered], ring), 0.0)
        experts = costs.expert & costs.matmul & ~costs.backward
        if experts.any() and (layouts.ep > 1).any():
            dims = [laws.at(shapes.samples, shapes.length) for laws in costs.dims]
            tokens = dims[0] * dims[1] * dims[3] * experts[:, None] / layouts.cp
            most = np.stack([tokens[costs.part == index].max(axis=0, initial=0.0) for index in range(count)])
            ways = collective(
                "all-to-all",
                most * size,
                layouts.ep * np.ones((count, 1)),
                stride * layouts.cp * np.ones((count, 1)),
                fabric,
            )
            found[int(backward)] += 2 * ways
    return found
