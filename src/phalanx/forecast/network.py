"""The time of collectives, by kind, bytes, and number of ranks and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.config.plan import AXES
from phalanx.forecast.operation_arrays import Array
from phalanx.forecast.rates import Wires
from phalanx.hardware.sweeps import CACHED
from phalanx.placement.collective_bytes import Exchange, MeshSizes

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The interconnect of ranks."""

    inside: float  # bytes/s of one device to its neighbours in the node, in one direction
    node: float  # bytes/s of one node to others, in one direction
    per_node: int  # devices in a node
    wires: Wires  # by how much collectives fall short
    socket: int = 4  # devices on one socket of it


def seconds(exchange: Exchange, mesh: MeshSizes, fabric: Fabric) -> Array:
    """Return seconds of all repetitions of ``exchange`` in a pass or a step: shape (N,).

    Its ranks are placed in the order of ``AXES``: those of the last dimension are neighbours.
    """
    if not np.any(exchange.times):
        return np.zeros_like(mesh.tp)
    near, room = np.ones_like(mesh.tp), np.full_like(mesh.tp, float(fabric.per_node))
    for axis in reversed(AXES):
        size = getattr(mesh, axis)
        if axis in exchange.over:
            near = near * np.clip(np.floor(room), 1, size)
        room = room / size
    ranks, stride = mesh.ranks(exchange.over), fabric.per_node / near
    size = exchange.size * np.ones_like(mesh.tp)
    # a ring's messages take what a gather of the same takes, which goes around one
    kind: Collective = "all-gather" if exchange.kind == "ring" else exchange.kind
    ranks = np.minimum(ranks, 2.0) if kind == "send" or exchange.ends else ranks
    return np.where(size > 0, exchange.times * collective(kind, size, ranks, stride, fabric), 0.0)


def collective(kind: Collective, size: Array, ranks: Array, stride: Array, fabric: Fabric) -> Array:
    """Return seconds of one collective.

    ``size`` is the bytes of the whole tensor on one rank (the result of an all-gather, the input of a reduce-scatter,
    the message of a send). The group's ranks are ``stride`` apart. A ring sends size x (ranks - 1)/ranks over the
    slowest of its links (twice for an all-reduce). Each rank in a node has its own share of the network.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009; Thakur et al., 2005 (latency terms).
    """
    wires = fabric.wires
    if wires.measured:
        return _measured(kind, size, ranks, wires.lines)
    near = np.clip(np.floor(fabric.per_node / stride), 1, ranks)
    nodes = np.ceil(ranks / near)
    if kind == "send":
        away = stride >= fabric.per_node
        speed = np.where(away, fabric.node / fabric.per_node * wires.between, fabric.inside * wires.inside)
        start = np.where(away, wires.start_between, wires.start)
        return np.where(ranks > 1, start + size / speed, 0.0)
    turns = 2.0 if kind == "all-reduce" else 1.0
    sent = turns * size * (ranks - 1) / np.maximum(ranks, 1)
    inside = fabric.inside * wires.inside * np.ones_like(size)
    network = fabric.node / fabric.per_node * near * wires.between
    speed = np.where(nodes > 1, np.minimum(inside, network), inside)
    if kind == "all-to-all":  # what goes to other nodes goes there directly
        speed = np.where(nodes > 1, np.minimum(inside, network / near * ranks / np.maximum(ranks - near, 1)), inside)
    hops = turns * wires.hop * (near - 1)
    hops += np.where(nodes > 1, np.minimum(turns * (nodes - 1), 4 * np.log2(nodes) + 2) * wires.hop_between, 0.0)
    start = np.where(nodes > 1, wires.start_between, wires.start)
    crowded = 1 + wires.crowd * np.log2(np.maximum(nodes, 1))
    return np.where(ranks > 1, start + hops + sent / speed * crowded, 0.0)


_ALIKE: Mapping[str, tuple[str, ...]] = {
    "all-to-all": ("all-gather", "reduce-scatter", "all-reduce"),
    "all-gather": ("reduce-scatter", "all-reduce"),
    "reduce-scatter": ("all-gather", "all-reduce"),
    "send": ("all-gather", "reduce-scatter", "all-reduce"),
    "all-reduce": ("all-gather", "reduce-scatter"),
}
"""What sends about as much, where a kind was not measured: the nearest first."""


def _measured(kind: Collective, size: Array, ranks: Array, lines: Mapping[str, float]) -> Array:
    there = {key.split(".")[0] for key in lines if key.endswith(".byte")}
    name = next(one for one in (kind, *_ALIKE[kind], *sorted(there)) if one in there)
    counts = sorted(int(key.split(".")[1]) for key in lines if key.startswith(f"{name}.") and key.endswith(".byte"))

    def at(end: str) -> Array:
        values = [lines.get(f"{name}.{count}.{end}", lines[f"{name}.{count}.byte"]) for count in counts]
        return np.interp(ranks, [1, *counts], [0.0, *values]) * np.maximum(ranks / counts[-1], 1.0)

    beyond = np.maximum(size - CACHED, 0.0)
    return np.where(ranks > 1, at("start") + (size - beyond) * at("byte") + beyond * at("far"), 0.0)
