"""What a checkpoint's files hold: ``manifest.json``, and a rank's safetensors, written as a stream.

One rank's safetensors file, written as a stream: one tensor at a time is copied to host memory, never all of them. The
format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, a JSON header
with dtype, shape and byte range of every tensor, then the bytes of all tensors without gaps.
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

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = "phalanx-checkpoint"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A block of a tensor: where it begins and its size along each dimension, and the file and key that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor as a whole: its global shape, its dtype, and the chunks that together fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a checkpoint of one optimizer step."""

    step: int
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest of the checkpoint in folder ``path``.

        Raises:
            CheckpointError: there is none, or it is damaged, or of a later format.
        """
        try:
            given = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}") from None
        except ValueError as error:
            raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from None
        return cls.from_json(given, path)

    @classmethod
    def from_json(cls, given: Any, path: Path) -> Manifest:
        """The manifest that parsed JSON describes; ``path`` is for messages."""
        if not isinstance(given, dict) or given.get("format") != _FORMAT:
            raise CheckpointError(f"{path / MANIFEST} does not describe a checkpoint of this kind ({_FORMAT})")
        if given.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format {given.get('version')}; this Phalanx reads format {_VERSION}\n"
                "    try: the version of Phalanx that wrote it"
            )
        try:
            files = {name: _file(name, entry) for name, entry in given["files"].items()}
            tensors = {name: _tensor(entry, files) for name, entry in given["tensors"].items()}
            return cls(step=int(given["step"]), tensors=tensors, files=files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which ``from_json`` makes an equal manifest."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "files": {file.name: {"size": file.size, "crc32": file.crc32} for file in self.files.values()},
            "tensors": {
                name: {
                    "shape": tensor.shape,
                    "dtype": dtype_name(tensor.dtype),
                    "chunks": [
                        {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": chunk.file, "key": chunk.key}
                        for chunk in tensor.chunks
                    ],
                }
                for name, tensor in self.tensors.items()
            },
        }

    def misfits(self, path: Path) -> list[str]:
        """The files that are missing from folder ``path`` or have another size than when they were written."""
        problems = []
        for file in self.files.values():
            try:
                size = (path / file.name).stat().st_size
            except OSError:
                problems.append(f"{file.name} is missing")
                continue
            if size != file.size:
                problems.append(f"{file.name} has {size} bytes; {file.size} were written")
        return problems


def _file(name: str, entry: Mapping[str, Any]) -> StoredFile:
    if Path(name).name != name:
        raise ValueError(f"the file name {name!r} points out of the checkpoint")
    return StoredFile(name=name, size=int(entry["size"]), crc32=str(entry["crc32"]))


def _tensor(entry: Mapping[str, Any], files: Mapping[str, StoredFile]) -> StoredTensor:
    chunks = tuple(
        Chunk(
            offsets=_numbers(chunk["offsets"]),
            sizes=_numbers(chunk["sizes"]),
            file=files[chunk["file"]].name,
            key=str(chunk["key"]),
        )
        for chunk in entry["chunks"]
    )
    tensor = StoredTensor(shape=_numbers(entry["shape"]), dtype=DTYPES[entry["dtype"]], chunks=chunks)
    # DCP would leave what no chunk covers as it finds it, without a word.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(tensor.shape):
        raise ValueError(f"the chunks do not fill the shape {tensor.shape}")
    return tensor


def _numbers(values: list[int]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values} are not sizes")
    return tuple(values)


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
class TensorEntry:
    """What the header says of one tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``; what ``DTYPES`` is keyed by."""
    return str(dtype).removeprefix("torch.")


def write_tensors(path: Path, entries: Iterable[TensorEntry], tensors: Iterable[Tensor]) -> StoredFile:
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


def _header(entries: Iterable[TensorEntry]) -> bytes:
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
