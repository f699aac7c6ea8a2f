"""The parts of a cluster: a device, the links between devices, the host they sit in, the network between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from phalanx.config.fields import FieldKind, is_number, misfits
from phalanx.device_kinds import hardware_names
from phalanx.errors import Problem, SpecError

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Names a device's ``peak`` may have, in the order they are shown."""


def _text(fix: str) -> FieldKind:
    return FieldKind(types=(str,), allowed="a name", fix=fix)


def _number(allowed: str, fix: str) -> FieldKind:
    return FieldKind(types=(float,), allowed=f"a number of {allowed}, 0 or more", fix=fix)


def _whole(allowed: str, fix: str) -> FieldKind:
    return FieldKind(types=(int,), allowed=f"a whole number of {allowed}, 0 or more", fix=fix)


_BANDWIDTH = _number("bytes per second in one direction", "bandwidth = 25e9")
_LATENCY = _number("seconds", "latency = 3.4e-6")
_LINK = {"name": _text('name = "NVLink 4"'), "bandwidth": _BANDWIDTH, "latency": _LATENCY}
_DEVICE = {
    "name": _text('name = "H100"'),
    "kind": FieldKind(types=(str,), allowed="a kind of device", fix='kind = "cpu"'),
    "memory": _whole("bytes", "memory = 85899345920"),
    "bandwidth": _number("bytes per second", "bandwidth = 3.35e12"),
    "kept": _whole("bytes", "kept = 1073741824"),
    "power": _number("watts", "power = 700"),
    "launch": _number("seconds", "launch = 5e-6"),
    "processors": _whole("multiprocessors", "processors = 132"),
}
_HOST = {
    "name": _text('name = "DGX H100"'),
    "slots": _whole("devices", "slots = 8"),
    "cores": _whole("cores", "cores = 112"),
    "memory": _whole("bytes", "memory = 2000000000000"),
    "numa": _whole("NUMA nodes", "numa = 2"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One thing that computes: a GPU, a TPU chip, or a CPU core.

    Attributes:
        name: as the catalog calls it, such as ``H100``.
        kind: as plans say it, such as ``cpu``; ``rocm`` where torch has one name for the devices of two makers.
        peak: most FLOP/s of matrix products by dtype, without sparsity. A dtype that is not there is not supported.
        memory: bytes of its memory.
        bandwidth: bytes per second between it and its memory.
        kept: bytes of ``memory`` that driver and runtime keep from a training process.
        power: watts it may draw at most; ``None`` where not published.
        launch: seconds the host needs to start one kernel; ``None`` where not known.
        processors: streaming multiprocessors or compute units; ``None`` where not known.
        measured: constants of its kernels and exchanges by name, as ``phalanx calibrate`` found them on the machine;
            they stand in place of those of its family. Empty where nobody measured.
    """

    name: str
    kind: str
    peak: Mapping[str, float] = field(hash=False)
    memory: int
    bandwidth: float
    kept: int = 0
    power: float | None = None
    launch: float | None = None
    processors: int | None = None
    measured: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    def __post_init__(self) -> None:
        problems = _wrong("device", self, _DEVICE) + _wrong_peak(self.peak) + _wrong_measured(self.measured)
        if _DEVICE["kind"].holds(self.kind) and self.kind not in (words := hardware_names()):
            fix = _DEVICE["kind"].fix
            problems.append(Problem(where="device.kind", given=repr(self.kind), allowed=", ".join(words), fix=fix))
        if not problems and self.bandwidth == 0:
            allowed = "more than 0 bytes per second"
            problems.append(Problem(where="device.bandwidth", given="0", allowed=allowed, fix="bandwidth = 3.35e12"))
        if not problems and self.kept > self.memory:
            allowed = f"at most the memory, {self.memory}"
            problems.append(Problem(where="device.kept", given=str(self.kept), allowed=allowed, fix="kept = 0"))
        if problems:
            raise SpecError(problems)

    @property
    def room(self) -> int:
        """Bytes a training process can use for tensors: the memory less what driver and runtime keep."""
        return self.memory - self.kept

    def ridge(self, dtype: str) -> float:
        """FLOP per byte of memory traffic above which a product in ``dtype`` is bound by arithmetic.

        Williams et al. 2009, "Roofline", section 3.

        Raises:
            KeyError: if the device does not support ``dtype``.
        """
        return self.peak[dtype] / self.bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What joins devices of one node, or a device and its host.

    Attributes:
        name: such as ``NVLink 4``.
        bandwidth: bytes per second that one device can send while it receives as much.
        latency: seconds that one hop takes, however little is sent.
    """

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_line("link", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What joins nodes.

    Attributes:
        bandwidth: bytes per second that one node can send while it receives as much, all its adapters together.
        latency: seconds that one hop takes, however little is sent.
        name: such as ``8 x 400 Gb/s InfiniBand``; empty where a user gave only a rate.
    """

    bandwidth: float
    latency: float
    name: str = ""

    def __post_init__(self) -> None:
        _check_line("network", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine that holds devices.

    Attributes:
        name: such as ``DGX H100``.
        slots: devices it holds when full; 0 where any number fits.
        link: between one device and the memory of the host; ``None`` where the device computes in that memory.
        cores: CPU cores of the machine; ``None`` where not known.
        memory: bytes of its memory; ``None`` where not known.
        numa: NUMA nodes of the machine; ``None`` where not known.
    """

    name: str
    slots: int = 0
    link: Link | None = None
    cores: int | None = None
    memory: int | None = None
    numa: int | None = None

    def __post_init__(self) -> None:
        problems = _wrong("host", self, _HOST)
        if problems:
            raise SpecError(problems)


def _check_line(where: str, line: Link | Network) -> None:
    problems = _wrong(where, line, _LINK)
    if not problems and line.bandwidth == 0:
        allowed = "more than 0 bytes per second"
        problems.append(Problem(where=f"{where}.bandwidth", given="0", allowed=allowed, fix=_BANDWIDTH.fix))
    if problems:
        raise SpecError(problems)


def _wrong(where: str, part: object, kinds: Mapping[str, FieldKind]) -> list[Problem]:
    values: dict[str, object] = {name: getattr(part, name) for name in kinds}
    optional = {one.name for one in fields(cast(Any, part)) if one.default is None}
    given = {name: value for name, value in values.items() if value is not None or name not in optional}
    problems = misfits(where, given, kinds)
    return problems + [
        Problem(where=f"{where}.{name}", given=repr(value), allowed=kinds[name].allowed, fix=kinds[name].fix)
        for name, value in given.items()
        if kinds[name].holds(value) and isinstance(value, int | float) and not (is_number(value) and value >= 0)
    ]


def _wrong_peak(peak: object) -> list[Problem]:
    allowed, fix = f"FLOP/s, more than 0, by dtype: {', '.join(DTYPES)}", "peak = {fp32 = 67e12, bf16 = 989e12}"
    if not isinstance(peak, Mapping) or len(cast(Any, peak)) == 0:
        return [Problem(where="device.peak", given=repr(cast(Any, peak)), allowed=allowed, fix=fix)]
    return [
        Problem(where=f"device.peak.{name}", given=repr(value), allowed=allowed, fix=fix)
        for name, value in cast(Mapping[str, Any], peak).items()
        if name not in DTYPES or not is_number(value) or value <= 0
    ]


def _wrong_measured(measured: object) -> list[Problem]:
    allowed, fix = "numbers, 0 or more, by the names of what was measured", "phalanx calibrate"
    if not isinstance(measured, Mapping):
        return [Problem(where="device.measured", given=repr(measured), allowed=allowed, fix=fix)]
    return [
        Problem(where=f"device.measured.{name}", given=repr(value), allowed=allowed, fix=fix)
        for name, value in cast(Mapping[str, Any], measured).items()
        if not is_number(value) or value < 0
    ]
