"""Clusters of other sizes, and what their devices compute in best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.errors import SpecError
from phalanx.hardware import entry
from phalanx.spec import Cluster
from phalanx.spec.plan import Precision


def mixed(cluster: Cluster) -> bool:
    """Whether devices differ."""
    return len({group.device.name for group in cluster.groups}) > 1


def precision_for(cluster: Cluster) -> Precision:
    """The fastest that every device has at hand: ``bf16``, else ``fp16``; on CPUs ``fp32``."""
    kinds = [group.device for group in cluster.groups]
    if any(device.kind == "cpu" for device in kinds):
        return "fp32"
    for precision in ("bf16", "fp16"):
        if all(precision in device.peak for device in kinds):
            return precision
    return "fp32"


def resized(cluster: Cluster, devices: int) -> Cluster | None:
    """A cluster of that many devices of the first kind of ``cluster``; ``None`` if they do not fill whole nodes.

    A full node has as many devices as its host has slots, or as the nodes of ``cluster`` where these are several.
    """
    group = cluster.groups[0]
    full = group.per_node if group.nodes > 1 else (group.host.slots or max(devices, group.per_node))
    if devices > full and devices % full:
        return None
    nodes, per_node = (devices // full, full) if devices > full else (1, devices)
    network = cluster.network
    if network.name:
        try:
            network = entry(group.device.name).network(per_node)
        except SpecError:  # a device of the user's own file: its network is what the file says
            network = cluster.network
    return Cluster(groups=(replace(group, nodes=nodes, per_node=per_node),), network=network)


def doublings(most: int) -> Iterator[int]:
    """1, 2, 4, ... and ``most``."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most
