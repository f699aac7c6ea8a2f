"""Clusters from text: ``8xH100``, ``4x8xA100-80GB@200Gb/s``, ``8xA100+8xV100``, or the path of a TOML file."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.config import Cluster, Group, Network
from phalanx.errors import SpecError
from phalanx.files import read_toml
from phalanx.hardware.catalog import CatalogEntry, entry, find, unknown

_FORM = "[nodes x] [devices x] name, joined by +, and at the end @ a rate for each node"
_FIX = "4x8xH100@8x400Gb/s"
_RATE = r"(?:(?P<times>\d+)x)?(?P<number>\d*\.?\d+)(?P<scale>[KMGTkmgt]?)(?P<unit>b/s|bit/s|bps|B/s)"
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def cluster(text: str) -> Cluster:
    """Return the cluster for a text or a file, with every figure of the catalog.

    - ``8xH100``: 8 devices in one node; ``H100``: one. ``64xH100``: 8 nodes, as a node of the catalog holds 8.
    - ``4x8xH100``: 4 nodes of 8.
    - ``8xA100+8xV100``: nodes of several kinds. They share the slowest of their networks.
    - ``4x8xH100@200Gb/s``, ``@8x200Gb/s``, ``@25GB/s``: a node's sending rate over the network, in one direction.
      Without it, each node has the adapters of the catalog, and as many fewer as it has fewer devices.
    - ``path/to/cluster.toml``: a file written by ``Cluster.to_toml``. A device's name may replace its table; then link,
      host and network may be left out.

    Raises:
        SpecError: pointing at the character that cannot be read, or naming the nearest devices or counts.
    """
    if text.strip().endswith(".toml"):
        return _from_file(Path(text.strip()))
    return _Reader(text=text).cluster()


@dataclass(kw_only=True, slots=True)
class _Reader:
    """A parser of one text, from left to right; ``at`` is the index of the next character."""

    text: str
    at: int = 0

    def cluster(self) -> Cluster:
        groups = [self._group()]
        while self._take(r"\+"):
            groups.append(self._group())
        rate = self._rate() if self._take("@") else None
        if self.text[self.at :].strip():
            raise self._wrong("the end" if rate else f"+, @ or the end, as in {_FORM}")
        slowest = min((network for _, network in groups), key=lambda one: one.bandwidth)
        network = Network(bandwidth=rate, latency=slowest.latency) if rate else slowest
        return Cluster(groups=tuple(group for group, _ in groups), network=network)

    def _group(self) -> tuple[Group, Network]:
        counts: list[tuple[int, int]] = []
        while len(counts) < 2 and (found := self._take(r"(\d+)\s*[x×*]")):
            counts.append((int(found.group(1)), found.start()))  # pyrefly: ignore[missing-attribute]
        begin = self.at
        name = self._take(r"(?:[A-Za-z]|\d{4})[\w.-]*")
        if name is None:
            expected = "a number and x, or the name of a device" if len(counts) < 2 else "the name of a device"
            if len(counts) < 2 and self._take(r"\d+"):
                expected = "x and the name of a device"
            raise self._wrong(f"{expected}, as in {_FORM}")
        found = find(name.group().strip())
        if found is None:
            self.at = begin + len(name.group()) - len(name.group().lstrip())
            problem = unknown(name.group().strip())
            raise self._wrong(problem.allowed, fix=self._with(name.span(), problem.fix))
        for count, place in counts:
            if count == 0:
                self.at = place
                raise self._wrong("a number, 1 or more")
        return _group_of([count for count, _ in counts], found, self.text)

    def _rate(self) -> float:
        found = self._take(_RATE)
        if found is None:
            raise self._wrong("a rate such as 200Gb/s, 8x200Gb/s, 25GB/s or 100Mb/s", fix=_FIX)
        rate = float(found["number"]) * _SCALES[found["scale"].lower()] * int(found["times"] or 1)
        rate = rate if found["unit"] == "B/s" else rate / 8
        if rate == 0:
            self.at = found.start()
            raise self._wrong("a rate above 0", fix=_FIX)
        return rate

    def _take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(rf"\s*(?:{pattern})").match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def _with(self, span: tuple[int, int], name: str) -> str:
        if name.startswith("phalanx "):
            return name
        return f"{self.text[: span[0]]}{name}{self.text[span[1] :]}".strip()

    def _wrong(self, expected: str, fix: str = _FIX) -> SpecError:
        rest = self.text[self.at :]
        at = self.at + len(rest) - len(rest.lstrip())
        given = f"{self.text!r}\n    {self.text}\n    {' ' * at}^ here"
        return SpecError.of(where="cluster", given=given, allowed=expected, fix=fix)


def _group_of(counts: list[int], found: CatalogEntry, text: str) -> tuple[Group, Network]:
    slots = found.host.slots
    match counts:
        case [nodes, per_node]:
            pass
        case [count] if slots and count > slots:
            if count % slots:
                name, below = found.device.name, count // slots * slots
                given = f"{text!r}: {count} {name} do not fill nodes of {slots}"
                allowed = f"{below} or {below + slots} of them, or nodes x devices"
                raise SpecError.of(where="cluster", given=given, allowed=allowed, fix=f"{below}x{name}")
            nodes, per_node = count // slots, slots
        case _:
            nodes, per_node = 1, counts[0] if counts else 1
    group = Group(device=found.device, link=found.link, host=found.host, per_node=per_node, nodes=nodes)
    return group, found.network(per_node)


def _from_file(path: Path) -> Cluster:
    allowed = "a TOML file of a cluster, or text such as 8xH100"
    table = read_toml(path, where="cluster", allowed=allowed, fix="8xH100")
    rows = table.get("groups")
    if isinstance(rows, list):
        entries = [_filled(row) for row in rows]
        known = [(row, one) for row, one in zip(rows, entries, strict=True) if one]
        if "network" not in table and len(known) == len(rows) > 0:
            networks = [one.network(_count(row, one)) for row, one in known]
            table["network"] = asdict(min(networks, key=lambda one: one.bandwidth))
    return Cluster.from_table(_without_none(table))


def _filled(row: Any) -> CatalogEntry | None:
    if not (isinstance(row, dict) and isinstance(row.get("device"), str)):
        return None
    found = entry(row["device"])
    row["device"] = asdict(found.device)
    row.setdefault("link", asdict(found.link))
    row.setdefault("host", asdict(found.host))
    return found


def _count(row: dict[str, Any], found: CatalogEntry) -> int:
    count = row.get("per_node", 1)
    return count if isinstance(count, int) and count > 0 else found.per_node


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
