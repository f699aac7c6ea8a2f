"""A cluster: nodes of devices, the links inside a node and the network between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import tomli_w

from phalanx.config.fields import SelfChecked, Veto, from_table, is_number, nearest, option, shown
from phalanx.device_kinds import hardware_names
from phalanx.errors import Problem, SpecError
from phalanx.files import toml_table

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Names a device's ``peak`` may have, in the order they are shown."""

_FILE_FIX = "write the file with Cluster.to_toml()"
_NEEDED = Veto("bandwidth", lambda one: one.bandwidth == 0, "0", "more than 0 bytes per second", "bandwidth = 25e9")
_ROOM = Veto("kept", lambda one: one.kept > one.memory, "{kept}", "at most the memory, {memory}", "kept = 0")
_PART = {"example": _FILE_FIX}


def _amount(of: str, example: str) -> dict[str, Any]:
    return {"least": 0, "of": of, "example": example}


_RATE = _amount("bytes per second in one direction", "bandwidth = 25e9")
_HOP = _amount("seconds", "latency = 3.4e-6")


def _peak_problems(given: Any) -> list[Problem]:
    allowed, fix = f"FLOP/s, more than 0, by dtype: {', '.join(DTYPES)}", "peak = {fp32 = 67e12, bf16 = 989e12}"
    if not isinstance(given, Mapping) or not given:
        return [Problem(where="device.peak", given=shown(given), allowed=allowed, fix=fix)]
    wrong = [name for name, rate in given.items() if name not in DTYPES or not is_number(rate) or rate <= 0]
    return [Problem(where=f"device.peak.{name}", given=repr(given[name]), allowed=allowed, fix=fix) for name in wrong]


_KIND = {
    "accepts": lambda kind: isinstance(kind, str) and kind in hardware_names(),
    "allowed": lambda: ", ".join(hardware_names()),
    "example": lambda kind: f'kind = "{nearest(str(kind), hardware_names(), cutoff=0.5)}"',
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(SelfChecked, where="device", rules=(_NEEDED, _ROOM)):
    """One unit that computes: a GPU, a TPU chip, or a CPU core.

    Attributes:
        kind: as in plans, such as ``cpu``; ``rocm`` if torch has one name for the devices of two makers.
        peak: most FLOP/s of matrix products by dtype, without sparsity; only dtypes that are supported.
        bandwidth: bytes per second between it and its memory.
        kept: bytes of ``memory`` that driver and runtime keep from a training process.
        power: most watts it draws; ``None`` if not published.
        launch: seconds the host needs to start one kernel; ``None`` if not known.
        processors: streaming multiprocessors or compute units; ``None`` if not known.
        measured: constants of its kernels and exchanges from ``phalanx calibrate``, in place of those of its family.
    """

    name: str = field(metadata={"example": 'name = "H100"'})
    kind: str = field(metadata=_KIND)
    peak: Mapping[str, float] = field(hash=False, metadata={"problems": _peak_problems})
    memory: int = field(metadata=_amount("bytes", "memory = 85899345920"))
    bandwidth: float = field(metadata=_amount("bytes per second", "bandwidth = 3.35e12"))
    kept: int = field(default=0, metadata=_amount("bytes", "kept = 1073741824"))
    power: float | None = field(default=None, metadata=_amount("watts", "power = 700"))
    launch: float | None = field(default=None, metadata=_amount("seconds", "launch = 5e-6"))
    processors: int | None = field(default=None, metadata=_amount("multiprocessors", "processors = 132"))
    measured: Mapping[str, float] = field(
        default_factory=dict[str, float], hash=False, metadata={"least": 0, "example": "phalanx calibrate"}
    )

    @property
    def room(self) -> int:
        """Bytes a training process can use for tensors: ``memory`` without ``kept``."""
        return self.memory - self.kept

    def ridge(self, dtype: str) -> float:
        """Return the FLOP per byte above which a product in ``dtype`` is bound by arithmetic (Williams 2009, 3)."""
        return self.peak[dtype] / self.bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(SelfChecked, where="link", rules=(_NEEDED,)):
    """A connection of devices of one node, or of a device and its host: bytes per second, and seconds of a hop."""

    name: str = field(metadata={"example": 'name = "NVLink 4"'})
    bandwidth: float = field(metadata=_RATE)
    latency: float = field(metadata=_HOP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network(SelfChecked, where="network", rules=(_NEEDED,)):
    """The connection between nodes, all adapters of a node together; without a name if a user gave only a rate."""

    bandwidth: float = field(metadata=_RATE)
    latency: float = field(metadata=_HOP)
    name: str = option("", 'name = "400 Gb/s InfiniBand"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Host(SelfChecked, where="host"):
    """A machine that holds devices.

    Attributes:
        slots: devices it holds when full; 0 for any number.
        link: between one device and the memory of the host; ``None`` if the device computes in that memory.
        numa: NUMA nodes; this, cores and memory (bytes) are ``None`` if not known.
    """

    name: str = field(metadata={"example": 'name = "DGX H100"'})
    slots: int = field(default=0, metadata=_amount("devices", "slots = 8"))
    link: Link | None = option(None, _FILE_FIX)
    cores: int | None = field(default=None, metadata=_amount("cores", "cores = 112"))
    memory: int | None = field(default=None, metadata=_amount("bytes", "memory = 2000000000000"))
    numa: int | None = field(default=None, metadata=_amount("NUMA nodes", "numa = 2"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group(SelfChecked, where="group"):
    """Equal nodes with equal devices, which ``link`` joins in each node."""

    device: Device = field(metadata=_PART)
    link: Link = field(metadata=_PART)
    host: Host = field(metadata=_PART)
    per_node: int = option(1, "per_node = 4", least=1)
    nodes: int = option(1, "nodes = 4", least=1)

    @property
    def devices(self) -> int:
        """Devices of all its nodes together."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        # more devices than a node usually has would be read as several nodes
        many = self.nodes > 1 or 0 < self.host.slots < self.per_node
        return f"{self.nodes}x{self.per_node}x{self.device.name}" if many else f"{self.per_node}x{self.device.name}"


_GROUPS = {
    "accepts": lambda given: type(given) is tuple and all(isinstance(one, Group) for one in given or [None]),
    "allowed": "one [[groups]] table or more",
    "example": _FILE_FIX,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(SelfChecked, where="cluster"):
    """Groups of nodes on one network. ``hardware.cluster("4x8xH100")`` makes one from text and the catalog."""

    groups: tuple[Group, ...] = field(metadata=_GROUPS)
    network: Network = field(metadata=_PART)

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        """Machines of all groups together."""
        return sum(group.nodes for group in self.groups)

    def __str__(self) -> str:
        """Return the text that ``hardware.cluster`` reads: names and rate, without changes of the catalog's figures."""
        rate = f"@{self.network.bandwidth * 8 / 1e9:.12g}Gb/s" if not self.network.name else ""
        return "+".join(map(str, self.groups)) + rate

    def to_toml(self) -> str:
        """Return the cluster as a TOML document with every figure."""
        return tomli_w.dumps(_without_none(asdict(self)))

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """Return the cluster in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        return cls.from_table(toml_table(text, where="cluster", fix=_FILE_FIX))

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Cluster:
        """Return the cluster in a table as ``to_toml`` writes it.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        problems: list[Problem] = []
        made = from_table(cls, "cluster", table, _FILE_FIX, problems)
        if made is None:
            raise SpecError(problems)
        return made


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, tuple | list) else value
