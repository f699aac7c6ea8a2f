"""One rank's safetensors file, written as a stream: one tensor at a time is copied to host memory, never all of them.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, a JSON
header with dtype, shape and byte range of every tensor, then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError

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
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
"""Every dtype that a checkpoint can hold, by name."""

# Few enough bytes to stay in the cache between the checksum and the write.
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a checkpoint: its bare name, its size in bytes, and the CRC-32 of its content as eight hex digits."""

    name: str
    size: int
    crc32: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the header says of one tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``; what ``DTYPES`` is keyed by."""
    return str(dtype).removeprefix("torch.")


def write_tensors(path: Path, entries: Iterable[Entry], tensors: Iterable[Tensor]) -> StoredFile:
    """Write ``tensors``, in the order of ``entries`` and taken one at a time, to a safetensors file; sync it to disk.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    return write_file(path, _stream(_header(entries), tensors))


def write_file(path: Path, pieces: Iterable[memoryview | bytes]) -> StoredFile:
    """Write ``pieces`` to a new file, sync it to disk, and say what was written."""
    size, crc = 0, 0
    with path.open("wb") as file:
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            file.write(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(name=path.name, size=size, crc32=f"{crc:08x}")


def checksum(path: Path) -> str:
    """CRC-32 of a file's content as eight hex digits."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def _header(entries: Iterable[Entry]) -> bytes:
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        if entry.key in header:
            raise CheckpointError(f"one rank holds two chunks of the tensor {entry.key!r}; it can write only one")
        end = start + math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.key] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file into memory, so the tensors have to begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stream(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview | bytes]:
    yield header
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]
