"""One rank's safetensors file: written as a stream, read by byte ranges, with a checksum for each block.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, a JSON header
with dtype, shape and byte range of every tensor, then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from isal import isal_zlib
from torch import Tensor

from phalanx.checkpoint.format import BLOCK, StoredFile
from phalanx.checkpoint.safe_files import create, damaged, open_file, unreadable
from phalanx.errors import CheckpointError
from phalanx.files import json_value

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """The header's entry for one tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, to read and to write."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, pieces: Iterable[memoryview | bytes]) -> StoredFile:
    """Write ``pieces`` to a new file, sync it to disk, and return its size and checksums.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    checksums, size, crc = list[int](), 0, 0
    with open(create(path), "wb", buffering=0) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                # Few enough bytes at a time to stay in the cache between the checksum and the write.
                part = rest[: BLOCK - size % BLOCK]
                rest = rest[len(part) :]
                crc = isal_zlib.crc32(part, crc)
                _write(file.fileno(), part)
                size += len(part)
                if size % BLOCK == 0:
                    checksums.append(crc)
                    crc = 0
        os.fsync(file.fileno())
    if size % BLOCK:
        checksums.append(crc)
    return StoredFile(name=path.name, size=size, checksums=tuple(checksums))


def _write(handle: int, part: memoryview) -> None:
    while part:
        part = part[os.write(handle, part) :]


def header_of(entries: Iterable[TensorEntry]) -> bytes:
    """Return the first bytes of a file with these tensors in this order.

    Raises:
        CheckpointError: two have one key.
    """
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        if entry.key in header:
            raise CheckpointError(f"one rank holds two chunks of the tensor {entry.key!r}; it can write only one")
        end = start + entry.nbytes
        header[entry.key] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file into memory, so the tensors have to begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@final
class ShardFile:
    """An open file of a checkpoint; every read is compared with its checksums.

    ``trusted``: its checksums have been compared before.
    """

    def __init__(self, folder: Path, file: StoredFile, *, trusted: bool = False) -> None:
        """Raise DamagedError if the file is missing, not a regular file, or of wrong size."""
        self._folder, self._file, self._trusted = folder, file, trusted
        self._block = BLOCK if trusted else file.block
        self._scratch = memoryview(bytearray())
        self._in_scratch = -1
        self._handle = open_file(folder, file.name)
        if (size := os.fstat(self._handle).st_size) != file.size:
            self.close()
            raise damaged(folder, f"{folder / file.name} has {size} bytes; {file.size} were written", file=file.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def read_into(self, out: memoryview, begin: int) -> None:
        """Fill ``out`` with the file's bytes from ``begin`` on.

        Raises:
            DamagedError: the bytes differ from the written ones.
        """
        end = begin + len(out)
        for block in range(begin // self._block, -(-end // self._block)):
            first, last = block * self._block, min((block + 1) * self._block, self._file.size)
            low, high = max(begin, first), min(end, last)
            part = out[low - begin : high - begin]
            if (low, high) == (first, last):
                self._fill(part, first, block)
            else:
                part[:] = self._whole(block, first, last)[low - first : high - first]

    def verify(self) -> None:
        """Read the whole file. Raises DamagedError if it was changed."""
        if self._file.block <= 1 << 24:
            for block, first in enumerate(range(0, self._file.size, self._block)):
                self._whole(block, first, min(first + self._block, self._file.size))
            return
        crc, piece = 0, memoryview(bytearray(BLOCK))
        for first in range(0, self._file.size, BLOCK):
            part = piece[: min(BLOCK, self._file.size - first)]
            self._pread(part, first)
            crc = isal_zlib.crc32(part, crc)
        self._compare(crc, 0)

    def entries(self) -> dict[str, tuple[TensorEntry, int]]:
        """Map key to its header entry and the byte at which its data begin.

        Raises:
            DamagedError: the header cannot be read, or does not describe the file.
        """
        try:
            length = int.from_bytes(self._read(8, 0), "little")
            if length > self._file.size - 8:
                raise ValueError(f"a header of {length} bytes")
            header = json_value(self._read(length, 8).decode())
            header.pop("__metadata__", None)
            found, expected = dict[str, tuple[TensorEntry, int]](), 8 + length
            for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
                dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
                begin, end = entry["data_offsets"]
                described = TensorEntry(key=key, dtype=dtype, shape=shape)
                if any(type(size) is not int or size < 0 for size in (*shape, begin, end)):
                    raise ValueError(f"{key} has sizes that are none")
                if 8 + length + begin != expected or end - begin != described.nbytes:
                    raise ValueError(f"{key} does not stand where its shape says")
                found[key], expected = (described, expected), expected + described.nbytes
            if expected != self._file.size:
                raise ValueError("the tensors do not fill it")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = self._file.name
            text = f"{self._folder / name} is not a safetensors file: {error}"
            raise damaged(self._folder, text, file=name) from None
        return found

    def _read(self, count: int, begin: int) -> bytearray:
        out = bytearray(min(count, self._file.size - begin))
        self.read_into(memoryview(out), begin)
        return out

    def _whole(self, block: int, first: int, last: int) -> memoryview:
        """Return the block from a scratch buffer, so that small tensors in one block are read from disk once."""
        if len(self._scratch) < last - first:
            self._scratch = memoryview(bytearray(last - first))
        if self._in_scratch != block:
            self._in_scratch = -1
            self._fill(self._scratch[: last - first], first, block)
            self._in_scratch = block
        return self._scratch[: last - first]

    def _fill(self, part: memoryview, first: int, block: int) -> None:
        self._pread(part, first)
        if not self._trusted:
            self._compare(isal_zlib.crc32(part), block)

    def _compare(self, crc: int, block: int) -> None:
        if crc != self._file.checksums[block]:
            name, first = self._file.name, block * self._block
            text = f"{self._folder / name} has changed since it was written: its bytes from {first} on have "
            text += f"the checksum {crc:08x}, was {self._file.checksums[block]:08x}"
            raise damaged(self._folder, text, file=name)

    def _pread(self, part: memoryview, at: int) -> None:
        try:
            while part:
                count = os.preadv(self._handle, [part], at)
                if not count:
                    raise damaged(
                        self._folder, f"{self._folder / self._file.name} became shorter", file=self._file.name
                    )
                part, at = part[count:], at + count
        except OSError as error:
            raise unreadable(self._folder, self._file.name, error) from None
