"""The catalog: published figures of devices, their hosts, links and networks, each with source and year."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.config import Device, Host, Link, Network
from phalanx.config.cluster import DTYPES
from phalanx.errors import Problem, SpecError
from phalanx.units import parse_bytes, show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The document, or the assumption made, behind figures.

    Attributes:
        figures: their kind: ``device``, ``link``, ``host``, ``host link``, ``network`` or ``room``.
    """

    figures: str
    document: str
    year: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """A device with its usual surroundings.

    Attributes:
        link: between the devices of one node.
        host: the machine they usually sit in.
        adapters: network adapters of a full host.
        adapter: the figures of one adapter.
        note: a remark for the user; may be empty.
    """

    device: Device
    link: Link
    host: Host
    adapters: int
    adapter: Network
    aliases: tuple[str, ...]
    sources: tuple[Source, ...]
    note: str

    @property
    def per_node(self) -> int:
        """Return the devices of a full host; 1 if any number fits."""
        return self.host.slots or 1

    def network(self, per_node: int) -> Network:
        """Return the network of a node with ``per_node`` devices; a part of a host has its part of adapters."""
        full = self.host.slots or per_node
        adapters = max(1, math.ceil(self.adapters * min(per_node, full) / full))
        name = f"{adapters} x {self.adapter.bandwidth * 8 / 1e9:g} Gb/s {self.adapter.name}"
        bandwidth = adapters * self.adapter.bandwidth
        return Network(name=name, bandwidth=bandwidth, latency=self.adapter.latency)


def names() -> tuple[str, ...]:
    """Return every device of the catalog, in its order; aliases left out."""
    return tuple(_entries())


def device(name: str) -> Device:
    """Return the device called ``name``, which may be an alias, in any case.

    Raises:
        SpecError: with the nearest names if there is none.
    """
    return entry(name).device


def entry(name: str) -> CatalogEntry:
    """Return the device called ``name`` with its link, host, network and sources.

    Raises:
        SpecError: with the nearest names if there is none.
    """
    found = find(name)
    if found is None:
        raise SpecError([unknown(name)])
    return found


def context(kind: str) -> int:
    """Return bytes of a device's memory that a process of this ``kind`` loses to its runtime; the catalog's
    assumption.
    """
    return parse_bytes(_tables()["assumptions"][kind])


def generic(kind: str = "") -> CatalogEntry:
    """Return the entry for unknown devices of this ``kind``, or of any accelerator.

    ``kind``: its name in plans.
    """
    return find(kind) or entry(_tables()["generic"]["accelerator"])


def find(name: str) -> CatalogEntry | None:
    """Return the entry called ``name``, which may be an alias, in any case; ``None`` if there is none."""
    known = _by_any_name().get(_key(name))
    return _entries()[known] if known else None


def unknown(name: str) -> Problem:
    """Return the problem of a device that is not in the catalog."""
    near = nearest(name)
    allowed = f"{', '.join(near)}, or another that phalanx devices lists" if near else "what phalanx devices lists"
    return Problem(where="device", given=repr(name), allowed=allowed, fix=near[0] if near else "phalanx devices")


def nearest(name: str) -> tuple[str, ...]:
    """Return names of the catalog that look like ``name``, best first."""
    known = _by_any_name()
    close = difflib.get_close_matches(_key(name), known, n=6, cutoff=0.5)
    starting = [one for one in known if _key(name) and one.startswith(_key(name))]
    return tuple(dict.fromkeys(known[one] for one in [*starting, *close]))[:4]


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@cache
def _by_any_name() -> dict[str, str]:
    return {_key(one): name for name, entry in _entries().items() for one in (name, *entry.aliases)}


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("phalanx.hardware").joinpath("catalog.toml").read_text(encoding="utf-8"))


@cache
def _entries() -> dict[str, CatalogEntry]:
    tables = _tables()
    return {name: _entry(name, tables) for name in tables["devices"]}


def _entry(name: str, tables: Mapping[str, Any]) -> CatalogEntry:
    row = tables["devices"][name]
    host, network = tables["hosts"][row["host"]], tables["networks"][row["network"]]
    link, host_link = tables["links"][row["link"]], tables["links"].get(host.get("link"))
    parts = {"device": row, "link": link, "host": host, "host link": host_link, "network": network}
    parts["room"] = tables["assumptions"]
    return CatalogEntry(
        device=_device(name, row, tables["assumptions"]),
        link=_link(link),
        host=Host(
            name=host["name"],
            slots=host["slots"],
            link=_link(host_link) if host_link else None,
            cores=host.get("cores"),
            memory=parse_bytes(host["memory"]) if "memory" in host else None,
            numa=host.get("numa"),
        ),
        adapters=network["nics"],
        adapter=Network(name=network["name"], bandwidth=network["rate"], latency=network["latency"]),
        aliases=tuple(row.get("aliases", ())),
        sources=tuple(
            Source(figures=what, document=part["source"], year=part["date"]) for what, part in parts.items() if part
        ),
        note=row.get("note", ""),
    )


def _device(name: str, row: Mapping[str, Any], assumed: Mapping[str, Any]) -> Device:
    memory = parse_bytes(row["memory"])
    unseen = 0 if row["kind"] == "cpu" else round(memory * assumed["unseen"])
    seen = parse_bytes(row["seen"]) if "seen" in row else memory - unseen
    return Device(
        name=name,
        kind=row["kind"],
        peak=row["peak"],
        memory=memory,
        bandwidth=row["bandwidth"],
        kept=memory - seen + parse_bytes(assumed[row["kind"]]),
        power=row.get("power"),
        launch=row.get("launch"),
        processors=row.get("processors"),
    )


def _link(row: Mapping[str, Any]) -> Link:
    return Link(name=row["name"], bandwidth=row["bandwidth"], latency=row["latency"])


_PEAKS = ("fp32", "tf32", "fp16", "bf16", "fp8")
HEADINGS = ("device", *_PEAKS, "GiB", "TB/s", "ridge", "link", "net", "watts")
NARROW = tuple(heading for heading in HEADINGS if heading not in ("tf32", "watts"))
LEGEND = (
    "TFLOP/s by dtype, dense. Memory: GiB and TB/s. Ridge: FLOP per byte, in bf16 (fp16 where there is none). "
    "Link in a node and network between nodes: GB/s for each device, one direction."
)


def cells(one: CatalogEntry) -> dict[str, str]:
    """Return one device as a row of a table: ``HEADINGS`` → text."""
    device, network = one.device, one.network(one.per_node)
    return {
        "device": device.name,
        **{dtype: _tera(device.peak.get(dtype)) for dtype in _PEAKS},
        "GiB": f"{device.memory / 2**30:.4g}",
        "TB/s": f"{device.bandwidth / 1e12:.3g}",
        "ridge": f"{device.ridge('bf16' if 'bf16' in device.peak else 'fp16'):.0f}",
        "link": f"{one.link.bandwidth / 1e9:.4g}",
        "net": f"{network.bandwidth / one.per_node / 1e9:.3g}",
        "watts": f"{device.power:.0f}" if device.power else "",
    }


def facts(one: CatalogEntry) -> list[tuple[str, str]]:
    """Return all facts of the catalog on a device, as label and text, its sources last."""
    device, network = one.device, one.network(one.per_node)
    peaks = ", ".join(f"{dtype} {_tera(device.peak[dtype])}" for dtype in DTYPES if dtype in device.peak)
    rows = [
        ("device", f"{device.name} ({device.kind})"),
        ("also called", ", ".join(one.aliases)),
        ("peak, TFLOP/s", peaks),
        ("memory", f"{show_bytes(device.memory)}, {device.bandwidth / 1e12:.4g} TB/s"),
        ("room", f"{show_bytes(device.room)} for a training process"),
        ("ridge", ", ".join(f"{name} {device.ridge(name):.0f}" for name in device.peak) + " FLOP/byte"),
        ("processors", str(device.processors or "")),
        ("power", f"{device.power:g} W" if device.power else ""),
        ("link", f"{one.link.name}, {one.link.bandwidth / 1e9:g} GB/s, {_micro(one.link.latency)}"),
        ("host", _host(one.host)),
        ("network", f"{network.name}, {network.bandwidth / 1e9:g} GB/s a node, {_micro(network.latency)}"),
        ("note", one.note),
    ]
    sources = [(f"source: {one.figures}", f"{one.document} ({one.year})") for one in one.sources]
    return [(label, text) for label, text in rows if text] + sources


def _host(host: Host) -> str:
    slots = f"{host.slots} devices" if host.slots else ""
    cores = f"{host.cores} cores" if host.cores else ""
    memory = show_bytes(host.memory) if host.memory else ""
    link = f"each device {host.link.bandwidth / 1e9:g} GB/s over {host.link.name}" if host.link else ""
    return ", ".join(part for part in (host.name, slots, cores, memory, link) if part)


def _tera(rate: float | None) -> str:
    if not rate:
        return ""
    return f"{rate / 1e12:.4g}" if rate >= 1e12 else f"{rate / 1e12:.2g}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs a hop"
