"""GPUs as a driver reports them: which entry of the catalog each is, and what joins them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from phalanx.hardware.catalog import Entry, context, entry, find, names
from phalanx.spec import Device, Link

_MAKERS = r"^(NVIDIA|Tesla|Quadro|GeForce|AMD|Instinct|Radeon)[ -]+"
_LANE, _SLOW_LANE = 25e9, 14.0625e9  # bytes per second and direction: NVLink 2 to 4, and the bridges of GA102 cards
_SLOW_LANES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device as the driver reports it.

    Attributes:
        name: such as ``NVIDIA A100-SXM4-80GB``.
        memory: bytes the driver offers.
    """

    name: str
    memory: int


def matched(gpu: Gpu) -> Entry:
    """The catalog's entry for a device; the entry ``cuda`` where the catalog does not know it."""
    name = gpu.name.strip()
    while (shorter := re.sub(_MAKERS, "", name, flags=re.IGNORECASE)) != name:
        name = shorter
    found = find(name) or find(f"{name}-{round(gpu.memory / 2**30)}GB")
    if found and _fits(gpu, found.device):
        return found
    # one name, several sizes: such as an H100 with 96 GB
    family = name.split()[0].split("-")[0].lower() if name else ""
    same = [one for one in map(entry, names()) if one.device.name.lower().split("-")[0] == family]
    fitting = [one for one in same if found and _fits(gpu, one.device)]
    return min(fitting, key=lambda one: one.device.memory - gpu.memory, default=entry("cuda"))


def measured(gpu: Gpu, found: Entry) -> Device:
    """The entry's device, with the memory that the driver offers on this one."""
    size = max(found.device.memory, gpu.memory) if found.device.name != "cuda" else gpu.memory
    kept = min(size, size - gpu.memory + context(found.device.kind))
    return replace(found.device, memory=size, kept=kept)


def link_of(matrix: str, count: int, found: Entry) -> Link:
    """What joins ``count`` GPUs, from the matrix that ``nvidia-smi topo -m`` prints; the catalog's link without one.

    NVLink counts where it leads from every GPU to every other, if over others: rings follow it. Else it is PCIe.
    """
    rows = _rows(matrix)
    if count < 2 or len(rows) < count:
        return found.link
    lanes = [[int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in row] for row in rows]
    if not _connected(lanes):
        return found.host.link or found.link
    if found.link.name.startswith("NVLink"):
        return found.link
    fewest = min(max(row) for row in lanes)
    bandwidth = fewest * (_SLOW_LANE if fewest <= _SLOW_LANES else _LANE)
    latency = entry("H100").link.latency
    return Link(name=f"NVLink bridge, {fewest} lanes", bandwidth=bandwidth, latency=latency)


def _connected(lanes: list[list[int]]) -> bool:
    reached, new = {0}, [0]
    while new:
        here = new.pop()
        fresh = [there for there, count in enumerate(lanes[here]) if count and there not in reached]
        reached.update(fresh)
        new += fresh
    return len(reached) == len(lanes)


def _rows(matrix: str) -> list[list[str]]:
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    lines = [line.split() or [""] for line in plain.splitlines()]
    rows = [line for line in lines if re.fullmatch(r"GPU\d+", line[0]) and "X" in line[1:]]
    return [row[1 : len(rows) + 1] for row in rows]


def _fits(gpu: Gpu, device: Device) -> bool:
    return 0.88 * device.memory < gpu.memory <= device.memory
