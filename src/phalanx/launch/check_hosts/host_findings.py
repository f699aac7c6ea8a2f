"""From what hosts said to what would keep training from running there, and what to do: pure, and told by no wording.

A finding ``fails`` where training would not start or not go on; others cost time, or make the numbers less sure.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import Plan, RunSpec
from phalanx.device_kinds import DeviceKind, all_kinds, kind_named, probed_kinds
from phalanx.launch.check_hosts.asking import HostAnswer, HostSurvey
from phalanx.launch.check_hosts.limit_findings import few_processes, limits
from phalanx.launch.check_hosts.link_findings import HostFinding, link_findings
from phalanx.launch.check_hosts.way_there import way_there
from phalanx.launch.unshared_folder import unshared_problems
from phalanx.units import show_bytes, show_names, show_seconds

_CLOCK = 5.0  # seconds that clocks may differ by
_BUSY = 2**30  # bytes of a device that somebody else uses
_KEPT = 3  # checkpoints on the disk at a time


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


def findings(survey: HostSurvey, needs: Needs | None) -> list[HostFinding]:
    """Everything that is wrong, what fails first; alike findings of several hosts are one."""
    there = [answer for answer in survey.hosts if answer.told]
    found = [
        *_unreached(survey.hosts),
        *_versions(there),
        *_job(there),
        *_folder(survey, there, needs),
        *_devices(there),
        *(_places(there, needs) if needs and len(there) == len(survey.hosts) else ()),
        *(_memory(there, needs) if needs and needs.memory else ()),
        *(_without_devices(there, needs.plan) if needs else ()),
        *(_split_groups(there, needs) if needs and needs.plan.tp > 1 and len(there) == len(survey.hosts) else ()),
        *limits(there, needs.plan.processes if needs else 1),
        *few_processes(there, workers_of(there, needs) if needs else {}),
        *_clocks(there),
        *link_findings(survey.links, {one.name: one.told for one in there}),
    ]
    return sorted(_together(found), key=lambda one: not one.fails)


def workers_of(answers: Sequence[HostAnswer], needs: Needs) -> dict[str, int]:
    """Workers that each host would have: as many as the target says, else by its devices, else an equal share."""
    left, counts = needs.plan.processes, {}
    even = -(-left // max(1, len(answers)))
    for answer in answers:
        devices = len(answer.told.get("devices", ())) // needs.plan.threads
        counts[answer.name] = min(left, answer.processes or devices or even)
        left -= counts[answer.name]
    return counts


def _together(found: Iterable[HostFinding]) -> list[HostFinding]:
    groups: dict[tuple[Any, ...], list[HostFinding]] = defaultdict(list)
    for one in found:
        groups[one.kind, one.what, one.fix, one.fails].append(one)
    return [replace(same[0], hosts=tuple(name for one in same for name in one.hosts)) for same in groups.values()]


def _unreached(answers: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    for one in answers:
        if not one.told:
            yield HostFinding(kind="host", hosts=(one.name,), what=one.error, fix=way_there(one.name, one.error))


_PHALANX = "install the same Phalanx on all hosts, from one folder: pip install path/to/phalanx"


def _versions(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    def minor(answer: HostAnswer) -> str:
        return ".".join(answer.told["python"].split(".")[:2])

    yield from _odd("Python", there, minor, "use the same Python on all hosts", fails=False)
    for name in ("torch", "phalanx"):
        yield from _package(name, there, lambda one, key=name: one.told.get("versions", {}).get(key), fails=True)
    for key, name in {key: name for kind in all_kinds() for key, name in kind.versions.items()}.items():
        same = "install the same torch on all hosts"
        yield from _odd(name, there, lambda one, key=key: one.told.get(key) or None, same)
    same = "install the same driver on all hosts"
    yield from _odd("GPU driver", there, lambda one: one.told["gpus"].get("driver") or None, same, fails=False)
    imports = sorted({name for one in there for name in one.told.get("source", {}).get("imports", {})})
    for name in imports:
        asked = [one for one in there if not one.unsent]
        loads = [one for one in asked if one.told.get("data") and not one.told["data"]["error"]]
        fails = len(loads) < len(asked)  # what a job imports only when it needs it may be missing
        yield from _package(name, there, lambda one, key=name: _import(one, key), fails=False, missing=fails)


def _import(answer: HostAnswer, name: str) -> str | None:
    return answer.told.get("source", {}).get("imports", {}).get(name)


def _package(
    name: str,
    there: Sequence[HostAnswer],
    version: Callable[[HostAnswer], str | None],
    *,
    fails: bool,
    missing: bool = True,
) -> Iterator[HostFinding]:
    """A package that is missing, cannot be imported, or is another on some hosts."""
    whole: list[HostAnswer] = []
    for one in there:
        here = version(one)
        if here is None or here == "local":
            continue
        if not here or here.startswith("!"):
            others = Counter(found for other in there if (found := version(other)) and not found.startswith("!"))
            pin = f"=={others.most_common(1)[0][0].partition('+')[0]}" if others else ""
            what = f"{name} cannot be imported: {here[1:]}" if here else f"{name} is not installed"
            fix = _PHALANX if name == "phalanx" else f"pip install {name}{pin}, with {one.told['executable']}"
            yield HostFinding(kind="packages", hosts=(one.name,), what=what, fix=fix, fails=missing)
        else:
            whole.append(one)
    common = Counter(version(one) for one in whole).most_common(1)
    fix = f"pip install {name}=={str(common[0][0]).partition('+')[0]} there" if common else ""
    fix = _PHALANX if name == "phalanx" else fix
    yield from _odd(name, whole, version, fix, fails=fails)


def _odd(
    what: str,
    there: Sequence[HostAnswer],
    value: Callable[[HostAnswer], str | None],
    fix: str,
    *,
    fails: bool = True,
) -> Iterator[HostFinding]:
    """A finding of the hosts whose ``value`` is not that of most, where they differ."""
    groups: dict[str, list[str]] = defaultdict(list)
    for one in there:
        if (found := value(one)) is not None:
            groups[found].append(one.name)
    if len(groups) > 1:
        few = sorted(groups.items(), key=lambda item: len(item[1]))  # the first hosts are most where as many differ
        few = [*few[:-1], few[-1]] if len(few[0][1]) < len(few[-1][1]) else [*reversed(few)]
        words = ", ".join(f"{found} on {show_names(names)}" for found, names in few)
        odd = tuple(name for _, names in few[:-1] for name in names)
        yield HostFinding(kind="versions", hosts=odd, what=f"{what} {words}", fix=fix, fails=fails)


def _job(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    sources = {one.name: one.told["source"] for one in there if one.told.get("source")}
    for one in there:
        if error := one.told.get("unpacked"):
            fix = "make room there, in the folder for temporary files (TMPDIR)"
            what = f"the job's code cannot be unpacked there: {error}"
            yield HostFinding(kind="job", hosts=(one.name,), what=what, fix=fix)
        if one.refused:
            sources.pop(one.name, None)
            what = f"the job's code is not there, or another, and is not sent: {one.refused.given}"
            yield HostFinding(kind="job", hosts=(one.name,), what=what, fix=one.refused.fix)
    for name in (name for name, source in sources.items() if source["missing"]):
        fix = "put the job's folder where all hosts see it under the same path, or copy it there"
        yield HostFinding(kind="job", hosts=(name,), what="the job's file is not there", fix=fix)
    whole = [one for one in there if one.name in sources and not sources[one.name]["missing"]]
    for file in sorted({file for one in whole for file in sources[one.name]["files"]}):
        texts = Counter(sources[one.name]["files"].get(file, "") for one in whole)
        common = texts.most_common(1)[0][0]
        for one in whole:
            if sources[one.name]["files"].get(file, "") != common:
                fix = "copy the job's folder there again, or put it where all hosts see it"
                yield HostFinding(kind="job", hosts=(one.name,), what=f"{file} is not what it is on others", fix=fix)
    for one in there:
        if one.sent:
            fix = "put the job's folder where all hosts see it, if none of it is to be sent"
            what = f"the job's code is not there, or another: {show_bytes(one.sent)} of it are sent"
            yield HostFinding(kind="job", hosts=(one.name,), what=what, fix=fix, fails=False)
    for one in whole:
        missing = any(not version or version.startswith("!") for version in sources[one.name]["imports"].values())
        told = one.told.get("data")
        if told and told["error"] and not missing:
            kind = "data" if told["of"] == "data" else "job"
            what = told["error"] if kind == "job" else f"the job's data: {told['error']}"
            fix = told["fix"] or "make the data readable there: job.data() is called on every host"
            yield HostFinding(kind=kind, hosts=(one.name,), what=what, fix=fix)
    for one in there:
        if one.told["ending"]:
            doing = "its data" if one.told.get("versions") else "torch"
            what = f"the process that was to load the job and {doing} {one.told['ending']}"
            fix = "load the job there by hand and see what takes so long, or ends it"
            kind = "data" if one.told.get("loaded") else "job"
            yield HostFinding(kind=kind, hosts=(one.name,), what=what, fix=fix)


def _folder(survey: HostSurvey, there: Sequence[HostAnswer], needs: Needs | None) -> Iterator[HostFinding]:
    where = survey.folder.parent if survey.folder.name.startswith(".phalanx-check-") else survey.folder
    apart = {one.name for one in there if one.scratch and not (one.told["folder"]["shared"] and one.seen)}
    yield from _copies(there, apart, needs, where)
    cannot = {one.name: error for one in there if (error := one.told["folder"].get("error")) and one.name not in apart}
    space = "make room there, or choose another folder: --run"
    rights = "choose a folder that can be written to: --run"
    for name, error in (cannot or ({"here": survey.folder_error} if survey.folder_error else {})).items():
        fix = space if "space" in error else rights
        yield HostFinding(kind="folder", hosts=(name,), what=f"{where} cannot be written to: {error}", fix=fix)
    if cannot or survey.folder_error:
        return
    for one in there:
        told = one.told["folder"]
        if one.name in apart:
            continue
        if not told["shared"] or not one.seen:
            what = f"{where} is not the folder of that path here: what one writes the other does not see"
            fix = "choose a folder that all hosts share, such as one on NFS: --run"
            yield HostFinding(kind="folder", hosts=(one.name,), what=what, fix=fix)
        elif needs and needs.state and told["free"] < _KEPT * needs.state:
            what = f"{where} has {show_bytes(told['free'])} free; a checkpoint takes {show_bytes(needs.state)}"
            fails = told["free"] < needs.state
            yield HostFinding(kind="folder", hosts=(one.name,), what=what, fix=space, fails=fails)


def _copies(
    there: Sequence[HostAnswer], apart: Collection[str], needs: Needs | None, where: Path
) -> Iterator[HostFinding]:
    """What is to be known where hosts get copies of the run folder, or the job's code."""
    for one in there:
        if not (one.sent or one.unsent or one.name in apart):
            continue
        told = one.told["scratch"]
        if told["error"]:
            fix = 'scratch = "/path" in the hosts file: a folder for code and a copy of the run folder there'
            yield HostFinding(kind="folder", hosts=(one.name,), what=f"{told['path']}: {told['error']}", fix=fix)
        elif one.name in apart and needs and needs.state and told["free"] < needs.state:
            what = f"{told['path']} has {show_bytes(told['free'])} free; a checkpoint takes {show_bytes(needs.state)}"
            fix = 'make room there, or scratch = "/path" in the hosts file'
            yield HostFinding(kind="folder", hosts=(one.name,), what=what, fix=fix)
        if one.name in apart:
            what = f"{where} is not the folder of that path here: it gets a copy, whose changes are brought here"
            fix = "choose a folder that all hosts share, such as one on NFS, if nothing is to be copied: --run"
            yield HostFinding(kind="folder", hosts=(one.name,), what=what, fix=fix, fails=False)
    run = needs and (needs.run or RunSpec(job="job", plan=needs.plan, folder=where))
    for problem in unshared_problems(run) if apart and run else ():
        what = f"{problem.where}: given {problem.given}; allowed: {problem.allowed}"
        yield HostFinding(kind="folder", hosts=tuple(sorted(apart)), what=what, fix=problem.fix)


def _devices(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    kind = _kind_of(there)
    counted = f"{kind.label} devices:"
    yield from _odd(
        counted, there, lambda one: str(len(one.told.get("devices", ()))), "see nvidia-smi there", fails=False
    )
    for one in there:
        gpus = one.told["gpus"]
        if gpus["error"]:
            fix = "mend the driver there: nvidia-smi must list the devices"
            yield HostFinding(kind="devices", hosts=(one.name,), what=f"nvidia-smi: {gpus['error']}", fix=fix)
        if gpus["devices"] and "devices" in one.told and not one.told["devices"]:
            what = f"torch sees none of {len(gpus['devices'])} devices: torch {one.told['versions']['torch']}"
            fix = f"install torch for that driver's {kind.label} there, and see {kind.visible}"
            yield HostFinding(kind="devices", hosts=(one.name,), what=what, fix=fix)
        for device in one.told.get("devices", ()):
            if device["error"]:
                what = f"device {device['index']} does not work: {device['error']}"
                fix = f"leave it out by {kind.visible} there, or reset it: nvidia-smi -r -i {device['index']}"
                yield HostFinding(kind="devices", hosts=(one.name,), what=what, fix=fix)
        for device in gpus["devices"]:
            if device["used"] > _BUSY:
                pids = f" (process {show_names(gpus['pids'])})" if gpus["pids"] else ""
                what = f"device {device['index']} is busy: {show_bytes(device['used'])} in use{pids}"
                fix = f"end what uses it, or leave the device out by {kind.visible} there"
                yield HostFinding(kind="devices", hosts=(one.name,), what=what, fix=fix, fails=False)


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
        have, takes = len(one.told.get("devices", ())), one.processes * plan.threads
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
            for device in one.told.get("devices", ())[: counts[one.name] * plan.threads]:
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
    return sum(len(one.told.get("devices", ())) for one in there)


def _clocks(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    middles = [0.0, *(sum(one.ahead) / 2 for one in there)]
    right = statistics.median_low(sorted(middles, key=abs)) if len(middles) > 2 else 0.0
    for one in there:
        least = one.ahead[0] - right if one.ahead[0] > right else right - one.ahead[1]
        if least > _CLOCK:
            way = "ahead" if one.ahead[0] > right else "behind"
            what = f"its clock is {show_seconds(least)} {way}"
            fix = "set it by NTP: timedatectl set-ntp true there"
            yield HostFinding(kind="clock", hosts=(one.name,), what=what, fix=fix, fails=False)
