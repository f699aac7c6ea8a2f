"""Worker processes that load data ahead, and pinned memory, with torch's DataLoader.

Workers die with the process that started them, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames
from typing import Any, final

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from phalanx.data.map_style import Fetcher
from phalanx.data.shared_epoch import with_own_epoch
from phalanx.data.streams import StreamReader, StreamStep
from phalanx.errors import DataError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderWorkers:
    """The settings for loading data ahead.

    Attributes:
        count: processes; 0 loads in this one.
        prefetch: items each process loads ahead; ``None``: 2.
        pin_memory: whether batches are copied to pinned host memory. Ignored without an accelerator.
        seed: of random draws outside samples.
    """

    count: int
    prefetch: int | None
    pin_memory: bool
    seed: int

    @property
    def needed(self) -> bool:
        """Return True if anything has to be done beyond loading in this process."""
        return self.count > 0 or self._pins

    @property
    def _pins(self) -> bool:
        return self.pin_memory and torch.accelerator.is_available()

    def indexed(
        self, fetcher: Fetcher, requests: Iterator[tuple[int, np.ndarray]]
    ) -> AbstractContextManager[Iterator[Any]]:
        """Load the requested batches in order; the processes live as long as the block."""
        return self._loaded(_Answers(fetcher, self.count * (self.prefetch or 2)), sampler=requests)

    def stream(self, reader: StreamReader) -> AbstractContextManager[Iterator[StreamStep]]:
        """Load the groups of the stream in order; the processes live as long as the block."""
        return self._loaded(_Groups(reader))

    @contextmanager
    def _loaded(self, dataset: Dataset[Any], **options: Any) -> Iterator[Iterator[Any]]:
        if self.count:
            options |= {
                "prefetch_factor": self.prefetch or 2,
                "worker_init_fn": partial(_die_with_parent, os.getpid()),
                # A job's collate is often a lambda, which only fork can hand over.
                "multiprocessing_context": "fork" if sys.platform == "linux" else None,
            }
        loader = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_identity,
            num_workers=self.count,
            pin_memory=self._pins,
            # Its own generator: DataLoader would draw from the training process's otherwise.
            generator=torch.Generator().manual_seed(self.seed),
            **options,
        )
        try:
            iterator = iter(loader)
        except RuntimeError as error:  # one ended while others were being started
            clear_frames(error.__traceback__)  # which hold those that run
            raise _explanation(error) from None
        try:
            yield _explained(iterator)
        finally:
            # Not left to __del__: a traceback that holds the frame would keep the processes.
            shut_down = getattr(iterator, "_shutdown_workers", None)
            if shut_down is not None:
                shut_down()


@final
class _Answers(Dataset[Any]):
    """A dataset indexed by a request (epoch, ids), with a batch for each index."""

    def __init__(self, fetcher: Fetcher, ahead: int) -> None:
        """Allow ``ahead`` batches to be loaded ahead; each of their tensors is an open file."""
        self._fetcher, self._ahead = fetcher, ahead

    def __getitem__(self, index: tuple[int, np.ndarray]) -> Any:
        epoch, ids = index
        batch = self._fetcher.fetch(epoch, ids)
        if self._ahead and torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
            tensors, limit = len(tree_leaves(batch)), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if tensors * self._ahead > limit:
                raise DataError(
                    f"{self._ahead} batches ahead (workers x prefetch) of {tensors} tensors each, where no more than "
                    f"{limit} files may be open\n    try: ulimit -n 65536, or fewer workers=, prefetch= or tensors"
                )
        self._ahead = 0  # it is known now
        return batch


@final
class _Groups(IterableDataset[StreamStep]):
    """A stream of groups; each worker yields every ``workers``-th, and DataLoader restores the order."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __iter__(self) -> Iterator[StreamStep]:
        info = get_worker_info()
        if info is None:
            return self._reader.groups()
        torch_worker._worker_info = None  # many streams split themselves by worker when they see that they are in one
        if get_worker_info() is not None:
            raise DataError("this torch does not let a worker read a whole stream\n    try: workers=0")
        reader = replace(self._reader, dataset=with_own_epoch(self._reader.dataset))
        return reader.groups(info.id, info.num_workers)


def _identity(batch: Any) -> Any:
    return batch


def _explained(results: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from results
    except DataError as error:  # of a process, with its traceback
        raise DataError(str(error).rpartition("DataError: ")[2].rstrip()) from None
    except RuntimeError as error:
        raise _explanation(error) from None


def _explanation(error: RuntimeError) -> Exception:
    if "unable to allocate shared memory" in str(error):
        return DataError(
            "/dev/shm is too small for the batches that processes load ahead\n"
            "    try: enlarge it (docker run --shm-size=8g), or workers=0 or a smaller prefetch"
        )
    if "DataLoader worker (pid" not in str(error):
        return error
    return DataError(
        f"a process that loads data ended: {error}\n"
        "    usual cause: not enough memory, or a crash in a library that the dataset calls\n"
        "    try: workers=0 to see its own error, or a smaller prefetch"
    )


def _die_with_parent(parent: int, worker: int) -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere torch's own watch notices within 5 s."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
