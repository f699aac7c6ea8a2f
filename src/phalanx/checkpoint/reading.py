"""Reading a checkpoint: only the needed rows of each chunk, verified as they are read.

Whole rows of a chunk go from the file into the tensor's own memory. If a tensor needs a part of each row, is not
contiguous or is on a device, rows are first read into a buffer, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.format import STATE, Chunk, Manifest, StoredChunk, StoredFile
from phalanx.checkpoint.safe_files import damaged
from phalanx.checkpoint.shard_file import ShardFile, TensorEntry, bytes_of
from phalanx.checkpoint.tensor_part import PartTensor, blocks_of
from phalanx.errors import CheckpointError, DamagedError
from phalanx.files import json_value

_BUFFER = 8 << 20
_MOST_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A part of a chunk: its begin in the chunk, and the memory to fill."""

    starts: tuple[int, ...]
    target: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkReading:
    """The wanted parts of one chunk, which lies in one file."""

    name: str
    dtype: torch.dtype
    chunk: Chunk
    wanted: list[Wanted]

    @property
    def nbytes(self) -> int:
        return sum(one.target.numel() for one in self.wanted) * self.dtype.itemsize


def fill(path: Path, manifest: Manifest, targets: Mapping[str, Tensor | PartTensor], *, verified: bool = False) -> None:
    """Fill ``targets`` from the checkpoint in folder ``path``. Not collective.

    ``verified``: this rank or another has called ``verify_first`` with the files to be read.

    Raises:
        DamagedError: the bytes differ from the written ones; targets may be filled in part.
    """
    by_file: dict[str, list[ChunkReading]] = {}
    for name, held in targets.items():
        for reading in _readings(manifest, name, blocks_of(held)):
            by_file.setdefault(reading.chunk.file, []).append(reading)
    if not verified:
        verify_first(path, manifest, by_file)
    tasks = [
        (path, manifest, file, part)
        for file, readings in by_file.items()
        for part in _parts(readings, -(-_MOST_THREADS // len(by_file)))
    ]
    threads = min(torch.get_num_threads(), _MOST_THREADS, len(tasks))
    with torch.no_grad():
        if threads < 2:
            for task in tasks:
                _read(*task)
            return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_read, *task) for task in tasks]:
            done.result()


def read_state(path: Path) -> dict[str, Any]:
    """Return the ``state`` saved with the checkpoint in folder ``path``; tuples come back as lists.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return _state(Path(path), Manifest.read(Path(path)))


def verify(path: Path) -> list[str]:
    """Return every defect of the checkpoint in folder ``path``; empty if it is whole.

    Reads each file once and finds missing and cut files, changed bytes, and chunks in wrong places. Needs no other
    process.
    """
    path = Path(path)
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    problems, stored = manifest.misfits(path), manifest.chunks_by_file()
    for file in () if problems else manifest.files.values():
        try:
            verify_file(path, file, stored.get(file.name, ()))
        except CheckpointError as error:
            problems.append(str(error).replace(f"{path}/", ""))
    try:
        if not problems:
            _state(path, manifest)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def verify_first(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read those of ``names`` that cannot be verified in parts: files of format 1 have one checksum each.

    Raises:
        DamagedError: a file was changed, or does not match ``manifest``.
    """
    if manifest.version == 1:
        stored = manifest.chunks_by_file()
        for name in names:
            verify_file(path, manifest.files[name], stored.get(name, ()))


def verify_file(path: Path, stored: StoredFile, chunks: Iterable[StoredChunk]) -> None:
    """Read one whole file of the checkpoint in folder ``path``, and check that it holds ``chunks``.

    Raises:
        DamagedError: it was changed, or does not hold them.
    """
    with ShardFile(path, stored) as file:
        file.verify()
    if stored.name == STATE:
        return
    with ShardFile(path, stored, trusted=True) as file:
        there = file.entries()
    for name, dtype, chunk in chunks:
        _begin(path, name, dtype, chunk, there)


def _state(path: Path, manifest: Manifest) -> dict[str, Any]:
    if STATE not in manifest.files:
        raise damaged(path, f"{path} is not a complete checkpoint: it has no {STATE}", file=STATE)
    stored = manifest.files[STATE]
    with ShardFile(path, stored) as file:
        content = bytearray(stored.size)
        file.read_into(memoryview(content), 0)
    try:
        state = json_value(content.decode(), finite=False)
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise damaged(path, f"{path / STATE} is damaged: {error}", file=STATE) from None
    return state


def _begin(
    path: Path, name: str, dtype: torch.dtype, chunk: Chunk, there: Mapping[str, tuple[TensorEntry, int]]
) -> int:
    entry, begin = there.get(chunk.key, (None, 0))
    if entry != TensorEntry(key=chunk.key, dtype=dtype, shape=chunk.sizes):
        text = f"{path / chunk.file} does not hold {chunk.key} of shape {list(chunk.sizes)}"
        raise damaged(path, text, file=chunk.file, tensor=name)
    return begin


def _readings(manifest: Manifest, name: str, blocks: Mapping[tuple[int, ...], Tensor]) -> Iterator[ChunkReading]:
    stored = manifest.tensors[name]
    for chunk in stored.chunks:
        wanted = [
            found for offsets, block in blocks.items() if (found := _common(chunk, offsets, block.detach())) is not None
        ]
        if wanted:
            yield ChunkReading(name=name, dtype=stored.dtype, chunk=chunk, wanted=wanted)


def _common(chunk: Chunk, offsets: tuple[int, ...], block: Tensor) -> Wanted | None:
    starts = list[int]()
    for dim, (first, size, at) in enumerate(zip(chunk.offsets, chunk.sizes, offsets, strict=True)):
        low, high = max(first, at), min(first + size, at + block.shape[dim])
        if low >= high:
            return None
        block = block.narrow(dim, low - at, high - low)
        starts.append(low - first)
    return Wanted(starts=tuple(starts), target=block)


def _parts(readings: list[ChunkReading], count: int) -> Iterator[list[ChunkReading]]:
    share = sum(reading.nbytes for reading in readings) // count + 1
    part, size = list[ChunkReading](), 0
    for reading in readings:
        part.append(reading)
        size += reading.nbytes
        if size >= share:
            yield part
            part, size = [], 0
    if part:
        yield part


def _read(path: Path, manifest: Manifest, name: str, readings: list[ChunkReading]) -> None:
    with torch.no_grad(), ShardFile(path, manifest.files[name], trusted=manifest.version == 1) as file:
        there = file.entries()
        begins = [(_begin(path, one.name, one.dtype, one.chunk, there), one) for one in readings]
        for begin, reading in sorted(begins, key=lambda pair: pair[0]):
            try:
                _read_chunk(file, begin, reading)
            except DamagedError as error:
                raise damaged(path, f"{error} ({reading.name})", file=name, tensor=reading.name) from None


def _read_chunk(file: ShardFile, begin: int, reading: ChunkReading) -> None:
    sizes = reading.chunk.sizes or (1,)
    leading = next((dim for dim, size in enumerate(sizes[:-1]) if size > 1), len(sizes) - 1)
    inner = sizes[leading + 1 :]
    row = prod(inner) * reading.dtype.itemsize
    parts = [_without_leading(one, leading) for one in reading.wanted]
    for first, last, group in _runs_of_rows(parts):
        target = group[0].target
        direct = (
            len(group) == 1 and target.shape[1:] == inner and target.is_contiguous() and target.device.type == "cpu"
        )
        if direct:
            file.read_into(bytes_of(target), begin + first * row)
        else:
            _through_buffer(file, begin, (first, last), group, torch.empty((0, *inner), dtype=reading.dtype))


def _without_leading(wanted: Wanted, leading: int) -> Wanted:
    """Drop the dimensions before ``leading``, where the chunk has one row; a number is a row of its own."""
    if not wanted.starts:
        return Wanted(starts=(0,), target=wanted.target.view(1))
    target = wanted.target
    for _ in range(leading):
        target = target[0]
    return Wanted(starts=wanted.starts[leading:], target=target)


def _runs_of_rows(wanted: list[Wanted]) -> Iterator[tuple[int, int, list[Wanted]]]:
    group, first, last = list[Wanted](), 0, -1
    for one in sorted(wanted, key=lambda one: one.starts[0]):
        begin, end = one.starts[0], one.starts[0] + one.target.shape[0]
        if group and begin >= last:
            yield first, last, group
            group = []
        first, last = (first, max(last, end)) if group else (begin, end)
        group.append(one)
    if group:
        yield first, last, group


def _through_buffer(file: ShardFile, begin: int, rows: tuple[int, int], group: list[Wanted], like: Tensor) -> None:
    """Read a few ``rows`` at a time and copy the wanted part; ``like`` is an empty tensor with the rows' shape and
    type.
    """
    row = prod(like.shape[1:]) * like.dtype.itemsize
    many = max(1, min(_BUFFER // max(row, 1), rows[1] - rows[0]))
    buffer = like.new_empty((many, *like.shape[1:]))
    for low in range(rows[0], rows[1], many):
        high = min(low + many, rows[1])
        here = buffer[: high - low]
        file.read_into(bytes_of(here), begin + low * row)
        for one in group:
            first, last = max(low, one.starts[0]), min(high, one.starts[0] + one.target.shape[0])
            if first >= last:
                continue
            source = here.narrow(0, first - low, last - first)
            for dim in range(1, source.ndim):
                source = source.narrow(dim, one.starts[dim], one.target.shape[dim])
            one.target.narrow(0, first - one.starts[0], last - first).copy_(source)
