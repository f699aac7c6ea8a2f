"""A save that fails on one rank fails on all, soon and readably, and leaves the previous checkpoint as the newest."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import FORKS_BESIDE_THREADS, laid_out, ranks

from phalanx import checkpoint
from phalanx.checkpoint import writing
from phalanx.errors import CheckpointError

torch.set_num_threads(1)

pytestmark = FORKS_BESIDE_THREADS


def tensors(numbers: int = 1000) -> dict[str, torch.Tensor]:
    return {f"model.{index}": torch.full((numbers,), float(index)) for index in range(6)}


def fails(folder: Path, rank: int, *, size: int = 1000, state: dict | None = None) -> str:
    """The message of a save that must fail, after checking that nothing of it is left behind."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, step=2, tensors=tensors(size), state=state or {})
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001"]
    assert checkpoint.latest(folder) == folder / "step-00000001"
    return str(caught.value)


def recovers(folder: Path) -> None:
    path = checkpoint.save(folder, step=3, tensors=tensors(), state={})
    dist.barrier()
    assert checkpoint.verify(path) == []
    assert checkpoint.latest(folder) == path


def test_full_disk_on_one_rank(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        checkpoint.save(tmp_path, step=1, tensors=tensors(), state={})
        write = writing.write_file

        def full(path: Path, *args):
            path.write_bytes(b"some")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        writing.write_file = full if rank == 2 else write
        text = fails(tmp_path, rank)
        assert "checkpoint of step 2 could not be written" in text
        assert "rank 2: [Errno 28] No space left on device" in text
        assert "rank 0" not in text
        assert "Traceback" not in text
        writing.write_file = write
        recovers(tmp_path)

    ranks(3, target)


@pytest.mark.parametrize("limited", [0, 1])
def test_size_limit_on_one_rank(limited: int, tmp_path: Path) -> None:
    def target(rank: int) -> None:
        checkpoint.save(tmp_path, step=1, tensors=tensors(), state={})
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        text = fails(tmp_path, rank, size=30_000)
        assert f"rank {limited}: [Errno 27] File too large" in text
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        recovers(tmp_path)

    ranks(2, target)


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_really_full_disk(small_disk: Path) -> None:
    def target(rank: int) -> None:
        folder = small_disk / "checkpoints"
        checkpoint.save(folder, step=1, tensors=tensors(), state={})
        assert "No space left on device" in fails(folder, rank, size=30_000)
        recovers(folder)

    ranks(2, target)


@pytest.mark.parametrize("wrong", [0, 1])
def test_state_that_is_wrong_on_one_rank(wrong: int, tmp_path: Path) -> None:
    def target(rank: int) -> None:
        checkpoint.save(tmp_path, step=1, tensors=tensors(), state={})
        text = fails(tmp_path, rank, state={"x": object()} if rank == wrong else {})
        assert f"rank {wrong}: the state of a checkpoint can hold only JSON" in text
        recovers(tmp_path)

    ranks(2, target)


def test_folder_that_is_not_shared(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1: .*own-1 is not on storage that all ranks share"):
            checkpoint.save(tmp_path / f"own-{rank}", step=1, tensors=tensors(), state={})

    ranks(2, target)


def test_rank_that_dies_in_the_middle(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        checkpoint.save(tmp_path, step=1, tensors=tensors(), state={})
        if rank == 1:
            writing.write_file = lambda *_: os._exit(0)
        with pytest.raises(Exception, match=r"(?i)connection|closed|peer|reset"):
            checkpoint.save(tmp_path, step=2, tensors=tensors(), state={})

    ranks(3, target)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    assert checkpoint.verify(tmp_path / "step-00000001") == []

    def again(rank: int) -> None:
        checkpoint.save(tmp_path, step=2, tensors=tensors(), state={})

    ranks(2, again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def everyone_hears(change: Callable[[int, Path], None], said: str, folder: Path) -> None:
    def target(rank: int) -> None:
        path = checkpoint.save(folder, step=1, tensors=tensors(), state={})
        dist.barrier()
        change(rank, path)
        dist.barrier()
        mine = tensors()
        if rank == 1:
            mine["model.0"] = torch.zeros(2)
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(path, mine)
        assert mine["model.5"][0] == 5.0

    ranks(2, target)


def test_load_of_another_model_on_one_rank(tmp_path: Path) -> None:
    everyone_hears(lambda rank, path: None, r"rank 1: .*another model\?\n.*model.0 float32\[2\] here", tmp_path)


def test_load_of_a_cut_file(tmp_path: Path) -> None:
    def cut(rank: int, path: Path) -> None:
        if rank == 0:
            os.truncate(path / "rank-00001.safetensors", 100)

    everyone_hears(cut, r"^.*not a complete checkpoint: rank-00001.safetensors has 100 bytes", tmp_path)


def test_optimizer_of_other_groups_on_one_rank(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        module, parameters = laid_out("fsdp")
        made, state = checkpoint.optimizer_tensors(torch.optim.AdamW(parameters.values()), parameters)
        path = checkpoint.save(tmp_path, step=1, tensors=made, state={"optimizer": state})
        held = list(parameters.values())[rank:]
        with pytest.raises(CheckpointError, match=r"rank 1: the optimizer groups its parameters otherwise"):
            checkpoint.restore_optimizer(torch.optim.AdamW(held), parameters, path)
        del module

    ranks(2, target)
