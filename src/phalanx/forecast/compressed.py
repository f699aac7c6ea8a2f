"""Gradients that are made smaller before they are sent: bytes on the way, and what it takes to make them so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phalanx.forecast.layouts import Layouts, Texts
from phalanx.forecast.links import collective
from phalanx.forecast.setting import Setting
from phalanx.forecast.stages import Stages
from phalanx.forecast.tables import Array, Table
from phalanx.spec.compress import Codec, Compression

_BYTES: dict[Codec, float] = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0 + 4.0 / 256, "powersgd": 4.0}
"""Of a message, an element: int8 has a scale of 4 bytes for 256 of them. topk takes 8 for each that it sends."""

_AVERAGED: dict[Codec, float] = {"fp16": 76.0, "bf16": 48.0, "int8": 135.0, "topk": 82.0, "powersgd": 62.0}
"""Bytes moved in memory, an element that is averaged: each operation of ``parallel.compress`` reads and writes once."""

_PUSHED: dict[Codec, float] = {"fp16": 22.0, "bf16": 12.0, "int8": 97.0, "topk": 78.0}
"""The same for an element that a worker encodes for a server, with what it keeps of what it leaves out."""

_READ = 17.0
"""Bytes a server moves to read an element and add it."""

_FED_BACK = ("int8", "topk", "powersgd")


def compressed(layouts: Layouts) -> Array:
    """Whether a plan sends less: shape (N,)."""
    return layouts.compress != "none"


def message(layouts: Layouts) -> Array:
    """Bytes of one rank's message, an element that is sent."""
    return _each(layouts.compress, lambda one: 8 * one.amount if one.codec == "topk" else _BYTES[one.codec])


def averaging(count: Array, thin: Array, layouts: Layouts, inner: Array, setting: Setting) -> tuple[Array, Array]:
    """Seconds to average ``count`` elements over ``dp``, on the wire and in memory; whole ones in one all-reduce.

    Half and byte messages go to the rank that adds a chunk up, and the mean of it to all; those of ``topk`` go to all.
    PowerSGD sums ``thin`` elements. ``inner``: how far apart the ranks of ``dp`` stand.
    """
    fabric, dp = setting.fabric, layouts.dp
    size = count * message(layouts)
    kind = _each(layouts.compress, lambda one: {"topk": 2.0, "powersgd": 3.0, "none": 0.0}.get(one.codec, 1.0))
    to_all = collective("all-gather", np.where(kind == 2, dp, 1.0) * size, dp, inner, fabric)
    two = collective("all-to-all", size, dp, inner, fabric) + to_all
    summed = collective("all-reduce", np.where(kind == 3, thin, count) * _BYTES["none"], dp, inner, fabric)
    wire = np.select([kind == 1, kind == 2], [two, to_all], summed)
    moved = count * _each(layouts.compress, lambda one: _AVERAGED.get(one.codec, 0.0))
    return wire / setting.habits.reach, moved / (setting.rates.bandwidth * setting.rates.kernels.stream)


def pushed(count: Array, layouts: Layouts, setting: Setting) -> tuple[Array, Array]:
    """Seconds for a worker to encode ``count`` elements, and for a server's host to read them from all workers."""
    encode = count * _each(layouts.compress, lambda one: _PUSHED.get(one.codec, 0.0))
    read = np.where(compressed(layouts), count * _READ * layouts.dp, 0.0)
    return encode / (setting.rates.bandwidth * setting.rates.kernels.stream), read / setting.processor


def fed_back(layouts: Layouts) -> Array:
    """Bytes a parameter takes on a device for what was left out of its gradients."""
    there = _each(layouts.compress, lambda one: 4.0 if one.codec in _FED_BACK else 0.0)
    return np.where((layouts.sync > 0) | (layouts.server > 0), 0.0, there)


def thin(costs: Table, lie: Stages, layouts: Layouts) -> Array:
    """Elements that PowerSGD sums: two thin matrices for each, as if all of a part's were square and of its mean size.

    Source: Vogels et al., "PowerSGD", 2019, section 3: r (n + m) of n m elements, which is least where n = m.
    """
    rank = _each(layouts.compress, lambda one: one.amount if one.codec == "powersgd" else 0.0)
    each = np.zeros((len(costs.parts), len(rank)))
    for index, part in enumerate(costs.parts):
        for one in part.weights:
            size = one.elements / max(one.tensors, 1)
            each[index] += one.tensors * np.minimum(2 * rank * np.sqrt(size), size)
    found: Array = np.einsum("kpn,pn->kn", lie.each, each).max(axis=0)
    return found


def _each(texts: Texts, value: Callable[[Compression], float]) -> Array:
    """A number for each plan's text."""
    found = np.full(len(texts), value(Compression.parse("none")))
    for text in np.unique(texts[texts != "none"]).tolist():
        found[texts == text] = value(Compression.parse(text))
    return found
