"""The time of one micro-batch in each part of the model: its operations on a device, and its exchanges.

Products are priced by tiles, attention by its products, the rest by its traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.forecast.layouts import Layouts
from phalanx.forecast.network import Fabric, seconds
from phalanx.forecast.operation_arrays import Array, Mask, OperationArrays
from phalanx.forecast.presets import Preset
from phalanx.forecast.rates import Rates
from phalanx.placement.collective_bytes import PartPass, Pass, Widths, inside


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSetting:
    """One kind of device with its interconnect and framework."""

    rates: Rates
    fabric: Fabric  # between devices
    preset: Preset
    precision: str  # computed in
    host: float = 25e9  # bytes/s between a device and the memory of its host
    bus: float = 0.0  # seconds until a copy between the two begins
    processor: float = 100e9  # bytes/s at which a host steps the parameters of a server on it


_ITEMSIZE = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0}


def itemsize(precision: str) -> float:
    """Return bytes of an activation in ``precision``; fp8 products read 8 bits, other operations 16."""
    return _ITEMSIZE[precision]


def price(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting) -> Array:
    """Return seconds of every operation under every candidate of ``layouts``: shape (operations, N)."""
    rates, preset, precision = setting.rates, setting.preset, setting.precision
    dims = _dims(costs, layouts)
    if rates.core:
        return _on_a_core(costs, layouts, dims, rates, precision)
    seconds, size, kernels = np.zeros_like(dims[0]), itemsize(precision), rates.kernels
    at = costs.matmul
    seconds[at] = _products(*(one[at] for one in dims[:4]), rates=rates, precision=precision)
    if precision != "fp32":
        seconds[costs.convolution] /= kernels.convolution
    at = costs.attention
    seconds[at] = _attention(costs, [one[at] for one in dims], rates, preset, precision)
    at = costs.memory
    moved = costs.traffic.at(layouts.micro, layouts.length)
    if preset.joined:
        moved += preset.joined * (costs.fused.at(layouts.micro, layouts.length) - moved)
    width = np.where(costs.wide, np.maximum(size, 4.0), size)[:, None]
    moved = (moved / _divided(costs, layouts) * width)[at]
    seconds[at] = moved / (rates.bandwidth * kernels.stream) + kernels.floor * (moved > 0)
    return seconds


def _on_a_core(costs: OperationArrays, layouts: Layouts, dims: list[Array], rates: Rates, precision: str) -> Array:
    assert rates.core
    core, size, returned = rates.core, itemsize(precision), layouts.returned > 0
    seconds, at = np.zeros_like(dims[0]), costs.matmul
    batch, m, n, k = (one[at] for one in dims[:4])
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
    flops = np.where(backward, 10.0, 4.0) * costs.half[at][:, None] * samples * heads * queries * keys * width
    share = np.where(backward, core.attention_backward, core.attention)
    made = np.where(backward, 3.0, 1.0) * samples * heads * queries * width * size
    seconds[at] = core.floor + flops / (rates.peak[precision] * share) + returned * core.pages(made)
    at, names = costs.memory, [name for name, one in zip(costs.names, costs.memory, strict=True) if one]
    elements = (costs.traffic.at(layouts.micro, layouts.length) / _divided(costs, layouts))[at]
    width = np.full((int(at.sum()), 1), 4.0)  # between products, autocast leaves the stream in fp32
    fresh = returned * core.pages(core.written(elements * width, names))
    seconds[at] = core.traffic(elements, width, names) + fresh
    return seconds


def _divided(costs: OperationArrays, layouts: Layouts) -> Array:
    by = np.ones((len(costs.part), len(layouts.tp)))
    by[costs.inner] *= _cut_over(costs, layouts)[costs.inner]
    by[costs.tokens] *= np.where(layouts.sequence > 0, layouts.tp, 1.0)
    return by * np.where((costs.traffic.length > 0)[:, None], layouts.cp, 1.0)


def _cut_over(costs: OperationArrays, layouts: Layouts) -> Array:
    return np.where(layouts.tp[None, :] <= costs.most[:, None], layouts.tp[None, :], 1.0)


def _dims(costs: OperationArrays, layouts: Layouts) -> list[Array]:
    dims = [laws.at(layouts.micro, layouts.length) for laws in costs.dims]
    waiting: Mask = np.ones(len(costs.part), dtype=bool)
    for laws, dim in zip(costs.dims, dims, strict=True):  # the tokens of one dimension are shared out, not of two
        cut = waiting & (laws.length > 0)
        dim[cut] /= layouts.cp
        waiting &= ~cut
    tp = _cut_over(costs, layouts)
    first, cut_n, cut_k = costs.matmul & ~costs.backward, costs.column, costs.row
    later = costs.matmul & costs.backward & ~costs.weights
    last = costs.matmul & costs.weights & (cut_n | cut_k)
    heads = costs.attention & costs.inner
    divided = [
        (2, first & cut_n),
        (3, first & cut_k),
        (3, later & cut_n),
        (2, later & cut_k),
        (2, last),
        (0, costs.matmul & costs.inner),
        (1, heads),
        (2, heads),
    ]
    for at, rows in divided:
        dims[at][rows] /= tp[rows]
    dims[0][costs.matmul & costs.expert] /= layouts.ep
    dims[1][costs.matmul & costs.expert] *= layouts.ep
    return dims


_TILES = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.97), (128.0, 64.0, 0.85), (64.0, 64.0, 0.7))
"""Rows and columns of the tiles that libraries choose from, and the rate of each against the largest: a smaller one
reads more for what it computes."""


def _products(batch: Array, m: Array, n: Array, k: Array, *, rates: Rates, precision: str) -> Array:
    """Price matrix products: tiles go to compute units in rounds, and each round fills and drains the pipeline.

    Like libraries, this takes the tile with the least time.
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


def _attention(costs: OperationArrays, dims: list[Array], rates: Rates, preset: Preset, precision: str) -> Array:
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
        return flops / (rates.peak[computed] * share * narrow) * (1 + 0.5 * (idle - 1)) + kernels.floor
    scores = _products(samples * heads, queries, keys, width, rates=rates, precision=computed)
    values = _products(samples * heads, queries, width, keys, rates=rates, precision=computed)
    products = np.where(backward, 2.0, 1.0) * (scores + values)
    moved = np.where(backward, 1.5, 1.0) * preset.scores * pairs * itemsize(computed)
    return products + moved / (rates.bandwidth * kernels.stream) + 3 * kernels.floor


def widths(preset: Preset, precision: str, zero: Array) -> Widths:
    """Return bytes of sent elements, for the framework's computation in ``precision``."""
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
    """Seconds of one micro-batch in each part of the model (counted once): shape (parts, N) each."""

    before: Array  # all of the forward
    back: Array  # all of the backward
    weights: Array  # of it, for weights' gradients only
    again: Array  # of it, recomputing
    exchange: Array  # of both, exchanges that stand in their way
    waiting: Array  # of both, the device waits for the host to launch
    by_kind: Array  # computing: shape (kinds, parts, N), see ``KINDS``


def compute(costs: OperationArrays, layouts: Layouts, setting: DeviceSetting) -> Times:
    """Return the times of every part under every candidate."""
    rates, preset = setting.rates, setting.preset
    priced = price(costs, layouts, setting)
    late = costs.backward & costs.weights
    forward, inputs, weights = (_summed(priced, costs, one) for one in (~costs.backward, costs.backward & ~late, late))
    again = _again(costs, priced, layouts, preset, forward)
    anew = np.where(layouts.recompute == 2, 1.0, 0.0) * _blocks(costs)
    sent, sent_again, sent_back = _exchanged(costs, layouts, setting, priced)
    once = (layouts.recompute == 1) & (preset.selective != "cheap")  # what others keep of a block spares its exchanges
    repeated = np.where(once, 0.0, layouts.mesh.again) * _blocks(costs)
    sent_back = sent_back + repeated * (sent_again if preset.stops_early else sent)
    ones = np.ones_like(priced)
    apart = _summed(ones, costs, costs.row & costs.matmul & ~costs.backward)
    apart = rates.wires.far * apart * (layouts.tp > setting.fabric.socket)
    each = rates.kernels.host * preset.launches
    launched, launched_back = (_summed(ones, costs, rows) * each + apart for rows in (~costs.backward, costs.backward))
    computed, computed_back = forward + sent, inputs + weights + again + sent_back
    waiting = np.maximum(launched - computed, 0.0)
    waiting_back = np.maximum(launched_back + anew * launched - computed_back, 0.0)
    return Times(
        before=computed + waiting,
        back=computed_back + waiting_back,
        weights=weights,
        again=again,
        exchange=sent + sent_back,
        waiting=waiting + waiting_back,
        by_kind=np.stack([_summed(priced, costs, rows) for rows in (costs.matmul, costs.attention, costs.memory)]),
    )


def _blocks(costs: OperationArrays) -> Array:
    return np.array([part.role == "block" for part in costs.parts], dtype=float)[:, None]


def _summed(seconds: Array, costs: OperationArrays, rows: Mask) -> Array:
    chosen = (costs.part[None, :] == np.arange(len(costs.parts))[:, None]) & rows[None, :]
    return chosen.astype(float) @ seconds


def _again(costs: OperationArrays, priced: Array, layouts: Layouts, preset: Preset, forward: Array) -> Array:
    if preset.selective == "attention":
        some = _summed(priced, costs, costs.attention & ~costs.backward)
    elif preset.selective == "alternate":
        some = forward / 2
    else:
        some = _summed(priced, costs, costs.memory & ~costs.backward)
        if preset.selective == "second":
            some = some + _summed(priced, costs, costs.matmul & ~costs.backward) / 2
    recompute = layouts.recompute
    return _blocks(costs) * np.where(recompute == 2, forward, np.where(recompute == 1, some, 0.0))


def _exchanged(
    costs: OperationArrays, layouts: Layouts, setting: DeviceSetting, priced: Array
) -> tuple[Array, Array, Array]:
    """Return seconds of ``tp``, ``cp`` and ``ep`` exchanges that computing does not hide: shape (parts, N) each.

    The three results are the forward, the forward repeated by a backward, and the backward. Only a ring is hidden: keys
    and values travel while attention computes (Liu et al., "Ring Attention", 2023).
    """
    mesh, wide, fabric = layouts.mesh, widths(setting.preset, setting.precision, layouts.zero), setting.fabric
    nothing = np.zeros_like(layouts.tp)
    found: dict[Pass, list[Array]] = {"forward": [], "again": [], "backward": []}
    computing = {
        backward: _summed(priced, costs, costs.attention & (costs.backward == backward)) for backward in (False, True)
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
