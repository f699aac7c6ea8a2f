"""What is wrong with the devices of hosts, and what a plan needs that hosts have not: places, devices, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.config import Plan, RunSpec
from phalanx.device_kinds import DeviceKind, kind_named, probed_kinds
from phalanx.launch.check_hosts.asking import HostAnswer
from phalanx.launch.check_hosts.finding import HostFinding, odd_ones
from phalanx.units import show_bytes, show_names

_BUSY = 2**30  # bytes of a device that somebody else uses


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the run needs there.

    Attributes:
        plan: of the run.
        run: all of its settings; ``None``: those of a run that nothing more is asked of.
        memory: bytes that each worker needs of its device, or of its host where that computes; 0 where not known.
        state: bytes of a checkpoint; 0 where not known.
    """

    plan: Plan
    run: RunSpec | None = None
    memory: float = 0.0
    state: float = 0.0


def workers_of(answers: Sequence[HostAnswer], needs: Needs) -> dict[str, int]:
    """Workers that each host would have: as many as the target says, else by its devices, else an equal share."""
    left, counts = needs.plan.processes, {}
    even = -(-left // max(1, len(answers)))
    for answer in answers:
        devices = len(answer.devices) // needs.plan.threads
        counts[answer.name] = min(left, answer.processes or devices or even)
        left -= counts[answer.name]
    return counts


def device_findings(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    """Of the devices themselves: how many there are, whether they work, and who uses them."""
    kind = _kind_of(there)
    counted, tool = f"{kind.label} devices:", kind.driver_tool or "the driver"
    yield from odd_ones(counted, there, lambda one: str(len(one.devices)), f"see {tool} there", fails=False)
    for one in there:
        gpus = one.told["gpus"]
        if gpus["error"]:
            fix = f"mend the driver there: {tool} must list the devices"
            yield HostFinding(kind="devices", hosts=(one.name,), what=f"{tool}: {gpus['error']}", fix=fix)
        if gpus["devices"] and "devices" in one.told and not one.told["devices"]:
            what = f"torch sees none of {len(gpus['devices'])} devices: torch {one.told['versions']['torch']}"
            fix = f"install torch for that driver's {kind.label} there, and see {kind.visible}"
            yield HostFinding(kind="devices", hosts=(one.name,), what=what, fix=fix)
        for device in one.devices:
            if device["error"]:
                what = f"device {device['index']} does not work: {device['error']}"
                reset = kind.driver_reset.format(index=device["index"])
                fix = f"leave it out by {kind.visible} there" + (f", or reset it: {reset}" if reset else "")
                yield HostFinding(kind="devices", hosts=(one.name,), what=what, fix=fix)
        for device in gpus["devices"]:
            if device["used"] > _BUSY:
                pids = f" (process {show_names(gpus['pids'])})" if gpus["pids"] else ""
                what = f"device {device['index']} is busy: {show_bytes(device['used'])} in use{pids}"
                fix = f"end what uses it, or leave the device out by {kind.visible} there"
                yield HostFinding(kind="devices", hosts=(one.name,), what=what, fix=fix, fails=False)


def plan_findings(there: Sequence[HostAnswer], needs: Needs, *, whole: bool) -> Iterator[HostFinding]:
    """Of what the run needs; ``whole``: every host has answered, so that what is missing is nowhere."""
    if whole:
        yield from _places(there, needs)
    if needs.memory:
        yield from _memory(there, needs)
    yield from _without_devices(there, needs.plan)
    if whole and needs.plan.tp > 1:
        yield from _split_groups(there, needs)


def _places(there: Sequence[HostAnswer], needs: Needs) -> Iterator[HostFinding]:
    """Whether there are as many places for processes as the plan takes: what the target says, devices, or cores."""
    plan, names = needs.plan, tuple(one.name for one in there)
    devices, kind = _gpus_of(there), _kind_of(there, plan)
    if any(one.processes for one in there):
        places, word = sum(one.processes for one in there), "places"
    elif devices and not kind.on_host:
        places, word = devices // plan.threads, f"{kind.label} devices"
    else:
        places, word = sum(one.told["cores"] for one in there), "cores"
    if places < plan.processes:
        what = f"{plan} takes {plan.processes} processes; there are {places} {word} in all"
        fix = f"--plan dp={places}, or more hosts"
        yield HostFinding(kind="plan", hosts=names, what=what, fix=fix, fails=word != "cores")  # cores can be shared
    elif plan.device != "auto" and not kind.on_host and devices < plan.devices:
        what = f"{plan} takes {plan.devices} {kind.label} devices; there are {devices} in all"
        yield HostFinding(kind="plan", hosts=names, what=what, fix="--plan with device=cpu, or other hosts")


def _without_devices(there: Sequence[HostAnswer], plan: Plan) -> Iterator[HostFinding]:
    """Hosts with fewer GPUs than workers, where there are any: all workers compute on one, or none."""
    kind = _kind_of(there, plan)
    for one in there:
        have, takes = len(one.devices), one.processes * plan.threads
        if not kind.on_host and not plan.server and have < takes and _gpus_of(there):  # a server needs none
            what = f"it has {have} {kind.label} devices for its {one.processes} workers, which need {takes}"
            fix = "give as many workers as it has devices, leave it out, or take a plan with device=cpu"
            yield HostFinding(kind="plan", hosts=(one.name,), what=what, fix=fix)


def _memory(there: Sequence[HostAnswer], needs: Needs) -> Iterator[HostFinding]:
    """Whether there is room for what each worker needs, on its device, or on its host where that computes."""
    plan, counts = needs.plan, workers_of(there, needs)
    on_gpus = not _kind_of(there, plan).on_host and _gpus_of(there) >= plan.devices
    smaller = "phalanx plan JOB shows plans that need less"
    for one in there:
        if on_gpus:
            for device in one.devices[: counts[one.name] * plan.threads]:
                if not device["error"] and device["free"] < needs.memory:
                    free, needed = show_bytes(device["free"]), show_bytes(needs.memory)
                    what = f"device {device['index']} has {free} free; a worker needs {needed}"
                    yield HostFinding(kind="memory", hosts=(one.name,), what=what, fix=smaller)
        elif one.told["memory"]["free"] < needs.memory * counts[one.name] * plan.threads:
            total = show_bytes(needs.memory * counts[one.name] * plan.threads)
            what = f"{show_bytes(one.told['memory']['free'])} of memory are free; its workers need {total}"
            yield HostFinding(kind="memory", hosts=(one.name,), what=what, fix=smaller)


def _split_groups(there: Sequence[HostAnswer], needs: Needs) -> Iterator[HostFinding]:
    """Ranks are laid host by host, and those of a tp group are neighbours: whether one has ranks on several hosts."""
    plan, counts = needs.plan, workers_of(there, needs)
    host_of = [name for name, count in counts.items() for _ in range(count)]
    groups = [host_of[first : first + plan.tp] for first in range(0, plan.world_size, plan.tp)]
    if split := [group for group in groups if len(set(group)) > 1]:
        what = f"{len(split)} of {len(groups)} tp groups are on several hosts: each layer exchanges over the network"
        fix = f"--plan with a tp that divides the devices of each host ({', '.join(map(str, counts.values()))})"
        hosts = tuple(dict.fromkeys(name for group in split for name in group))
        yield HostFinding(kind="plan", hosts=hosts, what=what, fix=fix, fails=False)


def _kind_of(there: Sequence[HostAnswer], plan: Plan | None = None) -> DeviceKind:
    """The kind of the devices that are looked for: the plan's, or that of those that are there."""
    if plan and plan.device != "auto":
        return kind_named(plan.device)
    return kind_named(next((one.told["kind"] for one in there if one.told.get("kind")), probed_kinds()[0].name))


def _gpus_of(there: Sequence[HostAnswer]) -> int:
    return sum(len(one.devices) for one in there)
