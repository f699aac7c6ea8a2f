"""Findings that need several hosts, or the plan: places, devices, memory, clocks and links."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.config import Plan
from phalanx.device_kinds import DeviceKind, kind_named, probed_kinds
from phalanx.launch.check_hosts.host_answer import HostAnswer, LinkAnswer
from phalanx.units import show_bytes, show_names, show_seconds

_BUSY = 2**30  # bytes of a device that others use
_CLOCK = 5.0  # seconds by which clocks may differ
_SLOW = 0.25  # of the bandwidth that most hosts have on their best link
_OPEN = "let firewalls pass TCP between the hosts, to {} on all ports, and see that they share a network"
_CABLE = "see the cable, the switch and the speed that the interface shows: ethtool, ip -s link"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFinding:
    """One fault.

    Attributes:
        kind: its subject: clock, data, devices, folder, host, job, limits, links, memory, packages, plan, queue (a
            refusal of the queue itself), versions.
        hosts: that have it; the hosts that differ from most, if hosts differ.
        what: the fault, in a sentence.
        fix: the way to mend it.
        fails: training would fail.
    """

    kind: str
    hosts: tuple[str, ...]
    what: str
    fix: str
    fails: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Needs of the run.

    Attributes:
        memory: bytes that each worker needs of its device, or of its host without one; 0: unknown.
        state: bytes of a checkpoint; 0: unknown.
    """

    plan: Plan
    memory: float = 0.0
    state: float = 0.0


def workers_of(answers: Sequence[HostAnswer], needs: Needs) -> dict[str, int]:
    """Return the workers of each host: as many as the target says, else by its devices, else an equal share."""
    left, counts = needs.plan.processes, {}
    even = -(-left // max(1, len(answers)))
    for answer in answers:
        devices = len(answer.facts.devices) // needs.plan.threads if answer.facts else 0
        counts[answer.name] = min(left, answer.processes or devices or even)
        left -= counts[answer.name]
    return counts


def kind_there(there: Sequence[HostAnswer], plan: Plan | None = None) -> DeviceKind:
    """Return the kind of device that the plan names, else the kind that hosts have."""
    if plan and plan.device != "auto":
        return kind_named(plan.device)
    return kind_named(next((one.facts.kind for one in there if one.facts and one.facts.kind), probed_kinds()[0].name))


def device_findings(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    """Find devices that do not compute, or that others use."""
    kind = kind_there(there)
    for host, device in ((one.name, device) for one in there if one.facts for device in one.facts.devices):
        used, leave = device.total - device.free, f"leave it out by {kind.visible} there"
        if device.error:
            what = f"device {device.index} does not work: {device.error}"
            reset = kind.driver_reset.format(index=device.index)
            fix = leave + (f", or reset it: {reset}" if reset else "")
            yield HostFinding(kind="devices", hosts=(host,), what=what, fix=fix)
        elif used > _BUSY:
            what = f"device {device.index} is busy: {show_bytes(used)} in use"
            fix = f"end the processes that use it, or {leave}"
            yield HostFinding(kind="devices", hosts=(host,), what=what, fix=fix, fails=False)


def plan_findings(there: Sequence[HostAnswer], needs: Needs, *, whole: bool) -> Iterator[HostFinding]:
    """Find what the plan lacks there; ``whole``: every host has answered."""
    plan, counts = needs.plan, workers_of(there, needs)
    kind, devices = kind_there(there, plan), sum(len(one.facts.devices) for one in there if one.facts)
    if whole:
        yield from _places(there, plan, kind, devices)
        yield from _split_groups(plan, counts)
    for one in there:
        assert one.facts
        have, takes = len(one.facts.devices), one.processes * plan.threads
        if not kind.on_host and not plan.server and have < takes and devices:  # a server needs none
            what = f"it has {have} {kind.label} devices for its {one.processes} workers, which need {takes}"
            fix = "give as many workers as it has devices, leave it out, or take a plan with device=cpu"
            yield HostFinding(kind="plan", hosts=(one.name,), what=what, fix=fix)
        smaller, count = "phalanx plan JOB shows plans that need less", counts[one.name] * plan.threads
        if not kind.on_host and devices >= plan.devices:
            for device in one.facts.devices[:count]:
                if not device.error and device.free < needs.memory:
                    free, needed = show_bytes(device.free), show_bytes(needs.memory)
                    what = f"device {device.index} has {free} free; a worker needs {needed}"
                    yield HostFinding(kind="memory", hosts=(one.name,), what=what, fix=smaller)
        elif one.facts.memory_free < needs.memory * count:
            free, total = show_bytes(one.facts.memory_free), show_bytes(needs.memory * count)
            what = f"{free} of memory are free; its workers need {total}"
            yield HostFinding(kind="memory", hosts=(one.name,), what=what, fix=smaller)


def _places(there: Sequence[HostAnswer], plan: Plan, kind: DeviceKind, devices: int) -> Iterator[HostFinding]:
    if any(one.processes for one in there):
        places, word = sum(one.processes for one in there), "places"
    elif devices and not kind.on_host:
        places, word = devices // plan.threads, f"{kind.label} devices"
    else:
        places, word = sum(one.facts.cores for one in there if one.facts), "cores"
    names = tuple(one.name for one in there)
    if places < plan.processes:
        what = f"{plan} takes {plan.processes} processes; there are {places} {word} in all"
        fix = f"--plan dp={places}, or more hosts"
        yield HostFinding(kind="plan", hosts=names, what=what, fix=fix, fails=word != "cores")  # cores can be shared
    elif plan.device != "auto" and not kind.on_host and devices < plan.devices:
        what = f"{plan} takes {plan.devices} {kind.label} devices; there are {devices} in all"
        yield HostFinding(kind="plan", hosts=names, what=what, fix="--plan with device=cpu, or other hosts")


def _split_groups(plan: Plan, counts: Mapping[str, int]) -> Iterator[HostFinding]:
    host_of = [name for name, count in counts.items() for _ in range(count)]  # ranks are laid host by host
    groups = [host_of[first : first + plan.tp] for first in range(0, plan.world_size, plan.tp)]
    if split := [group for group in groups if len(set(group)) > 1]:
        what = f"{len(split)} of {len(groups)} tp groups are on several hosts: each layer exchanges over the network"
        fix = f"--plan with a tp that divides the devices of each host ({', '.join(map(str, counts.values()))})"
        hosts = tuple(dict.fromkeys(name for group in split for name in group))
        yield HostFinding(kind="plan", hosts=hosts, what=what, fix=fix, fails=False)


def clock_findings(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    """Find clocks that differ from the clocks of most hosts, this machine among them."""
    middles = [0.0, *(sum(one.ahead) / 2 for one in there)]
    right = statistics.median_low(sorted(middles, key=abs)) if len(middles) > 2 else 0.0
    for one in there:
        least = one.ahead[0] - right if one.ahead[0] > right else right - one.ahead[1]
        if least > _CLOCK:
            what = f"its clock is {show_seconds(least)} {'ahead' if one.ahead[0] > right else 'behind'}"
            fix = "set it by NTP: timedatectl set-ntp true there"
            yield HostFinding(kind="clock", hosts=(one.name,), what=what, fix=fix, fails=False)


def link_findings(links: Sequence[LinkAnswer], addresses: Mapping[str, str]) -> Iterator[HostFinding]:
    """Find hosts that do not reach the others, and slow links; ``addresses``: of the hosts, first the meeting point."""
    first, *others = [*addresses, ""]
    errors = {one.source: one.error for one in links if one.error}
    meeting = f"{first} at {addresses.get(first)}, where all workers meet"
    near = [name for name, address in addresses.items() if any(address in error for error in errors.values())]
    if first in errors:  # all have met, but do not form a process group
        hosts, what = near or [*errors], f"hosts do not reach each other: {errors[first]}"
        yield HostFinding(kind="links", hosts=tuple(hosts), what=what, fix=_OPEN.format(", ".join(hosts)))
    elif errors and len(errors) == len(others) - 1:
        what = f"no other host reaches {meeting}: {show_names(sorted({*errors.values()}))}"
        yield HostFinding(kind="links", hosts=(first,), what=what, fix=_OPEN.format(first))
    else:
        for name, error in errors.items():
            what = f"it does not reach {meeting}: {error}"
            yield HostFinding(kind="links", hosts=(name,), what=what, fix=_OPEN.format(first))
    yield from _slow([one for one in links if not one.error])


def _slow(links: Sequence[LinkAnswer]) -> Iterator[HostFinding]:
    """Find hosts that are slow on each link that they send over, or receive over."""
    sends, gets = defaultdict[str, float](float), defaultdict[str, float](float)
    for one in links:
        sends[one.source] = max(sends[one.source], one.bandwidth)
        gets[one.target] = max(gets[one.target], one.bandwidth)
    if len(sends) < 3:  # nothing to compare with
        return
    usual = statistics.median([*sends.values(), *gets.values()])
    slow_out = {name for name, bandwidth in sends.items() if bandwidth < _SLOW * usual}
    slow_in = {name for name, bandwidth in gets.items() if bandwidth < _SLOW * usual}
    for name in sorted(slow_out | slow_in):
        both = name in slow_out and name in slow_in
        words = "all its links carry" if both else "it sends" if name in slow_out else "it gets"
        bandwidth = sends[name] if name in slow_out else gets[name]
        what = f"{words} {show_bytes(bandwidth)}/s; most hosts {show_bytes(usual)}/s"
        yield HostFinding(kind="links", hosts=(name,), what=what, fix=_CABLE, fails=False)
