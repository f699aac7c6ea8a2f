"""From what hosts said to what would keep training from running there, and what to do: pure, and told by no wording.

A finding ``fails`` where training would not start or not go on; others cost time, or make the numbers less sure.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.config import RunSpec
from phalanx.device_kinds import all_kinds
from phalanx.errors import Problem
from phalanx.launch.check_hosts.asking import HostAnswer, HostSurvey
from phalanx.launch.check_hosts.device_findings import Needs, device_findings, plan_findings, workers_of
from phalanx.launch.check_hosts.finding import HostFinding, odd_ones, way_there
from phalanx.launch.check_hosts.link_findings import link_findings
from phalanx.units import show_bytes, show_seconds

_CLOCK = 5.0  # seconds that clocks may differ by
_KEPT = 3  # checkpoints on the disk at a time


def findings(survey: HostSurvey, needs: Needs | None) -> list[HostFinding]:
    """Everything that is wrong, what fails first; alike findings of several hosts are one."""
    there = [answer for answer in survey.hosts if answer.told]
    silent = [(one.name, one.error) for one in survey.hosts if not one.told]
    found = [
        *(HostFinding(kind="host", hosts=(name,), what=error, fix=way_there(name, error)) for name, error in silent),
        *_versions(there),
        *_job(there),
        *_folder(survey, there, needs),
        *device_findings(there),
        *(plan_findings(there, needs, whole=len(there) == len(survey.hosts)) if needs else ()),
        *limit_findings(there, needs.plan.processes if needs else 1),
        *few_processes(there, workers_of(there, needs) if needs else {}),
        *_clocks(there),
        *link_findings(survey.links, {one.name: one.told for one in there}),
    ]
    return sorted(_together(found), key=lambda one: not one.fails)


def _together(found: Iterable[HostFinding]) -> list[HostFinding]:
    groups: dict[tuple[Any, ...], list[HostFinding]] = defaultdict(list)
    for one in found:
        groups[one.kind, one.what, one.fix, one.fails].append(one)
    return [replace(same[0], hosts=tuple(name for one in same for name in one.hosts)) for same in groups.values()]


_PHALANX = "install the same Phalanx on all hosts, from one folder: pip install path/to/phalanx"


def _versions(there: Sequence[HostAnswer]) -> Iterator[HostFinding]:
    fix = "use the same Python on all hosts"
    yield from odd_ones("Python", there, lambda one: one.told["python"].rpartition(".")[0], fix, fails=False)
    for name in ("torch", "phalanx"):
        yield from _package(name, there, lambda one, key=name: one.told.get("versions", {}).get(key), fails=True)
    for key, name in {key: name for kind in all_kinds() for key, name in kind.versions.items()}.items():
        same = "install the same torch on all hosts"
        yield from odd_ones(name, there, lambda one, key=key: one.told.get(key) or None, same)
    same = "install the same driver on all hosts"
    yield from odd_ones("GPU driver", there, lambda one: one.told["gpus"].get("driver") or None, same, fails=False)
    imports = sorted({name for one in there for name in one.told.get("source", {}).get("imports", {})})
    for name in imports:
        asked = [one for one in there if not one.unsent]
        loads = [one for one in asked if one.told.get("data") and not one.told["data"]["error"]]
        fails = len(loads) < len(asked)  # what a job imports only when it needs it may be missing
        yield from _package(
            name,
            there,
            lambda one, key=name: one.told.get("source", {}).get("imports", {}).get(key),
            fails=False,
            missing=fails,
        )


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
    yield from odd_ones(name, whole, version, fix, fails=fails)


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


_FILES = 1024  # open files that are always enough; below it they may not be
_FILES_OF = 128, 4  # that a worker has at least, and for each other worker
_PROCESSES = 1024  # processes and threads of a user that are enough; below it they may not be
_THREADS_OF = 4  # that a worker has at least
_SHARED_MEMORY = 128 * 2**20, 16 * 2**20  # bytes of /dev/shm that may be too little, and that are


def limit_findings(there: Sequence[HostAnswer], workers: int) -> Iterator[HostFinding]:
    """Open files, locked memory and shared memory that are few for a run of so many ``workers``."""
    for one in there:
        files = one.told["limits"].get("open_files", -1)
        if 0 <= files < _FILES:
            least = _FILES_OF[0] + _FILES_OF[1] * workers
            what = f"a process may open {files} files"
            fix = "ulimit -n 65536 there, in /etc/security/limits.conf for good"
            yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix=fix, fails=files < least)
        locked = one.told["limits"].get("memlock", -1)
        if one.told.get("infiniband") and locked >= 0:
            what = f"a process may lock {show_bytes(locked)} of memory, which InfiniBand needs more of"
            yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix="ulimit -l unlimited there", fails=False)
        loads = (one.told.get("data") or {}).get("workers", 0)
        if one.told["shm"]["total"] and (loads or len(one.devices) > 1):
            free = one.told["shm"]["free"]
            if free < _SHARED_MEMORY[0]:
                by = f"{loads} loader processes" if loads else "its devices"
                what = f"/dev/shm has {show_bytes(free)} free, over which {by} hand on tensors"
                fix = "mount -o remount,size=8G /dev/shm there; of a container --shm-size=8g"
                fails = bool(loads) and free < _SHARED_MEMORY[1]
                yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix=fix, fails=fails)


def few_processes(there: Sequence[HostAnswer], counts: Mapping[str, int]) -> Iterator[HostFinding]:
    """Of a user, to which threads count: fewer than its workers and what loads their data begin with, or few.

    ``counts``: workers by the name of each host; 1 where it is not there.
    """
    for one in there:
        most = one.told["limits"].get("processes", -1)
        loads = (one.told.get("data") or {}).get("workers", 0)
        least = counts.get(one.name, 1) * (_THREADS_OF + loads)
        if 0 <= most < max(_PROCESSES, least):
            what = f"its user may have {most} processes and threads"
            fix = "ulimit -u 65536 there, in /etc/security/limits.conf for good"
            yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix=fix, fails=most < least)


def unshared_problems(run: RunSpec) -> list[Problem]:
    """Why ``run`` needs a run folder that all hosts share; none where copies do, whose changes are brought together."""
    shared = "a run folder that all hosts and this machine share (--run)"
    apart = f"with a run folder ({run.folder}) that not all hosts share"
    here = f"{shared}, or none: checkpoints are brought to the run folder here"
    found = (
        (run.plan.server, "plan.server", str(run.plan), f"{shared}, or no servers", f"--plan dp={run.plan.processes}"),
        (run.rolls_back, "run.on_nonfinite", "'rollback'", f"{shared}, or stop or skip", 'on_nonfinite="skip"'),
        (run.mirror, "run.mirror", run.mirror, here, "no --mirror"),
    )
    return [Problem(where=one[1], given=f"{one[2]}, {apart}", allowed=one[3], fix=one[4]) for one in found if one[0]]
