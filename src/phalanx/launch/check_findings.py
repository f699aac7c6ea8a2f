"""Compare the answers of hosts, and find the reasons why training would fail there.

A finding ``fails`` if training would not start or not go on; others cost time, or make the numbers less sure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config import Plan
from phalanx.device_kinds import DeviceKind, all_kinds, kind_named, probed_kinds
from phalanx.launch.check import HostAnswer, HostFacts, HostSurvey, LinkAnswer
from phalanx.units import show_bytes, show_names, show_seconds

_KEPT = 3  # checkpoints on the disk at a time
_ENOUGH = 1024  # open files, and processes of a user
_SHM, _LEAST_SHM = 128 * 2**20, 16 * 2**20  # bytes of /dev/shm that are enough, and too few
_BUSY = 2**30  # bytes of a device that others use
_CLOCK = 5.0  # seconds by which clocks may differ
_SLOW = 0.25  # of the bandwidth of most links
_MUST = ("torch", "phalanx")
_SAME_PHALANX = "install the same Phalanx on all hosts, from one folder"
_INSTALL = "install the same Phalanx and torch there, for the interpreter of the workers"
_ROOM = "make room there, or choose another folder: --run"
_OPEN = "let firewalls pass TCP between the hosts, to {} on all ports, and see that they share a network"
_CABLE = "see the cable, the switch and the speed that the interface shows: ethtool, ip -s link"
_WAYS = (
    ("host key verification", "host", "ssh {name}, once by hand: look at its key, and accept it if it is right"),
    ("resolve hostname", "host", 'an entry {name} in ~/.ssh/config; or ssh = ["-F", "ssh.config"] in the hosts file'),
    ("connection refused", "host", "ssh {name} true: see that sshd listens there, at the port of ~/.ssh/config"),
    ("permission denied", "host", "ssh-copy-id {name}: nobody is asked for a password here"),
    *((sign, "packages", _INSTALL) for sign in ("no module named", "importerror", "cannot open shared object")),
    ("another answer", "packages", _SAME_PHALANX),
    ("no such file", "host", 'python = "/path/to/python" and folder = "/path" in the hosts file: those on the hosts'),
    ("not found", "host", 'python = "/path/to/python" in the hosts file: without it, it is the interpreter here'),
    ("", "host", "ssh {name} true: see that it is up, and that its name and address are right"),
)
"""Words in the error of a host without an answer, kind of the finding, and fix."""


@dataclass(frozen=True, slots=True)
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


def findings(survey: HostSurvey, needs: Needs | None = None) -> list[HostFinding]:
    """Return all faults, first the faults by which training fails; the same fault of several hosts is one."""
    there = {one.name: one.facts for one in survey.hosts if one.facts}
    counts = workers_of(survey.hosts, needs.plan) if needs else {}
    kind, folder = _kind_of(there.values()), survey.folder_error
    found = [_silent(one) for one in survey.hosts if not one.facts]
    found += _differences(there, survey.files)
    for name, facts in there.items():
        found += _of_job(name, facts, survey, needs.state if needs else 0.0)
        found += _of_system(name, facts, kind, counts)
    if folder and not any(one.folder_error for one in there.values()):
        found.append(HostFinding("folder", ("this machine",), f"{survey.folder} cannot be written to: {folder}", _ROOM))
    found += [*_clocks(survey.hosts), *_links(survey.links, there)]
    if needs and needs.plan.device != "auto":
        kind = kind_named(needs.plan.device)
    if needs:
        found += _of_plan([one for one in survey.hosts if one.facts], needs, kind, counts)
    if needs and len(there) == len(survey.hosts):
        found += _of_whole_plan(there, needs.plan, kind, counts)
    groups: dict[tuple[Any, ...], list[HostFinding]] = defaultdict(list)
    for one in found:
        one = replace(one, what=" ".join(one.what.split()), fix=" ".join(one.fix.split()))
        groups[one.kind, one.what, one.fix, one.fails].append(one)
    together = [replace(same[0], hosts=tuple(name for one in same for name in one.hosts)) for same in groups.values()]
    return sorted(together, key=lambda one: not one.fails)


def workers_of(answers: Sequence[HostAnswer], plan: Plan) -> dict[str, int]:
    """Return the workers of each host: as many as the target says, else by its devices, else an equal share."""
    left, counts = plan.processes, dict[str, int]()
    for answer in answers:
        devices = len(answer.facts.devices) // plan.threads if answer.facts else 0
        counts[answer.name] = min(left, answer.processes or devices or -(-plan.processes // len(answers)))
        left -= counts[answer.name]
    return counts


def _kind_of(there: Iterable[HostFacts]) -> DeviceKind:
    return kind_named(next((one.kind for one in there if one.kind), probed_kinds()[0].name))


def _silent(answer: HostAnswer) -> HostFinding:
    _, kind, way = next(row for row in _WAYS if row[0] in answer.error.lower())
    return HostFinding(kind, (answer.name,), answer.error, way.format(name=answer.name))


def _differences(there: Mapping[str, HostFacts], here: Mapping[str, str]) -> Iterator[HostFinding]:
    """Find values that hosts should have alike; ``here``: files of the job on this machine."""
    facts, labels = there.values(), {name: label for kind in all_kinds() for name, label in kind.versions.items()}
    rows = [
        ("versions", "Python", [one.python.rpartition(".")[0] for one in facts], "use the same Python there", False),
        ("versions", "GPU driver", [one.driver for one in facts], "install the same driver on all hosts", False),
        ("devices", "devices:", [f"{len(one.devices)}" for one in facts], "see that the driver lists all", False),
    ]
    for name in dict.fromkeys(name for one in facts for name in one.versions):
        fix = _SAME_PHALANX if name == "phalanx" else f"pip install {name}=={{}} there"
        fix, fails = ("install the same torch on all hosts" if name in labels else fix), name in {*_MUST, *labels}
        rows.append(("versions", labels.get(name, name), [one.versions.get(name, "") for one in facts], fix, fails))
    for file in dict.fromkeys(file for one in facts for file in one.files):
        digests = [files.get(file, "")[:12] for files in (here, *(one.files for one in facts))]
        rows.append(("job", f"{file} is another file:", digests, "copy it there again, or share its folder", True))
    for kind, label, values, fix, fails in rows:
        groups = defaultdict[str, list[str]](list)
        names = ("this machine", *there) if kind == "job" else there
        for name, value in zip(names, values, strict=True):
            groups[value] += [name] if value else []
        groups.pop("", None)
        # the first value is the usual one if several are as frequent
        usual, *odd = sorted(groups.items(), key=lambda item: -len(item[1])) or [("", [])]
        if odd:
            words = ", ".join(f"{value} on {show_names(hosts)}" for value, hosts in [*odd, usual])
            hosts = tuple(host for _, hosts in odd for host in hosts)
            yield HostFinding(kind, hosts, f"{label} {words}", fix.replace("{}", usual[0].partition("+")[0]), fails)


def _of_job(name: str, h: HostFacts, survey: HostSurvey, state: float) -> Iterator[HostFinding]:
    """Find what keeps the job from running on a host; ``state``: bytes of a checkpoint."""
    where, broken = survey.folder, survey.folder_error or h.folder_error
    rights = _ROOM if "space" in h.folder_error else "choose a folder that can be written to: --run"
    apart = f"{where} is not the folder of that path here: it does not see the files of others"
    ending = f"the process that was to load the job and its data {h.ending}"
    by_hand = "load the job there by hand and see what takes so long, or ends it"
    rows = [
        (h.missing, "job", "the job's file is not there", "copy it there, or share its folder"),
        (h.no_cwd, "folder", "the folder in which workers work is not there", 'share it, or folder = "/its/path"'),
        (h.job_error, "job", h.job_error, h.job_fix),
        (h.data_error, "data", f"the job's data: {h.data_error}", "make the data readable there: all hosts read it"),
        (h.ending, "data" if h.step == "data" else "job", ending, by_hand),
        (h.folder_error, "folder", f"{where} cannot be written to: {h.folder_error}", rights),
        (
            not h.shared and not broken,
            "folder",
            apart,
            "choose a folder that all hosts share, such as one on NFS: --run",
        ),
    ]
    yield from (HostFinding(kind, (name,), what, fix) for holds, kind, what, fix in rows if holds)
    if h.shared and h.folder_free < _KEPT * state:
        what = f"{where} has {show_bytes(h.folder_free)} free; a checkpoint takes {show_bytes(state)}"
        yield HostFinding("folder", (name,), what, _ROOM, h.folder_free < state)


def _of_system(name: str, h: HostFacts, kind: DeviceKind, counts: Mapping[str, int]) -> Iterator[HostFinding]:
    """Find faults of one host's system and devices; ``counts``: workers of each host."""
    on, files = (name,), 128 + 4 * sum(counts.values())  # at least
    processes = counts.get(name, 1) * (4 + h.loaders)  # threads count as processes
    if h.driver_error:
        yield HostFinding("devices", on, f"{kind.driver_tool}: {h.driver_error}", "mend the driver there")
    if h.driver_devices and h.versions and not h.devices:
        what = f"torch sees none of {h.driver_devices} devices: torch {h.versions.get('torch', '')}"
        fix = f"install torch for that driver's {kind.label} there, and see {kind.visible}"
        yield HostFinding("devices", on, what, fix)
    for limit, needed, option, what in (
        (h.open_files, files, "-n", f"a process may open {h.open_files} files"),
        (h.processes, processes, "-u", f"its user may have {h.processes} processes and threads"),
    ):
        if 0 <= limit < max(_ENOUGH, needed):
            fix = f"ulimit {option} 65536 there, in /etc/security/limits.conf for good"
            yield HostFinding("limits", on, what, fix, limit < needed)
    if h.infiniband and h.locked_memory >= 0:
        what = f"a process may lock {show_bytes(h.locked_memory)} of memory, which InfiniBand needs more of"
        yield HostFinding("limits", on, what, "ulimit -l unlimited there", False)
    if (h.loaders or len(h.devices) > 1) and 0 <= h.shm_free < _SHM:
        tensors = f"{h.loaders} loader processes" if h.loaders else "its devices"
        what = f"/dev/shm has {show_bytes(h.shm_free)} free, for the tensors of {tensors}"
        fix = "mount -o remount,size=8G /dev/shm there; of a container --shm-size=8g"
        yield HostFinding("limits", on, what, fix, h.loaders > 0 and h.shm_free < _LEAST_SHM)
    if h.meets:
        what = f"workers cannot meet at {h.address}: {h.meets}"
        yield HostFinding("links", on, what, "give an address of the host's own that the others reach")
    for device in h.devices:
        used, fix = device.total - device.free, f"leave it out by {kind.visible} there"
        if device.error:
            fix += f", or reset it: {kind.driver_reset.format(index=device.index)}" if kind.driver_reset else ""
            yield HostFinding("devices", on, f"device {device.index} does not work: {device.error}", fix)
        elif used > _BUSY:
            fix = f"end the processes that use it, or {fix}"
            yield HostFinding("devices", on, f"device {device.index} is busy: {show_bytes(used)} in use", fix, False)


def _of_plan(
    there: Sequence[HostAnswer], needs: Needs, kind: DeviceKind, counts: Mapping[str, int]
) -> Iterator[HostFinding]:
    """Find hosts with too few devices or too little memory for their workers."""
    plan, devices = needs.plan, sum(len(one.facts.devices) for one in there if one.facts)
    for one in there:
        assert one.facts
        on, found, takes = (one.name,), one.facts.devices, one.processes * plan.threads
        if not kind.on_host and not plan.server and len(found) < takes and devices:  # a server needs none
            what = f"it has {len(found)} {kind.label} devices for its {one.processes} workers, which need {takes}"
            fix = "give as many workers as it has devices, leave it out, or take a plan with device=cpu"
            yield HostFinding("plan", on, what, fix)
        count = counts[one.name] * plan.threads
        room = [("memory free; its workers need", one.facts.memory_free, needs.memory * count)]
        if not kind.on_host and devices >= plan.devices:
            used = [device for device in found[:count] if not device.error]
            room = [(f"free on device {device.index}; a worker needs", device.free, needs.memory) for device in used]
        for words, free, needed in room:
            if free < needed:
                what = f"{show_bytes(free)} {words} {show_bytes(needed)}"
                yield HostFinding("memory", on, what, "phalanx plan JOB shows plans that need less")


def _of_whole_plan(
    there: Mapping[str, HostFacts], plan: Plan, kind: DeviceKind, counts: Mapping[str, int]
) -> Iterator[HostFinding]:
    """Find too few places on all hosts together, and tp groups on several hosts."""
    devices, takes = sum(len(one.devices) for one in there.values()), plan.processes - plan.server
    on_devices = not kind.on_host and (devices or plan.device != "auto")
    places = devices // plan.threads if on_devices else sum(one.cores for one in there.values())
    if places < takes:
        word = f"{kind.label} devices" if on_devices else "cores"
        what = f"{plan} takes {takes} processes; there are {places} {word} in all"
        fix = f"--plan dp={max(1, places)}, or more hosts"
        yield HostFinding("plan", tuple(there), what, fix, fails=bool(on_devices))  # cores can be shared
    host_of = [name for name, count in counts.items() for _ in range(count)]  # ranks are laid host by host
    groups = [host_of[first : first + plan.tp] for first in range(0, plan.world_size, plan.tp)]
    if split := [group for group in groups if len(set(group)) > 1]:
        what = f"{len(split)} of {len(groups)} tp groups are on several hosts: each layer exchanges over the network"
        fix = f"--plan with a tp that divides the devices of each host ({', '.join(map(str, counts.values()))})"
        yield HostFinding("plan", tuple(dict.fromkeys(name for group in split for name in group)), what, fix, False)


def _clocks(answers: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    """Find clocks that differ from the clocks of most hosts, this machine among them."""
    clocks = {one.name: one.ahead for one in answers if one.facts}
    right = statistics.median_low([0.0, *clocks.values()]) if len(clocks) > 1 else 0.0
    for name, ahead in clocks.items():
        if abs(off := ahead - right) > _CLOCK:
            what = f"its clock is {show_seconds(abs(off))} {'ahead' if off > 0 else 'behind'}"
            yield HostFinding("clock", (name,), what, "set it by NTP: timedatectl set-ntp true there", False)


def _links(links: Sequence[LinkAnswer], there: Mapping[str, HostFacts]) -> Iterator[HostFinding]:
    """Find hosts that do not reach the others, and slow links."""
    first = next(iter(there), "")
    errors = {one.target: one.error for one in links if one.error}
    away = [one.target for one in links if one.error and not one.met]
    if away and len(away) == len(there) - 1:
        what = f"no other host reaches {first}, where all workers meet: {show_names(sorted({*errors.values()}))}"
        yield HostFinding("links", (first,), what, _OPEN.format(first))
    elif away:
        for name in away:
            what = f"it does not reach {first}, where all workers meet: {errors[name]}"
            yield HostFinding("links", (name,), what, _OPEN.format(first))
    elif errors:
        near = [name for name, one in there.items() if any(one.address in error for error in errors.values())]
        hosts, what = tuple(near or errors), f"hosts do not reach each other: {next(iter(errors.values()))}"
        yield HostFinding("links", hosts, what, _OPEN.format(", ".join(hosts)))
    measured = [one for one in links if not one.error]
    usual = statistics.median(one.bandwidth for one in measured) if len(measured) > 2 else 0.0
    for one in measured:
        if one.bandwidth < _SLOW * usual:
            rate, most = f"{show_bytes(one.bandwidth)}/s", f"{show_bytes(usual)}/s"
            what = f"the link from {one.source} to {one.target} carries {rate}; most links {most}"
            yield HostFinding("links", (one.source, one.target), what, _CABLE, False)
