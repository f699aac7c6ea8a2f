"""Checkpoints that one process writes by itself, since its peers are lost; and saves that are killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from test_checkpoint_store import some_tensors, zeros_like

from phalanx import checkpoint
from phalanx.checkpoint import SaveRequest, latest, load, save, save_as_survivor, store, verify, writing
from phalanx.checkpoint.folder import begin, temporary_of, turn
from phalanx.errors import RunError
from phalanx.files import join, release, take


def request(folder: Path, step: int, **how: int) -> SaveRequest:
    return SaveRequest(folder, step, some_tensors(), {"step": step}, **how)


def is_whole(path: Path | None) -> None:
    assert path is not None
    verify(path)
    found = zeros_like(some_tensors())
    load(path, found)
    assert all(torch.equal(found[name], one) for name, one in some_tensors().items())


def test_who_comes_later_and_has_no_more_leaves_it(tmp_path: Path) -> None:
    assert save_as_survivor(request(tmp_path, 7), rank=0)
    assert save_as_survivor(request(tmp_path, 7), rank=1) is None
    assert save_as_survivor(request(tmp_path, 6), rank=2) is None
    is_whole(save_as_survivor(request(tmp_path, 8), rank=3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007", "step-00000008"]


def test_all_at_once(tmp_path: Path) -> None:
    found: dict[int, Path | None] = {}

    def saves(rank: int) -> None:
        found[rank] = save_as_survivor(request(tmp_path, 7 + rank % 2), rank=rank)

    threads = [threading.Thread(target=saves, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert [path.name for path in found.values() if path].count("step-00000008") == 1
    is_whole(latest(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {"step-00000007", "step-00000008"}


def test_one_that_was_there_before_and_is_damaged_makes_way(tmp_path: Path) -> None:
    damaged = save(tmp_path, step=7, tensors=some_tensors(), state={})
    file = next(damaged.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    path = save_as_survivor(request(tmp_path, 7), rank=0, known={"step-00000007"})
    is_whole(path)
    assert save_as_survivor(request(tmp_path, 6), rank=0, known={"step-00000007"})


def test_a_save_that_begins_leaves_alone_what_a_survivor_writes(tmp_path: Path) -> None:
    written = temporary_of(tmp_path, 7, 1)
    with turn(tmp_path):
        written.mkdir()
        begin(tmp_path, 7)
        assert written.is_dir()
    begin(tmp_path, 8)  # its process is gone
    assert not written.exists()


@pytest.mark.parametrize(
    "write", [partial(save_as_survivor, rank=0), lambda one: save_at(one.folder, one.step)], ids=["survivor", "all"]
)
def test_nothing_is_published_in_a_taken_folder(write: Callable[[SaveRequest], object], tmp_path: Path) -> None:
    token = take(tmp_path)
    try:
        writer = tmp_path / "writer.json"
        writer.write_text(json.dumps({**json.loads(writer.read_text()), "identity": "another"}).ljust(1024))
        with pytest.raises(RunError, match="was taken over"):
            write(request(tmp_path / "checkpoints", 7))
        assert list(tmp_path.glob("checkpoints/*")) == []
    finally:
        release(token)


def test_older_ones_are_removed_as_by_any_save(tmp_path: Path) -> None:
    for step in (5, 6):
        save(tmp_path, step=step, tensors=some_tensors(), state={})
    save_as_survivor(request(tmp_path, 7, keep=2), rank=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]


def test_one_that_joined_checks_too(tmp_path: Path) -> None:
    """A rank that another agent has started has the right to write from rank 0, by its identity."""
    token = take(tmp_path)
    try:
        assert join(tmp_path, token.identity).identity == token.identity
        is_whole(save_as_survivor(request(tmp_path / "checkpoints", 7), rank=1))
    finally:
        release(token)


def save_at(folder: Path, step: int) -> Path:
    tensors = {"model.x": torch.full((1000,), float(step))}
    return checkpoint.save(folder, step=step, tensors=tensors, state={"step": step}, keep=1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
