"""What ``manifest.json`` says of a checkpoint: every tensor, the chunks it was cut into, the files that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.shardfile import DTYPES, StoredFile, dtype_name
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
