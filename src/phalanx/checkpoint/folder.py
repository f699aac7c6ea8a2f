"""The folder ``checkpoints``: its entries, their publication and their deletion."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.best import best_step
from phalanx.checkpoint.format import MANIFEST, STATE, Manifest, step_of
from phalanx.checkpoint.safe_files import is_folder, is_link, remove, size_of
from phalanx.errors import CheckpointError, SpecError
from phalanx.files import check_writer

_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|old|gone)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """An entry of the folder ``checkpoints``.

    Attributes:
        nbytes: of its files.
        time: when it was written, seconds since 1970; 0 without a manifest.
        whole: all files exist in full length; ``verify`` also reads them.
    """

    path: Path
    step: int
    nbytes: int
    time: float
    whole: bool


def name_of(step: int) -> str:
    """Return ``step-00000100`` for 100."""
    return f"step-{step:08d}"


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, by step, or ``None``.

    In a complete checkpoint all files exist in full length; ``verify`` also reads them.
    """
    return next((path for path in newest_first(folder) if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Return True if all files of the checkpoint ``path`` exist in full length."""
    try:
        manifest = Manifest.read(path)
    except CheckpointError:
        return False
    return STATE in manifest.files and not manifest.misfits(path)


def newest_first(folder: Path) -> list[Path]:
    """Return all checkpoints in ``folder``, complete or not, by descending step.

    Raises:
        CheckpointError: ``folder`` is a symbolic link.
    """
    folder = Path(folder)
    _refuse_link(folder)
    if not is_folder(folder):
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and is_folder(path)]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Return all checkpoints in ``folder``, complete or not, by descending step.

    Raises:
        CheckpointError: ``folder`` is a symbolic link.
    """
    found = list[FoundCheckpoint]()
    for path in newest_first(folder):
        sizes = [size for file in path.iterdir() if isinstance(size := size_of(file), int)]
        manifest = path / MANIFEST
        time = manifest.lstat().st_mtime if isinstance(size_of(manifest), int) else 0.0
        step = step_of(path) or 0
        found.append(FoundCheckpoint(path=path, step=step, nbytes=sum(sizes), time=time, whole=is_complete(path)))
    return found


def temporary(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint that is not complete yet."""
    return folder / f".{name_of(step)}.tmp"


def begin(folder: Path, step: int) -> None:
    """Make the empty temporary folder of ``step``, and remove those of crashed saves.

    Raises:
        CheckpointError: ``folder`` is a symbolic link.
        RunError: another run has taken over the run folder.
    """
    check_writer(folder)
    _refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and not _give_back(path):
            remove(path)
    temporary(folder, step).mkdir()


def publish(folder: Path, step: int) -> Path:
    """Give the complete temporary folder of ``step`` its final name, in place of an older one for that step.

    Raises:
        RunError: another run has taken over the run folder.
    """
    check_writer(folder)
    path, old = folder / name_of(step), folder / f".{name_of(step)}.old"
    written = temporary(folder, step)
    sync(written)
    if path.exists() or is_link(path):
        path.rename(old)
    written.rename(path)
    sync(folder)
    with suppress(OSError):
        remove(old)
    return path


def give_up(folder: Path, step: int) -> None:
    """Remove an incomplete checkpoint of ``step``."""
    with suppress(OSError):
        remove(temporary(folder, step))


def prune(
    folder: Path,
    *,
    keep: int,
    keep_every: int = 0,
    upto: int | None = None,
    stays: Callable[[Path], bool] = is_complete,
) -> list[Path]:
    """Delete old checkpoints in ``folder`` and return their paths.

    Args:
        keep: number of newest checkpoints to keep; the newest with ``stays`` true, and that of the best evaluation,
            stay in any case.
        keep_every: keep each step that is a multiple of this; 0 keeps none.
        upto: later steps are neither counted nor deleted.

    Raises:
        RunError: another run has taken over the run folder.
    """
    check_writer(folder)
    try:
        best = best_step(folder.parent)
    except SpecError:  # which of them is not to be deleted is not known
        return []
    steps = {path: step_of(path) or 0 for path in newest_first(folder)}
    found = [path for path, step in steps.items() if upto is None or step <= upto]
    stay = {*found[:keep], *(path for path in found if keep_every and steps[path] % keep_every == 0)}
    stay |= {path for path in found if steps[path] == best}
    stay |= set(next(([path] for path in found if stays(path)), []))
    gone = list[Path]()
    for path in reversed(found):
        if path not in stay:
            # Under another name first: half deleted it would pass for a damaged one. What cannot be deleted now is
            # tried again by the next save.
            with suppress(OSError):
                aside = path.with_name(f".{path.name}.gone")
                path.rename(aside)
                gone.append(path)
                remove(aside)
    return gone


def sync(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_link(folder: Path) -> None:
    if is_link(folder):
        raise CheckpointError(
            f"{folder} is a symbolic link, and nothing is read or written through one\n"
            f"    try: the folder that it points to, {folder.resolve().parent}, as the run folder"
        )


def give_back_replaced(folder: Path) -> None:
    """Restore the name of each checkpoint whose replacement for the same step was not completed.

    Raises:
        CheckpointError: ``folder`` is a symbolic link.
    """
    _refuse_link(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            _give_back(path)


def _give_back(leftover: Path) -> bool:
    # An ".old" without its successor: the save that replaced it died between two renames.
    final = leftover.with_name(leftover.name[1:].removesuffix(".old"))
    if leftover.suffix != ".old" or not is_folder(leftover) or final.exists():
        return False
    leftover.rename(final)
    return True


def to_json(value: Any, what: str) -> bytes:
    """Return ``value`` as JSON; floats read back bit for bit, NaN and infinities as in Python.

    Raises:
        CheckpointError: names every part of ``value`` that is not JSON; ``what`` is the name of the value.
    """
    if wrong := ", ".join(f"{kind} at {where or 'the top'}" for where, kind in not_json(value, "")):
        allowed = "only JSON (dict with str keys, list, str, int, float, bool, None)"
        raise CheckpointError(f"{what} can hold {allowed}, not {wrong}")
    return (json.dumps(value, indent=1) + "\n").encode()


def not_json(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the place and type of each item in ``value`` that is not JSON."""
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
