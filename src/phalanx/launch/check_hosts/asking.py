"""What a check asks: each host by itself, then the links between them, all in the time that it may take.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from phalanx.device_kinds import all_kinds, probed_kinds
from phalanx.errors import Problem, RunError
from phalanx.launch import code_files
from phalanx.launch.check_hosts import host_probe, job_probe, link_probe
from phalanx.launch.check_hosts.asking_links import LEAST, LinkAnswer, ask_links
from phalanx.launch.check_hosts.started_program import BOOT, CheckTime, end_started, ended_by_signals
from phalanx.launch.check_hosts.target_host import CODE_OF_CHECK, TargetHost, program_text
from phalanx.launch.host_messages import checked_answer
from phalanx.units import show_bytes, show_names

_OF_HOST, _OF_JOB = 0.84, 0.74  # of the time that is left: of a host to answer in, and of the job's process there
_OF_LINK = 12.0  # seconds
_LOOKS = 20  # at a folder on several machines, whose view of it may be some seconds old
_CLEARING = 10  # tries to remove what hosts may still write into


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckQuestion:
    """What hosts are asked about.

    Attributes:
        reference: of the job, as the hosts know it; empty where none is asked about.
        file: the job's, absolute; empty where there is none.
        folder: of the run, or that it would be made in.
        cwd: where the job is loaded from.
        time: that all may take.
    """

    reference: str = ""
    file: str = ""
    folder: Path
    cwd: str
    time: CheckTime = field(default_factory=CheckTime)


class DeviceThere(TypedDict):
    """A device of a host by the ``probe`` of its kind, with bytes of memory; ``error`` is empty where it works.

    Of one that does not, the name and the memory may be missing.
    """

    index: int
    name: str
    free: int
    total: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAnswer:
    """What one host said.

    Attributes:
        name: of the host.
        processes: that the target has for it; 0 where that follows from its devices.
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
    told: Mapping[str, Any]
    error: str = ""
    ahead: tuple[float, float] = (0.0, 0.0)
    seen: bool = True
    scratch: str = ""
    sent: int = 0
    unsent: int = 0
    refused: Problem | None = None

    @property
    def devices(self) -> Sequence[DeviceThere]:
        """Those that its torch has; none where it has not said."""
        return self.told.get("devices", ())

    @property
    def whole_devices(self) -> list[DeviceThere]:
        """Those of them that work."""
        return [one for one in self.devices if not one["error"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSurvey:
    """All that was said.

    Attributes:
        folder: where the words were left.
        folder_error: why this machine could not write there; empty where it could.
        unasked: pairs of hosts that no time was left to ask for their link.
    """

    hosts: tuple[HostAnswer, ...]
    links: tuple[LinkAnswer, ...]
    folder: Path
    folder_error: str = ""
    unasked: int = 0

    @property
    def not_looked_at(self) -> list[str]:
        """What hosts could not be asked, and why."""
        unsent = {one.name: one.unsent for one in self.hosts if one.unsent}
        if not unsent:
            return []
        most = f"{show_bytes(max(unsent.values()))}, which launching sends; a check sends {show_bytes(CODE_OF_CHECK)}"
        return [f"the job, its imports and data on {show_names([*unsent])}: its code is not there, and {most} at most"]


def survey(hosts: Sequence[TargetHost], asked: CheckQuestion) -> HostSurvey:
    """Ask all ``hosts``, and leave nothing behind there or here, also where Ctrl-C or SIGTERM cuts it short."""
    with ended_by_signals(), _shared_folder(asked.folder) as (folder, token, error), _asking(hosts, asked.time) as pool:
        meeting = hosts[0].address if hosts else ""
        probed = {kind.name: kind.probe for kind in probed_kinds()}
        drivers = {kind.name: kind.driver for kind in all_kinds() if kind.driver}
        common = {
            "job": {
                "reference": asked.reference,
                "file": asked.file,
                "stamp": code_files.stamp_of(asked.file),
                "kinds": probed,
            },
            "drivers": drivers,
            "boot": BOOT,
            "job_probe": program_text(code_files, job_probe),
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
        told = {answer.name: answer.told for answer in answers}
        links = ask_links(
            [host for host in hosts if host.name in there],
            told,
            lambda host, question: _run(host, link_probe, question, min(_OF_LINK, asked.time.at_least(LEAST))),
            pool,
            asked.time,
        )
    return HostSurvey(hosts=tuple(answers), links=links.links, folder=folder, folder_error=error, unasked=links.unasked)


@contextmanager
def _asking(hosts: Sequence[TargetHost], limit: CheckTime) -> Iterator[ThreadPoolExecutor]:
    """A thread for each of ``hosts``; what they have started is ended at once where this is cut short."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        try:
            yield pool
        except BaseException:
            limit.end()
            pool.shutdown(wait=False, cancel_futures=True)
            end_started()
            raise


def _ask_with_code(host: TargetHost, question: Mapping[str, Any], asked: CheckQuestion) -> HostAnswer:
    """Ask ``host``; where it does not share the job's file, and the target sends code that is lacking, with that.

    Whether it lacks any is what a launch goes by: the job's file is the very one here, or all files are alike.
    """
    answer = _ask(host, question, asked.time)
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
    answer = _ask(host, {**question, "job": job}, asked.time)
    if answer.told.get("alike", True):  # copied by hand
        return answer
    return replace(answer, sent=len(code.pack), unsent=0 if code.pack else code.nbytes)


def _ask(host: TargetHost, question: Mapping[str, Any], limit: CheckTime) -> HostAnswer:
    question = {**question, "scratch": host.scratch, "patience": _OF_JOB * limit.left}
    known: dict[str, Any] = {"name": host.name, "processes": host.processes, "scratch": host.scratch}
    before = time.time()
    try:
        told = _run(host, host_probe, question, _OF_HOST * limit.left)
    except RunError as error:
        return HostAnswer(**known, told={}, error=str(error))
    after = time.time()
    if question["meets"] and host.address:
        told["address"] = host.address
    return HostAnswer(**known, told=told, ahead=(told["ended"] - after, told["began"] - before))


def _run(host: TargetHost, program: Any, question: Mapping[str, Any], patience: float) -> dict[str, Any]:
    """What one of the programs answers on ``host``."""
    if not patience:
        raise RunError("was not asked: no time was left")
    text = json.dumps({**question, "program": program_text(program)}) + "\n"
    out = host.run(["-c", BOOT], text, patience)
    lines = [line for line in out.splitlines() if line.startswith(host_probe.MARK)]
    told = checked_answer(lines[-1].removeprefix(host_probe.MARK), of_link=program is link_probe) if lines else None
    if told is None:
        raise RunError("runs Python, which does not say what it was asked")
    return told


@contextmanager
def _shared_folder(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """A folder of the check's own in ``folder``, or in what there is of the path to it, with a word in it."""
    whole = folder.absolute()
    above = next((one for one in (whole, *whole.parents) if one.exists()), whole)
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
        _remove(own)


def _remove(folder: Path) -> None:
    """Again where a host has put something in just then."""
    for number in range(_CLEARING):
        time.sleep(0.1 if number else 0.0)
        with suppress(OSError):
            for file in folder.iterdir():
                with suppress(OSError):
                    file.unlink()
        with suppress(OSError):
            folder.rmdir()
        if not folder.is_dir():
            return


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
