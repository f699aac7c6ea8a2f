"""Where exchanges run beside the computation, one after another in the order in which they were begun.

Ranks begin theirs in the same order, so that the collectives inside, of which each exchange has several, meet.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

Exchange = Callable[[], Tensor]


class Lane(ABC):
    """Runs one exchange after another. Its group should be its own: others' collectives are not in its order."""

    @abstractmethod
    def start(self, exchange: Exchange) -> Future[Tensor]:
        """Queue ``exchange``; the future holds what it gives, or raises what it raises."""

    @abstractmethod
    def close(self) -> None:
        """No more exchanges come; those begun are finished."""


def lane(device: torch.device) -> Lane:
    """The lane of a device: a thread on a CPU, a stream of its own on CUDA."""
    return _Stream(device) if device.type == "cuda" else _Thread()


_Queue = queue.SimpleQueue["tuple[Exchange, Future[Tensor]] | None"]


class _Thread(Lane):
    def __init__(self) -> None:
        self._waiting: _Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._waiting.put, None).atexit = False

    def start(self, exchange: Exchange) -> Future[Tensor]:
        if self._thread is None:
            # Nobody waits for it at exit: a peer that died must not keep this process alive.
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
            found.set_exception(error)  # pyright: ignore[reportArgumentType]  # torch types it as a result
        del item, exchange, found  # before the next comes, which may be long


class _Stream(Lane):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, exchange: Exchange) -> Future[Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        found: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            found.set_result(exchange())
        return found

    def close(self) -> None:
        self._stream.synchronize()
