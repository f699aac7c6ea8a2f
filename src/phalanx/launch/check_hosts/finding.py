"""One thing that is wrong on hosts, and which of several hosts differ from most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.launch.check_hosts.asking import HostAnswer
from phalanx.units import show_names

FindingKind = Literal[
    "clock",
    "data",
    "devices",
    "folder",
    "host",
    "job",
    "limits",
    "links",
    "memory",
    "packages",
    "plan",
    "queue",
    "versions",
]
"""What a finding is about, in a word; ``queue``: of what a queue itself refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFinding:
    """One thing that is wrong on hosts.

    Attributes:
        kind: what it is about.
        hosts: where; those that differ from most, where hosts differ.
        what: was found.
        fix: what to do.
        fails: whether training would fail by it.
    """

    kind: FindingKind
    hosts: tuple[str, ...]
    what: str
    fix: str
    fails: bool = True


def odd_ones(
    what: str,
    there: Sequence[HostAnswer],
    value: Callable[[HostAnswer], str | None],
    fix: str,
    *,
    fails: bool = True,
) -> Iterator[HostFinding]:
    """A finding of the hosts whose ``value`` is not that of most, where they differ."""
    groups: dict[str, list[str]] = defaultdict(list)
    for one in there:
        if (found := value(one)) is not None:
            groups[found].append(one.name)
    if len(groups) > 1:
        few = sorted(groups.items(), key=lambda item: len(item[1]))  # the first hosts are most where as many differ
        few = [*few[:-1], few[-1]] if len(few[0][1]) < len(few[-1][1]) else [*reversed(few)]
        words = ", ".join(f"{found} on {show_names(names)}" for found, names in few)
        odd = tuple(name for _, names in few[:-1] for name in names)
        yield HostFinding(kind="versions", hosts=odd, what=f"{what} {words}", fix=fix, fails=fails)


_WAYS = (
    ("host key verification", "ssh {name}, once by hand: look at its key, and accept it if it is the right one"),
    ("resolve hostname", 'an entry {name} in ~/.ssh/config; or ssh = ["-F", "ssh.config"] in the hosts file'),
    (
        "connection refused",
        "ssh {name} true: see that sshd listens there, at the port that ~/.ssh/config has",
    ),
    ("permission denied", "ssh-copy-id {name}: nobody is asked for a password here"),
    ("no such file", 'python = "/path/to/python" and folder = "/path" in the hosts file: those on the hosts'),
    ("not found", 'python = "/path/to/python" in the hosts file: without it, it is the path of the interpreter here'),
)


def way_there(name: str, said: str) -> str:
    """What to do where the host ``name`` cannot be used, by what ssh or its shell ``said``."""
    ways = (way for sign, way in _WAYS if sign in said.lower())
    return next(ways, "ssh {name} true: see that it is up, and that its name and address are right").format(name=name)
