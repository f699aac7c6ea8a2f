"""Requests of workers: server 0's side of their connections, and its records of each."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from phalanx.comm.frames import Connection, Frame, LostError
from phalanx.parallel.parameter_server import BatchPiece, Flat, Form, FrameKind, Report, WorkQueue, deal_ticket
from phalanx.train.consistency import unlike_data
from phalanx.train.parameter_server.server_group import Patience


@dataclass(slots=True)
class WorkerState:
    """Server 0's record of a worker.

    Attributes:
        joined: when it first came, as of ``time.monotonic()``.
        last: when its last counted piece came in.
        waiting: whether it waits for an answer.
        silent: whether it holds a piece and has not been heard of, or has made no progress, for long.
        progress: the progress counter of its main thread, from its heartbeats.
        moved: when that last changed, or it got its piece.
        memory: its memory, reported when it leaves.
    """

    connection: Connection | None
    joined: float
    last: float = 0.0
    waiting: bool = False
    silent: bool = False
    progress: int = 0
    moved: float = 0.0
    samples: int = 0
    pieces: int = 0
    memory: dict[str, int] | None = None


@final
class RequestHandler:
    """The assignment of pieces to workers, from any thread.

    Attributes:
        news: held while data here is changed or read; notified when a piece has come in or a worker has gone.
        queue: of the steps, or of an evaluation.
        happened: events of workers, to be written by the main thread.
        statistics: step → those of normalisation layers that came with its first piece.
    """

    def __init__(
        self, queue: WorkQueue, data: Mapping[str, Any], form: Form, patience: Patience, secret: bytes
    ) -> None:
        """Take the first queue; ``data`` are the facts of server 0's ``BatchPieces``."""
        self.news = threading.Condition()
        self.queue = queue
        self.workers: dict[int, WorkerState] = {}
        self.happened: list[dict[str, Any]] = []
        self.statistics: dict[int, Flat] = {}
        self._what, self._data, self._form, self._patience = "train", data, form, patience
        self._secret, self._finished, self._from = secret, False, queue.version
        self._looked = time.monotonic()
        self._skipped = False  # the last look
        self._laps: deque[float] = deque(maxlen=64)
        self.trouble: Exception | None = None

    def turn_to(self, what: str, queue: WorkQueue) -> None:
        """Assign pieces of ``queue`` from now on, for ``train`` or ``evaluate``."""
        with self.news:
            self._what, self.queue, self._from = what, queue, queue.version
        self.dispatch()

    def dispatch(self) -> None:
        """Give work to waiting workers, as far as there is any."""
        with self.news:
            waiting = [rank for rank, known in sorted(self.workers.items()) if known.waiting]
        for rank in waiting:
            self.answer(rank)

    def finish(self) -> None:
        """Tell every asking worker that all is done."""
        with self.news:
            self._finished = True
        self.dispatch()

    @property
    def present(self) -> list[int]:
        """Return ranks that are connected and have not left."""
        return [rank for rank, known in self.workers.items() if known.connection is not None and known.memory is None]

    def look(self) -> None:
        """Find workers that are silent, or make no progress, and those that have been so for too long.

        The first look after a long gap does not count: this process may have been stopped itself, with unread messages.
        """
        patience, now, fallen = self._patience, time.monotonic(), False
        gap, self._looked = now - self._looked, now
        self._skipped = gap > patience.silent and not self._skipped
        if self._skipped:
            return
        limit = patience.silent + patience.pieces * (statistics.median(self._laps) if self._laps else 0.0)
        slow = limit if self._laps else max(limit, patience.answer)  # the duration of a piece is not known yet
        lost: list[tuple[int, Connection, str]] = []
        with self.news:
            for rank, known in self.workers.items():
                piece = self.queue.piece_of(rank)
                if known.connection is None or (piece is None and not known.silent):
                    continue
                quiet = now - known.connection.heard
                still = now - max(known.moved, known.joined) if piece else 0.0
                where = f" with part {piece.part} of step {piece.step}" if piece else ""
                said = f"nothing heard for {quiet:.1f} s" if quiet > limit else f"no progress for {still:.1f} s{where}"
                if max(quiet, still) > patience.stuck:
                    lost.append((rank, known.connection, said))
                elif not known.silent and (quiet > limit or still > slow):
                    known.silent = fallen = True
                    self.queue.silent(rank)
                    self._note(rank, "silent", said)
                elif known.silent and quiet < limit and still < slow:
                    known.silent = False
                    self.queue.returned(rank)
                    self._note(rank, "returned", "it is heard of again")
        for rank, connection, said in lost:
            self.lost(rank, connection, said)
            connection.close()
        if fallen:
            self.dispatch()

    def heard(self, rank: int, connection: Connection, progress: int) -> None:
        """Record a worker's heartbeat with its progress counter."""
        with self.news:
            known = self.workers[rank]
            if known.connection is connection and known.progress != progress:
                known.progress, known.moved = progress, time.monotonic()

    def connected(self, rank: int, connection: Connection, data: Mapping[str, Any]) -> None:
        """Record a connected worker; ``data`` are the facts of its data."""
        with self.news:
            told = {"server 0": self._data, f"rank {rank}": data}
            self.trouble = unlike_data(told, shared="whoever is free computes the next piece") or self.trouble
            self.workers[rank] = WorkerState(connection, time.monotonic())
            self._note(rank, "joined", "")
            self.news.notify_all()

    def asked(self, rank: int, connection: Connection, frame: Frame) -> None:
        """Take a worker's result and its request, which ``answer`` will answer."""
        brought = None
        if frame.size:
            brought = Flat(self._form)
            connection.fill(frame, brought.wire)
        with self.news:
            known = self.workers[rank]
            if done := frame.meta.get("done"):
                self._take_in(rank, known, done, brought)
            self.queue.leave(rank)
            known.waiting = True

    def answer(self, rank: int) -> None:
        """Give a waiting worker its next piece, if there is one, or tell it that all is done."""
        with self.news:
            known = self.workers.get(rank)
            if known is None or not known.waiting or known.connection is None:
                return
            piece = None if self._finished else self.queue.ask(rank)
            if piece is None and not self._finished:
                return
            known.waiting, connection, known.moved = False, known.connection, time.monotonic()
            what, version = self._what, self.queue.version
        try:
            if piece is None:
                connection.send(FrameKind.END)
            else:
                place = {"what": what, "step": piece.step, "part": piece.part}
                ticket = deal_ticket(self._secret, rank, **place)
                connection.send(FrameKind.DEAL, {**place, "version": version, "ticket": ticket})
        except LostError:
            return  # its own thread hears of it, too

    def parted(self, rank: int, memory: dict[str, int]) -> None:
        """Record that a worker has been told that all is done, and leaves."""
        with self.news:
            self.workers[rank].memory = memory
            self.news.notify_all()

    def lost(self, rank: int, connection: Connection, reason: str) -> None:
        """Handle the end of a worker's connection, which is an error unless it has left."""
        with self.news:
            known = self.workers.get(rank)
            if known is None or known.connection is not connection:
                return
            known.connection = None
            if known.memory is None and not self._finished:
                self._note(rank, "lost", reason)
                self.trouble = self.trouble or LostError(f"worker {rank} was lost: {reason}")
            self.news.notify_all()

    def _take_in(self, rank: int, known: WorkerState, done: dict[str, Any], brought: Flat | None) -> None:
        piece = BatchPiece(done["step"], done["part"])
        if done["what"] != self._what:
            return
        if self._what == "evaluate" and done["version"] != self._from:
            return  # of an earlier evaluation
        sums = {name: (float(total), float(count)) for name, (total, count) in done["sums"].items()}
        facts = {name: done[name] for name in ("version", "samples", "seconds")}
        report = Report(worker=rank, gradient_sums=sums, **facts)
        if not self.queue.put(rank, piece, report):
            return
        if self._what == "train":
            known.pieces += 1
            known.last = time.monotonic()
            known.samples += report.samples
            if brought is not None:
                self.statistics[piece.step] = brought
        self._laps.append(report.seconds)
        if self.queue.ready() is not None:
            self.news.notify_all()

    def _note(self, rank: int, state: str, reason: str) -> None:
        self.happened.append({"rank": rank, "state": state, "reason": reason})
