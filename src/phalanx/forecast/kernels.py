"""What one micro-batch takes in each part of the model: its operations on a device, and the exchanges between.

Products are priced by tiles, attention by its products, the rest by its traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.forecast.layouts import Layouts
from phalanx.forecast.network import Fabric, seconds
from phalanx.forecast.operation_arrays import Array, Mask, OperationArrays
from phalanx.forecast.presets import Preset
from phalanx.forecast.rates import Rates
from phalanx.placement.collective_bytes import PartPass, Pass, Widths, inside


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSetting:
    """One kind of device, joined in one way, used by one framework.

    Attributes:
        rates: of the device.
        fabric: between devices.
        preset: of the framework.
        precision: computed in.
        host: bytes/s between a device and the memory of its host.
        bus: seconds until a copy between the two begins.
        processor: bytes/s at which a host steps the parameters of a server on it.
    """

    rates: Rates
    fabric: Fabric
    preset: Preset
    precision: str
    host: float = 25e9
    bus: float = 0.0
    processor: float = 100e9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Priced:
    """Seconds of each operation, and what they are for: shape (operations, N) each.

    Attributes:
        seconds: on the device.
        flops: computed.
    """

    seconds: Array
    flops: Array


_ITEMSIZE = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0}


def itemsize(precision: str) -> float:
    """Bytes of an activation computed in ``precision``; fp8 products read 8 bits, and what lies between has 16."""
    return _ITEMSIZE[precision]


def price(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting) -> Priced:
    """Every operation of ``costs`` under every candidate of ``layouts``."""
    rates, preset, precision = setting.rates, setting.preset, setting.precision
    dims = _dims(costs, layouts)
    flops = np.zeros_like(dims[0])
    seconds = np.zeros_like(dims[0])
    size = itemsize(precision)
    kernels = rates.kernels
    if rates.core:
        return _on_a_core(costs, layouts, dims, rates, precision)
    at = costs.matmul
    flops[at] = 2 * dims[0][at] * dims[1][at] * dims[2][at] * dims[3][at]
    seconds[at] = _products(*(one[at] for one in dims[:4]), rates=rates, precision=precision)
    if precision != "fp32":
        seconds[costs.convolution] /= kernels.convolution
    at = costs.attention
    flops[at], seconds[at] = _attention(costs, [one[at] for one in dims], rates, preset, precision)
    at = costs.memory
    moved = costs.traffic.at(layouts.micro, layouts.length)
    if preset.joined:
        moved += preset.joined * (costs.fused.at(layouts.micro, layouts.length) - moved)
    width = np.where(costs.wide, np.maximum(size, 4.0), size)[:, None]
    moved = (moved / _divided(costs, layouts) * width)[at]
    seconds[at] = moved / (rates.bandwidth * kernels.stream) + kernels.floor * (moved > 0)
    return Priced(seconds=seconds, flops=flops)


def _on_a_core(costs: OperationArrays, layouts: Layouts, dims: list[Array], rates: Rates, precision: str) -> Priced:
    """Every operation by the laws of a CPU core, which the machine's own constants go with."""
    assert rates.core
    core, size, returned = rates.core, itemsize(precision), layouts.returned > 0
    flops, seconds = np.zeros_like(dims[0]), np.zeros_like(dims[0])
    at = costs.matmul
    batch, m, n, k = (one[at] for one in dims[:4])
    flops[at] = 2 * batch * m * n * k
    products = core.products((batch, m, n, k), rates.peak[precision], precision)
    cast = batch * (m + n) * k
    folded = costs.convolution[at]
    sizes = (batch[folded], m[folded], n[folded], k[folded])
    # measured in fp32, which 16 bits hardly beat on cores; a number is cast once for all windows that it is in
    products[folded] = core.convolutions(sizes, rates.peak["fp32"], costs.backward[at][folded])
    cast[folded] = 2 * np.median(np.stack([(m * n)[folded], (m * k)[folded], (n * k)[folded]]), axis=0)
    if size < 4:
        products += core.casts(cast)
    seconds[at] = products + returned * core.pages(batch * m * n * size)
    at = costs.attention
    samples, heads, _, queries, keys, width = (one[at] for one in dims)
    backward = costs.backward[at][:, None]
    flops[at] = np.where(backward, 10.0, 4.0) * costs.half[at][:, None] * samples * heads * queries * keys * width
    share = np.where(backward, core.attention_backward, core.attention)
    made = np.where(backward, 3.0, 1.0) * samples * heads * queries * width * size
    seconds[at] = core.floor + flops[at] / (rates.peak[precision] * share) + returned * core.pages(made)
    at, names = costs.memory, [name for name, one in zip(costs.names, costs.memory, strict=True) if one]
    elements = (costs.traffic.at(layouts.micro, layouts.length) / _divided(costs, layouts))[at]
    width = np.full((int(at.sum()), 1), 4.0)  # between products, autocast leaves the stream in fp32
    fresh = returned * core.pages(core.written(elements * width, names))
    seconds[at] = core.traffic(elements, width, names) + fresh
    return Priced(seconds=seconds, flops=flops)


def _divided(costs: OperationArrays, layouts: Layouts) -> Array:
    """By how many ranks the elements of each operation are divided: shape (operations, N)."""
    by = np.ones((len(costs.part), len(layouts.tp)))
    by[costs.inner] *= layouts.tp
    by[costs.tokens] *= np.where(layouts.sequence > 0, layouts.tp, 1.0)
    return by * np.where((costs.traffic.length > 0)[:, None], layouts.cp, 1.0)


def _dims(costs: OperationArrays, layouts: Layouts) -> list[Array]:
    """The six dimensions of each operation on one rank."""
    dims = [laws.at(layouts.micro, layouts.length) for laws in costs.dims]
    waiting: Mask = np.ones(len(costs.part), dtype=bool)
    for laws, dim in zip(costs.dims, dims, strict=True):  # the tokens of one dimension are shared out, not of two
        cut = waiting & (laws.length > 0)
        dim[cut] /= layouts.cp
        waiting &= ~cut
    first, cut_n, cut_k = costs.matmul & ~costs.backward, costs.column, costs.row
    dims[2][first & cut_n] /= layouts.tp
    dims[3][first & cut_k] /= layouts.tp
    later = costs.matmul & costs.backward & ~costs.weights
    dims[3][later & cut_n] /= layouts.tp
    dims[2][later & cut_k] /= layouts.tp
    last = costs.matmul & costs.weights & (cut_n | cut_k)
    dims[2][last] /= layouts.tp
    dims[0][costs.matmul & costs.inner] /= layouts.tp
    heads = costs.attention & costs.inner
    dims[1][heads] /= layouts.tp
    dims[2][heads] /= layouts.tp
    dims[0][costs.matmul & costs.expert] /= layouts.ep
    dims[1][costs.matmul & costs.expert] *= layouts.ep
    return dims


_TILES = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.97), (128.0, 64.0, 0.85), (64.0, 64.0, 0.7))
"""Rows and columns of the tiles that libraries choose from, and the rate of each against the largest: a smaller one
reads more for what it computes."""


def _products(batch: Array, m: Array, n: Array, k: Array, *, rates: Rates, precision: str) -> Array:
    """Tiles of the result are dealt to the device's units in rounds; the inner size fills and drains each.

    As libraries do, the tile is chosen for which all this takes least.
    """
    kernels = rates.kernels
    speed = rates.peak[precision] * kernels.product / rates.units
    best = np.full(np.broadcast_shapes(m.shape, k.shape), np.inf)
    for rows, columns, rate in _TILES:
        for long, wide in {(rows, columns), (columns, rows)}:
            rounds = batch * np.ceil(m / long) * np.ceil(n / wide) / rates.units
            rounds += kernels.waves * (np.ceil(rounds) - rounds)
            np.minimum(best, rounds * (2 * long * wide / (speed * rate)) * (k + kernels.depth), out=best)
    size = 1.0 if precision == "fp8" else itemsize(precision)
    moved = batch * ((m + n) * k * size + m * n * itemsize(precision))
    return np.maximum(best, moved / (rates.bandwidth * kernels.stream)) + kernels.floor


def _attention(
    costs: OperationArrays, dims: list[Array], rates: Rates, preset: Preset, precision: str
) -> tuple[Array, Array]:
    samples, heads, _, queries, keys, width = dims
    backward = costs.backward[costs.attention][:, None]
    pairs = samples * heads * queries * keys
    kernels = rates.kernels
    computed = "bf16" if precision == "fp8" else precision
    if preset.attention == "fused":
        half = costs.half[costs.attention][:, None]
        flops = np.where(backward, 10.0, 4.0) * half * pairs * width
        share = preset.speed * np.where(backward, kernels.attention_backward, kernels.attention)
        narrow = width / (width + 32.0) * (160.0 / 128.0)  # a head of 64 leaves part of each product idle
        blocks = samples * heads * np.ceil(queries / 128.0)
        rounds = blocks / rates.units
        idle = np.ceil(rounds) / rounds
        return flops, flops / (rates.peak[computed] * share * narrow) * (1 + 0.5 * (idle - 1)) + kernels.floor
    scores = _products(samples * heads, queries, keys, width, rates=rates, precision=computed)
    values = _products(samples * heads, queries, width, keys, rates=rates, precision=computed)
    products = np.where(backward, 2.0, 1.0) * (scores + values)
    moved = np.where(backward, 1.5, 1.0) * preset.scores * pairs * itemsize(computed)
    flops = np.where(backward, 8.0, 4.0) * pairs * width
    return flops, products + moved / (rates.bandwidth * kernels.stream) + 3 * kernels.floor


def widths(preset: Preset, precision: str, zero: Array) -> Widths:
    """Bytes of what is sent: as the framework computes in ``precision``."""
    half = itemsize(precision)
    return Widths(
        products=half,
        stream=np.where(zero == 3, half, 4.0) if preset.autocast else half,
        gathered=half if preset.autocast else preset.gathered,
        weights=preset.weights,
        sent=preset.sent,
    )


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
    priced = price(costs, layouts, setting)
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
        micro = PartPass.of(costs.parts, part, layouts.micro, layouts.length)
        for way, each in found.items():
            joined, ring, rest = nothing, nothing, nothing
            for one in inside(micro, mesh, wide, way):
                lasts = seconds(one, mesh, fabric)
                if one.over == ("tp",):
                    joined = joined + lasts
                elif one.kind == "ring":
                    ring = ring + lasts
                else:
                    rest = rest + lasts
            ring = np.maximum(ring - computing[way == "backward"][index], _SHOWS * ring)
            each.append(joined * (1 - setting.preset.overlap_tensor) + ring + rest)
    forward, again, backward = (np.stack(each) for each in found.values())
    return forward, again, backward


_SHOWS = 0.1  # share of a ring's time that computing never hides
