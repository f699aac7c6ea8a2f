"""The sample ledger: the samples each rank saw in each step, written during the run.

A run folder's ``ledger/`` holds one file per rank and *segment*; a segment begins when a run starts or resumes. The
file is named by the segment's first step and the rank, ``00000100-rank00002.bin``, and holds

- a header, 16 bytes: ``b"PHXLEDG1"``, world size (uint32, 0: not known), 4 bytes unused;
- a record a step, in order: step (uint64), epoch (uint32), count of ids (uint32), bytes of an id (uint32, 4 or 8; 256
  more for a step without update), CRC-32 of the ids (uint32), then the ids.

All numbers are little-endian. A record cut off by a crash ends the file's content. On a full disk records wait in
memory; ``flush`` raises if a checkpoint's records are not on the disk.

Segments overlap if a run died after its last checkpoint; then the later one is valid from its first step on.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Self, final

import numpy as np

from phalanx.data.step_batch import StepBatch
from phalanx.errors import DataError
from phalanx.files import open_plain

_MAGIC = b"PHXLEDG1"
_FILE = struct.Struct("<8sI4x")
_RECORD = struct.Struct("<QIIII")
_NAME = re.compile(r"(\d+)-rank(\d+)\.bin")
_BUFFER = 2**18  # bytes
_LEFT_OUT = 256
_MAPPED = 256  # files of a segment: each mapped file stays open, and more are read whole


@final
class Ledger:
    """One rank's writer of the ledger, for one segment.

    Records are buffered: ``flush()`` before a checkpoint counts.
    """

    def __init__(self, folder: Path, *, rank: int, first_step: int, world_size: int = 0) -> None:
        """Begin a segment in ``folder``, and invalidate earlier records from ``first_step`` on.

        ``world_size``: processes of the run; files left by further ranks at the same first step are ignored.

        Raises:
            DataError: if it cannot be written.
            SpecError: if a link or another special file is in its place.
        """
        self.path = folder / f"{first_step:08d}-rank{rank:05d}.bin"
        self._waiting = bytearray(_FILE.pack(_MAGIC, world_size))
        self._failed: OSError | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _OwnFile(self.path)
            # A run that goes on from before a segment's start takes that segment's place. One rank sees to it: of many
            # each would list the files of all.
            for found in _files(folder) if rank == 0 else ():
                if found.first_step > first_step:
                    found.path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritten(error) from error
        self._write()

    def record(self, batch: StepBatch, *, left_out: bool = False) -> None:
        """Record the samples of one step in this process; kept in memory if the disk is full.

        ``left_out``: the step made no update.
        """
        ids = [one for part in batch.parts for micro in part for one in micro.ids]
        words = _words(ids)
        payload = words.tobytes()
        width = words.itemsize + _LEFT_OUT * left_out
        head = _RECORD.pack(batch.step, batch.epoch, len(ids), width, zlib.crc32(payload))
        self._waiting += head + payload
        if len(self._waiting) >= _BUFFER:
            self._write()

    def flush(self) -> None:
        """Hand all records to the operating system.

        Raises:
            DataError: if they cannot be written.
        """
        self._write()
        if self._failed:
            raise self._unwritten(self._failed) from self._failed

    def close(self) -> None:
        """Flush and close; a second call does nothing. Raises the errors of ``flush``."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()

    def _write(self) -> None:
        """Write the waiting records; the next call tries again with any that do not fit on the disk."""
        self._failed = None
        try:
            while self._waiting:
                del self._waiting[: self._file.append(self._waiting)]
        except OSError as error:
            self._failed = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DataError:
            if kind is None:  # else the error in the block is the cause, and is raised alone
                raise

    def _unwritten(self, error: OSError) -> DataError:
        what = f"the sample ledger {self.path} cannot be written: {error.strerror}"
        return DataError(f"{what}\n    try: free space there, then resume with resume=True")


@final
class _OwnFile:
    """A file written by one rank."""

    def __init__(self, path: Path) -> None:
        os.close(open_plain(path, os.O_WRONLY | os.O_CREAT, below=2))
        path.unlink()  # a run that has lost the folder and does not know it yet goes on in the old file
        self._file = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, below=2)

    @property
    def closed(self) -> bool:
        return self._file < 0

    def append(self, data: bytearray) -> int:
        return os.write(self._file, data)

    def close(self) -> None:
        os.close(self._file)
        self._file = -1


def _words(ids: list[int]) -> array[int]:
    """Encode the ids as little-endian words of 4 bytes, or 8 if an id needs them."""
    try:
        words = array("I", ids)
    except OverflowError:
        words = array("Q", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRecord:
    """One rank's samples of one step; ``ids`` are uint32 or uint64, possibly a view into a mapped file.

    ``left_out``: the step made no update.
    """

    step: int
    epoch: int
    rank: int
    ids: np.ndarray
    left_out: bool = False


def records(folder: Path) -> dict[int, list[LedgerRecord]]:
    """Return the valid records, by step and then by rank. Superseded ones are left out.

    Ids are views into the mapped files, which are read on access.

    Raises:
        DataError: if a file is no ledger.
    """
    segments = {first: list(files) for first, files in groupby(_files(folder), key=lambda file: file.first_step)}
    found: dict[int, list[LedgerRecord]] = {}
    for files, end in zip_longest(segments.values(), [*segments][1:]):
        for record in _segment(files):
            if end is None or record.step < end:
                found.setdefault(record.step, []).append(record)
    return {step: sorted(found[step], key=lambda record: record.rank) for step in sorted(found)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    path: Path
    first_step: int
    rank: int


def _files(folder: Path) -> list[_File]:
    matches = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("*.bin")]
    files = [_File(path=path, first_step=int(match[1]), rank=int(match[2])) for path, match in matches if match]
    return sorted(files, key=lambda file: (file.first_step, file.rank))


def _segment(files: list[_File]) -> Iterator[LedgerRecord]:
    """Yield the records of one segment, without those of ranks that the run no longer had."""
    mapped = len(files) <= _MAPPED
    contents = [(file, _content(file.path, mapped=mapped)) for file in files]
    first = next((content for file, content in contents if file.rank == 0 and content), None)
    world_size = _FILE.unpack_from(first)[1] if first else 0
    for file, content in contents:
        if world_size == 0 or file.rank < world_size:
            yield from _parse(content, file.rank)


def _content(path: Path, *, mapped: bool) -> mmap.mmap | bytes:
    """Return the bytes of a file; empty if a crash cut off even the header."""
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY, below=2), "rb") as file:
            if os.fstat(file.fileno()).st_size < _FILE.size:
                return b""
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
    except OSError as error:
        raise _no_ledger(f"{path} cannot be read: {error.strerror}") from None
    if content[: len(_MAGIC)] != _MAGIC:
        raise _no_ledger(f"{path} is no sample ledger: it does not begin with {_MAGIC.decode()}")
    return content


def _no_ledger(what: str) -> DataError:
    error = DataError(f"{what}\n    try: phalanx audit RUN with a run folder as training left it")
    error.exit_code = 2  # an input error, before any run
    return error


def _parse(content: mmap.mmap | bytes, rank: int) -> Iterator[LedgerRecord]:
    at, end = _FILE.size, len(content)
    while at + _RECORD.size <= end:
        step, epoch, count, width, crc = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        width, left_out = width & ~_LEFT_OUT, bool(width & _LEFT_OUT)
        if width not in (4, 8) or at + count * width > end:
            return
        ids = np.frombuffer(content, dtype=f"<u{width}", count=count, offset=at)
        if zlib.crc32(ids.tobytes()) != crc:
            return
        at += count * width
        yield LedgerRecord(step=step, epoch=epoch, rank=rank, ids=ids, left_out=left_out)
