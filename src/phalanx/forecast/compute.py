"""What one micro-batch takes in each part of the model: computing, and the exchanges that stand between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.forecast.kernels import DeviceSetting, Priced, price, widths
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.network import seconds
from phalanx.forecast.operation_arrays import Array, OperationArrays
from phalanx.forecast.presets import Preset
from phalanx.placement.collective_bytes import PartPass, Pass, context, experts, tensor

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


def compute(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting) -> Times:
    """The times of every part under every candidate."""
    rates, fabric, preset = setting.rates, setting.fabric, setting.preset
    priced = price(costs, layouts.shapes, setting)
    count = len(costs.parts)
    late = costs.backward & costs.weights
    forward, inputs, weights = (
        _summed(priced.seconds, costs, rows, count) for rows in (~costs.backward, costs.backward & ~late, late)
    )
    again = _again(costs, priced, layouts, preset, forward)
    anew = np.where(layouts.recompute == 2, 1.0, 0.0) * _blocks(costs)
    sent_forward, sent_again, sent_backward = _exchanged(costs, layouts, setting, priced)
    sent_backward = sent_backward + anew * (sent_again if preset.stops_early else sent_forward)
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


def _blocks(costs: OperationArrays) -> Array:
    return np.array([part.role == "block" for part in costs.parts], dtype=float)[:, None]


def _summed(seconds: Array, costs: OperationArrays, rows: npt.NDArray[np.bool_], count: int) -> Array:
    """Sums over the operations in ``rows``, by part."""
    chosen = (costs.part[None, :] == np.arange(count)[:, None]) & rows[None, :]
    return chosen.astype(float) @ seconds


def _launches(costs: OperationArrays, rows: npt.NDArray[np.bool_], count: int) -> Array:
    return np.bincount(costs.part[rows], minlength=count).astype(float)


def _again(costs: OperationArrays, priced: Priced, layouts: Layouts, preset: Preset, forward: Array) -> Array:
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


def _exchanged(
    costs: OperationArrays, layouts: Layouts, setting: DeviceSetting, priced: Priced
) -> tuple[Array, Array, Array]:
    """Seconds of exchanges over ``tp``, ``cp`` and ``ep`` that computing does not hide: shape (parts, N) each.

    In the forward, in the forward that a backward does again, and in the backward.

    Only a ring is hidden: keys and values go around while attention computes (Liu et al., "Ring Attention", 2023).
    """
    mesh, wide, fabric = layouts.mesh, widths(setting.preset, setting.precision, layouts.zero), setting.fabric
    nothing = np.zeros_like(layouts.tp)
    found: dict[Pass, list[Array]] = {"forward": [], "again": [], "backward": []}
    computing = {
        backward: _summed(priced.seconds, costs, costs.attention & (costs.backward == backward), len(costs.parts))
        for backward in (False, True)
    }
    for index, part in enumerate(costs.parts):
        after = costs.parts[min(1, len(costs.parts) - 1)]
        entry = after.entry if part.role == "before" else part.entry
        micro = PartPass(part=part, entry=entry, samples=layouts.micro, length=layouts.length)
        for way, each in found.items():
            joined = sum((seconds(one, mesh, fabric) for one in tensor(micro, mesh, wide, way)), nothing)
            ring, rest = nothing, nothing
            for one in (*context(micro, mesh, wide, way), *experts(micro, mesh, wide, way)):
                lasts = seconds(one, mesh, fabric)
                ring, rest = (ring + lasts, rest) if one.kind == "ring" else (ring, rest + lasts)
            ring = np.maximum(ring - computing[way == "backward"][index], _SHOWS * ring)
            each.append(joined * (1 - setting.preset.overlap_tensor) + ring + rest)
    forward, again, backward = (np.stack(each) for each in found.values())
    return forward, again, backward


_SHOWS = 0.1  # share of a ring's time that computing never hides
