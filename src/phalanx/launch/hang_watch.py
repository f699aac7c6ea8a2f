"""Notices in the launcher that workers do not go on, and finds out where each of them stands.

A rank that waits for another gives up by itself after the timeout. Some time before that all ranks are asked where they
stand, again and again, so that the answers are there when the first gives up. They then say who is to blame: whoever
gave up is not. Where nobody gives up because nobody waits for a rank (all are stuck in code of their own), and no
process has computed, read or written anything for the whole timeout, nor waited for a disk, the run is ended from here.

A rank that only takes long is left alone: as long as others do not give up on it, or it goes on. So is one that has no
step, as servers beside the first have none, while others have: those who need it come to no step of their own then.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.config import Plan
from phalanx.launch.failure import HANG, Failure, gave_up
from phalanx.launch.hang_report import CollectiveCall, HangReport, RankStand
from phalanx.launch.rank_probe import SIGNAL, MainThreadClock, ProbeFiles
from phalanx.launch.stack_frames import StackFrame, parse_stacks, parse_traceback

_ASK = 0.7  # of the timeout without a step, after which ranks are asked
_AGAIN = 0.08  # of the timeout, between askings
_ANSWER = 1.0  # seconds that an answer may take
_SOON = 0.02  # seconds between looks whether it is there
_LOOK = 0.5  # seconds between looks at how busy processes are
_STIRS = 0.03  # of a core: less is what idle threads of gloo take
_WORKS = 0.1  # of a core: less, in one look alone, may be the worker's writing down where it stands
_STREAMS = 1 << 18  # bytes from one look to the next: less is what a worker writes down of itself
_LATER = 1.0  # seconds that ranks that wait have to give up by themselves
_PROC = Path("/proc")
_GAP = 5.0  # seconds without a look: this process was stopped itself, and perhaps the others with it


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """What a launcher knows of a worker on its own machine.

    Attributes:
        step: the optimizer step it has begun last, ``None`` before the first.
        files: where it writes down how it stands; ``None`` once its process has ended.
    """

    pid: int
    step: int | None
    files: ProbeFiles | None


@dataclass(slots=True)
class _RankProgress:
    """Since when a rank is in its step, and since when its processes do nothing."""

    step: tuple[int, int | None]
    since: float
    idle_since: float
    ticks: float
    looked: float
    clock: MainThreadClock
    moved: int = 0
    stirred: bool = False
    busy: float | None = None

    @classmethod
    def begun(cls, pid: int, step: int | None, now: float) -> _RankProgress:
        return cls((pid, step), now, now, _ticks(pid), now, MainThreadClock(pid))

    def look(self, now: float) -> None:
        """Take in how busy the rank's processes are."""
        pid, _ = self.step
        ticks = _ticks(pid)
        share, stirred = (ticks - self.ticks) / (now - self.looked), self.stirred
        self.stirred = share > _STIRS
        if share > _WORKS or (self.stirred and stirred) or self._reads_or_writes():
            self.idle_since = now
        self.ticks, self.looked, self.busy = ticks, now, self.clock.busy()

    def _reads_or_writes(self) -> bool:
        """Whether the rank's processes have moved bytes since this was last asked, or one of them waits for a disk."""
        every = [self.step[0], *_descendants(self.step[0])]
        before, self.moved = self.moved, sum(map(_bytes_moved, every))
        return self.moved - before > _STREAMS or any(map(_waits_for_disk, every))


@dataclass(slots=True)
class HangWatch:
    """Follows the workers of one launch; ``look`` is called many times a second."""

    ranks: Callable[[], Mapping[int, WatchedRank]]
    timeout: float
    plan: Plan | None = None
    _progress: dict[int, _RankProgress] = field(default_factory=dict[int, _RankProgress])
    _next: float = 0.0
    _looked: float = 0.0
    _report: HangReport | None = None

    def look(self) -> Failure | None:
        """Take in how far ranks are. Returns how the run failed where it has to be ended from here."""
        now, ranks = time.monotonic(), self.ranks()
        gap, self._looked = now - (self._looked or now), now
        for rank, watched in ranks.items():
            known = self._progress.get(rank)
            if known is None or known.step != (watched.pid, watched.step) or gap > _GAP:
                self._progress[rank] = _RankProgress.begun(watched.pid, watched.step, now)
            elif now - known.looked >= min(_LOOK, self.timeout / 4):
                known.look(now)
        there = {rank: watched for rank, watched in ranks.items() if watched.files}
        begun = [rank for rank, watched in there.items() if watched.step is not None]
        quiet = [now - self._progress[rank].since for rank in begun or there]
        if not quiet or max(quiet) < _ASK * self.timeout:
            self._report = None
            return None
        if now >= self._next:
            self._ask(ranks)
            self._next = time.monotonic() + _AGAIN * self.timeout
        idle = [now - self._progress[rank].idle_since for rank in ranks]
        if min(idle) < self.timeout + _LATER or self._report is None:
            return None
        return failure_of(self._report)

    def last_look(self) -> None:
        """Some rank has given up waiting: see where those stand that have not. To be called before they are ended."""
        ranks = self.ranks()
        if ranks and self._report is None:
            self._ask(ranks)

    def blamed(self, first: Failure, failures: Sequence[Failure]) -> Failure:
        """``first``, or where it only gave up on another, how the run failed as far as ranks have shown."""
        if not first.lost_peer or self._report is None or not any(map(gave_up, failures)):
            return first
        ended = {failure.rank: failure for failure in failures if failure.lost_peer}
        stands = [_after(stand, ended.get(stand.rank)) for stand in self._report.stands]
        return failure_of(HangReport.of(stands, self._report.seconds))

    def _ask(self, ranks: Mapping[int, WatchedRank]) -> None:
        """Have every worker write down its stacks, and read them."""
        asked: dict[int, tuple[ProbeFiles, int]] = {}
        for rank, watched in ranks.items():
            size = watched.files.answer(0)[0] if watched.files else 0
            if watched.files and size:  # before it has written anything, the signal would end it
                asked[rank] = watched.files, size
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(watched.pid, SIGNAL)
        answers: dict[int, tuple[int, tuple[StackFrame, ...]]] = {}
        deadline = time.monotonic() + _ANSWER
        while asked and time.monotonic() < deadline:
            time.sleep(_SOON)
            for rank, (files, size) in list(asked.items()):
                before = answers.get(rank, (0, ()))
                answers[rank] = files.answer(size)
                if (before[1] and answers[rank] == before) or state_of(ranks[rank].pid) in "Tt":
                    del asked[rank]
        before = {stand.rank: stand for stand in self._report.stands} if self._report else {}
        frames = {rank: answers.get(rank, (0, ()))[1] for rank in ranks}
        stands = [
            before[rank]  # where it stood: it has ended since
            if rank in before and not watched.files
            else self._stand(rank, watched, frames[rank])
            for rank, watched in ranks.items()
        ]
        now = time.monotonic()
        since = max((self._progress[rank].since for rank in ranks if rank in self._progress), default=now)
        self._report = HangReport.of(stands, now - since)

    def _stand(self, rank: int, watched: WatchedRank, frames: tuple[StackFrame, ...]) -> RankStand:
        written = watched.files.read()[0] if watched.files else None
        return RankStand(
            rank=rank,
            step=watched.step,
            pid=watched.pid,
            host=written.host if written else "",
            state=state_of(watched.pid),
            busy=progress.busy if (progress := self._progress.get(rank)) else None,
            frames=frames,
            calls=tuple(in_run(self.plan, rank, call) for call in written.calls) if written else (),
        )


def in_run(plan: Plan | None, rank: int, call: CollectiveCall) -> CollectiveCall:
    """``call`` of ``rank`` with the run's numbers of ranks, where replicas that step by themselves have their own."""
    if plan is None or plan.sync == "each" or not call.ranks:
        return call
    replica = plan.coordinate(rank)["dp"]
    world = [one for one in range(plan.world_size) if plan.coordinate(one)["dp"] == replica]
    ranks = tuple(world[one] for one in call.ranks if one < len(world))
    return replace(call, group=f"{call.group} of replica {replica}", ranks=ranks)


def blamed(failure: Failure, stands: Sequence[RankStand], plan: Plan, seconds: float) -> Failure:
    """How the run failed where a worker gave up on others: as ``stands`` have it, which workers told each other.

    A rank that has told nothing may be stopped, which others see that are on its host.
    """
    here = {stand.rank: state_of(stand.pid) for stand in stands if stand.pid and stand.host == socket.gethostname()}
    told = [
        replace(
            stand,
            error=failure.message if stand.rank == failure.rank else "",
            state=here.get(stand.rank, ""),
            frames=() if here.get(stand.rank) in ("T", "t") else stand.frames,  # those were told before
            calls=tuple(in_run(plan, stand.rank, call) for call in stand.calls),
        )
        for stand in stands
    ]
    if not gave_up(failure) or not any(stand.frames for stand in told):
        return failure
    return failure_of(HangReport.of(told, seconds))


def _after(stand: RankStand, failure: Failure | None) -> RankStand:
    """Where a rank stood that has given up since."""
    if failure is None:
        return stand
    frames = stand.frames or parse_stacks(failure.traceback) or parse_traceback(failure.traceback)
    return replace(stand, frames=frames, error=failure.message.strip().partition("\n")[0] or failure.kind)


def failure_of(report: HangReport) -> Failure:
    """How the run failed, as ``report`` has it."""
    first = report.first
    steps = [stand.step for stand in report.stands if stand.step is not None]
    return Failure(
        rank=first.rank,
        step=max(steps, default=None),
        kind=HANG,
        message=report.headline,
        traceback=f"{report.text}\n\nwhat to do: {report.advice}",
        time=time.monotonic(),
        hang=report.to_dict(),
    )


def _ticks(pid: int) -> float:
    """Seconds of CPU that a process and those it started have used; 0 where that is not known."""
    found = 0.0
    for one in (pid, *_descendants(pid)):
        with suppress(OSError, ValueError, IndexError):
            fields = (_PROC / f"{one}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _descendants(pid: int) -> Iterator[int]:
    """The processes that ``pid`` has started, and those that they have."""
    children = list[str]()
    with suppress(OSError):
        children = (_PROC / f"{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _bytes_moved(pid: int) -> int:
    """Bytes that a process has read and written, by calls or with a disk; 0 where that is not known."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (_PROC / f"{pid}/io").read_text().splitlines())
        return sum(int(size) for name, size in lines if name in _MOVED)
    return 0


_MOVED = ("rchar:", "wchar:", "read_bytes:", "write_bytes:")


def _waits_for_disk(pid: int) -> bool:
    """Whether any thread of a process does, as one that saves."""
    return any(_state(path) == "D" for path in (_PROC / f"{pid}/task").glob("*/stat"))


def state_of(pid: int) -> str:
    """The state of a process as the kernel has it; a space where that is not known."""
    return _state(_PROC / f"{pid}/stat")


def _state(stat: Path) -> str:
    with suppress(OSError, IndexError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return " "
