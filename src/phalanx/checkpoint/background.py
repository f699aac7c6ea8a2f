"""Saves during training: training stops for a copy to host memory, and a thread writes the copy.

The copy needs as much host memory as this rank writes, and the next save uses it again. Threads of different ranks talk
through the ranks' store and never by collectives, because two threads in collectives of one group would receive each
other's data.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, final
from uuid import uuid4
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyrefly: ignore

from phalanx.checkpoint.agreement import Agreement
from phalanx.checkpoint.all_ranks import GroupRendezvous, Rendezvous, StoreRendezvous, anywhere, from_first, grouped
from phalanx.checkpoint.store import PreparedSave, SaveRequest, prepared
from phalanx.comm.process_group import group_timeout
from phalanx.device_kinds import kind_of
from phalanx.errors import CheckpointError
from phalanx.hardware import memory_bytes

_PARTING = 10.0  # seconds that a run which ends in an error waits for a save that is under way
_writers: WeakSet[Thread] = WeakSet()


@final
class Saving:
    """A checkpoint that is being written.

    Attributes:
        standstill: seconds for which training stopped.
        nbytes: of its files, once it is written.
        seconds: from the begin of the save until the checkpoint was complete on the disk.
        note: a remark for the user about the way it is saved; may be empty.
    """

    def __init__(self, step: int, path: Path, begun: float) -> None:
        self.step, self.path, self.standstill, self.note = step, path, 0.0, ""
        self.nbytes, self.seconds = 0, 0.0
        self._begun = begun
        self._error: BaseException | None = None
        self._over = Event()

    @classmethod
    def done(cls, step: int, path: Path, begun: float) -> Saving:
        """Return a checkpoint that was written while training waited; ``begun`` is a time by ``time.perf_counter``."""
        saving = cls(step, path, begun)
        saving.end(None)
        saving.standstill = saving.seconds
        return saving

    @property
    def published(self) -> bool:
        """Return True if it is complete on the disk."""
        return self._over.is_set() and self._error is None

    def end(self, error: BaseException | None) -> None:
        """Mark it as written, or as failed with ``error``."""
        self._error, self.seconds = error, time.perf_counter() - self._begun
        if error is None:
            with suppress(OSError):  # a later save of another process may have removed it already
                self.nbytes = sum(file.lstat().st_size for file in self.path.iterdir())
        self._over.set()

    def wait(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            CheckpointError: it cannot be written; the same on all ranks.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error


@final
class BackgroundSaver:
    """A writer of one training's checkpoints, one after the other.

    ``ranks_here``: number of ranks that share this machine's memory.
    """

    def __init__(self, *, ranks_here: int = 1) -> None:
        self._ranks_here = ranks_here
        self._memory = _nothing()
        self._agreement: Agreement | None = None
        self._store: Store | None = None
        self._saving: Saving | None = None
        self._thread: Thread | None = None
        self._given_up = Event()

    def save(self, asked: SaveRequest, *, at_once: bool = False) -> Saving:
        """Begin to save the present values; the tensors may change once this returns. Collective.

        Waits for the previous save. Writes before it returns if ``at_once`` is given, or if a rank has no memory for a
        copy.

        Raises:
            CheckpointError: on all ranks, if any rank cannot save, or if the previous save failed.
        """
        self.wait()
        begun = time.perf_counter()
        ready = prepared(asked, self._agreement)
        self._agreement = ready.agreement
        if at_once:
            return Saving.done(asked.step, ready.write(GroupRendezvous()), begun)
        needed = ready.content.nbytes
        on_device = any(kind_of(tensor.device).pinned for tensor in ready.content.tensors)
        meets = self._find_store()
        if anywhere(not (meets and self._allocate(needed, on_device))):
            self._memory = _nothing()
            saving = Saving.done(asked.step, ready.write(GroupRendezvous()), begun)
            saving.note = (
                "no host memory for a copy of what is saved, or no store that threads can meet at: training waits "
                "until a checkpoint is written"
            )
            return saving
        ready = PreparedSave(
            asked=asked,
            state=ready.state,
            content=ready.content.copied_to(self._memory, self._given_up),
            agreement=ready.agreement,
        )
        self._saving = saving = Saving(asked.step, ready.path, begun)
        self._start(ready, saving, from_first(uuid4().hex))
        saving.standstill = time.perf_counter() - begun
        return saving

    def wait(self) -> None:
        """Wait for a running save. Raises the errors of ``Saving.wait``."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
        if self._thread is not None:
            self._thread.join()

    def close(self, *, patience: float = _PARTING) -> None:
        """Give a running save ``patience`` seconds to finish, then abandon it unpublished."""
        if self._thread is not None:
            self._thread.join(patience)
            self._given_up.set()
            self._thread.join(patience)
        self._memory, self._store, self._saving = _nothing(), None, None

    def _start(self, ready: PreparedSave, saving: Saving, prefix: str) -> None:
        rendezvous: Rendezvous = GroupRendezvous()
        if self._store is not None:
            under, patience = f"phalanx/checkpoint/{prefix}", group_timeout().total_seconds()
            rank, size, given_up = dist.get_rank(), dist.get_world_size(), self._given_up
            rendezvous = StoreRendezvous(self._store, under, rank, size, patience=patience, given_up=given_up)

        def run() -> None:
            try:
                ready.write(rendezvous)
                saving.end(None)
            except CheckpointError as error:
                saving.end(error)
            except Exception as error:
                what = f"the checkpoint of step {ready.asked.step} could not be written"
                saving.end(CheckpointError(f"{what}: {type(error).__name__}: {error}"))

        self._thread = Thread(target=run, name="phalanx-checkpoint", daemon=True)
        _writers.add(self._thread)
        self._thread.start()

    def _find_store(self) -> bool:
        """Return True if threads of all ranks can meet.

        The thread gets its own client, because a waiting client blocks others.
        """
        if not grouped() or dist.get_world_size() == 1:
            return True
        if self._store is None:
            with suppress(RuntimeError, NotImplementedError, AttributeError):
                store: Any = dist.distributed_c10d._get_default_store()
                self._store = store.clone()
        return self._store is not None

    def _allocate(self, needed: int, on_device: bool) -> bool:
        """Return True if ``needed`` bytes of memory are free; memory of the last save is used again if large enough."""
        if len(self._memory) >= needed:
            return True
        self._memory = _nothing()  # let go of it first
        if needed * self._ranks_here > _available():
            return False
        with suppress(RuntimeError, MemoryError, OSError):
            self._memory = _pinned(needed) if on_device else _paged(needed)
        return len(self._memory) >= needed


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _paged(size: int) -> torch.Tensor:
    """Allocate host memory in large pages if possible: first touching small pages costs more than the copy."""
    pages = mmap.mmap(-1, max(size, 1))
    with suppress(AttributeError, OSError, ValueError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _available() -> int:
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        return min(int(lines["MemAvailable"].split()[0]) * 1024, memory_bytes() - resident)
    return memory_bytes()


def _wait_for_writers() -> None:
    # A forked child would inherit what a thread holds at that moment, and never get it back.
    for thread in list(_writers):
        if thread is not threading.current_thread():
            thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_writers)
