"""Compare the answers of hosts, and find the reasons why training would fail there: two tables, and a few functions.

A finding ``fails`` if training would not start or not go on; others cost time, or make the numbers less sure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from phalanx.device_kinds import DeviceKind, all_kinds
from phalanx.launch.check_hosts.group_findings import (
    HostFinding,
    Needs,
    clock_findings,
    device_findings,
    kind_there,
    link_findings,
    plan_findings,
    workers_of,
)
from phalanx.launch.check_hosts.host_answer import HostAnswer, HostFacts
from phalanx.launch.check_hosts.host_survey import HostSurvey
from phalanx.units import show_bytes, show_names

_KEPT = 3  # checkpoints on the disk at a time
_ENOUGH = 1024  # open files, and processes of a user
_SHM, _LEAST_SHM = 128 * 2**20, 16 * 2**20  # bytes of /dev/shm that are enough, and too few
_SAME_PHALANX = "install the same Phalanx on all hosts, from one folder"
_INSTALL = "install the same Phalanx and torch there, for the interpreter of the workers"
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


def findings(survey: HostSurvey, needs: Needs | None) -> list[HostFinding]:
    """Return all faults, first the faults by which training fails; the same fault of several hosts is one."""
    there = [one for one in survey.hosts if one.facts]
    whole, kind = len(there) == len(survey.hosts), kind_there(there)
    counts, total = (workers_of(there, needs), needs.plan.processes) if needs else ({}, 1)
    facts = [one.facts for one in there if one.facts]
    found = [
        *(_silent(one) for one in survey.hosts if not one.facts),
        *_differences(facts, [one.name for one in there]),
        *(row for one, h in zip(there, facts, strict=True) for row in _of_host(one, h, survey, needs)),
        *_of_folders(survey, needs),
        *(
            row
            for one, h in zip(there, facts, strict=True)
            for row in _of_system(one.name, h, kind, (counts.get(one.name, 1), total))
        ),
        *device_findings(there),
        *(plan_findings(there, needs, whole=whole) if needs else ()),
        *clock_findings(there),
        *link_findings(survey.links, {one.name: one.facts.address for one in there if one.facts}),
    ]
    groups: dict[tuple[Any, ...], list[HostFinding]] = defaultdict(list)
    for one in found:
        one = replace(one, what=" ".join(one.what.split()), fix=" ".join(one.fix.split()))
        groups[one.kind, one.what, one.fix, one.fails].append(one)
    together = [replace(same[0], hosts=tuple(name for one in same for name in one.hosts)) for same in groups.values()]
    return sorted(together, key=lambda one: not one.fails)


def way_there(name: str, said: str) -> str:
    """Return the fix for the host ``name``, which cannot be used, by the words of ssh or its shell."""
    return next(way for sign, _, way in _WAYS if sign in said.lower()).format(name=name)


def _silent(answer: HostAnswer) -> HostFinding:
    kind = next(kind for sign, kind, _ in _WAYS if sign in answer.error.lower())
    return HostFinding(kind=kind, hosts=(answer.name,), what=answer.error, fix=way_there(answer.name, answer.error))


def _differences(there: Sequence[HostFacts], names: Sequence[str]) -> Iterator[HostFinding]:
    """Find values that hosts should have alike."""
    of_kinds = {name: label for kind in all_kinds() for name, label in kind.versions.items()}
    rows = [
        ("versions", "Python", [one.python.rpartition(".")[0] for one in there], "use the same Python there", False),
        ("versions", "GPU driver", [one.driver for one in there], "install the same driver on all hosts", False),
        ("devices", "devices:", [f"{len(one.devices)}" for one in there], "see that the driver lists all", False),
    ]
    for name in dict.fromkeys(name for one in there for name in one.versions):
        fix = _SAME_PHALANX if name == "phalanx" else f"pip install {name}=={{}} there"
        fix, fails = ("install the same torch on all hosts" if name in of_kinds else fix), name in _MUST | {*of_kinds}
        rows.append(("versions", of_kinds.get(name, name), [one.versions.get(name, "") for one in there], fix, fails))
    for file in dict.fromkeys(file for one in there for file in one.files):
        digests = [one.files.get(file, "")[:12] for one in there]
        fix = "copy the job's folder there again, or put it where all hosts see it"
        rows.append(("job", f"{file} is another file:", digests, fix, True))
    for kind, label, values, fix, fails in rows:
        groups = defaultdict[str, list[str]](list)
        for name, value in zip(names, values, strict=True):
            groups[value] += [name] if value else []
        groups.pop("", None)
        # the value of the first host is the usual one if several are as frequent
        usual, *odd = sorted(groups.items(), key=lambda item: -len(item[1])) or [("", [])]
        if odd:
            words = ", ".join(f"{value} on {show_names(hosts)}" for value, hosts in [*odd, usual])
            hosts = tuple(host for _, hosts in odd for host in hosts)
            fix = fix.replace("{}", usual[0].partition("+")[0])
            yield HostFinding(kind=kind, hosts=hosts, what=f"{label} {words}", fix=fix, fails=fails)


_MUST = {"torch", "phalanx"}


def _of_host(answer: HostAnswer, h: HostFacts, survey: HostSurvey, needs: Needs | None) -> Iterator[HostFinding]:
    """Find faults of one host by itself: the job and its folders."""
    where, state, ending = survey.folder, needs.state if needs else 0.0, h.ending
    unshared = not (h.shared or survey.folder_error or h.folder_error)
    with_it = f", with {h.executable}" if h.job_fix.startswith("pip ") else ""
    room, free = "make room there, or choose another folder: --run", show_bytes(h.folder_free)
    rights = room if "space" in h.folder_error else "choose a folder that can be written to: --run"
    yield from _rows(
        answer.name,
        (h.missing, "job", "the job's file is not there", "copy it there, or share its folder"),
        (h.job_error, "job", h.job_error, h.job_fix + with_it),
        (h.data_error, "data", f"the job's data: {h.data_error}", "make the data readable there: all hosts read it"),
        (
            *(ending, "data" if h.step == "data" else "job"),
            f"the process that was to load the job and its data {ending}",
            "load the job there by hand and see what takes so long, or ends it",
        ),
        (h.folder_error, "folder", f"{where} cannot be written to: {h.folder_error}", rights),
        (
            *(unshared, "folder", f"{where} is not the folder of that path here: it does not see the files of others"),
            "choose a folder that all hosts share, such as one on NFS: --run",
        ),
        (
            *(h.shared and h.folder_free < _KEPT * state, "folder"),
            *(f"{where} has {free} free; a checkpoint takes {show_bytes(state)}", room, h.folder_free < state),
        ),
    )


def _of_system(name: str, h: HostFacts, kind: DeviceKind, workers: tuple[int, int]) -> Iterator[HostFinding]:
    """Find faults of one host's system; ``workers``: of the run on this host, and on all."""
    files, processes = 128 + 4 * workers[1], workers[0] * (4 + h.loaders)  # at least; threads count as processes
    forever, torch = "there, in /etc/security/limits.conf for good", h.versions.get("torch", "")
    locked = f"a process may lock {show_bytes(h.locked_memory)} of memory, which InfiniBand needs more of"
    shm = f"/dev/shm has {show_bytes(h.shm_free)} free, for the tensors of "
    shm += f"{h.loaders} loader processes" if h.loaders else "its devices"
    unseen = h.driver_devices and h.versions and not h.devices
    yield from _rows(
        name,
        (h.driver_error, "devices", f"{kind.driver_tool}: {h.driver_error}", "mend the driver there"),
        (
            *(unseen, "devices", f"torch sees none of {h.driver_devices} devices: torch {torch}"),
            f"install torch for that driver's {kind.label} there, and see {kind.visible}",
        ),
        (
            *(0 <= h.open_files < _ENOUGH, "limits", f"a process may open {h.open_files} files"),
            *(f"ulimit -n 65536 {forever}", h.open_files < files),
        ),
        (
            *(0 <= h.processes < max(_ENOUGH, processes), "limits"),
            f"its user may have {h.processes} processes and threads",
            *(f"ulimit -u 65536 {forever}", h.processes < processes),
        ),
        (h.infiniband and h.locked_memory >= 0, "limits", locked, "ulimit -l unlimited there", False),
        (
            *(h.shm and (h.loaders or len(h.devices) > 1) and h.shm_free < _SHM, "limits", shm),
            *("mount -o remount,size=8G /dev/shm there; of a container --shm-size=8g",),
            h.loaders > 0 and h.shm_free < _LEAST_SHM,
        ),
        (
            *(h.meets, "links", f"workers cannot meet at {h.address}: {h.meets}"),
            "give an address of the host's own that the others reach",
        ),
    )


def _rows(host: str, *rows: tuple[Any, ...]) -> Iterator[HostFinding]:
    """Yield the rows that hold: condition, kind, sentence, fix, and whether training fails."""
    for holds, kind, what, fix, *fails in rows:
        if holds:
            yield HostFinding(kind=kind, hosts=(host,), what=what, fix=fix, fails=bool(*fails) if fails else True)


def _of_folders(survey: HostSurvey, needs: Needs | None) -> Iterator[HostFinding]:
    """Find faults of the run folder that are of no single host."""
    facts = [one.facts for one in survey.hosts if one.facts]
    if survey.folder_error and not any(one.folder_error for one in facts):
        what = f"{survey.folder} cannot be written to: {survey.folder_error}"
        fix = "make room there, or choose another folder: --run"
        yield HostFinding(kind="folder", hosts=("here",), what=what, fix=fix)
