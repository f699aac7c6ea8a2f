"""From what hosts said of themselves, or what a target says of them, to the cluster that plans and forecasts are for.

Pure: nobody is asked anything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from phalanx.config import Cluster, Group, Host, Link, Network
from phalanx.errors import RunError, SpecError
from phalanx.hardware import entry
from phalanx.hardware.probe import Gpu, cpu_group, cpu_processes, link_of, matched, measured
from phalanx.launch.check_hosts.host_answer import HostAnswer, LinkAnswer
from phalanx.launch.check_hosts.host_survey import HostSurvey
from phalanx.launch.targets.offer import Offer
from phalanx.units import show_names

_ALIKE = 0.05  # share of their memory by which machines of one kind may differ
_ONE_STREAM = 6e8  # bytes per second from which one connection says more of its hosts than of what joins them


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """What one host has for its workers.

    Attributes:
        gpu: the smallest of those it uses; ``None`` where its workers compute on its cores.
        count: devices that it uses: GPUs, or processes that share its cores.
        memory: bytes of the host.
    """

    name: str
    gpu: Gpu | None
    link: Link
    count: int
    cores: int
    memory: int

    @classmethod
    def of(cls, answer: HostAnswer) -> _Machine:
        facts, whole = answer.facts, answer.working
        assert facts
        count = answer.processes or len(whole) or 1
        gpu, link = None, entry("cpu").link
        if len(whole) >= count:
            gpu = min((Gpu(name=one.name, memory=one.total) for one in whole), key=lambda one: one.memory)
            link = link_of(facts.topology, len(facts.devices), matched(gpu))
        return cls(name=answer.name, gpu=gpu, link=link, count=count, cores=facts.cores, memory=facts.memory)

    def is_like(self, other: _Machine) -> bool:
        """Return True if the two are of one kind."""
        pairs = [(self.memory, other.memory)]
        if self.gpu and other.gpu:
            if self.gpu.name != other.gpu.name or self.link != other.link:
                return False
            pairs.append((self.gpu.memory, other.gpu.memory))
        elif self.gpu or other.gpu or self.cores != other.cores:
            return False
        return self.count == other.count and all(abs(one - two) <= _ALIKE * one for one, two in pairs)


def cluster_there(survey: HostSurvey) -> Cluster:
    """The hosts in their order, neighbours of one kind as a group, and the network that was measured between them.

    Of a GPU the catalog's figures, with the memory that was found; of cores the catalog's, an equal share to each of
    the host's workers. TCP tells nothing of InfiniBand: between hosts that have it, the network is the catalog's, as it
    is where no link was measured.

    Raises:
        RunError: a host gave no answer; each is named, with why.
        SpecError: some hosts have GPUs for all their workers and others have not.
    """
    if silent := [one for one in survey.hosts if not one.facts]:
        lines = [f"host {one.name} cannot be used: {one.error}" for one in silent]
        raise RunError("\n".join([*lines, "    try: phalanx check --to TARGET, which says more"]))
    machines = [_Machine.of(one) for one in survey.hosts]
    _refuse_mixture(machines)
    kinds: list[list[_Machine]] = []
    for one in machines:
        if kinds and kinds[-1][0].is_like(one):
            kinds[-1].append(one)
        else:
            kinds.append([one])
    shares = {kind[0].cores / kind[0].count for kind in kinds}
    groups = tuple(_group(kind, one_share=len(shares) == 1) for kind in kinds)
    return Cluster(groups=groups, network=_network(survey, machines))


def cluster_offered(offer: Offer) -> Cluster:
    """The machines of an offer, with the catalog's figures of everything that it does not say."""
    if offer.device:
        known = entry(offer.device)
        group = Group(device=known.device, link=known.link, host=known.host, per_node=offer.devices, nodes=offer.nodes)
        return Cluster(groups=(group,), network=known.network(offer.devices))
    cores = offer.cores or offer.devices
    host = Host(name="a node", slots=offer.devices, cores=cores, memory=offer.memory or None)
    group = cpu_processes(cpu_group(host), offer.devices, cores / offer.devices, host)
    return Cluster(groups=(replace(group, nodes=offer.nodes),), network=entry("cpu").network(1))


def _refuse_mixture(machines: Sequence[_Machine]) -> None:
    """
    Raises:
        SpecError: workers of one run compute on GPUs, or all on cores.
    """
    without = [one.name for one in machines if not one.gpu]
    if not 0 < len(without) < len(machines):
        return
    given = f"{show_names(without)}, without a GPU for each worker, beside hosts that have them"
    allowed = "hosts that all have GPUs, or none; or a plan with device=cpu"
    raise SpecError.of("hosts", given, allowed, f"leave {show_names(without)} out, or give fewer devices for it")


def _group(alike: Sequence[_Machine], *, one_share: bool) -> Group:
    """``one_share``: all hosts of the cluster give each of their workers as many cores."""
    first, memory = alike[0], min(one.memory for one in alike)
    gpus = [one.gpu for one in alike if one.gpu]
    host = Host(name=show_names([one.name for one in alike]), slots=first.count, cores=first.cores, memory=memory)
    if not gpus:
        had = first.cores / first.count
        group = cpu_processes(cpu_group(host), first.count, had, host)
        device = group.device if one_share else replace(group.device, name=f"cpu-{had:g}-cores")
        return replace(group, device=device, nodes=len(alike))
    least = min(gpus, key=lambda one: one.memory)
    known = matched(least)
    around = replace(host, link=known.host.link)
    return Group(device=measured(least, known), link=first.link, host=around, per_node=first.count, nodes=len(alike))


def _network(survey: HostSurvey, machines: Sequence[_Machine]) -> Network:
    by_catalog = [matched(one.gpu).network(one.count) if one.gpu else entry("cpu").network(1) for one in machines]
    usual = min(by_catalog, key=lambda one: one.bandwidth)
    links = [one for one in survey.links if not one.error and one.bandwidth > 0]
    if not links or all(one.facts and one.facts.infiniband for one in survey.hosts):
        return usual
    speeds = {one.name: one.facts.speed for one in survey.hosts if one.facts}
    slowest = min(_carries(one, speeds.get(one.source, 0.0)) for one in links)  # a ring goes over all of them
    trip = _rounded(median(one.latency for one in links))
    return Network(bandwidth=_rounded(slowest), latency=trip / 2)


def _carries(link: LinkAnswer, interface: float) -> float:
    """Bytes per second, of one connection or, where that is as much as one can be, by the word of the interface."""
    return max(link.bandwidth, interface) if link.bandwidth > _ONE_STREAM else link.bandwidth


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
