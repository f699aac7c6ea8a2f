"""What is asked: a work, the devices it may use and in which precision; clusters of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from phalanx.config import Cluster, Plan
from phalanx.config.plan import Precision
from phalanx.errors import Problem, SpecError
from phalanx.forecast import PHALANX, Preset, Work
from phalanx.hardware import entry
from phalanx.planner.cost import Prices


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A work and a cluster for it.

    Attributes:
        work: what is done in each step.
        cluster: what there is.
        precision: that plans compute in.
        steps: optimizer steps of the whole training; 0 where nobody knows.
        prices: what devices cost; none where nobody says.
        preset: of the framework.
        look: what keeps a plan from the job, by a look at its model; ``None`` where there is none to look at.
    """

    work: Work
    cluster: Cluster
    precision: Precision
    steps: int = 0
    prices: Prices = field(default_factory=Prices)
    preset: Preset = PHALANX
    look: Callable[[Plan], list[Problem]] | None = field(default=None, compare=False)

    @property
    def mixed(self) -> bool:
        """Whether devices differ."""
        return mixed(self.cluster)

    def on(self, devices: int) -> Question | None:
        """The same on that many of the devices, in as few nodes as hold them; ``None`` if they fill no nodes."""
        cluster = resized(self.cluster, devices)
        return replace(self, cluster=cluster) if cluster else None


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


def full_node(cluster: Cluster) -> int:
    """Devices of a full node of the first kind of ``cluster``; 0 where any number fits.

    As many as its host has slots, or as the nodes of ``cluster`` have where these are several or nobody knows.
    """
    group = cluster.groups[0]
    if group.nodes > 1:
        return group.per_node
    return group.host.slots or (group.per_node if group.per_node > 1 else 0)


def resized(cluster: Cluster, devices: int) -> Cluster | None:
    """A cluster of that many devices of the first kind of ``cluster``; ``None`` if they do not fill whole nodes."""
    full = full_node(cluster) or devices
    if devices > full and devices % full:
        return None
    group = cluster.groups[0]
    nodes, per_node = (devices // full, full) if devices > full else (1, devices)
    network = cluster.network
    if network.name:
        try:
            network = entry(group.device.name).network(per_node)
        except SpecError:  # a device of the user's own file: its network is what the file says
            network = cluster.network
    return Cluster(groups=(replace(group, nodes=nodes, per_node=per_node),), network=network)


def doublings(cluster: Cluster, most: int) -> Iterator[int]:
    """1, 2, 4, ... devices of one node, 1, 2, 4, ... full nodes, and ``most``."""
    full = full_node(cluster) or most
    count = 1
    while count < most:
        yield count
        count = full if count < full < 2 * count else 2 * count
    yield most
