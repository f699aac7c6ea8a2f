"""The speed of devices: data sheets with the efficiency of kernels, or constants measured on a CPU core.

A core waits for nothing but itself: each operation costs its call, its arithmetic, its traffic through cache or memory,
and the pages of its result if these are fresh from the kernel. GPUs follow other laws: see ``kernels``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from phalanx.config import Device
from phalanx.forecast.operation_arrays import Array, Mask

_PIECE = 2.0**20  # from this size on, freed memory goes back to the kernel: hardware/probe.py
_CAST = 6.0  # bytes read and written to cast an element
_MADE = 0.4  # share of its traffic that an operation writes, if not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """Constants of one core, alone on the machine."""

    floor: float  # seconds that an eager operation takes, however small
    # seconds for each element that a product reads or writes beside computing, by precision
    operand: Mapping[str, float] = field(hash=False)
    convolution: float = 0.5  # share of the peak that convolutions reach
    # least size of the product a convolution amounts to, at which it reaches half of that
    convolution_half: float = 0.0
    convolution_backward: float = 0.5  # as ``convolution``, of the backward
    convolution_backward_half: float = 0.0  # as ``convolution_half``, of the backward
    attention: float = 0.5  # share of the peak that fused attention reaches forward
    attention_backward: float = 0.5  # and backward
    near: float  # bytes/s of an operation whose traffic fits the cache
    far: float  # bytes/s of one that does not
    cache: float  # bytes of traffic between the two
    fresh: float = 0.0  # seconds for each byte of a result of 1 MiB or more whose pages come from the kernel
    # seconds for each element of traffic that an operation takes beyond ``near`` or ``far``, by its name
    pace: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    # share of its traffic that an operation writes, by its name
    made: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    # seconds to step one parameter, by the optimizer
    update: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    # seconds beyond that where freed memory goes back to the kernel
    update_fresh: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    # seconds to step one tensor of parameters beyond that, by the optimizer
    tensor: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    busy: float = 1.0  # by how much arithmetic slows down when all cores compute
    busy_stream: float = 1.0  # by how much traffic does
    # seconds of each step that no part explains, by processes
    rest: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    # seconds beyond those of a send in which a stage hands something on to the next, by processes
    relay: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @classmethod
    def of(cls, measured: Mapping[str, float]) -> Core | None:
        """Build the core of ``Device.measured``; ``None`` if a needed constant was not measured."""
        if not {"floor", "near", "far", "cache", "operand.fp32"} <= measured.keys():
            return None
        plain = {name: measured[name] for name in cls.__slots__ if name in measured}
        groups = {
            name: _under(name, measured)
            for name in ("operand", "pace", "made", "update", "update_fresh", "tensor", "rest", "relay")
        }
        return cls(**plain, **groups)  # pyrefly: ignore

    def products(self, sizes: tuple[Array, Array, Array, Array], peak: float, precision: str) -> Array:
        """Return seconds of ``batch`` products of m x k by k x n, without the pages of their results."""
        batch, m, n, k = sizes
        each = self.operand.get(precision, self.operand["fp32"])
        return self.floor + batch * (2 * m * n * k / peak + each * (m * n + (m + n) * k))

    def convolutions(self, sizes: tuple[Array, Array, Array, Array], peak: float, backward: Mask) -> Array:
        """Return seconds of convolutions as large as these products; few channels use part of each vector."""
        batch, m, n, k = sizes
        share = np.where(backward, self.convolution_backward, self.convolution)[:, None]
        half = np.where(backward, self.convolution_backward_half, self.convolution_half)[:, None]
        least = np.minimum(np.minimum(m, n), k)
        return self.floor + 2 * batch * m * n * k / (peak * share) * (1 + half / least)

    def traffic(self, elements: Array, itemsize: Array, names: Sequence[str]) -> Array:
        """Return seconds of operations on ``elements`` of ``itemsize`` bytes, without the pages of their results."""
        seconds = self.moving(elements * itemsize)
        paces = np.array([self.pace.get(name, 0.0) for name in names])
        return np.where(elements > 0, self.floor + seconds + elements * paces[:, None], 0.0)

    def moving(self, moved: Array) -> Array:
        """Return seconds to read and write this many bytes in one operation."""
        away = moved**2 / (moved**2 + self.cache**2)
        return moved * (away / self.far + (1 - away) / self.near)

    def casts(self, elements: Array) -> Array:
        """Return seconds to cast elements between 32 and 16 bits, as autocast does around products."""
        return elements * _CAST / self.far

    def written(self, moved: Array, names: Sequence[str]) -> Array:
        """Return the part of ``moved`` that operations with these names write."""
        return moved * np.array([self.made.get(name, _MADE) for name in names])[:, None]

    def pages(self, size: Array) -> Array:
        """Return seconds to get fresh pages for a result of ``size`` bytes."""
        return np.where(size >= _PIECE, self.fresh * size, 0.0)

    def stepping(self, optimizer: str, parameters: Array, tensors: Array, returned: Array) -> Array:
        """Return seconds of the optimizer's step; an unmeasured one counts as AdamW."""
        known = optimizer if optimizer in self.update else "adamw"
        each = self.update.get(known, 0.0) + self.update_fresh.get(known, 0.0) * returned
        return each * parameters + self.tensor.get(known, 0.0) * tensors

    def fixed(self, processes: Array) -> Array:
        """Return seconds of each step that no part explains."""
        return _by_processes(self.rest, processes)

    def relayed(self, processes: Array) -> Array:
        """Return seconds in which a stage hands on a result, beyond the send."""
        return _by_processes(self.relay, processes) if self.relay else np.zeros_like(processes)


def _by_processes(known: Mapping[str, float], processes: Array) -> Array:
    counts = sorted(map(int, known))
    return np.interp(processes, counts, [known[str(count)] for count in counts])


def _under(name: str, measured: Mapping[str, float]) -> dict[str, float]:
    return {key.partition(".")[2]: value for key, value in measured.items() if key.startswith(f"{name}.")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Constants of a family of devices: measured once, the same for every model and source."""

    product: float = 0.8  # share of the peak that large products reach
    waves: float = 0.5  # share of a last, partly filled round of tiles over the device's units that is lost
    depth: float = 128.0  # inner size at which a product reaches half of its rate: filling and draining a tile
    # rate of convolutions against products of their size, on units for matrices (fp32 has none)
    convolution: float = 0.57
    attention: float = 0.6  # share of the peak that fused attention reaches forward, with heads of 128
    attention_backward: float = 0.5  # and backward
    stream: float = 0.8  # share of the memory bandwidth that elementwise kernels reach
    floor: float = 3e-6  # seconds a kernel takes however small
    host: float = 6e-6  # seconds the host needs to launch an eager operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Wires:
    """Constants of collectives."""

    inside: float = 0.75  # share of the in-node link's bandwidth that large collectives reach
    between: float = 0.8  # share of the network's bandwidth
    start: float = 20e-6  # seconds to start a collective inside a node
    hop: float = 1e-6  # seconds for each further rank in a ring inside a node
    start_between: float = 30e-6  # seconds to start one between nodes
    hop_between: float = 5e-6  # seconds for each further node
    far: float = 0.0  # seconds that the host waits more for each exchange of ranks on both sockets of a node
    # share of computing by which a step is longer for each doubling of the nodes: the slowest of many
    jitter: float = 0.0
    crowd: float = 0.01  # share of time added with each doubling of the nodes: jitter, shared switches
    # seconds to start a collective, for each byte, and for each byte of what fits no cache, as measured, by
    # ``kind.ranks.start``, ``.byte`` and ``.far``; where there are some, they take the place of all above
    lines: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @property
    def measured(self) -> bool:
        return any(name.endswith(".byte") for name in self.lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A device's speed in forecasts."""

    peak: Mapping[str, float]  # FLOP/s by data type
    bandwidth: float  # bytes/s of its memory
    units: int = 1  # processors on it that compute a tile each
    kernels: Kernels = field(default_factory=Kernels)  # by how much kernels fall short
    wires: Wires = field(default_factory=Wires)  # by how much collectives do
    # constants of a CPU core where it was measured, whose laws then hold in place of those of GPUs
    core: Core | None = None


_AMPERE = Kernels(
    product=0.832,
    waves=0.01,
    depth=10.0,
    attention=0.572,
    attention_backward=0.245,
    stream=0.604,
    floor=11.9e-6,
    host=10e-6,
)
_HOPPER = Kernels(
    product=0.695,
    waves=0.99,
    depth=304.0,
    attention=0.27,
    attention_backward=0.23,
    stream=0.6,
    floor=12e-6,
    host=10e-6,
)
_GPU_WIRES = Wires(
    inside=0.68,
    between=0.993,
    start=43e-6,
    hop=4.8e-6,
    start_between=5e-6,
    hop_between=7.3e-6,
    jitter=0.0094,
    far=0.2e-3,
    crowd=0.075,
)
"""Fitted on half of the published runs, by a hash of their id; inside a node on measured curves of 8 devices."""

_FAMILIES = {"ampere": _AMPERE, "hopper": _HOPPER}
_WORDS = {
    "ampere": ("A100", "A10", "A30", "A40", "RTX-3"),
    "hopper": ("H100", "H200", "GH200", "H800"),
    "blackwell": ("B200", "GB200", "B300"),
    "ada": ("L4", "RTX-4"),
    "volta": ("V100", "T4", "P100"),
}


def family(device: Device) -> str:
    """Return the generation of ``device``; its kind if unknown."""
    for name, words in _WORDS.items():
        if device.name.startswith(words):
            return name
    return device.kind


def rates(device: Device) -> Rates:
    """Return the rates of a catalog device, with the constants of its family, or of the most similar family."""
    near = {"blackwell": _HOPPER}.get(family(device), _AMPERE)
    kernels = _FAMILIES.get(family(device), near)
    if device.launch is not None and device.kind != "cpu":
        kernels = replace(kernels, host=max(kernels.host, device.launch))
    return measured(
        device,
        Rates(
            peak=device.peak,
            bandwidth=device.bandwidth,
            units=device.processors or 1,
            kernels=kernels,
            wires=_GPU_WIRES,
        ),
    )


def measured(device: Device, known: Rates) -> Rates:
    """Return ``known`` with constants measured on the machine in place of the family's.

    A CPU core has its own laws and constants; for other devices, constants have their names in ``Kernels`` and
    ``Wires``.
    """
    found = device.measured
    lines = {name: value for name, value in found.items() if name.endswith((".start", ".byte", ".far"))}
    if device.kind == "cpu":
        # a core's bandwidth is the one that was measured, not a data sheet's of which kernels reach a share
        kernels = replace(known.kernels, host=0.0, stream=1.0) if found else known.kernels
        return replace(known, kernels=kernels, wires=replace(known.wires, lines=lines), core=Core.of(found))
    return replace(
        known,
        kernels=replace(known.kernels, **_named(Kernels, found)),
        wires=replace(known.wires, lines=lines, **_named(Wires, found)),
    )


def _named(kind: type[Kernels] | type[Wires], found: Mapping[str, float]) -> dict[str, Any]:
    return {one.name: found[one.name] for one in fields(kind) if one.name in found}
