"""A cluster: nodes of devices, the links inside a node and the network between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar, cast

import tomli_w

from phalanx.config.device import Device, Host, Link, Network
from phalanx.config.fields import is_whole
from phalanx.errors import Problem, SpecError
from phalanx.files import toml_table

_T = TypeVar("_T")
_PARTS: dict[str, type] = {"device": Device, "link": Link, "host": Host, "network": Network}
_FILE_FIX = "write the file with Cluster.to_toml()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Equal nodes with equal devices.

    Attributes:
        device: what computes.
        link: between the devices of one node.
        host: the machine around them.
        per_node: devices in one node.
        nodes: machines.
    """

    device: Device
    link: Link
    host: Host
    per_node: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        problems = [
            Problem(where=f"group.{name}", given=repr(value), allowed="a whole number, 1 or more", fix=f"{name} = 4")
            for name, value in (("per_node", self.per_node), ("nodes", self.nodes))
            if not is_whole(value, 1)
        ]
        for name, part in (("device", self.device), ("link", self.link), ("host", self.host)):
            problems += _not_a(name, part, "group")
        if problems:
            raise SpecError(problems)

    @property
    def devices(self) -> int:
        """Devices of all its nodes together."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        # more devices than a node usually has would be read as several nodes
        many = self.nodes > 1 or 0 < self.host.slots < self.per_node
        return f"{self.nodes}x{self.per_node}x{self.device.name}" if many else f"{self.per_node}x{self.device.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Groups of nodes on one network. ``hardware.cluster("4x8xH100")`` makes one from text and the catalog.

    Attributes:
        groups: equal nodes together; more than one where devices differ.
        network: between the nodes.
    """

    groups: tuple[Group, ...]
    network: Network

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if type(self.groups) is not tuple or not all(isinstance(one, Group) for one in self.groups or [None]):
            allowed = "a tuple of one Group or more"
            problems.append(Problem(where="cluster.groups", given=repr(self.groups), allowed=allowed, fix=_FILE_FIX))
        problems += _not_a("network", self.network, "cluster")
        if problems:
            raise SpecError(problems)

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        """Machines of all groups together."""
        return sum(group.nodes for group in self.groups)

    def __str__(self) -> str:
        """The text that ``hardware.cluster`` reads: what differs from the catalog is not in it, but for the rate."""
        rate = f"@{self.network.bandwidth * 8 / 1e9:.12g}Gb/s" if not self.network.name else ""
        return "+".join(map(str, self.groups)) + rate

    def to_toml(self) -> str:
        """The cluster, every figure included, as a TOML document."""
        table = asdict(self)
        table["groups"] = list(table["groups"])
        return tomli_w.dumps(_without_none(table))

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """The cluster in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        table = toml_table(text, where="cluster", fix=_FILE_FIX)
        return cls.from_table(table)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Cluster:
        """The cluster in a table as ``to_toml`` writes it.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        problems = [
            Problem(where=f"cluster.{key}", given="unknown key", allowed="groups, network", fix=_FILE_FIX)
            for key in table
            if key not in ("groups", "network")
        ]
        given = cast(object, table.get("groups"))
        rows: list[object] = [*cast(list[object], given)] if isinstance(given, list) else []
        groups = [_built(Group, f"groups[{place}]", row, problems) for place, row in enumerate(rows)]
        if not rows:
            allowed = "one [[groups]] table or more"
            problems.append(
                Problem(where="cluster.groups", given=repr(table.get("groups")), allowed=allowed, fix=_FILE_FIX)
            )
        network = _built(Network, "network", table.get("network"), problems)
        if problems or network is None:
            raise SpecError(problems)
        return cls(groups=tuple(group for group in groups if group), network=network)


def _not_a(name: str, part: object, where: str) -> list[Problem]:
    if isinstance(part, _PARTS[name]):
        return []
    return [Problem(where=f"{where}.{name}", given=repr(part), allowed=f"a {_PARTS[name].__name__}", fix=_FILE_FIX)]


def _built(cls: type[_T], where: str, given: object, problems: list[Problem]) -> _T | None:
    """An instance from a table, or what is wrong with it added to ``problems``."""
    if not isinstance(given, Mapping):
        allowed = f"a table with {', '.join(_required(cls))}"
        problems.append(
            Problem(where=where, given="nothing" if given is None else repr(given), allowed=allowed, fix=_FILE_FIX)
        )
        return None
    table = cast(Mapping[str, Any], given)
    names = [one.name for one in fields(cast(Any, cls))]
    found = [
        Problem(where=f"{where}.{key}", given="unknown key", allowed=", ".join(names), fix=_FILE_FIX)
        for key in table
        if key not in names
    ]
    found += [
        Problem(where=f"{where}.{name}", given="nothing", allowed=f"a value of {cls.__name__}", fix=_FILE_FIX)
        for name in _required(cls)
        if name not in table
    ]
    values: dict[str, Any] = {}
    for name in (name for name in names if name in table):
        part = _PARTS.get(name) if cls in (Group, Host) else None
        values[name] = _built(part, f"{where}.{name}", table[name], found) if part else table[name]
    problems += found
    try:
        return cls(**values) if not found else None
    except SpecError as error:
        for problem in error.problems:
            inside = problem.where.partition(".")[2]
            path = f"{where}.{inside}" if inside else where
            problems.append(Problem(where=path, given=problem.given, allowed=problem.allowed, fix=problem.fix))
        return None


def _required(cls: type) -> list[str]:
    return [one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING]


def _without_none(value: Any) -> Any:
    match value:
        case dict():
            table = cast(dict[str, Any], value)
            return {name: _without_none(one) for name, one in table.items() if one is not None}
        case list():
            return [_without_none(one) for one in cast(list[Any], value)]
        case _:
            return value
