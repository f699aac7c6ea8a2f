"""The file that names the hosts of a launch by SSH: ``hosts.toml``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
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
_NAME = re.compile(r"[\w.:@%+][\w.:@%+-]*")  # for ssh: no option of it, and nothing for a shell
_ADDRESS = re.compile(r"[\w.][\w.-]*")  # torchrun's agents meet at no address of IPv6
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_HOST = {"name", "devices", "address"}
_KINDS: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("folder", "python"), (str, "a text")),
    "ssh": (list, "a list of texts"),
    "environment": (dict, "a table of texts, whose names are of letters, digits and _"),
}


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
    """

    hosts: tuple[HostEntry, ...]
    folder: str = field(default_factory=lambda: str(Path.cwd()))
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
        problems = [
            _wrong(path, f"{name} = ...", ", ".join([*_KINDS, "host"])) for name in sorted({*table} - {*_KINDS, "host"})
        ]
        entries = table.get("host")
        if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
            given = "no [[host]]" if entries is None else repr(entries)
            raise SpecError([*problems, _wrong(path, given, "one [[host]] or more")])
        hosts: list[HostEntry] = []
        for number, entry in enumerate(entries, 1):
            wrong = _entry_problems(entry, f"{path}, host {number}")
            problems += wrong
            if not wrong:
                hosts.append(HostEntry(name=entry["name"], devices=entry.get("devices", 1), address=_address(entry)))
        names = [host.name for host in hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problems.append(_wrong(path, f"{', '.join(twice)}: named twice", "each host once, with all its devices"))
        for name, (kind, allowed) in _KINDS.items():
            value = table.get(name, kind())
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if not isinstance(value, kind) or not all(isinstance(one, str) for one in inside):
                problems.append(_wrong(f"{path}, {name}", repr(value), allowed))
            elif kind is dict:
                problems += [
                    _wrong(f"{path}, {name}", repr(one), allowed) for one in value if not _VARIABLE.fullmatch(one)
                ]
        if problems:
            raise SpecError(problems)
        own = {name: table[name] for name in ("folder", "python", "environment") if name in table}
        return cls(hosts=tuple(hosts), ssh=tuple(table.get("ssh", ())), **own)


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


def _address(entry: Mapping[str, Any]) -> Any:
    return entry.get("address", str(entry.get("name")).rpartition("@")[2])


def _entry_problems(entry: Mapping[str, Any], where: str) -> list[Problem]:
    name, address, devices = entry.get("name"), _address(entry), entry.get("devices", 1)
    problems = [_wrong(where, f"{one} = ...", ", ".join(sorted(_OF_HOST))) for one in sorted({*entry} - _OF_HOST)]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(_wrong(f"{where}, name", repr(name), "a host as ssh knows it"))
    elif not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        problems.append(_wrong(f"{where}, address", repr(address), "a name, or an address of IPv4"))
    if not is_whole(devices, 1):
        problems.append(_wrong(f"{where}, devices", repr(devices), "a whole number, 1 or more"))
    return problems


def _wrong(where: object, given: str, allowed: str) -> Problem:
    return Problem(where=str(where), given=given, allowed=allowed, fix=_FIX.rstrip())
