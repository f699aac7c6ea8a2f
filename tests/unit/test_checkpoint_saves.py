"""Saves: older ones go, nothing of a taken folder is published, and what a killed save leaves is no checkpoint."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

from phalanx import checkpoint
from phalanx.checkpoint import store, writing
from phalanx.errors import RunError
from phalanx.files import release, take


def save_at(folder: Path, step: int, keep: int = 1) -> Path:
    tensors = {"model.x": torch.full((1000,), float(step))}
    return checkpoint.save(folder, step=step, tensors=tensors, state={"step": step}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_published_in_a_taken_folder(tmp_path: Path) -> None:
    token = take(tmp_path)
    try:
        writer = tmp_path / "writer.json"
        writer.write_text(json.dumps({**json.loads(writer.read_text()), "identity": "another"}).ljust(1024))
        with pytest.raises(RunError, match="was taken over"):
            save_at(tmp_path / "checkpoints", 7)
        assert list(tmp_path.glob("checkpoints/*")) == []
    finally:
        release(token)


def test_older_ones_are_removed(tmp_path: Path) -> None:
    for step in (5, 6, 7):
        save_at(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000006", "step-00000007"]


class Killer:
    """Kills this process with SIGKILL just before the call number ``at`` that changes something on the disk."""

    def __init__(self, at: int) -> None:
        self._left = at

    def watch(self, owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args, **kwargs):
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            return real(*args, **kwargs)

        setattr(owner, name, watched)


def killed_in_save(folder: Path, step: int, at: int) -> bool:
    """Whether a forked process was killed at that call; not if the save has fewer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        killer = Killer(at)
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")):
            killer.watch(owner, name)
        killer.watch(writing, "header_of")
        killer.watch(store, "prune")
        try:
            save_at(folder, step)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_killed_at_every_moment(again: bool, tmp_path: Path) -> None:
    moments = 0
    for at in range(60):
        folder = tmp_path / str(at)
        save_at(folder, 1)
        if not killed_in_save(folder, 1 if again else 2, at):
            break
        moments += 1
        newest = checkpoint.latest(folder)
        if newest is None:
            # Between the two renames that replace a checkpoint by another of the same step.
            assert again
            assert ".step-00000001.old" in names(folder)
        else:
            assert checkpoint.verify(newest) == []
            assert checkpoint.read_state(newest)["step"] in (1, 2)
        save_at(folder, 3)
        assert names(folder) == ["step-00000003"]
        assert checkpoint.verify(folder / "step-00000003") == []
    assert 8 <= moments < 60


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = os.fsync

    def seen(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", seen)
    path = save_at(tmp_path / "checkpoints", 1)
    assert sorted(order[:3]) == ["manifest.json", "rank-00000.safetensors", "state.json"]
    assert order[3:] == [".step-00000001.tmp", "checkpoints"]
    assert path.name == "step-00000001"
