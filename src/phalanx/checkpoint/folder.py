"""The folder ``checkpoints``: how its entries are named, which one is the newest, how a new one takes its place."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from phalanx.checkpoint.manifest import STATE, Manifest
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
