"""How fast a device does what: its data sheet, and the few constants by which kernels fall short of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from phalanx.forecast.cores import Core
from phalanx.spec import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Constants of a family of devices: measured once, the same for every model and source.

    Attributes:
        product: share of the peak that large products reach.
        waves: share of a last, partly filled round of tiles over the device's units that is lost.
        depth: inner size at which a product reaches half of its rate: filling and draining a tile.
        convolution: rate of convolutions against products of their size, on units for matrices (fp32 has none).
        attention: share of the peak that fused attention reaches forward, with heads of 128.
        attention_backward: and backward.
        stream: share of the memory bandwidth that elementwise kernels reach.
        floor: seconds a kernel takes however small.
        host: seconds the host needs to launch an eager operation.
    """

    product: float = 0.8
    waves: float = 0.5
    depth: float = 128.0
    convolution: float = 0.57
    attention: float = 0.6
    attention_backward: float = 0.5
    stream: float = 0.8
    floor: float = 3e-6
    host: float = 6e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Wires:
    """Constants of collectives.

    Attributes:
        inside: share of the in-node link's bandwidth that large collectives reach.
        between: share of the network's bandwidth.
        start: seconds to start a collective inside a node.
        hop: seconds for each further rank in a ring inside a node.
        start_between: seconds to start one between nodes.
        hop_between: seconds for each further node.
        jitter: share of computing by which a step is longer for each doubling of the nodes: the slowest of many.
        far: seconds that the host waits more for each exchange of ranks on both sockets of a node.
        crowd: share of time added with each doubling of the nodes: jitter, shared switches.
        lines: seconds to start a collective, for each byte, and for each byte of what fits no cache, as measured, by
            ``kind.ranks.start``, ``.byte`` and ``.far``; where there are some, they take the place of all above.
    """

    inside: float = 0.75
    between: float = 0.8
    start: float = 20e-6
    hop: float = 1e-6
    start_between: float = 30e-6
    hop_between: float = 5e-6
    far: float = 0.0
    jitter: float = 0.0
    crowd: float = 0.01
    lines: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @property
    def measured(self) -> bool:
        """Whether there are measured lines."""
        return any(name.endswith(".byte") for name in self.lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A device as forecasts see it.

    Attributes:
        peak: FLOP/s by data type.
        bandwidth: bytes/s of its memory.
        units: processors on it that compute a tile each.
        kernels: by how much kernels fall short.
        wires: by how much collectives do.
        core: constants of a CPU core where it was measured, whose laws then hold in place of those of GPUs.
    """

    peak: Mapping[str, float]
    bandwidth: float
    units: int = 1
    kernels: Kernels = field(default_factory=Kernels)
    wires: Wires = field(default_factory=Wires)
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
_CUDA = Wires(
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
    """The generation that ``device`` is of; its kind where none is known."""
    for name, words in _WORDS.items():
        if device.name.startswith(words):
            return name
    return device.kind


def rates(device: Device) -> Rates:
    """The rates of a device of the catalog, with the constants of its family, or those of the family most like it."""
    near = {"blackwell": _HOPPER}.get(family(device), _AMPERE)
    kernels = _FAMILIES.get(family(device), near)
    if device.launch is not None and device.kind != "cpu":
        kernels = replace(kernels, host=max(kernels.host, device.launch))
    return measured(
        device,
        Rates(peak=device.peak, bandwidth=device.bandwidth, units=device.processors or 1, kernels=kernels, wires=_CUDA),
    )


def measured(device: Device, known: Rates) -> Rates:
    """``known``, with what was measured on the machine in place of the constants of the family.

    A CPU core has laws and constants of its own; of other devices, constants go by their names in ``Kernels`` and
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
