"""Names the rank that a run waits for: stacks that workers write at a signal, read and compared after the timeout.

``faulthandler`` writes the stack of the main thread in C: a rank that is blocked in compiled code still answers. A
thread adds the collectives that torch's Flight Recorder has seen. The culprit is a rank that does not wait for others;
among several, one with fewer collectives begun. A run is ended from here only if no process has computed, read or
written anything for the whole timeout: otherwise a rank that waits gives up by itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary
from typing import NamedTuple, final

from phalanx.comm import Place
from phalanx.launch.failure import HANG, Failure, gave_up
from phalanx.train.user_traceback import origin
from phalanx.units import show_names

_SIGNAL = signal.SIGUSR2  # has a worker write its stack
_QUIET, _ASK, _ASK_AGAIN = 0.5, 0.7, 0.08  # of the timeout: a worker notes its collectives; requests for stacks
_ANSWER, _POLL, _DUMP = 1.0, 0.02, 0.05  # seconds: for a process to answer, between looks, to write a stack
_LOOK, _GAP, _LATER = 0.5, 5.0, 1.0  # seconds between looks; if the launcher was stopped; for ranks to give up
_ACTIVE, _MOVED = 0.05, 1 << 18  # share of a core, and bytes a look: idle threads of gloo use less
_PROC = Path("/proc")
_NEAR, _MOST, _TAIL = 4, 16, 1 << 17  # frames that show a wait; ranks and frames in a report; bytes of stacks

_EXCHANGE = re.compile(r"[/\\]torch[/\\]distributed[/\\]|[/\\]phalanx[/\\]comm[/\\]")
_LOADING = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]|[/\\]phalanx[/\\]data[/\\]")
_WAITS = re.compile(r"\.(wait|recv|irecv|send|barrier|synchronize)\(|store\.(get|wait)|all_reduce|all_gather|broadcast")
_FRAME = re.compile(r'^ +File "(.*)", line (\d+),? in (.*)$', re.MULTILINE)

_TEXTS = {  # activity of a rank, or cause of a hang → words for the report, and advice
    "stopped": ("is stopped", "a signal has stopped it: kill -CONT {} on its host; see who sent SIGSTOP or SIGTSTP"),
    "silent": ("did not answer", "it runs no Python: stopped, swapped out, or its host is cut off; see ps and dmesg"),
    "waits": ("waits for other ranks", "a link between hosts is cut or a firewall drops packets: look at the network"),
    "disk": ("waits for a disk", "the file system that it reads or writes does not answer"),
    "loads": ("loads data", "its data do not come: look at what it reads from, and try workers=0 in the job"),
    "computes": ("computes", "it computes what others do not: an endless loop, or the run's timeout is too short"),
    "blocked": ("neither computes nor waits for ranks,", "it waits for a lock, pipe, server or sleep: see its stack"),
    "mismatch": ("", "ranks took different ways: a branch by rank or data, or a collective that only some call"),
}


def parse_stacks(text: str) -> tuple[FrameSummary, ...]:
    """Return the innermost frames first, of the thread that took the signal, in the last dump of ``faulthandler``."""
    start = max(text.rfind("Current thread "), text.rfind("Stack (most"))
    start = text.rfind("Thread 0x") if start < 0 else start
    return _frames(text[start:].partition("\n\n")[0]) if start >= 0 else ()


def _frames(text: str) -> tuple[FrameSummary, ...]:
    return tuple(FrameSummary(file, int(line), function) for file, line, function in _FRAME.findall(text))


def _shown(frame: FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"


class CollectiveCall(NamedTuple):
    """A collective that a rank has begun: the ``number``-th of its process group, counted from 1."""

    group: str
    ranks: tuple[int, ...]
    number: int
    what: str
    pending: bool

    def __str__(self) -> str:
        among = f" among ranks {show_names([*map(str, self.ranks)], _MOST)}" if self.ranks else ""
        return f"{self.what} (exchange {self.number} of its group){among}"


def collective_calls(world_size: int) -> tuple[CollectiveCall, ...]:
    """Return the last collective of each process group, as torch's Flight Recorder has it; prefers pending ones."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    found: dict[str, CollectiveCall] = {}
    with suppress(ValueError, RuntimeError, LookupError, TypeError, AttributeError):  # torch may change the format
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        members = {world.pg_names[group]: tuple(ranks) for group, ranks in list(world.pg_group_ranks.items())}
        known = max(map(len, members.values()), default=0) == world_size  # replicas with sync=local count ranks from 0
        for entry in json.loads(dump()).get("entries", ()) if dump else ():
            name, kind = entry["process_group"][0], entry["profiling_name"].partition(":")[2]
            types = "/".join(sorted({str(one).lower() for one in entry["input_dtypes"]}))
            sizes = " ".join("×".join(map(str, size)) or "1" for size in entry["input_sizes"][:3])
            what, number = f"{kind} of {types} {sizes}".strip(), entry["collective_seq_id"]
            call = CollectiveCall(name, members.get(name, ()) if known else (), number, what, not entry["retired"])
            if not entry["is_p2p"] and not (name in found and found[name].pending and not call.pending):
                found[name] = call
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStand:
    """State of one rank at the hang."""

    rank: int
    step: int | None = None
    pid: int = 0
    host: str = ""
    state: str = ""  # as the kernel has it: R runs, S sleeps, D waits for a disk, T is stopped
    frames: tuple[FrameSummary, ...] = ()  # of its main thread, the innermost first; empty if it did not answer
    calls: tuple[CollectiveCall, ...] = ()  # the last of each group
    gave_up: bool = False  # it has raised an error meanwhile, as it waited for others

    @classmethod
    def from_text(cls, text: str, rank: int) -> RankStand:
        """Read the file that a ``HangProbe`` writes: lines of JSON, and stacks."""
        fields = json.loads(next((line for line in reversed(text.splitlines()) if line[:1] == "{"), '{"calls": []}'))
        calls = tuple(CollectiveCall(group, tuple(ranks), *rest) for group, ranks, *rest in fields.pop("calls"))
        return cls(rank=rank, **fields, frames=parse_stacks(text), calls=calls)

    def after(self, failure: Failure) -> RankStand:
        """Return the stand of a rank that has given up since."""
        frames = self.frames or parse_stacks(failure.traceback) or _frames(failure.traceback)[::-1]
        return replace(self, step=failure.step, frames=frames, gave_up=True)

    def frame_by(self, *authors: str) -> FrameSummary | None:
        """Return the innermost frame of code by one of ``authors``."""
        return next((frame for frame in self.frames if origin(frame.filename) in authors), None)

    @property
    def pending(self) -> list[CollectiveCall]:
        """Collectives that have not ended."""
        return [call for call in self.calls if call.pending]

    @property
    def waits(self) -> bool:
        """True if it waits for other ranks, by its stack."""
        for depth, frame in enumerate(self.frames[: 0 if self.gave_up else _NEAR]):
            calls, by = depth == 0 and _WAITS.search(frame.line or ""), origin(frame.filename)
            if by == "user" and not calls:
                return False
            if _EXCHANGE.search(frame.filename) or (calls and by != "torch"):
                return True
            if frame.name == "_engine_run_backward":  # DistributedDataParallel waits below it, in compiled code
                return self.state == "S"
        return self.gave_up

    def to_dict(self) -> dict[str, object]:
        """Return its part of the ``hang`` event."""
        stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in self.frames]
        told = {name: getattr(self, name) for name in ("rank", "step", "pid", "host", "doing")}
        return told | {"stack": stack}

    @property
    def activity(self) -> str:
        """A key of the table of texts."""
        if self.state in ("T", "t") or not (self.frames or self.gave_up):
            return "stopped" if self.state in ("T", "t") else "silent"
        if self.waits or self.state == "D":
            return "waits" if self.waits else "disk"
        torch = self.frame_by("torch")
        inner = self.frames[: self.frames.index(torch) + 1] if torch else self.frames
        if any(_LOADING.search(frame.filename) for frame in inner):
            return "loads"
        return "computes" if self.state == "R" else "blocked"

    @property
    def name(self) -> str:
        """The process, in words."""
        return f"rank {self.rank} (process {self.pid}, host {self.host})" if self.host else f"rank {self.rank}"

    @property
    def doing(self) -> str:
        """Its activity and place, in words: the innermost line of the user, else of Phalanx, else of a library."""
        frame = self.frame_by("user") or self.frame_by("phalanx") or next(iter(self.frames), None)
        place = f" in {_shown(frame)}" if frame else ""
        if self.activity == "waits" and self.pending:
            return f"waits in {self.pending[-1]}, called{place}"
        return _TEXTS[self.activity][0] + place


@final
@dataclass(frozen=True, slots=True)
class HangReport:
    """Stands of all ranks after ``seconds`` without a step, in rank order."""

    stands: Sequence[RankStand]
    seconds: float

    def verdict(self) -> tuple[Sequence[RankStand], str]:
        """Return the ranks to blame and the cause; the page of events explains the causes."""
        for cause in ("stopped", "silent"):
            if found := [stand for stand in self.stands if stand.activity == cause]:
                return found, cause
        idle = [stand for stand in self.stands if not stand.waits]
        awaited = [stand for stand in self.stands if self.missed_by(stand)]
        if len(idle) == len(self.stands):
            return idle, "blocked"
        late = [one for one in awaited if not one.waits] or idle or [one for one in awaited if not one.pending]
        return (late, "absent") if late else self._mismatch()

    def missed_by(self, stand: RankStand) -> CollectiveCall | None:
        """Return a collective in which another rank waits and that ``stand`` has not begun."""
        begun = {call.group: call.number for call in stand.calls}
        calls = (call for peer in self.stands for call in peer.pending if stand.rank in call.ranks)
        return next((call for call in calls if begun.get(call.group, 0) < call.number), None)

    def _mismatch(self) -> tuple[Sequence[RankStand], str]:
        kinds: dict[object, list[RankStand]] = {}
        for stand in self.stands:
            outer = (frame for frame in stand.frames if not _EXCHANGE.search(frame.filename))
            place = next(((frame.filename, frame.lineno) for frame in outer), None)
            kinds.setdefault((tuple(sorted(stand.pending)) or place, stand.step), []).append(stand)
        if len(kinds) == 1:
            return self.stands, "link"
        return min(kinds.values(), key=_suspicion), "mismatch"

    def failure(self) -> Failure:
        """Return the failure of the run, with the ``hang`` event of the log."""
        blamed, cause = self.verdict()
        first, others = blamed[0], [stand for stand in self.stands if stand not in blamed]
        step = max((stand.step for stand in self.stands if stand.step is not None), default=None)
        when = "the time before the first step" if step is None else f"step {step}"
        names, seconds = " and ".join(stand.name for stand in blamed[:4]), f"{self.seconds:.0f} s"
        missed = self.missed_by(first) or next((call for stand in others for call in stand.pending), "an exchange")
        apart = f", while {others[0].name} {others[0].doing}" if others else ""
        message = {
            "link": f"every rank came to the same exchange of {when}, and nothing arrives: {first.doing}",
            "blocked": f"nothing has gone on for {seconds} in {when}: {names} {first.doing}",
            "mismatch": f"{names} is in another exchange than its peers in {when}: it {first.doing}{apart}",
        }.get(cause, f"{names} did not come to {missed} of {when} for {seconds}: it {first.doing}")
        advice = _TEXTS[cause if cause == "mismatch" else first.activity][1].format(first.pid)
        event = {"ranks": [stand.rank for stand in blamed], "cause": cause, "seconds": self.seconds}
        event |= {"message": message, "advice": advice, "stands": [stand.to_dict() for stand in self.stands]}
        alike: dict[str, list[str]] = {}
        for stand in self.stands:
            at = f", step {'-' if stand.step is None else stand.step}: {stand.doing}"
            alike.setdefault(at, []).append(stand.name)
        lines = [f"  {show_names(names, _MOST)}{doing}" for doing, names in alike.items()][:_MOST]
        for stand in self.stands if cause == "mismatch" else blamed:
            lines += ["", f"  stack of rank {stand.rank}, the innermost call first:"] if stand.frames else []
            lines += [f"    {_shown(frame)}" for frame in stand.frames[:_MOST]]
        text = "\n".join([*lines, "", f"what to do: {advice}"])
        now = time.monotonic()
        return Failure(rank=first.rank, step=step, kind=HANG, message=message, traceback=text, time=now, hang=event)


def _suspicion(alike: Sequence[RankStand]) -> tuple[int, bool, int, int]:
    first = alike[0]
    by_phalanx = first.frame_by("user", "phalanx") != first.frame_by("user")
    return len(alike), by_phalanx, -1 if first.step is None else first.step, -first.rank


@final
class HangProbe:
    """Has this process write its stack into ``stacks``; made by its main thread. ``publish``: for other hosts."""

    def __init__(self, place: Place, stacks: int, publish: Callable[[str], bool] | None = None) -> None:
        self.ended = threading.Event()  # to be set at the end of the run
        self._place, self._stacks, self._publish, self._published = place, stacks, publish, False
        self.report_step(None)
        os.putenv("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_FR_BUFFER_SIZE", "64"))  # torch alone reads it
        # frames of other threads change while they are read, which may crash a run that is only slow
        faulthandler.register(_SIGNAL, file=stacks, all_threads=False)
        os.write(stacks, b"ready\n")
        threading.Thread(target=self._run, name="phalanx-hangs", daemon=True).start()

    def report_step(self, step: int | None) -> None:
        """Take in the step that begins."""
        self._step, self._since = step, time.monotonic()

    def _run(self) -> None:
        while not self.ended.wait(min(1.0, self._place.timeout / 20)):
            with suppress(Exception):
                self._look()

    def _look(self) -> None:
        quiet = time.monotonic() - self._since > _QUIET * self._place.timeout
        if not quiet and (self._published or not self._publish):
            return
        before, pid = os.fstat(self._stacks).st_size, os.getpid()
        calls = collective_calls(self._place.world_size) if quiet else ()
        fields = {"step": self._step, "pid": pid, "host": socket.gethostname(), "state": state_of(pid), "calls": calls}
        os.write(self._stacks, json.dumps(fields).encode() + b"\n")
        if self._publish:
            if quiet:
                os.kill(pid, _SIGNAL)
                time.sleep(_DUMP)
            self._published = self._publish(_read(self._stacks, before)) and not quiet


def _read(stacks: int, start: int = 0) -> str:
    size = os.fstat(stacks).st_size
    return os.pread(stacks, _TAIL, max(start, size - _TAIL)).decode(errors="replace")


class WatchedRank(NamedTuple):
    """A worker on the launcher's machine; ``stacks``: descriptor of the file it writes, ``None`` once it has ended."""

    pid: int
    step: int | None
    stacks: int | None


@final
class HangWatch:
    """Follows the workers of one launch; ``look`` is called many times a second."""

    def __init__(self, ranks: Callable[[], Mapping[int, WatchedRank]], timeout: float) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._steps: dict[int, tuple[int, int | None]] = {}
        self._stands: dict[int, RankStand] = {}
        self._used = (0.0, 0, False)
        self._stepped = self._active = self._looked = self._asked = 0.0

    def look(self) -> Failure | None:
        """Take in the progress of ranks. Returns a failure if nothing has gone on for the timeout."""
        now, ranks = time.monotonic(), self._ranks()
        if now - self._looked < min(_LOOK, self._timeout / 4):
            return None
        seconds, self._looked = now - self._looked, now
        steps = {rank: (one.pid, one.step) for rank, one in ranks.items()}
        if steps != self._steps or seconds > _GAP:
            self._steps, self._stepped, self._active, self._stands = steps, now, now, {}
        (spent, moved, _), self._used = self._used, _used(one.pid for one in ranks.values() if one.stacks is not None)
        if self._used[0] - spent > _ACTIVE * seconds or self._used[1] - moved > _MOVED or self._used[2]:
            self._active = now
        if now - self._stepped < _ASK * self._timeout or not any(one.stacks is not None for one in ranks.values()):
            return None
        if now - self._asked > _ASK_AGAIN * self._timeout:
            self._ask(ranks)
        return self._report(()).failure() if now - self._active > self._timeout + _LATER else None

    def blamed(self, first: Failure, failures: Sequence[Failure]) -> Failure:
        """Return ``first``, or the hang behind it if it only gave up. Call it before workers are ended."""
        ranks = self._ranks()
        if not ranks or not first.lost_peer or not any(map(gave_up, failures)):
            return first
        if not self._stands:
            self._ask(ranks)
        return self._report(failures).failure()

    def _report(self, failures: Sequence[Failure]) -> HangReport:
        stands = dict(self._stands)
        for failure in failures:
            stands[failure.rank] = stands.get(failure.rank, RankStand(rank=failure.rank)).after(failure)
        return HangReport([stands[rank] for rank in sorted(stands)], time.monotonic() - self._stepped)

    def _ask(self, ranks: Mapping[int, WatchedRank]) -> None:
        """Have each worker write its stack, and read it. A worker without a file yet would be ended by the signal."""
        stacks = {rank: one.stacks for rank, one in ranks.items() if one.stacks is not None}
        sizes = {rank: os.fstat(file).st_size for rank, file in stacks.items()}
        waiting, deadline = {rank for rank, size in sizes.items() if size}, time.monotonic() + _ANSWER
        for rank in waiting:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(ranks[rank].pid, _SIGNAL)
        while waiting and time.monotonic() < deadline:
            time.sleep(_POLL)
            for rank in list(waiting):
                if parse_stacks(_read(stacks[rank], sizes[rank])) or state_of(ranks[rank].pid) in "Tt":
                    waiting.remove(rank)
        time.sleep(_DUMP)  # the first lines may have been seen
        for rank, file in stacks.items():
            pid, frames = ranks[rank].pid, parse_stacks(_read(file, sizes[rank]))
            now = {"step": ranks[rank].step, "pid": pid, "host": socket.gethostname(), "state": state_of(pid)}
            self._stands[rank] = replace(RankStand.from_text(_read(file), rank), **now, frames=frames)
        self._asked = time.monotonic()


def _used(pids: Iterable[int]) -> tuple[float, int, bool]:
    """Return seconds of CPU and bytes moved by processes and their children; True if one waits for a disk."""
    ticks, moved, disk = 0, 0, False
    for pid in (one for given in pids for one in _family(given)):
        ticks += sum(map(int, _stat(_PROC / f"{pid}/stat")[11:13]))
        disk = disk or any(_stat(path)[0] == "D" for path in (_PROC / f"{pid}/task").glob("*/stat"))
        with suppress(OSError):
            moved += sum(map(int, re.findall(r"\d+", (_PROC / f"{pid}/io").read_text())))
    return ticks / os.sysconf("SC_CLK_TCK"), moved, disk


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for child in (_PROC / f"{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel has it; a space if unknown."""
    return _stat(_PROC / f"{pid}/stat")[0]


def _stat(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().rpartition(")")[2].split() or [" "]
    return [" "]
