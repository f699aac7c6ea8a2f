"""What a check asks: each host by itself, then the links between them, at once where none disturbs another.

Nothing is judged here: ``host_findings`` does that.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.device_kinds import probed_kinds
from phalanx.errors import Problem, RunError
from phalanx.launch import code_files
from phalanx.launch.check_hosts import host_probe, job_probe, link_probe
from phalanx.launch.check_hosts.target_host import CODE_OF_CHECK, TargetHost, program_text
from phalanx.units import show_bytes, show_names

PATIENCE = 50.0
"""Seconds that a host has to answer in."""
_OF_JOB = 40.0  # seconds of them for the job's file, imports and data
_OF_LINK = 12.0
_UNTIL = 45.0  # seconds from the beginning, after which no further round of links begins
_LEAST = 2  # rounds that there are in any case, so that each host has a link, and most have two
_RING = 8  # hosts; where there are more, each is asked for its links to two others, not to all
_LOOKS = 20  # at a folder on several machines, whose view of it may be some seconds old
_BOOT = """
import json, sys
QUESTION = json.load(sys.stdin)
exec(compile(QUESTION.pop("program"), "phalanx check", "exec"), {"__name__": "__main__", "QUESTION": QUESTION})
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckQuestion:
    """What hosts are asked about.

    Attributes:
        reference: of the job, as the hosts know it; empty where none is asked about.
        file: the job's, absolute; empty where there is none.
        folder: of the run, or that it would be made in.
        cwd: where the job is loaded from.
    """

    reference: str = ""
    file: str = ""
    folder: Path
    cwd: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAnswer:
    """What one host said.

    Attributes:
        name: of the host.
        processes: that the target has for it; 0 where that follows from its devices.
        port: where all workers meet on it; 0 where that is another's, or any.
        told: as ``host_probe`` has it; empty where nothing came.
        error: why nothing came.
        ahead: the least and the most seconds that its clock may be ahead of this machine's.
        seen: whether its word in the run folder is seen here.
        scratch: where the target puts what the host does not share; empty where it needs shared folders.
        sent: bytes of the job's code that was sent for the asking, which the host has not; 0 where it has it.
        unsent: bytes of files of that code, which a launch would send there, but are too many for the asking, so that
            nothing is told of the job; 0 else.
        refused: why a launch would refuse to send there what it has not; ``None`` where it would not.
    """

    name: str
    processes: int = 0
    port: int = 0
    told: Mapping[str, Any]
    error: str = ""
    ahead: tuple[float, float] = (0.0, 0.0)
    seen: bool = True
    scratch: str = ""
    sent: int = 0
    unsent: int = 0
    refused: Problem | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAnswer:
    """One way between two hosts.

    Attributes:
        source: the host that opened a connection.
        target: the host that listened.
        port: where.
        error: why there was no connection; empty where there was.
        latency: seconds of a round trip of one byte; 0 where not measured.
        bandwidth: bytes per second from ``source`` to ``target``; 0 where not measured.
    """

    source: str
    target: str
    port: int
    error: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSurvey:
    """All that was said.

    Attributes:
        folder: where the words were left.
        folder_error: why this machine could not write there; empty where it could.
        links_left: pairs of hosts whose link there was no time for.
    """

    hosts: tuple[HostAnswer, ...]
    links: tuple[LinkAnswer, ...]
    folder: Path
    folder_error: str = ""
    links_left: int = 0

    @property
    def not_looked_at(self) -> list[str]:
        """What hosts could not be asked, and why."""
        unsent = {one.name: one.unsent for one in self.hosts if one.unsent}
        if not unsent:
            return []
        most = f"{show_bytes(max(unsent.values()))}, which launching sends; a check sends {show_bytes(CODE_OF_CHECK)}"
        return [f"the job, its imports and data on {show_names([*unsent])}: its code is not there, and {most} at most"]


def survey(hosts: Sequence[TargetHost], asked: CheckQuestion) -> HostSurvey:
    """Ask all ``hosts``, and leave nothing behind there or here."""
    until = time.monotonic() + _UNTIL
    with _shared_folder(asked.folder) as (folder, token, error), ThreadPoolExecutor(max(1, len(hosts))) as pool:
        meeting = hosts[0].address if hosts else ""
        probed = {kind.name: kind.probe for kind in probed_kinds()}
        common = {
            "job": {
                "reference": asked.reference,
                "file": asked.file,
                "stamp": _stamp(Path(asked.file)),
                "kinds": probed,
            },
            "boot": _BOOT,
            "job_probe": program_text(code_files, job_probe),
            "patience": _OF_JOB,
            "folder": str(folder),
            "token": token,
            "towards": meeting or host_probe.ANYWHERE,
        }
        rows = [
            (host, {**common, "name": f"host-{number}", "cwd": host.folder or asked.cwd, "meets": not number})
            for number, host in enumerate(hosts)
        ]
        answers = list(pool.map(lambda row: _ask_with_code(row[0], row[1], asked), rows))
        there = {host.name for host, answer in zip(hosts, answers, strict=True) if answer.told}
        seen = _seen(folder, token, [number for number, answer in enumerate(answers) if _wrote(answer)])
        answers = [replace(one, seen=not _wrote(one) or number in seen) for number, one in enumerate(answers)]
        links, left = _links([host for host in hosts if host.name in there], answers, pool, until)
    return HostSurvey(hosts=tuple(answers), links=tuple(links), folder=folder, folder_error=error, links_left=left)


def _ask_with_code(host: TargetHost, question: Mapping[str, Any], asked: CheckQuestion) -> HostAnswer:
    """Ask ``host``; where it does not share the job's file, and the target sends code that is lacking, with that.

    Whether it lacks any is what a launch goes by: the job's file is the very one here, or all files are alike.
    """
    answer = _ask(host, question)
    shares = answer.told.get("source", {"state": "same"})["state"] == "same"
    if not host.scratch or shares or not (code := host.sent_code(asked.reference, asked.folder)):
        return answer
    if code.refused:
        return replace(answer, refused=code.refused)
    job = {
        **question["job"],
        "within": str(Path(asked.file).relative_to(code.root)),
        "root": str(code.root),
        "digests": dict(code.digests),
        "pack": base64.b64encode(code.pack).decode(),
    }
    answer = _ask(host, {**question, "job": job})
    if answer.told.get("alike", True):  # copied by hand
        return answer
    return replace(answer, sent=len(code.pack), unsent=0 if code.pack else code.nbytes)


def _stamp(path: Path) -> list[int]:
    with suppress(OSError):
        return code_files.stamp_of(path.stat())
    return []


def _ask(host: TargetHost, question: Mapping[str, Any]) -> HostAnswer:
    question = {**question, "port": host.port, "scratch": host.scratch}
    known: dict[str, Any] = {
        "name": host.name,
        "processes": host.processes,
        "port": host.port,
        "scratch": host.scratch,
    }
    before = time.time()
    try:
        told = _run(host, host_probe, question, PATIENCE)
    except RunError as error:
        return HostAnswer(**known, told={}, error=str(error))
    after = time.time()
    if question["meets"] and host.address:
        told["address"] = host.address
    return HostAnswer(**known, told=told, ahead=(told["ended"] - after, told["began"] - before))


def _run(host: TargetHost, program: Any, question: Mapping[str, Any], patience: float) -> dict[str, Any]:
    """What one of the programs answers on ``host``."""
    text = json.dumps({**question, "program": program_text(program)})
    out = host.run(["-c", _BOOT], text, patience)
    lines = [line for line in out.splitlines() if line.startswith(host_probe.MARK)]
    if not lines:
        raise RunError("runs Python, which does not say what it was asked")
    return json.loads(lines[-1].removeprefix(host_probe.MARK))


@contextmanager
def _shared_folder(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """A folder of the check's own in ``folder``, or in what there is of the path to it, with a word in it."""
    above = folder.absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    token, error = secrets.token_hex(8), ""
    own = above / f".phalanx-check-{token}"
    try:
        own.mkdir()
        (own / host_probe.TOKEN).write_text(token)
    except OSError as failure:
        error = failure.strerror or str(failure)
    try:
        yield (own if own.is_dir() else above), token, error
    finally:
        if own.is_dir():
            for file in own.iterdir():
                with suppress(OSError):
                    file.unlink()
            with suppress(OSError):
                own.rmdir()


def _wrote(answer: HostAnswer) -> bool:
    folder = answer.told.get("folder", {})
    return bool(folder.get("shared")) and not folder.get("error")


def _seen(folder: Path, token: str, wrote: list[int]) -> set[int]:
    """The hosts whose word in the folder this machine sees."""
    missing, looks = set(wrote), 0
    while missing and looks < _LOOKS:
        time.sleep(0.2 if looks else 0.0)
        looks += 1
        for number in tuple(missing):
            with suppress(OSError):
                os.listdir(folder)  # some file systems look again only for that
                if (folder / f"host-{number}").read_text() == token:
                    missing.discard(number)
    return set(wrote) - missing


def _links(
    hosts: Sequence[TargetHost], answers: Sequence[HostAnswer], pool: ThreadPoolExecutor, until: float
) -> tuple[list[LinkAnswer], int]:
    """Round after round, in each of which a host is asked for one link only; and how many pairs are left ``until``."""
    told = {answer.name: answer.told for answer in answers}
    found: list[LinkAnswer] = []
    left = 0
    for number, pairs in enumerate(rounds(len(hosts))):
        if number >= _LEAST and time.monotonic() > until:
            left += len(pairs)
            continue
        rows = [(hosts[one], hosts[other], told) for one, other in pairs]
        for both in pool.map(lambda row: _both_ways(*row), rows):
            found += both
    return found, left


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of ``count`` hosts, in rounds in which none stands twice: all pairs, of many hosts those of a ring."""
    if count > _RING:
        ring = [(one, (one + 1) % count) for one in range(count)]
        even, odd = ring[: count - count % 2 : 2], ring[1::2]
        return [even, odd, ring[-1:]] if count % 2 else [even, odd]
    seats = [*range(count), *([-1] if count % 2 else [])]
    found: list[list[tuple[int, int]]] = []
    for _ in range(max(0, len(seats) - 1)):  # the circle method: one stays, the others move on by a seat
        half = len(seats) // 2
        pairs = [(min(pair), max(pair)) for pair in zip(seats[:half], reversed(seats[half:]), strict=True)]
        found.append([pair for pair in pairs if pair[0] >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _both_ways(one: TargetHost, other: TargetHost, told: Mapping[str, Mapping[str, Any]]) -> list[LinkAnswer]:
    ports = {host.name: _listening(host, told[host.name]) for host in (one, other)}

    def ask(host: TargetHost, peer: TargetHost) -> LinkAnswer:
        question = {
            "port": ports[host.name],
            "peer": [told[peer.name]["address"], ports[peer.name]],
            "first": host is one,
        }
        known: dict[str, Any] = {"source": host.name, "target": peer.name, "port": ports[peer.name]}
        try:
            return LinkAnswer(**known, **_run(host, link_probe, question, _OF_LINK))
        except RunError as error:
            return LinkAnswer(**known, error=str(error))

    with ThreadPoolExecutor(2) as pair:
        return list(pair.map(ask, (one, other), (other, one)))


def _listening(host: TargetHost, told: Mapping[str, Any]) -> int:
    """The port that all workers meet at on this host, where there is such a one and it is free; else a free one."""
    return host.port if host.port and not told["port"]["error"] else told["free_port"]
