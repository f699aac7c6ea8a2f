"""The folder ``checkpoints``: its entries, how a new one takes its place, and whether one still is what was written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.format import STATE, Manifest, checksum
from phalanx.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(tmp|old)")


def name_of(step: int) -> str:
    """``step-00000100`` for 100."""
    return f"step-{step:08d}"


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, the one of the highest step; ``None`` where there is none.

    Complete means that all files are there in full length; ``verify`` also reads them. A damaged one is passed over.
    """
    return next((path for path in reversed(checkpoints(folder)) if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Whether all files of the checkpoint in folder ``path`` are there in full length."""
    try:
        manifest = Manifest.read(path)
    except CheckpointError:
        return False
    return STATE in manifest.files and not manifest.misfits(path)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in ``folder``, complete or not, by ascending step."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_step)


def temporary(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder / f".{name_of(step)}.tmp"


def begin(folder: Path, step: int) -> None:
    """Make the empty temporary folder of ``step``, and remove those that crashed saves left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _give_back_or_remove(path)
    temporary(folder, step).mkdir()


def publish(folder: Path, step: int) -> Path:
    """Give the complete temporary folder of ``step`` its final name; an older one of the same step makes way."""
    path, old = folder / name_of(step), folder / f".{name_of(step)}.old"
    sync(temporary(folder, step))
    if path.exists():
        path.rename(old)
    temporary(folder, step).rename(path)
    sync(folder)
    shutil.rmtree(old, ignore_errors=True)
    return path


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints up to ``step``; those of later steps are not touched."""
    for path in [path for path in checkpoints(folder) if _step(path) <= step][:-keep]:
        # What cannot be deleted now is tried again after the next save: the new checkpoint stands all the same.
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _give_back_or_remove(leftover: Path) -> None:
    # An ".old" without its successor: the save that replaced it died between two renames.
    final = leftover.with_name(leftover.name[1:].removesuffix(".old"))
    if leftover.suffix == ".old" and not final.exists():
        leftover.rename(final)
    else:
        shutil.rmtree(leftover)


def to_json(value: Any, what: str) -> bytes:
    """``value`` as JSON text; floats are written so that they read back bit for bit, NaN and infinities as in Python.

    Raises:
        CheckpointError: names every part of ``value`` that is not JSON; ``what`` says what the value is.
    """
    if wrong := ", ".join(f"{kind} at {where or 'the top'}" for where, kind in not_json(value, "")):
        allowed = "only JSON (dict with str keys, list, str, int, float, bool, None)"
        raise CheckpointError(f"{what} can hold {allowed}, not {wrong}")
    return (json.dumps(value, indent=1) + "\n").encode()


def not_json(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Where in ``value`` something stands that is not JSON, and its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from not_json(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{where}[{key!r}]", f"a key of type {type(key).__name__}"
            else:
                yield from not_json(item, f"{where}.{key}" if where else key)
    else:
        yield where, type(value).__name__


def verify(path: Path) -> list[str]:
    """Everything that is wrong with the checkpoint in folder ``path``; empty if it is whole.

    Reads every file once: missing and cut files, changed bytes (CRC-32), and chunks that are not where the manifest
    says. Works alone, in any process.
    """
    path = Path(path)
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    if problems := manifest.misfits(path):
        return problems
    if STATE not in manifest.files:
        problems.append(f"{STATE} is not listed in the manifest")
    problems += [
        f"{file.name} has changed since it was written: checksum {now}, was {file.crc32}"
        for file in manifest.files.values()
        if (now := checksum(path / file.name)) != file.crc32
    ]
    if problems:
        return problems
    from phalanx.checkpoint.store import read_state  # loads torch's checkpoint package

    try:
        read_state(path)
    except CheckpointError as error:
        problems.append(str(error))
    return problems + _misplaced(path, manifest)


def _misplaced(path: Path, manifest: Manifest) -> list[str]:
    wanted: dict[str, list[tuple[str, list[int]]]] = {}
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            wanted.setdefault(chunk.file, []).append((chunk.key, list(chunk.sizes)))
    problems = []
    for name, chunks in wanted.items():
        try:
            with safe_open(path / name, framework="pt") as file:
                there = set(file.keys())
                problems += [
                    f"{name} does not hold {key} of shape {sizes}"
                    for key, sizes in chunks
                    if key not in there or file.get_slice(key).get_shape() != sizes
                ]
        except SafetensorError as error:
            problems.append(f"{name} is not a safetensors file: {error}")
    return problems
