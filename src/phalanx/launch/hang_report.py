"""Why a run stands still: from where each rank stands, who did not come to which exchange, and what to do about it.

Two sources tell of a rank. Its stack says which line it stands in. torch's flight recorder says which collectives it
has begun, numbered within each process group: where rank 0 has begun number 57 of a group and rank 1 of the same group
only 56, rank 0 waits for rank 1, whatever either stack looks like. A rank for which others wait and which waits for
nobody is the one to blame. Where all wait, they wait for different things (mismatched collectives), or for the same
that does not arrive (the network).

Pure: what it reads was collected by ``hang_watch.py``, and before that in the worker by ``rank_probe.py``.
"""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from phalanx.launch.stack_frames import StackFrame

_EXCHANGE = re.compile(r"[/\\]torch[/\\]distributed[/\\]|[/\\]phalanx[/\\]comm[/\\]")
_LOADING = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]|[/\\]phalanx[/\\]data[/\\]")
_WAITS = re.compile(r"\.(wait|recv|irecv|send|barrier|synchronize)\(|store\.(get|wait)|all_reduce|all_gather|broadcast")
_NEAR = 4  # innermost frames in which a wait for others shows
_BUSY = 0.5  # of a core


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """One exchange that a rank has begun.

    Attributes:
        group: torch's name of the process group, the same on all of its ranks.
        ranks: in the group; empty where they are not known.
        number: which of the group's exchanges it is, counted from 1.
        what: its kind, element type and sizes.
        pending: it has not ended.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    what: str
    pending: bool

    def __str__(self) -> str:
        among = f" among ranks {ranges(self.ranks)}" if self.ranks else ""
        return f"{self.what} (exchange {self.number} of its group){among}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStand:
    """Where one rank stands.

    Attributes:
        step: the optimizer step that it has begun last, ``None`` before the first.
        state: of the process as the kernel has it: R runs, S sleeps, D waits for a disk, T is stopped; empty: unknown.
        busy: cores that it has used lately, ``None`` where that is not known.
        frames: of its main thread, the innermost first; empty where it did not answer.
        calls: the last exchange of each group that it has begun.
        error: that it has raised meanwhile, waiting for others.
    """

    rank: int
    step: int | None = None
    pid: int = 0
    host: str = ""
    state: str = ""
    busy: float | None = None
    frames: tuple[StackFrame, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStand:
        """What ``to_json`` gave in another process."""
        fields = json.loads(text)
        frames = tuple(StackFrame(**frame) for frame in fields.pop("frames"))
        calls = tuple(CollectiveCall(**{**call, "ranks": tuple(call["ranks"])}) for call in fields.pop("calls"))  # pyrefly: ignore[bad-argument-type]
        return cls(**fields, frames=frames, calls=calls)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state in ("T", "t")

    @property
    def place(self) -> StackFrame | None:
        """The line of the job's own code that it stands in, else of Phalanx's, else of whoever's."""
        whose = ("user", "phalanx", "torch", "library")
        return next((frame for by in whose for frame in self.frames if frame.by == by), None)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as its own stack says."""
        if self.error:
            return True
        for depth, frame in enumerate(self.frames[:_NEAR]):
            if frame.by == "user" and not (depth == 0 and _WAITS.search(linecache.getline(frame.file, frame.line))):
                return False
            if _EXCHANGE.search(frame.file):
                return True
            if depth == 0 and frame.by != "torch" and _WAITS.search(linecache.getline(frame.file, frame.line)):
                return True
            if frame.function == "_engine_run_backward":  # DistributedDataParallel waits below it, in compiled code
                return self.busy is not None and self.busy < _BUSY
        return False

    @property
    def loads(self) -> bool:
        """Whether it waits for data."""
        for frame in self.frames:
            if _LOADING.search(frame.file):
                return True
            if frame.by == "torch":
                return False
        return False

    @property
    def name(self) -> str:
        """Which process it is, in words."""
        process = f"process {self.pid}" if self.pid else ""
        where = ", ".join(filter(None, (process, self.host and f"host {self.host}")))
        return f"rank {self.rank} ({where})" if where else f"rank {self.rank}"

    @property
    def doing(self) -> str:
        """What it is found doing, in words."""
        if self.stopped:
            return f"is stopped{f', in {self.place}' if self.place else ''}"
        if not self.frames:
            return "did not answer"
        at = f"{self.place}"
        if self.waits and (call := next((one for one in reversed(self.calls) if one.pending), None)):
            return f"waits in {call}, called in {at}"
        if self.waits:
            return f"waits for other ranks in {at}"
        if self.state == "D":
            return f"waits for a disk in {at}"
        if self.loads:
            return f"loads data in {at}"
        if self.busy is None:
            return f"stands in {at}"
        return f"computes in {at}" if self.busy >= _BUSY else f"neither computes nor waits for ranks, in {at}"


Cause = Literal["stopped", "silent", "absent", "mismatch", "link", "blocked"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HangReport:
    """Who is to blame that a run stands still.

    Attributes:
        blamed: ranks that did not come; of all ranks where none can be told.
        cause: ``stopped`` by a signal, ``silent`` (did not answer), ``absent`` from an exchange that others are in,
            ``mismatch``: in another exchange than others, ``link``: all came, nothing arrives; ``blocked``: nobody
            waits for anybody.
        missed: the exchange that they did not come to, as far as it is known.
        stands: where every rank stands, in rank order.
    """

    blamed: tuple[int, ...]
    cause: Cause
    missed: CollectiveCall | None
    stands: tuple[RankStand, ...]
    seconds: float

    @classmethod
    def of(cls, stands: Iterable[RankStand], seconds: float) -> HangReport:
        """What ``stands`` say of a run that has not gone on for so many ``seconds``."""
        every = {stand.rank: stand for stand in sorted(stands, key=lambda stand: stand.rank)}
        blamed, cause = _blame(every)
        return cls(
            blamed=blamed, cause=cause, missed=_missed(every, blamed), stands=tuple(every.values()), seconds=seconds
        )

    @property
    def first(self) -> RankStand:
        """Where the first blamed rank stands."""
        return next(stand for stand in self.stands if stand.rank in self.blamed)

    @property
    def headline(self) -> str:
        """One line: who, what, where."""
        first, who = self.first, " and ".join([one.name for one in self.stands if one.rank in self.blamed][:4])
        steps = [stand.step for stand in self.stands if stand.step is not None]
        when = f"step {max(steps)}" if steps else "the time before the first step"
        if self.cause == "link":
            return f"every rank came to the same exchange of {when}, and nothing arrives: {first.doing}"
        if self.cause == "blocked":
            return f"nothing has gone on for {self.seconds:.0f} s in {when}: {who} {first.doing}"
        if self.cause == "mismatch":
            others = next((stand for stand in self.stands if stand.rank not in self.blamed), None)
            apart = f", while {others.name} {others.doing}" if others else ""
            return f"{who} is in another exchange than its peers in {when}: it {first.doing}{apart}"
        missed = f"{self.missed} of {when}" if self.missed else f"an exchange of {when}"
        return f"{who} did not come to {missed} for {self.seconds:.0f} s: it {first.doing}"

    @property
    def text(self) -> str:
        """The whole report, the headline aside."""
        lines = [f"  {stand.name}, step {_step(stand.step)}: {stand.doing}" for stand in self.stands[:_MOST_RANKS]]
        if len(self.stands) > _MOST_RANKS:
            lines.append(f"  and {len(self.stands) - _MOST_RANKS} more ranks")
        for stand in self.stands:
            if stand.frames and (stand.rank in self.blamed or self.cause == "mismatch"):
                lines += ["", f"  stack of rank {stand.rank}, the innermost call first:"]
                lines += [f"    {frame}" for frame in stand.frames[:_MOST_FRAMES]]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The ``hang`` event of the log."""
        return {
            "ranks": list(self.blamed),
            "cause": self.cause,
            "seconds": self.seconds,
            "message": self.headline,
            "advice": self.advice,
            "stands": [
                {
                    "rank": stand.rank,
                    "step": stand.step,
                    "pid": stand.pid,
                    "host": stand.host,
                    "doing": stand.doing,
                    "stack": [f"{frame.file}:{frame.line} {frame.function}" for frame in stand.frames],
                }
                for stand in self.stands
            ],
        }

    @property
    def advice(self) -> str:
        """What to do, in a sentence."""
        first = self.first
        if self.cause == "stopped":
            return f"a signal has stopped it: kill -CONT {first.pid} on its host, and see who sent SIGSTOP or SIGTSTP"
        if self.cause == "silent":
            return (
                "its process does not run Python code any more: stopped, swapped out, or cut off with its host; "
                "look there with ps and dmesg"
            )
        if self.cause == "link":
            return "a link between hosts is cut or a firewall drops what ranks send: look at the network"
        if self.cause == "mismatch":
            return (
                "ranks have taken different ways through the code: a branch that depends on the rank or on its data, "
                "a loop that ends early on one, or a collective that one calls alone"
            )
        if first.loads:
            return "its data do not come: look at what it reads from, and try workers=0 in the job"
        if first.state == "D":
            return "the file system that it reads or writes does not answer"
        if first.busy is not None and first.busy >= _BUSY:
            return (
                "it computes what others do not: a loop without an end, or the run's timeout is too short for this work"
            )
        return "it waits for something that does not come (a lock, a pipe, a server, a sleep), where its stack stands"


_MOST_RANKS, _MOST_FRAMES = 16, 14


def _blame(every: Mapping[int, RankStand]) -> tuple[tuple[int, ...], Cause]:
    def those(ranks: Iterable[RankStand]) -> tuple[int, ...]:
        return tuple(stand.rank for stand in ranks)

    stands = list(every.values())
    if stopped := those(stand for stand in stands if stand.stopped):
        return stopped, "stopped"
    if silent := those(stand for stand in stands if not stand.frames and not stand.error):
        return silent, "silent"
    waiting = {stand.rank for stand in stands if stand.waits}
    if not waiting:
        return those(stands), "blocked"
    awaited = _awaited(every)
    idle = [stand for stand in stands if stand.rank not in waiting]
    if idle:
        # who others wait for by their count of exchanges, before one who is only not waiting
        return those([one for one in idle if one.rank in awaited] or idle), "absent"
    if behind := awaited - {rank for rank in waiting if _pending(every[rank])}:
        return tuple(sorted(behind)), "absent"
    return _mismatched(stands)


def _pending(stand: RankStand) -> list[CollectiveCall]:
    return [call for call in stand.calls if call.pending]


def _awaited(every: Mapping[int, RankStand]) -> set[int]:
    """Ranks that have begun fewer exchanges of a group than another that waits in it."""
    found: set[int] = set()
    for stand in every.values():
        for call in _pending(stand):
            for peer in call.ranks:
                if peer in every and peer != stand.rank and _reached(every[peer], call.group) < call.number:
                    found.add(peer)
    return found


def _reached(stand: RankStand, group: str) -> int:
    return max((call.number for call in stand.calls if call.group == group), default=0)


def _missed(every: Mapping[int, RankStand], blamed: Sequence[int]) -> CollectiveCall | None:
    """The exchange that others are in and the first of ``blamed`` has not begun."""
    for stand in every.values():
        for call in _pending(stand):
            if blamed and blamed[0] in call.ranks and _reached(every[blamed[0]], call.group) < call.number:
                return call
    return next((call for stand in every.values() if stand.rank not in blamed for call in _pending(stand)), None)


def _mismatched(stands: Sequence[RankStand]) -> tuple[tuple[int, ...], Cause]:
    """All wait: those that stand in another exchange than most; by their steps where there is no most."""
    if len({(_where(stand), stand.step) for stand in stands}) == 1:
        return tuple(stand.rank for stand in stands), "link"
    kinds: dict[object, list[RankStand]] = {}
    for stand in stands:
        kinds.setdefault((_where(stand), stand.step), []).append(stand)
    fewest, *others = sorted(kinds.values(), key=len)
    if len(others) == 1 and len(fewest) == len(others[0]):
        fewest = min(fewest, others[0], key=lambda some: (not _own_call(some[0]), _at(some[0]), -some[0].rank))
    return tuple(stand.rank for stand in fewest), "mismatch"


def _where(stand: RankStand) -> object:
    pending = _pending(stand)
    if pending:
        return tuple(sorted((call.group, call.number, call.what) for call in pending))
    return next(((frame.file, frame.line) for frame in stand.frames if not _EXCHANGE.search(frame.file)), None)


def _own_call(stand: RankStand) -> bool:
    """Whether the job's own code has called the exchange, rather than Phalanx."""
    return next((frame.by == "user" for frame in stand.frames if frame.by in ("user", "phalanx")), False)


def _at(stand: RankStand) -> int:
    return -1 if stand.step is None else stand.step


def ranges(ranks: Sequence[int]) -> str:
    """``0-3, 6`` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)
