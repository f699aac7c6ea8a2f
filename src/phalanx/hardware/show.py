"""The catalog as text: one row a device for tables, and all facts of one device."""

from __future__ import annotations

from phalanx.hardware.catalog import Entry, entry, names
from phalanx.spec import Host
from phalanx.spec.device import DTYPES
from phalanx.units import show_bytes

_PEAKS = ("fp32", "tf32", "fp16", "bf16", "fp8")
HEADINGS = ("device", *_PEAKS, "GiB", "TB/s", "ridge", "link", "net", "watts")
NARROW = tuple(heading for heading in HEADINGS if heading not in ("tf32", "watts"))
LEGEND = (
    "TFLOP/s by dtype, dense. Memory: GiB and TB/s. Ridge: FLOP per byte, in bf16 (fp16 where there is none). "
    "Link in a node and network between nodes: GB/s for each device, one direction."
)


def cells(one: Entry) -> dict[str, str]:
    """One device as a row of a table: ``HEADINGS`` → text."""
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


def facts(one: Entry) -> list[tuple[str, str]]:
    """Everything the catalog says of a device, as label and text, its sources last."""
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


def catalog_table() -> str:
    """The catalog as a table in markdown, followed by the sources of each device."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"| --- |{' ---: |' * (len(HEADINGS) - 1)}"]
    entries = [entry(name) for name in names()]
    lines += [f"| {' | '.join(cells(one).values())} |" for one in entries]
    lines += ["", "## Names and sources", "", "| device | also called | source of its figures | year |"]
    lines += ["| --- | --- | --- | --- |"]
    for one in entries:
        source = one.sources[0]
        aliases = ", ".join(f"`{alias}`" for alias in one.aliases)
        lines.append(f"| {one.device.name} | {aliases} | {source.document} | {source.year} |")
    return "\n".join(lines)


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
