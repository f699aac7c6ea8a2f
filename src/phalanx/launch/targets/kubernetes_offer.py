"""What the options of a launch on Kubernetes say of its pods: GPUs and their kind, or cores and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.hardware.catalog import find
from phalanx.launch.targets.offer import Offer

_BY_LABEL = re.compile(r"[^=]*(?:gpu|accelerator)[^=]*=(?:nvidia-)?(?P<kind>.+)", re.IGNORECASE)
_OF_CLOUDS = {"tesla-a100": "A100-40GB", "tesla-v100": "V100-16GB"}  # as GKE calls them
_CORES = re.compile(r"[1-9][0-9]{0,6}")
_MEMORY = re.compile(r"(?P<number>[1-9][0-9]{0,14})(?P<unit>[kMGTP]i?)?")
_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "M", "G", "T", "P"))}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P")) if unit}


def pods_offered(options: Mapping[str, str]) -> Offer | None:
    """What so many pods have by ``--gpus-per-node`` and a label of ``--node-selector`` that names the kind of GPU; of
    pods without GPUs by ``--cpu`` and ``--memory``, a process each. ``None`` where the options do not say it.

    Options that are wrong offer nothing: what prepares the launch says so.
    """
    nodes, gpus = options.get("nodes", "1"), options.get("gpus-per-node", "")
    if not _CORES.fullmatch(nodes):
        return None
    if gpus == "0":
        cores, memory = options.get("cpu", ""), _bytes(options.get("memory", ""))
        known = _CORES.fullmatch(cores)
        return Offer(nodes=int(nodes), devices=1, cores=int(cores), memory=memory, by="--cpu") if known else None
    labels = [_BY_LABEL.fullmatch(word) for word in options.get("node-selector", "").split(",")]
    names = [label["kind"].lower() for label in labels if label]
    found = [
        entry for name in names if (entry := find(_OF_CLOUDS.get(name, name)) or find(name.removeprefix("tesla-")))
    ]
    if len(found) != 1 or not _CORES.fullmatch(gpus):
        return None
    return Offer(nodes=int(nodes), devices=int(gpus), device=found[0].device.name, by="--gpus-per-node")


def _bytes(amount: str) -> int:
    matched = _MEMORY.fullmatch(amount)
    return int(matched["number"]) * _UNITS[matched["unit"] or ""] if matched else 0
