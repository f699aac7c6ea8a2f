"""What is wrong with the links between hosts: ways that lead nowhere, and links far slower than the others."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.launch.check_hosts.asking_links import LinkAnswer
from phalanx.launch.check_hosts.finding import HostFinding
from phalanx.units import show_bytes, show_names

_SLOW = 0.25  # of the bandwidth that most hosts have on their best link
_OPEN = "let firewalls pass TCP between the hosts, to {} on all ports, and see that they share a network"
_CABLE = "see the cable, the switch and the speed that the interface shows: ethtool, ip -s link"


def link_findings(links: Sequence[LinkAnswer], hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[HostFinding]:
    """Of the ``links`` between ``hosts``, that where all workers meet first, by what each host told."""
    yield from _addresses(hosts)
    alone = _alone(links)
    for name in alone:
        errors = sorted({one.error for one in links if name in (one.source, one.target)})
        what = f"it reaches no other host, and none reaches it at {hosts[name]['address']}: {show_names(errors)}"
        yield HostFinding(kind="links", hosts=(name,), what=what, fix=_OPEN.format(name))
    others = [one for one in links if one.source not in alone and one.target not in alone]
    yield from _closed([one for one in others if one.error], others, hosts)
    measured = [one for one in others if not one.error and one.bandwidth]
    yield from _slow(measured)


def _addresses(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[HostFinding]:
    for name, told in hosts.items():
        if told["meets"]:
            what = f"workers cannot meet at {told['address']}: {told['meets']}"
            fix = "give an address of the host's own that the others reach"
            yield HostFinding(kind="links", hosts=(name,), what=what, fix=fix)
        elif not told["address"] and len(hosts) > 1:
            first = next(iter(hosts))
            fix = "connect it to the network of the others, and let it know their names"
            what = f"it knows no way to {hosts[first]['address'] or first}, where all workers meet"
            yield HostFinding(kind="links", hosts=(name,), what=what, fix=fix)


def _alone(links: Sequence[LinkAnswer]) -> list[str]:
    """Hosts without one way to or from another, where others have some."""
    names = dict.fromkeys(name for one in links for name in (one.source, one.target))
    joined = {name for one in links if not one.error for name in (one.source, one.target)}
    return [name for name in names if name not in joined] if joined else []


def _closed(
    failed: Sequence[LinkAnswer], links: Sequence[LinkAnswer], hosts: Mapping[str, Mapping[str, Any]]
) -> Iterator[HostFinding]:
    """One finding for all ways that lead to one port."""
    ways: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for one in failed:
        ways[one.target, one.port, one.error].append(one.source)
    for (target, port, error), sources in ways.items():
        asked = [one for one in links if one.target == target]
        who = "no other host reaches" if len(sources) == len(asked) > 1 else f"{show_names(sources)} does not reach"
        what = f"{who} {target} at {hosts[target]['address']}:{port}: {error}"
        yield HostFinding(kind="links", hosts=(target,), what=what, fix=_OPEN.format(target))


def _slow(links: Sequence[LinkAnswer]) -> Iterator[HostFinding]:
    """Links far slower than what most hosts can do, named by the host where all that one sends or gets is slow."""
    sends, gets = _best(links, "source"), _best(links, "target")
    if len(sends) < 3:  # of two hosts there is nothing to compare with
        return
    usual = statistics.median([*sends.values(), *gets.values()])
    slow_out = {name for name, bandwidth in sends.items() if bandwidth < _SLOW * usual}
    slow_in = {name for name, bandwidth in gets.items() if bandwidth < _SLOW * usual}
    for name in sorted(slow_out | slow_in):
        both = name in slow_out and name in slow_in
        what = "all its links carry" if both else "it sends" if name in slow_out else "it gets"
        bandwidth = sends[name] if name in slow_out else gets[name]
        what = f"{what} {show_bytes(bandwidth)}/s; most hosts {show_bytes(usual)}/s"
        yield HostFinding(kind="links", hosts=(name,), what=what, fix=_CABLE, fails=False)
    for one in links:
        if one.bandwidth < _SLOW * usual and one.source not in slow_out and one.target not in slow_in:
            carries = f"{show_bytes(one.bandwidth)}/s go from {one.source} to {one.target}"
            what = f"{carries}; over most links {show_bytes(usual)}/s"
            yield HostFinding(kind="links", hosts=(one.source, one.target), what=what, fix=_CABLE, fails=False)


def _best(links: Sequence[LinkAnswer], end: str) -> dict[str, float]:
    best: dict[str, float] = {}
    for one in links:
        name = getattr(one, end)
        best[name] = max(best.get(name, 0.0), one.bandwidth)
    return best
