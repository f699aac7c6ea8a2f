"""Notices in the launcher that one rank is slower than those that do the same, while the run goes on.

Ranks of a mesh take their steps together, so all are as slow as the slowest: what tells it from the others is that they
wait for it. Each worker finds ten times a second whether its main thread computes, waits for other ranks, or waits for
data (``rank_probe.py``). A rank is a straggler that for half a minute has spent more time of its own than its peers, by
a half; its peers are the ranks of the same stage of the pipeline, as stages have unlike work.

On CUDA the host runs ahead of the device, whose waiting it does not see: there a rank is named whose host is slow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.config import Plan
from phalanx.config.run_files import EVENTS
from phalanx.events import EventLog
from phalanx.launch.hang_watch import WatchedRank
from phalanx.launch.rank_probe import TimeSpent

FACTOR = 1.5
"""A straggler's time of its own over that of its peers."""

WINDOW = 30.0
"""Seconds for which that has to be so, and steps have to go on."""

_LOOK, _PACE, _AGAIN = 1.0, 60.0, 600.0  # seconds between looks, between ``pace`` events, before one is named again
_LEAST = 0.2  # of the time that peers of a straggler wait at least
_QUEUES = 0.3  # of its time that a rank waits for a core, where others take it


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPace:
    """What a rank has spent a stretch of time on, in seconds.

    Attributes:
        computes: all that is neither of the others, the job's own code included.
        waits: for other ranks.
        loads: waiting for data.
        queues: ready to run, without a core; part of ``computes``.
    """

    rank: int
    step: int
    computes: float
    waits: float
    loads: float
    queues: float
    host: str = ""

    @property
    def own(self) -> float:
        """Seconds for which others may have waited."""
        return self.computes + self.loads

    @property
    def reason(self) -> str:
        """Why it may be slow, in words."""
        whole = self.own + self.waits
        if self.loads > 0.5 * self.own:
            return "it waits for its data: faster storage, or more workers= in the job"
        if self.queues > _QUEUES * whole:
            return "it waits for a core: other processes run there, or its CPU quota is used up"
        return "it computes for longer: slower or fewer cores, a lower clock, or more work in its share of the batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that is slower than its peers, by ``factor``, for ``seconds``."""

    pace: RankPace
    factor: float
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """The ``straggler`` event of the log."""
        pace = self.pace
        where = f" on host {pace.host}" if pace.host else ""
        slower = f"is slower than its peers by {self.factor:.1f} x for {self.seconds:.0f} s, and they wait for it"
        return {
            "rank": pace.rank,
            "step": pace.step,
            "host": pace.host,
            "factor": self.factor,
            "seconds": self.seconds,
            "message": f"rank {pace.rank}{where} {slower}: {pace.reason}",
        }


def straggler(paces: Iterable[RankPace], seconds: float) -> Straggler | None:
    """The slowest of ranks that do the same, over as many ``seconds``; ``None`` where none stands out."""
    slowest, *peers = sorted(paces, key=lambda pace: -pace.own)
    if not peers:
        return None
    others = statistics.median(pace.own for pace in peers)
    waited = statistics.median(pace.waits for pace in peers)
    factor = slowest.own / others if others else FACTOR
    if factor < FACTOR or waited < _LEAST * seconds:
        return None
    return Straggler(pace=slowest, factor=factor, seconds=seconds)


@dataclass(slots=True)
class StragglerWatch:
    """Follows the workers of one launch; ``look`` is called many times a second."""

    ranks: Callable[[], Mapping[int, WatchedRank]]
    plan: Plan
    folder: Path
    window: float = WINDOW
    _seen: deque[tuple[float, dict[int, tuple[int, str, TimeSpent]]]] = field(
        default_factory=deque[tuple[float, dict[int, tuple[int, str, TimeSpent]]]]
    )
    _told: dict[int, float] = field(default_factory=dict[int, float])
    _looked: float = 0.0
    _paced: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Take in what ranks have spent their time on; append what there is to say to the events of the run."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK, self.window / 4):
            return
        self._looked = now
        self._seen.append((now, self._spent()))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self.window:
            self._seen.popleft()
        (began, before), (_, after) = self._seen[0], self._seen[-1]
        if now - began < self.window:
            return
        paces = _paces(before, after)
        events = [("straggler", one.to_dict()) for one in self._stragglers(paces, now - began)]
        whole = len(paces) == len(before.keys() | after.keys())  # not while some have ended, or are just writing
        if now - self._paced >= _PACE and paces and whole:
            self._paced = now
            rows = [[pace.rank, pace.computes, pace.waits, pace.loads] for pace in paces]
            steps = max(after[pace.rank][0] - before[pace.rank][0] for pace in paces)
            events.append(("pace", {"step": max(pace.step for pace in paces), "steps": steps, "ranks": rows}))
        if events and self.folder.is_dir():
            with EventLog(self.folder / EVENTS) as log:
                for name, fields in events:
                    log.write(name, **fields)

    def _spent(self) -> dict[int, tuple[int, str, TimeSpent]]:
        found: dict[int, tuple[int, str, TimeSpent]] = {}
        for rank, watched in self.ranks().items():
            stand, spent = watched.files.read() if watched.files else (None, TimeSpent())
            if stand is not None and watched.step is not None:
                found[rank] = watched.step, stand.host, spent
        return found

    def _stragglers(self, paces: list[RankPace], seconds: float) -> Iterable[Straggler]:
        stages: dict[tuple[int, int], list[RankPace]] = {}
        for pace in paces:
            at = self.plan.coordinate(pace.rank)
            stages.setdefault((at["pp"], at["dp"] if self.plan.sync != "each" else 0), []).append(pace)
        now = time.monotonic()
        for peers in stages.values():
            found = straggler(peers, seconds)
            if found and now - self._told.get(found.pace.rank, -_AGAIN) >= _AGAIN:
                self._told[found.pace.rank] = now
                yield found


def _paces(
    before: Mapping[int, tuple[int, str, TimeSpent]], after: Mapping[int, tuple[int, str, TimeSpent]]
) -> list[RankPace]:
    """What each rank has spent its time on, of those that have gone on."""
    found: list[RankPace] = []
    for rank in before.keys() & after.keys():
        (first, _, old), (step, host, new) = before[rank], after[rank]
        if step > first and new.looks > old.looks:
            spent = [later - earlier for later, earlier in zip(new, old, strict=True)]
            computes, waits, loads, queues, seconds = spent
            each = seconds / (computes + waits + loads)
            found.append(
                RankPace(
                    rank=rank,
                    step=step,
                    computes=computes * each,
                    waits=waits * each,
                    loads=loads * each,
                    queues=queues,
                    host=host,
                )
            )
    return sorted(found, key=lambda pace: pace.rank)
