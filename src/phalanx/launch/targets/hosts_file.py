"""The file that names the hosts of a launch by SSH: ``hosts.toml``."""

from __future__ import annotations

import ipaddress
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import RunSpec
from phalanx.config.fields import is_whole
from phalanx.errors import Problem, SpecError
from phalanx.files import read_toml
from phalanx.launch.targets.offer import nearest_plan
from phalanx.launch.targets.option_checks import changing_devices

EXAMPLE = """[[host]]
name = "n1"             # as ssh knows it: of ~/.ssh/config, user@n1, or an address
devices = 8             # workers to start there
address = "10.0.0.1"    # for what workers send each other; name, where it is not given
"""
"""A file that names one host."""

_FIX = "a file such as\n" + "".join(f"        {line}\n" for line in EXAMPLE.splitlines())
_NAME = re.compile(r"[\w.:@%+-]+")  # a host, with its user perhaps; no option of ssh, and nothing for a shell
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_KINDS: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("folder", "python", "code"), (str, "a text")),
    "ssh": (list, "a list of texts"),
    "environment": (dict, "a table of texts"),
}
_OF_HOST = {"name", "devices", "address"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    """One host.

    Attributes:
        name: the destination for ``ssh``.
        devices: number of workers to start there.
        address: for connections from the other hosts.
    """

    name: str
    devices: int
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsFile:
    """The hosts of a launch; rank 0 is on the first, and torchrun's agents meet there.

    Attributes:
        folder: working directory of the workers on each host; that of this process if not given.
        python: the interpreter there; the path of this process's interpreter if not given.
        ssh: options for ``ssh``, such as ``["-F", "ssh.config"]``.
        environment: variables for workers.
        code: a folder here that ``rsync`` copies to the same path on each host.
    """

    hosts: tuple[HostEntry, ...]
    folder: str = field(default_factory=lambda: str(Path.cwd()))
    code: str | None = None
    python: str = sys.executable
    ssh: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of workers on all hosts together."""
        return sum(host.devices for host in self.hosts)

    @classmethod
    def read(cls, path: Path) -> HostsFile:
        """Read the file at ``path``.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        table = read_toml(path, where="--to", fix=f"--to ssh:hosts.toml, {_FIX}", below=0)
        problems = _unknown(table, {*_KINDS, "host"}, str(path))
        entries = table.pop("host", None)
        if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
            given = "no [[host]]" if entries is None else repr(entries)
            raise SpecError([*problems, _wrong(path, given, "one [[host]] or more")])
        hosts: list[HostEntry] = []
        for number, entry in enumerate(entries, 1):
            found, wrong = _entry(entry, f"{path}, host {number}")
            problems += wrong
            hosts += [found] if found else []
        twice = sorted({one.name for one in hosts if sum(other.name == one.name for other in hosts) > 1})
        if twice:
            problems.append(_wrong(path, f"{', '.join(twice)}: named twice", "each host once, with all its devices"))
        for name, (kind, allowed) in _KINDS.items():
            value = table.get(name, kind())
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if not isinstance(value, kind) or not all(isinstance(one, str) for one in inside):
                problems.append(_wrong(f"{path}, {name}", repr(value), allowed))
            elif kind is dict:
                wrong_names = [one for one in value if not _VARIABLE.fullmatch(one)]
                allowed = "names of letters, digits and _"
                problems += [_wrong(f"{path}, {name}", repr(one), allowed) for one in wrong_names]
        if problems:
            raise SpecError(problems)
        return cls(hosts=tuple(hosts), **{**table, "ssh": tuple(table.get("ssh", ()))})


def refuse_size(run: RunSpec, file: HostsFile) -> None:
    """Refuse a plan whose number of processes is not that of the hosts' devices.

    Raises:
        SpecError: it needs more or fewer, or the run's number of devices may change.
    """
    problems: list[Problem] = []
    names = ", ".join(f"{host.name}: {host.devices}" for host in file.hosts)
    if run.plan.processes != file.devices:
        given = f"{run.plan}, of {run.plan.processes} processes, for {file.devices} devices ({names})"
        allowed = "as many processes as the hosts have devices"
        nearest = shlex.quote(str(nearest_plan(run.plan, file.devices)))
        problems.append(Problem(where="--plan", given=given, allowed=allowed, fix=f"--plan {nearest}"))
    if problems := [*problems, *changing_devices(run, "hosts by SSH")]:
        raise SpecError(problems)


def _entry(entry: dict[str, Any], where: str) -> tuple[HostEntry | None, list[Problem]]:
    problems = _unknown(entry, _OF_HOST, where)
    name, devices = entry.get("name"), entry.get("devices", 1)
    address = entry.get("address", name.rpartition("@")[2] if isinstance(name, str) else name)
    if isinstance(address, str) and _is_ipv6(address):
        allowed = "a name, or an address of IPv4: workers meet at those"
        return None, [*problems, _wrong(f"{where}, address", f"{address!r}, an address of IPv6", allowed)]
    for key, value in (("name", name), ("address", address)):
        if not isinstance(value, str) or not _NAME.fullmatch(value) or value.startswith("-"):
            problems.append(_wrong(f"{where}, {key}", repr(value), "a host's name or address"))
    if not is_whole(devices, 1):
        problems.append(_wrong(f"{where}, devices", repr(devices), "a whole number, 1 or more"))
    if problems:
        return None, problems
    return HostEntry(name=str(name), devices=devices, address=str(address)), []


def _is_ipv6(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address.strip("[]")).version == 6
    return False


def _unknown(table: Mapping[str, Any], known: set[str], where: str) -> list[Problem]:
    return [_wrong(where, f"{name} = ...", f"{', '.join(sorted(known))}") for name in sorted(set(table) - known)]


def _wrong(where: object, given: str, allowed: str) -> Problem:
    return Problem(where=str(where), given=given, allowed=allowed, fix=_FIX.rstrip())
