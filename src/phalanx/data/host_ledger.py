"""The sample ledger of a run of many ranks: those of a host share a file, so that there are as many files as hosts.

A file is named by its segment's first step and the first rank on its host, ``00000100-host00008.bin``, and holds

- a header, 40 bytes: ``b"PHXLEDG2"``, world size (uint32), 4 bytes unused, 16 bytes that all files of a segment have in
  common, and how many bytes of the file count (uint64);
- records as in a file of one rank (``ledger.py``), each with its rank (uint32) between checksum and ids.

Ranks write in turn, by a lock of the file. What a rank that was killed has left half written is beyond the bytes that
count, and is written over. Files that another attempt has left, on hosts that the run no longer has, are known by what
they have in common: it is not what the file of rank 0's host has.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from phalanx.files import open_plain

HOST_MAGIC = b"PHXLEDG2"
RANK = struct.Struct("<I")
MOST_FILES = 1024
"""Ranks of a run that have files of their own; of one with more, hosts have."""


def share_files(ranks: int) -> bool:
    """Whether ranks of a host share a file in a run of so many."""
    return ranks > MOST_FILES


_HEADER = struct.Struct("<8sI4x16sQ")
_KEY, _END = slice(16, 32), struct.Struct("<Q")
_END_AT = 32
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class HostKey:
    """Which file of a segment is this host's: ``first_rank`` on it; and 16 bytes that are the segment's own."""

    first_rank: int
    key: bytes


def key_of(content: mmap.mmap | bytes) -> bytes:
    """What the files of a segment have in common."""
    return bytes(content[_KEY])


def end_of(content: mmap.mmap | bytes) -> int:
    """How many bytes of a file count; 0 where its header is not whole."""
    if len(content) < HEADER_BYTES:
        return 0
    return min(len(content), _END.unpack_from(content, _END_AT)[0])


@final
class HostFile:
    """A file that the ranks of a host write together. The first that comes begins it; others find it begun."""

    def __init__(self, path: Path, host: HostKey, world_size: int) -> None:
        header = _HEADER.pack(HOST_MAGIC, world_size, host.key, HEADER_BYTES)
        self._file = open_plain(path, os.O_RDWR | os.O_CREAT, below=2)
        try:
            while not self._begun(path, host.key, header):
                os.close(self._file)
                self._file = open_plain(path, os.O_RDWR | os.O_CREAT, below=2)
        except OSError:
            self.close()
            raise

    def _begun(self, path: Path, key: bytes, header: bytes) -> bool:
        """Whether the open file is this segment's; else another is to be opened."""
        with self._turn():
            there = os.pread(self._file, HEADER_BYTES, 0)
            if not there:
                _write_all(self._file, header, 0)
            elif there[_KEY] != key and _is_at(path, self._file):
                path.unlink()  # an earlier attempt's: who still writes there goes on in the old file
            return not there or there[_KEY] == key

    @property
    def closed(self) -> bool:
        return self._file < 0

    def append(self, data: bytearray) -> int:
        """Write at the end, all or nothing. Returns how many bytes.

        Raises:
            OSError: there is no room for all.
        """
        with self._turn():
            (end,) = _END.unpack(os.pread(self._file, _END.size, _END_AT))
            _write_all(self._file, data, end)
            _write_all(self._file, _END.pack(end + len(data)), _END_AT)
        return len(data)

    def close(self) -> None:
        os.close(self._file)
        self._file = -1

    @contextmanager
    def _turn(self) -> Generator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _is_at(path: Path, file: int) -> bool:
    """Whether the open ``file`` is still the one at ``path``."""
    try:
        there, ours = os.lstat(path), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _write_all(file: int, data: bytes | bytearray, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
