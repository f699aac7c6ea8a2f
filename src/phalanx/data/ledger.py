"""The sample ledger: which samples each rank saw in each step, as the run went.

A run folder's ``ledger/`` holds one file a rank and *segment*; a segment begins where a run starts or goes on. A
segment's file is named by its first step and its rank, ``00000100-rank00002.bin``, and holds

- a header, 16 bytes: ``b"PHXLEDG1"``, world size (uint32, 0: not known), 4 bytes unused;
- a record a step, in order: step (uint64), epoch (uint32), count of ids (uint32), bytes of an id (uint32, 4 or 8),
  CRC-32 of the ids (uint32), then the ids.

All numbers are little-endian. A record that a crash cut off ends the file's content.

Where segments overlap, because a run died after its last checkpoint, the later one holds from its first step on.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np

from phalanx.data.batch_split import StepBatch
from phalanx.errors import DataError

_MAGIC = b"PHXLEDG1"
_FILE = struct.Struct("<8sI4x")
_RECORD = struct.Struct("<QIIII")
_NAME = re.compile(r"(\d+)-rank(\d+)\.bin")
_BUFFER = 2**18  # bytes


@final
class Ledger:
    """One rank's side of the ledger, for one segment. Records are buffered: ``flush()`` before a checkpoint counts."""

    def __init__(self, folder: Path, *, rank: int, first_step: int, world_size: int = 0) -> None:
        """Begins a segment. What an earlier attempt wrote from ``first_step`` on is given up.

        Args:
            folder: of the ledger; made where it is missing.
            rank: of this process.
            first_step: the step the run starts or goes on with.
            world_size: processes of the run. With it, files that more ranks left behind at the same first step do
                not count.

        Raises:
            DataError: if it cannot be written.
        """
        self.path = folder / f"{first_step:08d}-rank{rank:05d}.bin"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for found in _files(folder):
                # A run that goes on from before a segment's start takes that segment's place.
                if found.first_step > first_step:
                    found.path.unlink(missing_ok=True)
            self.path.write_bytes(_FILE.pack(_MAGIC, world_size))
            self._file = self.path.open("ab", buffering=_BUFFER)
        except OSError as error:
            raise self._unwritable(error) from error

    def record(self, batch: StepBatch) -> None:
        """Notes the samples of one step that this process got.

        Raises:
            DataError: if it cannot be written.
        """
        ids: list[int] = []
        for part in batch.parts:
            for micro in part:
                ids += micro.ids
        words = _words(ids)
        payload = words.tobytes()
        head = _RECORD.pack(batch.step, batch.epoch, len(ids), words.itemsize, zlib.crc32(payload))
        try:
            self._file.write(head + payload)
        except OSError as error:
            raise self._unwritable(error) from error

    def flush(self) -> None:
        """Hands everything recorded to the operating system.

        Raises:
            DataError: if it cannot be written.
        """
        try:
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Flushes and closes; a second call does nothing.

        Raises:
            DataError: if it cannot be written.
        """
        try:
            self._file.close()
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"the sample ledger {self.path} cannot be written: {error.strerror}\n    try: free space there, then resume"
        )


def _words(ids: list[int]) -> array[int]:
    """The ids as little-endian words of 4 bytes, or of 8 where one needs them."""
    try:
        words = array("I", ids)
    except OverflowError:
        words = array("Q", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRecord:
    """What one rank saw in one step.

    Attributes:
        step: optimizer step.
        epoch: pass over the data.
        rank: who recorded it.
        ids: sample ids, uint32 or uint64; a view into the file where that is mapped.
    """

    step: int
    epoch: int
    rank: int
    ids: np.ndarray


def records(folder: Path) -> dict[int, list[LedgerRecord]]:
    """The records that count, by step in order; those of a step by rank. Superseded ones are left out.

    Ids are views into the mapped files: what is not looked at is not read.

    Raises:
        DataError: if a file is no ledger.
    """
    files = _files(folder)
    starts = sorted({file.first_step for file in files})
    found: dict[int, list[LedgerRecord]] = {}
    for first_step, end in zip_longest(starts, starts[1:]):
        for record in _segment([file for file in files if file.first_step == first_step]):
            if end is None or record.step < end:
                found.setdefault(record.step, []).append(record)
    return dict(sorted(found.items()))


def read_ledger(folder: Path) -> dict[int, tuple[int, np.ndarray]]:
    """For each step in order, its epoch and the sorted ids (int64) of its global batch, over all ranks.

    Raises:
        DataError: if a file is no ledger.
    """
    return {
        step: (those[0].epoch, np.sort(np.concatenate([record.ids for record in those])).astype(np.int64))
        for step, those in records(folder).items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    path: Path
    first_step: int
    rank: int


def _files(folder: Path) -> list[_File]:
    """The ledger's files, by first step and rank."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("*.bin")]
    files = [_File(path=path, first_step=int(match[1]), rank=int(match[2])) for path, match in matches if match]
    return sorted(files, key=lambda file: (file.first_step, file.rank))


def _segment(files: list[_File]) -> Iterator[LedgerRecord]:
    """The records of one segment's files, without those of ranks that the run no longer had."""
    contents = [(file, _content(file.path)) for file in files]
    known = [_FILE.unpack_from(content)[1] for file, content in contents if file.rank == 0 and len(content)]
    for file, content in contents:
        if not known or known[0] == 0 or file.rank < known[0]:
            yield from _parse(content, file.rank)


def _content(path: Path) -> mmap.mmap | bytes:
    """The file as mapped bytes; empty where a crash cut off even the header."""
    if path.stat().st_size < _FILE.size:
        return b""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if content[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{path} is no sample ledger: it does not begin with {_MAGIC.decode()}")
    return content


def _parse(content: mmap.mmap | bytes, rank: int) -> Iterator[LedgerRecord]:
    at = _FILE.size
    while at + _RECORD.size <= len(content):
        step, epoch, count, width, crc = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        if width not in (4, 8) or at + count * width > len(content):
            return
        ids = np.frombuffer(content, dtype=f"<u{width}", count=count, offset=at)
        if zlib.crc32(ids.tobytes()) != crc:
            return
        at += count * width
        yield LedgerRecord(step=step, epoch=epoch, rank=rank, ids=ids)
