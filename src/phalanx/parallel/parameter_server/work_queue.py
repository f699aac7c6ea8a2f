"""The assignment of pieces of global batches to workers. No sockets.

Step k's global batch is cut into pieces, assigned on request, the oldest step first; a step is complete when all its
pieces are in, and is applied as one update. So every update is that of a whole global batch, every sample counts once,
and a fast worker computes more pieces than a slow one.

A piece of step j is assigned only while ``j - version <= staleness``, and ``version`` counts the updates so far;
updates come in the order of steps, and the first ``after`` steps have a staleness of 0. So a gradient lacks at most
``staleness`` updates when it is applied. Without a bound a step is applied as soon as it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """A part of the global batch of a step."""

    step: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A worker's report on a piece."""

    worker: int  # its rank
    version: int  # of the parameters the gradient is of; the oldest of the servers'
    gradient_sums: dict[str, tuple[float, float]]  # by name (sum, count) of the loss, in evaluations of each metric
    samples: int
    seconds: float  # that it took, the exchange included


@dataclass(slots=True)
class _OpenStep:
    parts: tuple[int, ...]
    needed: int
    reports: dict[int, Report] = field(default_factory=dict[int, Report])

    @property
    def complete(self) -> bool:
        return len(self.reports) >= self.needed


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessBound:
    """The largest distance between workers."""

    staleness: float = 0  # updates that a gradient may lack; math.inf for any number
    backup: int = 0  # pieces that a step does not wait for
    after: int = 0  # first steps whose gradients lack nothing

    def allows(self, step: int, version: int) -> bool:
        """Return True if a piece of ``step`` may use the parameters after ``version`` updates."""
        return step - version <= (0 if step < self.after else self.staleness)


@final
class WorkQueue:
    """The pieces of steps ``first`` to ``limit``."""

    def __init__(
        self, sizes: Callable[[int], Sequence[int]], *, first: int, limit: int, pace: StalenessBound | None = None
    ) -> None:
        """Take ``sizes(step)``, the samples of each piece; empty pieces are not assigned."""
        self.version = first  # updates applied, those before ``first`` included
        self.floor = self._next = first  # every step below it has been applied
        self.done: set[int] = set()  # steps above it that have
        self.limit = limit  # no piece of this step or a later one is dealt; may change
        self._sizes, self._pace = sizes, pace or StalenessBound()
        self._open: dict[int, _OpenStep] = {}
        self._held: dict[int, BatchPiece] = {}
        self._silent: set[int] = set()

    @property
    def at_rest(self) -> bool:
        """Return True if every step below the limit has been applied."""
        return self.floor >= self.limit

    def begin_no_more(self) -> None:
        """Set the limit to the first step without an assigned piece."""
        self.limit = min(self.limit, self._next)

    def piece_of(self, worker: int) -> BatchPiece | None:
        """Return the piece assigned to ``worker`` and not given back yet."""
        return self._held.get(worker)

    def ask(self, worker: int) -> BatchPiece | None:
        """Return the next piece for ``worker``, or ``None`` for now. Its former piece may go to others."""
        self.leave(worker)
        busy = {piece for other, piece in self._held.items() if other not in self._silent}
        for step in sorted(self._open):
            known = self._open[step]
            if known.complete or not self._pace.allows(step, self.version):
                continue
            for part in known.parts:
                piece = BatchPiece(step, part)
                if part not in known.reports and piece not in busy:
                    return self._give(worker, piece)
        if self._next >= self.limit or not self._pace.allows(self._next, self.version):
            return None
        step, self._next = self._next, self._next + 1
        sizes = self._sizes(step)
        parts = tuple(part for part, size in enumerate(sizes) if size)
        self._open[step] = _OpenStep(parts, max(1, min(len(parts), len(sizes) - self._pace.backup)))
        return self._give(worker, BatchPiece(step, parts[0]))

    def put(self, worker: int, piece: BatchPiece, report: Report) -> bool:
        """Record that ``piece`` is computed; return False if it came too late, or twice."""
        if self.piece_of(worker) == piece:
            del self._held[worker]
        known = self._open.get(piece.step)
        if known is None or known.complete or piece.part not in known.parts or piece.part in known.reports:
            return False
        known.reports[piece.part] = report
        return True

    def ready(self) -> int | None:
        """Return the step to be updated next, if it is complete."""
        if self._pace.staleness == math.inf:
            return min((step for step, known in self._open.items() if known.complete), default=None)
        known = self._open.get(self.floor)
        return self.floor if known is not None and known.complete else None

    def applied(self, step: int) -> tuple[dict[int, Report], int]:
        """Close ``step`` after its update; return its pieces by part, and the number left out."""
        known = self._open.pop(step)
        self.version += 1
        self.done.add(step)
        while self.floor in self.done:
            self.done.discard(self.floor)
            self.floor += 1
        return dict(sorted(known.reports.items())), len(known.parts) - len(known.reports)

    def pieces(self, step: int) -> dict[int, Report]:
        """Return the pieces of ``step`` that are in, by part."""
        return dict(sorted(self._open[step].reports.items()))

    def leave(self, worker: int) -> None:
        """Free the piece of ``worker``, which is gone or gives it up."""
        self._held.pop(worker, None)
        self._silent.discard(worker)

    def silent(self, worker: int) -> None:
        """Let others compute the piece of ``worker``, too, because it is silent; the first result counts."""
        self._silent.add(worker)

    def returned(self, worker: int) -> None:
        """Record that ``worker`` is active again."""
        self._silent.discard(worker)

    def _give(self, worker: int, piece: BatchPiece) -> BatchPiece:
        self._held[worker] = piece
        return piece
