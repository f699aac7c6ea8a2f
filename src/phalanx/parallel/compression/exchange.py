"""Exchanges that run beside the computation, one after another, and count the bytes sent by this rank.

Ranks begin their exchanges in the same order, so that the collectives inside match.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from phalanx.device_kinds import DeviceKind, kind_of

Exchange = Callable[[], Tensor]


class ExchangeQueue(ABC):
    """A queue of exchanges. It needs its own group, because other collectives are not in its order."""

    @abstractmethod
    def start(self, exchange: Exchange) -> Future[Tensor]:
        """Queue ``exchange``; the future has its result or its error."""

    @abstractmethod
    def close(self) -> None:
        """Finish the begun exchanges; no more may be started."""


def lane(device: torch.device) -> ExchangeQueue:
    """Return the queue of a device: a stream if the device has streams, else a thread."""
    kind = kind_of(device)
    return _Stream(kind, device) if kind.streams else _Thread()


_Queue = queue.SimpleQueue["tuple[Exchange, Future[Tensor]] | None"]  # pyrefly: ignore[not-a-type]


class _Thread(ExchangeQueue):
    def __init__(self) -> None:
        self._waiting: _Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._waiting.put, None).atexit = False

    def start(self, exchange: Exchange) -> Future[Tensor]:
        if self._thread is None:
            # The exit does not wait for it: a peer that died must not keep this process alive.
            self._thread = threading.Thread(target=_work, args=(self._waiting,), name="exchanges", daemon=True)
            self._thread.start()
        found: Future[Tensor] = Future()
        self._waiting.put((exchange, found))
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None


def _work(waiting: _Queue) -> None:
    while (item := waiting.get()) is not None:
        exchange, found = item
        try:
            found.set_result(exchange())
        except Exception as error:
            found.set_exception(error)  # torch types it as a result
        del item, exchange, found  # before the next comes, which may be long


class _Stream(ExchangeQueue):
    def __init__(self, kind: DeviceKind, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._stream = kind.stream(device)

    def start(self, exchange: Exchange) -> Future[Tensor]:
        self._stream.wait_stream(self._kind.current_stream(self._device))
        found: Future[Tensor] = Future(devices=[self._device])
        with self._kind.queued_on(self._stream):
            found.set_result(exchange())
        return found

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(kw_only=True, slots=True)
class CompressedTraffic:
    """Bytes that this rank sent, and bytes it would have sent without compression."""

    sent: int = 0  # to other ranks
    kept: int = 0  # for checkpoints, to bring together what was left out; not among ``sent``
    whole: int = 0  # that fp32, all-reduced by a ring, would have been: 2 (ranks - 1) / ranks of 4 bytes an element
    steps: int = 0  # optimizer steps in which that was

    def count_uncompressed(self, count: int, ranks: int) -> None:
        """Count ``count`` fp32 elements, averaged over ``ranks``, as a ring of plain numbers sends them."""
        self.whole += 8 * count * (ranks - 1) // ranks


class Wire:
    """A group of ranks to talk to; every method waits until it is done (on CUDA: queues it).

    ``group`` is any ``ProcessGroup``, or a backend made by itself, such as ``ProcessGroupGloo``.
    """

    def __init__(self, group: Any, traffic: CompressedTraffic | None = None) -> None:
        self._group = group
        self.traffic = traffic or CompressedTraffic()
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i of ``rows`` (ranks, n) to rank i, and return (ranks, n) with row i from rank i."""
        found = torch.empty_like(rows)
        self._group.alltoall_base(found.view(-1), rows.view(-1), [], []).wait()
        self.traffic.sent += rows.nbytes * (self.size - 1) // self.size
        return found

    def all_gather(self, part: Tensor) -> Tensor:
        """Return every rank's ``part`` (n,), in rank order: (ranks, n)."""
        found = part.new_empty(self.size, part.numel())
        self._group._allgather_base(found.view(-1), part).wait()
        self.traffic.sent += part.nbytes * (self.size - 1)
        return found

    def all_reduce(self, flat: Tensor) -> None:
        """Sum ``flat`` over the ranks, in place. Counted like a ring: 2 (ranks - 1) / ranks of its bytes."""
        self._group.allreduce([flat]).wait()
        self.traffic.sent += 2 * flat.nbytes * (self.size - 1) // self.size
