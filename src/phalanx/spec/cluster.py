"""A cluster: which devices there are, written ``4xcpu``, ``8xcuda`` or ``2x8xcuda`` (nodes × devices)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass

import tomli_w

from phalanx.errors import Problem, SpecError
from phalanx.spec.fields import Kind, misfits

_KINDS = {
    "device": Kind(types=(str,), allowed="a device name such as cpu, cuda or H100", fix='device = "cpu"'),
    "per_node": Kind(types=(int,), allowed="a whole number, 1 or more", fix="per_node = 4"),
    "nodes": Kind(types=(int,), allowed="a whole number, 1 or more", fix="nodes = 2"),
    "memory": Kind(types=(int,), allowed="a whole number of bytes, 0 or more", fix="memory = 85899345920"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Devices of one kind on one or more nodes.

    Attributes:
        device: kind of device: ``cpu``, ``cuda``, or a name from a catalog such as ``H100``.
        per_node: devices in one node.
        nodes: machines.
        memory: bytes of memory of one device; 0 where not known.
    """

    device: str
    per_node: int = 1
    nodes: int = 1
    memory: int = 0

    def __post_init__(self) -> None:
        problems = misfits("cluster", asdict(self), _KINDS)
        problems += [
            Problem(where=f"cluster.{name}", given=str(value), allowed=f"a whole number, {least} or more", fix="4xcpu")
            for name, value, least in (
                ("per_node", self.per_node, 1),
                ("nodes", self.nodes, 1),
                ("memory", self.memory, 0),
            )
            if _KINDS[name].holds(value) and value < least
        ]
        if _KINDS["device"].holds(self.device) and not re.fullmatch(r"(?!x\d)[A-Za-z][\w.+-]+", self.device):
            problems.append(
                Problem(
                    where="cluster.device",
                    given=repr(self.device),
                    allowed="a device name such as cpu, cuda or H100",
                    fix="4xcpu",
                )
            )
        if problems:
            raise SpecError(problems)

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.device}"

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster that ``cpu``, ``8xH100`` or ``4x8xH100`` describes.

        Raises:
            SpecError: pointing at what cannot be read.
        """
        match = re.fullmatch(r"\s*(?:(\d+)x)?(?:(\d+)x)?((?!x\d)[A-Za-z][\w.+-]+)\s*", text)
        if match is None:
            raise SpecError(
                [Problem(where="cluster", given=repr(text), allowed="[nodes x] devices x kind", fix="8xH100")]
            )
        first, second, device = match.groups()
        if second is None:
            return cls(device=device, per_node=int(first or 1))
        return cls(device=device, per_node=int(second), nodes=int(first))

    def to_toml(self) -> str:
        """The cluster as a TOML document."""
        return tomli_w.dumps(asdict(self))

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """The cluster in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(
                [Problem(where="cluster", given=str(error), allowed="a TOML document", fix='device = "cpu"')]
            ) from None
        problems = [
            Problem(where=f"cluster.{key}", given="unknown key", allowed=", ".join(_KINDS), fix='device = "cpu"')
            for key in table
            if key not in _KINDS
        ]
        problems += misfits("cluster", table, _KINDS)
        if "device" not in table:
            problems.append(
                Problem(where="cluster.device", given="nothing", allowed="a device name", fix='device = "cpu"')
            )
        if problems:
            raise SpecError(problems)
        return cls(**table)
