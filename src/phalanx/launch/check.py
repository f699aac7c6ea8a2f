"""Ask all hosts of a launch target about themselves at the same time, then about the links between them.

A host may be hostile: each field of an answer is checked, bounded, and shown without control characters.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final, get_args, get_origin, get_type_hints

from phalanx.device_kinds import all_kinds
from phalanx.errors import RunError
from phalanx.files import json_value
from phalanx.launch.addresses import ANYWHERE
from phalanx.launch.check_probe import MARK
from phalanx.launch.code_files import digest_of
from phalanx.launch.jobfile import Reference
from phalanx.launch.reaper import StopRequest, kill_group, raise_stopped
from phalanx.units import visible

T = TypeVar("T")

MOST = 50.0
"""Seconds that a check may take."""
LONGEST = 2**20
"""Bytes of a host's answer; of longer output the end is read."""
PROGRAM = ("-m", "phalanx.launch.check_probe")
"""Arguments of the Python of a host."""
_ENTRIES, _CHARACTERS = 4096, 2**16  # of a list, and of a text
_OF_HOST, _OF_JOB = 0.7, 0.6  # share of the time left for a host's answer, and for the job's process there
_OF_LINKS, _IMPORTS = 20.0, 5.0  # seconds for the links, and of these for imports
_LOOK, _END = 0.05, 2.0  # seconds between looks at the time, and for a program to end by itself


@final
class CheckTime:
    """The time left for a check, or for a part of it."""

    def __init__(self, seconds: float | None = None, within: CheckTime | None = None) -> None:
        """``seconds``: ``MOST`` if not given. ``within``: the check that this is a part of, and ends with."""
        self.seconds, self._within = MOST if seconds is None else seconds, within
        self._until = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds; never below 0."""
        return max(0.0, min(self._until - time.monotonic(), self._within.left if self._within else self.seconds))

    def end(self) -> None:
        """Leave no time from now on."""
        self._until = time.monotonic()


class TargetHost(ABC):
    """One machine of a launch target.

    Attributes:
        name: as the user knows it; no two hosts of a target have one name.
        address: for the other hosts; empty if the host is to find it out.
        processes: workers it is to have; 0: as many as it has devices.
        folder: of its workers; empty: the folder of the asking process.
    """

    name: str
    address: str = ""
    processes: int = 0
    folder: str = ""

    @abstractmethod
    def run(self, arguments: Sequence[str], text: str, limit: CheckTime) -> str:
        """Return the output of the workers' Python there, given ``arguments`` and ``text`` on stdin.

        Stdin stays open until the program has ended; the program ends if it closes. Several threads may call it.

        Raises:
            RunError: the program fails, or takes longer than ``limit``; the text does not name the host.
        """


@final
class ThisMachine(TargetHost):
    """The machine that asks."""

    def __init__(self, python: str = sys.executable) -> None:
        """``python``: the interpreter of workers."""
        self.name, self._python = "this machine", python

    def run(self, arguments: Sequence[str], text: str, limit: CheckTime) -> str:
        return run_here([self._python, *arguments], text, limit)


def run_here(command: Sequence[str], text: str, limit: CheckTime) -> str:
    """Return all that ``command`` prints, given ``text`` on stdin, which stays open until it has ended.

    Raises:
        RunError: there is no such program, it fails, or takes longer than ``limit``.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen([*command], bufsize=0, start_new_session=True, **pipes)
    except OSError as error:
        raise RunError(f"{command[0]} cannot be started: {error.strerror}") from None
    assert process.stdin
    with process:
        try:
            with suppress(OSError):  # it has ended
                process.stdin.write(text.encode())  # pyrefly: ignore
            said = _output(process, limit)  # pyrefly: ignore
        finally:
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            if process.poll() is None:
                kill_group(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        raise RunError(visible(lines[-1].strip() if lines else f"ended with exit code {process.returncode}"))
    return said


def _output(process: subprocess.Popen[bytes], limit: CheckTime) -> str:
    assert process.stdout
    said, poll, pipe = b"", select.poll(), process.stdout.fileno()
    poll.register(pipe, select.POLLIN)
    while left := limit.left:
        if poll.poll(1000 * min(_LOOK, left)):
            if not (data := os.read(pipe, 2**16)):
                return said.decode(errors="replace")
            said = (said + data)[-LONGEST:]
    raise RunError(f"gives no answer within {limit.seconds:.0f} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device as torch knows it; memory in bytes. ``error`` is empty if the device computes."""

    index: int
    name: str = ""
    error: str = ""
    free: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts that a host reports; sizes in bytes, times in seconds.

    Attributes:
        open_files, locked_memory, processes: soft limits; -1: none.
        shared: the host sees the asker's file in the run folder.
        no_cwd: the working directory of workers is not there.
        missing: the job's file is not there.
        speed: bytes per second of the host's fastest network; 0 if unknown.
        meets: reason why workers cannot meet at the host's address.
        driver_devices: devices that their driver lists.
        versions: Python package, or name in ``DeviceKind.versions`` → version.
        files: file of the job, relative to its folder → SHA-256.
        samples: of the job's data; -1: a stream, or not read.
        loaders: processes that load the data of each worker.
        step: step that the probing process was in as it ended.
        ending: reason why it did not finish.
    """

    python: str
    cores: int
    memory: int
    memory_free: int
    shared: bool
    folder_free: int
    address: str
    clock: float
    open_files: int = -1
    locked_memory: int = -1
    processes: int = -1
    shm_free: int = -1
    folder_error: str = ""
    no_cwd: bool = False
    missing: bool = False
    speed: float = 0.0
    infiniband: bool = False
    meets: str = ""
    free_port: int = 0
    driver: str = ""
    driver_error: str = ""
    driver_devices: int = 0
    topology: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    job_error: str = ""
    job_fix: str = ""
    data_error: str = ""
    data_read: bool = False
    samples: int = -1
    loaders: int = 0
    step: str = ""
    ending: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("", *(one.name for one in all_kinds())) or min(self.cores, self.memory) < 1:
            raise ValueError(f"{self.kind or 'no device'}, {self.cores} cores, {self.memory} bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAnswer:
    """A link of the ring of hosts: seconds of a round trip and bytes per second, or the error of its ``target``.

    Attributes:
        met: the target has reached the meeting point.
    """

    source: str = ""
    target: str = ""
    met: bool = False
    error: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAnswer:
    """Answer of one host.

    Attributes:
        processes: that the target starts there; 0: as many as it has devices.
        facts: ``None`` if no answer came, for the reason ``error``.
        ahead: seconds by which its clock is ahead of this machine's.
    """

    name: str
    processes: int = 0
    facts: HostFacts | None = None
    error: str = ""
    ahead: float = 0.0

    @property
    def working(self) -> list[DeviceFacts]:
        """Devices that compute."""
        return [one for one in self.facts.devices if not one.error] if self.facts else []


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSurvey:
    """The answers of all hosts.

    Attributes:
        folder: in which hosts looked for this machine's file.
        folder_error: reason why this machine could not write there.
        files: the job's file here, with its SHA-256.
    """

    hosts: tuple[HostAnswer, ...]
    links: tuple[LinkAnswer, ...] = ()
    folder: Path
    folder_error: str = ""
    files: Mapping[str, str] = field(default_factory=dict[str, str])


def read_answer(text: str, form: type[T]) -> T:
    """Return the answer in the last marked line of ``text``.

    Raises:
        RunError: there is none of this ``form``.
    """
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    try:
        return _read(json_value(lines[-1].removeprefix(MARK)), form)
    except (LookupError, TypeError, ValueError):  # TypeError: a field is missing or unknown
        raise RunError("gives another answer than this version of Phalanx asks for") from None


def _read(value: Any, form: Any) -> Any:
    kind, inner = get_origin(form), get_args(form)
    if is_dataclass(form) and isinstance(value, dict):
        kinds = get_type_hints(form, vars(sys.modules[__name__]))
        return form(**{name: _read(one, kinds.get(name)) for name, one in value.items()})  # pyrefly: ignore
    if kind is tuple and isinstance(value, list) and len(value) <= _ENTRIES:
        return tuple(_read(one, inner[0]) for one in value)
    if kind is Mapping and isinstance(value, dict) and len(value) <= _ENTRIES:
        return {_read(name, str): _read(one, inner[1]) for name, one in value.items()}
    if form is str and isinstance(value, str) and len(value) <= _CHARACTERS:
        return visible(value)
    if type(value) is form and (form in (bool, float) or (form is int and -1 <= value < 2**63)):
        return value
    raise ValueError(f"not {form}")


def survey(
    hosts: Sequence[TargetHost],
    folder: Path,
    reference: str = "",
    limit: CheckTime | None = None,
    *,
    quick: bool = False,
) -> HostSurvey:
    """Return the answers of all ``hosts``; Ctrl-C or SIGTERM end it without leaving anything behind.

    Args:
        folder: of the run; the nearest folder above it if it is not there yet.
        reference: of the job; empty: none.
        quick: no host loads torch or the job, and links are not measured.
    """
    limit, where = limit or CheckTime(), Reference.parse(reference) if reference else None
    file = where.file if where else None
    with StopRequest() as stop, _token_file(folder) as (token, error), ThreadPoolExecutor(max(1, len(hosts))) as pool:
        question = {
            "reference": str(where or ""),
            "file": str(file or ""),
            "token": str(token),
            "towards": (hosts[0].address if hosts else "") or ANYWHERE,
            "quick": quick,
        }

        def ask_all(ask: Callable[[int], T], count: int) -> list[T]:
            asked = [pool.submit(ask, number) for number in range(count)]
            while not all(one.done() for one in asked):
                if stop.number:
                    limit.end()  # of all programs that run for it
                    raise_stopped(stop.number, saved=False)
                time.sleep(_LOOK)
            return [one.result() for one in asked]

        answers = ask_all(lambda number: _ask(hosts[number], {**question, "first": not number}, limit), len(hosts))
        there = [(host, one.facts) for host, one in zip(hosts, answers, strict=True) if one.facts]
        ring = CheckTime(min(_OF_LINKS, limit.left), limit)
        meets = len(there) > 1 and not quick
        links = ask_all(lambda rank: _link(there, rank, ring), len(there)) if meets else []
    raise_stopped(stop.number, saved=False)
    files = {file.name: digest_of(file)} if file and file.is_file() else {}
    return HostSurvey(hosts=tuple(answers), links=tuple(links), folder=token.parent, folder_error=error, files=files)


def _ask(host: TargetHost, question: Mapping[str, Any], limit: CheckTime) -> HostAnswer:
    own = {"cwd": host.folder or os.getcwd(), "patience": _OF_JOB * limit.left}
    try:
        facts = _run(host, {**question, **own}, CheckTime(_OF_HOST * limit.left, limit), HostFacts)
    except RunError as error:
        return HostAnswer(name=host.name, processes=host.processes, error=str(error))
    ahead = facts.clock - time.time()
    facts = replace(facts, address=host.address) if question["first"] and host.address else facts
    return HostAnswer(name=host.name, processes=host.processes, facts=facts, ahead=ahead)


def _run(host: TargetHost, question: Mapping[str, Any], limit: CheckTime, form: type[T]) -> T:
    return read_answer(host.run(PROGRAM, json.dumps(question) + "\n", limit), form)


def _link(there: Sequence[tuple[TargetHost, HostFacts]], rank: int, limit: CheckTime) -> LinkAnswer:
    """Have a host join the process group of all, and measure its link in their ring."""
    (source, _), (target, _), meeting = there[rank - 1], there[rank], there[0][1]
    question = {"hosts": len(there), "meeting": [meeting.address, meeting.free_port], "rank": rank}
    try:  # the program imports torch, in its own time
        said = _run(target, {**question, "patience": max(1.0, limit.left - _IMPORTS)}, limit, LinkAnswer)
    except RunError as error:
        said = LinkAnswer(error=str(error))
    return replace(said, source=source.name, target=target.name)


@contextmanager
def _token_file(folder: Path) -> Iterator[tuple[Path, str]]:
    """Make a file of a random name in ``folder``, or in the nearest folder above it; yield it and the error."""
    whole = folder.absolute()
    above = next((one for one in (whole, *whole.parents) if one.is_dir()), whole)
    with ExitStack() as stack:
        token, error = above / ".phalanx-check", ""
        try:
            made = stack.enter_context(tempfile.NamedTemporaryFile(prefix=f"{token.name}-", dir=above))
            token = Path(made.name)
        except OSError as failure:
            error = failure.strerror or str(failure)
        yield token, error
