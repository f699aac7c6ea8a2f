"""The cluster for plans and forecasts, from the answers of hosts or the offer of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from phalanx.config import Cluster, Group, Host, Network
from phalanx.errors import RunError, SpecError
from phalanx.hardware import entry
from phalanx.hardware.probe import Gpu, cpu_group, cpu_processes, link_of, matched, measured
from phalanx.launch.check import HostAnswer, HostSurvey, LinkAnswer
from phalanx.launch.targets.offer import Offer
from phalanx.units import show_names

_ALIKE = 0.05  # share of their memory by which machines of one kind may differ
_ONE_STREAM = 6e8  # bytes per second from which one connection says more of its hosts than of what joins them


def cluster_there(survey: HostSurvey) -> Cluster:
    """Return the hosts in their order, neighbours of one kind as a group, and the measured network between them.

    GPUs have the catalog's figures and the memory that was found. Workers on cores have an equal share of their host.
    Between hosts with InfiniBand, or if no link was measured, the network is the catalog's: TCP tells nothing of it.

    Raises:
        RunError: a host gave no answer.
        SpecError: only some hosts have GPUs for all their workers.
    """
    if silent := [one for one in survey.hosts if not one.facts]:
        lines = [f"host {one.name} cannot be used: {one.error}" for one in silent]
        raise RunError("\n".join([*lines, "    try: phalanx check --to TARGET, which says more"]))
    found, networks = zip(*map(_group, survey.hosts), strict=True)
    without = [one.host.name for one in found if one.device.kind == "cpu"]
    if 0 < len(without) < len(found):
        given = f"{show_names(without)}, without a GPU for each worker, beside hosts that have them"
        allowed = "hosts that all have GPUs, or none; or a plan with device=cpu"
        raise SpecError.of("hosts", given, allowed, f"leave {show_names(without)} out, or give fewer devices for it")
    kinds: list[list[Group]] = []
    for group in found:
        if kinds and _alike(kinds[-1][0], group):
            kinds[-1].append(group)
        else:
            kinds.append([group])
    one_share = len({(group.host.cores or 0) / group.per_node for group in found}) == 1
    groups = tuple(_joined(alike, one_share=one_share or not without) for alike in kinds)
    usual = min(networks, key=lambda one: one.bandwidth)
    return Cluster(groups=groups, network=_network(survey, usual))


def _group(answer: HostAnswer) -> tuple[Group, Network]:
    """Return a host with its workers, and its network by the catalog."""
    facts, whole = answer.facts, answer.working
    assert facts
    count = answer.processes or len(whole) or 1
    host = Host(name=answer.name, slots=count, cores=facts.cores, memory=facts.memory)
    if len(whole) < count:
        return cpu_processes(cpu_group(host), count, facts.cores / count, host), entry("cpu").network(1)
    gpu = min((Gpu(name=one.name, memory=one.total) for one in whole), key=lambda one: one.memory)
    known = matched(gpu)
    link, around = link_of(facts.topology, len(facts.devices), known), replace(host, link=known.host.link)
    group = Group(device=measured(gpu, known), link=link, host=around, per_node=count)
    return group, known.network(count)


def _alike(one: Group, two: Group) -> bool:
    same = (one.device.name, one.link, one.per_node) == (two.device.name, two.link, two.per_node)
    same = same and (one.device.kind != "cpu" or one.host.cores == two.host.cores)
    pairs = ((one.device.room, two.device.room), (one.host.memory or 0, two.host.memory or 0))
    return same and all(abs(memory - other) <= _ALIKE * memory for memory, other in pairs)


def _joined(alike: Sequence[Group], *, one_share: bool) -> Group:
    """Join hosts of one kind; ``one_share``: each worker of the cluster has as many cores, or computes on a GPU."""
    least = min(alike, key=lambda one: one.device.room)
    names, memory = show_names([one.host.name for one in alike]), min(one.host.memory or 0 for one in alike)
    share = f"cpu-{(least.host.cores or 0) / least.per_node:g}-cores"
    device = least.device if one_share else replace(least.device, name=share)
    return replace(least, device=device, host=replace(least.host, name=names, memory=memory), nodes=len(alike))


def cluster_offered(offer: Offer) -> Cluster:
    """The nodes of an offer, with the catalog's figures of everything that it does not say."""
    known = entry(offer.device)
    group = Group(device=known.device, link=known.link, host=known.host, per_node=offer.devices, nodes=offer.nodes)
    return Cluster(groups=(group,), network=known.network(offer.devices))


def _network(survey: HostSurvey, usual: Network) -> Network:
    links = [one for one in survey.links if not one.error and one.bandwidth > 0]
    if not links or all(one.facts and one.facts.infiniband for one in survey.hosts):
        return usual
    speeds = {one.name: one.facts.speed for one in survey.hosts if one.facts}
    slowest = min(_carries(one, speeds.get(one.source, 0.0)) for one in links)  # a ring goes over all of them
    trip = _rounded(median(one.latency for one in links))
    return Network(bandwidth=_rounded(slowest), latency=trip / 2)


def _carries(link: LinkAnswer, interface: float) -> float:
    """Return the bytes per second of one connection, or of the interface if one connection cannot fill it."""
    return max(link.bandwidth, interface) if link.bandwidth > _ONE_STREAM else link.bandwidth


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
