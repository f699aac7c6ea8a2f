"""``manifest.json``: the content of a checkpoint, the place of each part, and the checksums of its bytes.

Everything is checked. The manifest ends with a checksum of itself; the chunks of a tensor must fill it exactly; a
chunk's key names its tensor and its begin, and the file repeats its dtype and shape.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.safe_files import damaged, is_link, read_file, size_of
from phalanx.errors import CheckpointError, DamagedError
from phalanx.files import json_value

MANIFEST = "manifest.json"
STATE = "state.json"
BLOCK = 1 << 20
"""Bytes of a file that have a checksum of their own: who reads some rows reads and verifies the blocks they lie in."""

_FORMAT = "phalanx-checkpoint"
_VERSIONS = (1, 2)
_FILE = re.compile(r"rank-\d{5,9}\.safetensors|state\.json")
_NAME = re.compile(r"step-(\d{8,18})")
_SEAL = re.compile(rb',\n"checksum": "([0-9a-f]{8})"\}\n\Z')
_MOST, _MOST_DIMENSIONS = 1 << 63, 64  # torch and the operating system count no further

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    )
}
"""Every dtype that a checkpoint can hold, by name."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A block of a tensor: where it begins and its size along each dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        name: without folders.
        size: bytes.
        checksums: CRC-32 of each ``block`` bytes, the last one of what is left.
    """

    name: str
    size: int
    checksums: tuple[int, ...]
    block: int = BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A block of a tensor: its begin and size along each dimension, and its file and key."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


StoredChunk = tuple[str, torch.dtype, Chunk]
"""A chunk, with the name and dtype of its tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A whole tensor: its global shape, its dtype, and the chunks that fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a checkpoint of one optimizer step.

    Attributes:
        version: of the format. Files of version 1 have one checksum each, and its manifest has none.
    """

    step: int
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    version: int = 2

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of the checkpoint in folder ``path``.

        Raises:
            DamagedError: there is none, or it is not as it was written.
            CheckpointError: it is of a later format.
        """
        if is_link(path):
            raise damaged(path, f"{path} is a symbolic link, which is not followed")
        content = read_file(path, MANIFEST)
        sealed = _SEAL.search(content, max(0, len(content) - 40))
        if sealed and int(sealed[1], 16) != zlib.crc32(content[: sealed.start()]):
            raise _no_manifest(path, "it has changed since it was written")
        try:
            given = json_value(content.decode())
        except ValueError as error:
            raise _no_manifest(path, error) from None
        return cls.from_json(given, path, sealed=sealed is not None)

    @classmethod
    def from_json(cls, given: Any, path: Path, *, sealed: bool = True) -> Manifest:
        """Build a manifest from parsed JSON; ``path`` is for messages. ``sealed``: its checksum was right."""
        if not isinstance(given, dict) or given.get("format") != _FORMAT:
            kind = f"does not describe a checkpoint of this kind ({_FORMAT})"
            raise damaged(path, f"{path / MANIFEST} {kind}", file=MANIFEST)
        version = given.get("version")
        if sealed and isinstance(version, int) and version > _VERSIONS[-1]:
            raise CheckpointError(
                f"{path} has checkpoint format {version}; this Phalanx reads formats up to {_VERSIONS[-1]}\n"
                "    try: the version of Phalanx that wrote it"
            )
        try:
            if version not in _VERSIONS or (version == 2 and not sealed):
                raise ValueError(f"of format {version!r}, without a checksum of its own")
            block = _number(given["block"]) if version == 2 else 0
            if version == 2 and not 1 << 10 <= block <= 1 << 30:
                raise ValueError(f"checksums of {block} bytes each")
            files = {name: _file(name, entry, block) for name, entry in given["files"].items()}
            tensors = {name: _tensor(name, entry, files, version) for name, entry in given["tensors"].items()}
            step = _number(given["step"])
        except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise _no_manifest(path, f"{type(error).__name__}: {error}") from None
        if (named := step_of(path)) is not None and named != step:
            raise _no_manifest(path, f"it is of step {step}")
        return cls(step=step, tensors=tensors, files=files, version=version)

    def to_bytes(self) -> bytes:
        """Return the file content for ``read``: JSON that ends with a checksum of the text before it."""
        files = {
            file.name: {"size": file.size, "crc32": "".join(f"{one:08x}" for one in file.checksums)}
            for file in self.files.values()
        }
        tensors = {
            name: {
                "shape": tensor.shape,
                "dtype": dtype_name(tensor.dtype),
                "chunks": [
                    {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": chunk.file, "key": chunk.key}
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in self.tensors.items()
        }
        given = {"format": _FORMAT, "version": 2, "step": self.step, "block": BLOCK, "files": files, "tensors": tensors}
        return seal(json.dumps(given).encode())

    def chunks_by_file(self) -> dict[str, list[StoredChunk]]:
        """Map file name to its chunks; files without tensors are left out."""
        found: dict[str, list[StoredChunk]] = {}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                found.setdefault(chunk.file, []).append((name, tensor.dtype, chunk))
        return found

    def misfits(self, path: Path, files: Iterable[StoredFile] | None = None) -> list[str]:
        """Return a message for each of ``files`` (by default all) that is missing, not a file, or of wrong size."""
        problems = []
        for file in self.files.values() if files is None else files:
            size = size_of(path / file.name)
            if isinstance(size, str):
                problems.append(f"{file.name} {size}")
            elif size != file.size:
                problems.append(f"{file.name} has {size} bytes; {file.size} were written")
        return problems

    def checked(self, path: Path, files: Iterable[StoredFile] | None = None) -> Manifest:
        """Return this manifest after a check of ``files`` (by default all); each rank can check a share.

        Raises:
            DamagedError: files are missing from folder ``path`` or have a wrong size.
        """
        if misfits := self.misfits(path, files):
            raise damaged(
                path, f"{path} is not a complete checkpoint: {'; '.join(misfits)}", file=misfits[0].split()[0]
            )
        return self


def seal(text: bytes) -> bytes:
    """Return ``text``, a JSON object, with a checksum of the text before its last brace as the last field."""
    body = text[:-1]
    return body + b',\n"checksum": "%08x"}\n' % zlib.crc32(body)


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint folder; ``None`` for any other name."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named else None


def key_of(name: str, shape: Sequence[int], box: Box) -> str:
    """Return the key of a chunk in its file: the tensor's name, and for a part also its begin."""
    offsets, sizes = box
    return name if tuple(sizes) == tuple(shape) else _part_of(name, offsets)


def not_filled(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Return the reason why ``boxes`` do not fill ``shape`` exactly once, or ""."""
    whole = math.prod(shape)
    found = list(boxes)
    for offsets, sizes in found:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            at + size <= end for at, size, end in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            return f"a chunk of {list(sizes)} at {list(offsets)} is not inside the shape {list(shape)}"
    found = [box for box in found if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in found) != whole:
        return f"the chunks do not fill the shape {list(shape)}"
    return _overlap(found) if len(found) > 1 else ""


def _overlap(boxes: list[Box]) -> str:
    # Swept along the dimension that is cut most often, in which few boxes lie beside each other.
    dim = max(range(len(boxes[0][0])), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    reached: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        offsets, sizes = box
        reached = [other for other in reached if other[0][dim] + other[1][dim] > offsets[dim]]
        for starts, lengths in reached:
            apart = any(
                at + size <= start or start + length <= at
                for at, size, start, length in zip(offsets, sizes, starts, lengths, strict=True)
            )
            if not apart:
                return f"two chunks, at {list(starts)} and {list(offsets)}, overlap"
        reached.append(box)
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``; a key of ``DTYPES``."""
    return str(dtype).removeprefix("torch.")


def _no_manifest(path: Path, why: object) -> DamagedError:
    return damaged(path, f"{path / MANIFEST} is damaged: {why}", file=MANIFEST)


def _file(name: str, entry: Mapping[str, Any], block: int) -> StoredFile:
    if not _FILE.fullmatch(name):
        raise ValueError(f"the file name {name!r} points out of the checkpoint or is none of its files")
    size, digits = _number(entry["size"]), entry["crc32"]
    count = -(-size // block) if block else 1  # version 1 has one checksum for all of the file
    if len(digits) != 8 * count:
        raise ValueError(f"{len(digits) // 8} checksums for the {size} bytes of {name}")
    checksums = struct.unpack(f">{count}I", bytes.fromhex(digits))
    return StoredFile(name=name, size=size, checksums=checksums, block=block or max(size, 1))


def _tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, StoredFile], version: int) -> StoredTensor:
    shape, dtype = _numbers(entry["shape"]), DTYPES[entry["dtype"]]
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= _MOST or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} cannot have the shape {list(shape)}")
    chunks = tuple(
        Chunk(
            offsets=_numbers(chunk["offsets"]),
            sizes=_numbers(chunk["sizes"]),
            file=files[chunk["file"]].name,
            key=str(chunk["key"]),
        )
        for chunk in entry["chunks"]
    )
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    if wrong := not_filled(shape, boxes):
        raise ValueError(f"{name}: {wrong}")
    for chunk, box in zip(chunks, boxes, strict=True):
        # Version 1 called the only part of a tensor in a file by the tensor's name alone.
        if chunk.key != key_of(name, shape, box) and (version > 1 or chunk.key not in (name, _part_of(name, box[0]))):
            raise ValueError(f"{name}: the chunk at {list(chunk.offsets)} has the key {chunk.key!r}")
    return StoredTensor(shape=shape, dtype=dtype, chunks=chunks)


def _part_of(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{str(value)[:40]} is not a size")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise ValueError(f"{str(values)[:40]} are not sizes")
    return tuple(_number(value) for value in values)
