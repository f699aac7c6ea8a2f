"""Saves, at once and in the background: of the moment they begin in, whole or not at all on all ranks, and in order."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import FORKS_BESIDE_THREADS, local, ranks, sharded
from small import fit

from law_rows import longer
from phalanx import checkpoint
from phalanx.checkpoint import BackgroundSaver, SaveRequest, background, writing
from phalanx.errors import CheckpointError, WorkerError

pytestmark = FORKS_BESIDE_THREADS


def tensors(numbers: int = 1000) -> dict[str, torch.Tensor]:
    return {f"model.{index}": torch.full((numbers,), float(index)) for index in range(6)}


def disk_is_full(path: Path, *_: Any) -> Any:
    path.write_bytes(b"some")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def flip(file: Path) -> None:
    """Change a bit, so that the file has the same length and holds something else."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def full_disk() -> Callable[[], Any]:
    write, writing.write_file = writing.write_file, disk_is_full
    return lambda: setattr(writing, "write_file", write)


def size_limit() -> Callable[[], Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


FAULTS: dict[str, tuple[Callable[[], Callable[[], Any]] | None, str]] = {
    "full disk": (full_disk, r"\[Errno 28\] No space left on device"),
    "size limit": (size_limit, r"\[Errno 27\] File too large"),
    "state": (None, "the state of a checkpoint can hold only JSON"),
}


@pytest.mark.parametrize(("fault", "wrong"), [("size limit", 0), ("state", 1), *longer(("full disk", 2))])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(
    fault: str, wrong: int, tmp_path: Path
) -> None:
    strike, said = FAULTS[fault]

    def target(rank: int) -> None:
        checkpoint.save(tmp_path, step=1, tensors=tensors(), state={})
        mend = strike() if strike and rank == wrong else lambda: None
        state = {"x": object()} if strike is None and rank == wrong else {}
        fails(tmp_path, f"rank {wrong}: {said}", state)
        mend()
        recovers(tmp_path)

    ranks(3, target)


def fails(folder: Path, words: str, state: dict[str, Any] | None = None) -> None:
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(folder, step=2, tensors=tensors(30_000), state=state or {})
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001"]
    assert checkpoint.latest(folder) == folder / "step-00000001"


def recovers(folder: Path) -> None:
    path = checkpoint.save(folder, step=3, tensors=tensors(), state={})
    dist.barrier()
    assert checkpoint.verify(path) == []
    assert checkpoint.latest(folder) == path


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
    ranks(2, lambda rank: checkpoint.save(tmp_path, step=2, tensors=tensors(), state={}) and None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    def refused(path: Path, mine: dict[str, torch.Tensor], words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(path, mine)
        assert mine["model.5"][0] == 5.0
        dist.barrier()

    def target(rank: int) -> None:
        module, parameters = sharded()
        made, state = checkpoint.optimizer_tensors(torch.optim.AdamW(parameters.values()), parameters)
        path = checkpoint.save(tmp_path, step=1, tensors=made | tensors(), state={"optimizer": state})
        held = list(parameters.values())[rank:]
        with pytest.raises(CheckpointError, match="rank 1: the optimizer groups its parameters otherwise"):
            checkpoint.restore_optimizer(torch.optim.AdamW(held), parameters, path)
        other = {"model.0": torch.zeros(2)} if rank else {}
        refused(path, made | tensors() | other, r"rank 1: .*another model\?\n.*model.0 float32\[2\] here")
        if rank == 0:
            os.truncate(path / "rank-00001.safetensors", 100)
        dist.barrier()
        refused(path, made | tensors(), r"^.*not a complete checkpoint: rank-00001.safetensors has 100 bytes")
        del module

    ranks(2, target)


@pytest.fixture
def saver():
    made = BackgroundSaver()
    yield made
    made.close(patience=0.1)


class Held:
    """Holds the writing of files until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go, self._real = threading.Event(), writing.write_file
        monkeypatch.setattr(writing, "write_file", self._write)

    def _write(self, path: Path, pieces: Any) -> Any:
        assert self._go.wait(20)
        return self._real(path, pieces)

    def let_go(self) -> None:
        self._go.set()


def asked(folder: Path, step: int, tensor: torch.Tensor) -> SaveRequest:
    return SaveRequest(folder, step, {"model.x": tensor, "model.flag": torch.tensor(True)}, {"step": step})


def loaded(path: Path, like: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(like)
    checkpoint.load(path, {"model.x": found, "model.flag": torch.tensor(False)})
    return found


class TestBackground:
    def test_is_of_the_moment_it_began_in(
        self, saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held, tensor = Held(monkeypatch), torch.arange(6.0).view(2, 3).t()
        saving = saver.save(asked(tmp_path, 1, tensor))
        tensor.zero_()
        assert not saving.published
        assert checkpoint.latest(tmp_path) is None
        held.let_go()
        saving.wait()
        assert saving.published
        assert loaded(saving.path, tensor).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert saving.nbytes == sum(file.stat().st_size for file in saving.path.iterdir())
        assert 0 < saving.standstill < saving.seconds

    def test_the_copy_uses_the_same_memory_again(
        self, saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, real = [], background._paged
        monkeypatch.setattr(background, "_paged", lambda size: made.append(size) or real(size))
        for step, size in enumerate((1000, 1000, 500, 2000)):
            saver.save(asked(tmp_path, step, torch.ones(size)))
        saver.wait()
        assert made == [4001, 8001]

    def test_an_error_is_raised_by_the_next(self, saver: BackgroundSaver, tmp_path: Path) -> None:
        tensor = torch.ones(3)
        saver.save(asked(tmp_path, 1, tensor))
        saver.save(asked(tmp_path, 2, torch.full((3,), float("nan"))))
        with pytest.raises(CheckpointError, match=r"step 2 .*\n.*model.x is not finite \(3 NaN"):
            saver.save(asked(tmp_path, 3, tensor))
        saver.save(asked(tmp_path, 3, tensor)).wait()
        assert [one.step for one in checkpoint.checkpoints(tmp_path)] == [3, 1]

    def test_given_up_it_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        held, saver = Held(monkeypatch), BackgroundSaver()
        saving = saver.save(asked(tmp_path, 1, torch.ones(1000)))
        saver.close(patience=0.01)
        held.let_go()
        with pytest.raises(CheckpointError, match="given up"):
            saving.wait()
        assert list(tmp_path.iterdir()) == []

    def test_a_fork_waits_for_the_thread(
        self, saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = Held(monkeypatch)
        saving = saver.save(asked(tmp_path, 1, torch.ones(10)))
        threading.Timer(0.1, held.let_go).start()
        child = os.fork()
        if child == 0:
            os._exit(0 if saving.published else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_of_ranks_that_are_in_collectives_meanwhile(self, tmp_path: Path) -> None:
        def target(rank: int) -> None:
            module, parameters = sharded()
            saver, number = BackgroundSaver(), torch.zeros(1)
            tensors = {f"model.{name}": tensor.detach() for name, tensor in parameters.items()}
            for step in range(1, 6):
                for tensor in tensors.values():
                    local(tensor).fill_(step)
                saver.save(SaveRequest(tmp_path, step, tensors, {"step": step}))
                for tensor in tensors.values():
                    local(tensor).fill_(-1.0)
                for _ in range(50):
                    dist.all_reduce(number.fill_(1.0))
                    assert number == 2.0
            saver.wait()
            dist.barrier()
            path = checkpoint.latest(tmp_path)
            assert path.name == "step-00000005"
            assert checkpoint.verify(path) == []
            checkpoint.load(path, tensors)
            assert all(bool((local(tensor) == 5.0).all()) for tensor in tensors.values())
            saver.close()
            del module

        ranks(2, target)

    def test_a_full_disk_on_one_rank_is_heard_by_all(self, tmp_path: Path) -> None:
        def target(rank: int) -> None:
            saver = BackgroundSaver()
            saver.save(SaveRequest(tmp_path, 1, tensors(), {})).wait()
            mend = full_disk() if rank == 1 else lambda: None
            saver.save(SaveRequest(tmp_path, 2, tensors(), {}))
            with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
                saver.wait()
            mend()
            saver.save(SaveRequest(tmp_path, 3, tensors(), {})).wait()
            saver.close()

        ranks(2, target)
        assert [(one.step, one.whole) for one in checkpoint.checkpoints(tmp_path)] == [(3, True), (1, True)]

    def test_no_memory_for_a_copy_on_one_rank_makes_all_wait(self, tmp_path: Path) -> None:
        def target(rank: int) -> None:
            if rank == 1:
                background._available = lambda: 10
            saver = BackgroundSaver()
            saving = saver.save(SaveRequest(tmp_path, 1, {"model.x": torch.ones(900), "model.y": torch.ones(9)}, {}))
            assert saving.published
            assert saving.note
            assert checkpoint.verify(saving.path) == []
            saver.close()

        ranks(2, target)


class TestRuns:
    @pytest.mark.parametrize("plan", ["server=1 dp=1", *longer("fsdp=2", "single")])
    def test_a_damaged_newest_is_named_and_the_one_before_used(self, plan: str, tmp_path: Path) -> None:
        fit(plan, tmp_path / "run", checkpoint_every=3)
        newest = tmp_path / "run" / "checkpoints" / "step-00000008"
        flip(newest / "rank-00000.safetensors")
        run = fit(plan, tmp_path / "run", resume=True)
        (resumed,) = run.events("resume")
        assert resumed["path"] == "checkpoints/step-00000006"
        assert any("step-00000008 is damaged" in event["message"] for event in run.events("warning"))
        assert [event["step"] for event in run.events("end")] == [8, 8]
        assert checkpoint.verify(newest) == []  # written anew
        assert json.loads((newest / "state.json").read_text())["step"] == 8

    def test_parameters_that_are_not_finite_are_not_published(self, tmp_path: Path) -> None:
        class Poisoned(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                self.taken = getattr(self, "taken", 0) + 1
                if self.taken == 8:  # the last: no loss that tells follows
                    self.param_groups[0]["params"][-1].data[0] = float("inf")

        with pytest.raises(WorkerError, match=r"head\.bias is not finite after step 7"):
            fit("dp=2", tmp_path / "run", checkpoint_every=1, optimizer=lambda params: Poisoned(params, lr=0.0))
        found = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
        assert [(one.step, one.whole) for one in found] == [(7, True), (6, True)]
