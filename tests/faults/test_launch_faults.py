"""Whatever goes wrong in a worker, everything ends, nothing is left, and the first failure is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from inject import (
    LIMIT,
    Fault,
    alive,
    be_killed,
    crash,
    exhaust_memory,
    hang,
    leave_silently,
    note,
    noted,
    raise_error,
    start_child,
    wait_until,
)
from small import fit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from law_rows import longer
from phalanx.comm import Place, default_process_group, device_for
from phalanx.errors import DataError, Problem, RefusedError, RunError, WorkerError
from phalanx.launch import worker_pool
from phalanx.launch.local import launch
from phalanx.launch.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def _torch_warm() -> None:
    launch(lambda place, report: None, 1)


@pytest.fixture(autouse=True)
def _nothing_left(_torch_warm: None, tmp_path: Path) -> Iterator[None]:
    descriptors, before = len(os.listdir("/proc/self/fd")), {*psutil.Process().children(recursive=True)}
    yield
    assert {*psutil.Process().children(recursive=True)} <= before
    # what a worker had started is killed, not waited for: it is gone as soon as it has its turn
    assert wait_until(lambda: alive(noted(tmp_path)) == [], 20.0)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def fails(target: Callable[..., object], world_size: int) -> WorkerError:
    with pytest.raises(WorkerError) as raised:
        launch(target, world_size)
    return raised.value


def striking(fault: Fault, folder: Path) -> Callable[..., object]:
    """A worker that has a child process, takes 5 steps and would then wait for ever.

    The fault strikes once all have begun: workers are ended soon after it, whether they have or not.
    """

    def target(place: Place, report: Callable[[int], None]) -> None:
        note(folder, os.getpid())
        start_child(folder)
        if place.rank == fault.rank:
            wait_until(lambda: len(noted(folder)) == 2 * place.world_size, LIMIT)
        for step in range(5):
            report(step)
            fault.strike(place.rank, step)
        hang()

    return target


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (raise_error, "ValueError", ["ValueError: the injected fault", "in raise_error"]),
        (be_killed, "signal 9", ["ended in step 3 by SIGKILL", "what to do: "]),
        (crash, "signal 11", ["SIGSEGV", "in crash", "compiled code crashed"]),
        (leave_silently, "exit 0", ["ended without a result", "os._exit"]),
        (exhaust_memory, "RuntimeError", ["can't allocate memory", "smaller micro="]),
    ],
    ids=["exception", "killed", "crash", "silent", "memory"],
)
def test_fault(how: Callable[[], None], kind: str, words: list[str], tmp_path: Path) -> None:
    world_size = 1 if how is leave_silently else 2
    rank = world_size - 1
    error = fails(striking(Fault(rank=rank, step=3, how=how), tmp_path), world_size)
    assert (error.rank, error.step, error.kind, error.exit_code) == (rank, 3, kind, 3)
    assert f"rank {rank} of {world_size}" in str(error)
    for word in words:
        assert word in str(error)
    assert ('plan="single"' in str(error)) == (world_size > 1 and how in (raise_error, crash))
    assert len(noted(tmp_path)) == 2 * world_size


def test_worker_that_ignores_sigterm(tmp_path: Path) -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        if place.rank == 0:
            assert wait_until(lambda: len(noted(tmp_path)) == 1, LIMIT)
            raise_error()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(tmp_path, os.getpid())
        hang()

    error = fails(target, 2)
    assert (error.rank, error.step) == (0, None)
    assert "before the first step" in str(error)


@pytest.mark.parametrize("how", [raise_error, be_killed], ids=["exception", "killed"])
def test_first_failing_rank_is_named_and_not_the_one_that_lost_its_peer(how: Callable[[], None]) -> None:
    fault = Fault(rank=1, step=2, how=how)

    def target(place: Place, report: Callable[[int], None]) -> None:
        with default_process_group(place, torch.device("cpu")):
            for step in range(1000):
                report(step)
                fault.strike(place.rank, step)
                dist.all_reduce(torch.ones(4))

    error = fails(target, 2)
    assert (error.rank, error.step) == (1, 2)
    assert "Connection closed" not in str(error)


def test_a_launcher_that_was_held_looks_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of a lost peer, has no core for longer than it waits for others, and who was lost has ended by then."""
    held = tmp_path / "held"

    def target(place: Place, report: Callable[[int], None]) -> None:
        if place.rank == 0:
            raise ConnectionResetError("connection reset by peer")
        note(tmp_path, os.getpid())
        wait_until(held.exists, LIMIT)
        be_killed()

    def holds(pool: WorkerPool) -> None:
        held.touch()
        assert wait_until(lambda: bool(noted(tmp_path)), LIMIT)
        os.waitid(os.P_PID, noted(tmp_path)[0], os.WEXITED | os.WNOWAIT)

    awaits = WorkerPool._await_other_failures

    def holding(pool: WorkerPool) -> None:
        holds(pool)
        awaits(pool)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * held.exists())
    monkeypatch.setattr(WorkerPool, "_await_other_failures", holding)
    monkeypatch.setattr(worker_pool, "time", clock)
    error = fails(target, 2)
    assert (error.rank, error.kind) == (1, "signal 9")


def test_lost_peer_is_named_where_nothing_else_is_known() -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        if place.rank == 1:
            hang()
        raise ConnectionResetError("connection reset by peer")

    error = fails(target, 2)
    assert error.rank == 0
    assert "network" in str(error)


def test_error_of_ours_keeps_its_message_and_exit_code() -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        report(6)
        raise DataError("the stream ended early\n    try: drop_last=True")

    error = fails(target, 1)
    assert (error.exit_code, error.kind) == (3, "DataError")
    assert str(error) == "rank 0 of 1 in step 6: the stream ended early\n    try: drop_last=True"
    assert "in target" in error.traceback


def test_what_was_written_wrong_is_no_matter_of_ranks() -> None:
    wrong = Problem(where="job.batch", given="3", allowed="4 or more", fix="batch=4")

    def target(place: Place, report: Callable[[int], None]) -> None:
        raise RefusedError([wrong])

    with pytest.raises(RefusedError) as caught:
        launch(target, 1)
    assert caught.value.problems == (wrong,)
    assert caught.value.exit_code == 2


def _misses_a_package(place: Place, report: Callable[[int], None]) -> None:
    import no_such_package  # noqa: F401


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda place, report: torch.ones(1), "not JSON serializable"),
        (lambda place, report: exit(0), "SystemExit"),
        (_misses_a_package, "install the missing package"),
    ],
    ids=["a result that is no JSON", "exit", "a missing package"],
)
def test_what_fails_in_a_worker_by_itself(target: Callable[..., object], words: str) -> None:
    assert words in str(fails(target, 1))


def test_error_in_watch_ends_the_workers(tmp_path: Path) -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        note(tmp_path, os.getpid())
        hang()

    def watch() -> None:
        if noted(tmp_path):
            raise LookupError("nobody to show it to")

    with pytest.raises(LookupError):
        launch(target, 1, watch=watch)


def test_launcher_that_has_asked_cuda_is_told_from_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(WorkerError, match=r"torch\.cuda\.device_count\(\) in place of torch\.cuda\.is_available"):
        launch(lambda place, report: str(device_for(place, "cuda")), 2)
    assert launch(lambda place, report: str(device_for(place, "cpu")), 1) == ["cpu"]


def test_a_failed_worker_does_not_wait_for_the_others_to_leave_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "destroy_process_group", hang)

    def target(place: Place, report: Callable[[int], None]) -> None:
        with default_process_group(place, torch.device("cpu")):
            raise_error()

    error = fails(target, 2)
    assert error.kind == "ValueError"


def test_process_limit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = iter([os.fork])

    def fork() -> int:
        try:
            real = next(forks)
        except StopIteration:
            raise BlockingIOError(11, "Resource temporarily unavailable") from None
        return real()

    monkeypatch.setattr(worker_pool, "fork", fork)
    with pytest.raises(RunError, match=r"could not start worker 1 of 2.*\n.*ulimit -u"):
        launch(lambda place, report: hang(), 2)


class FaultError(Exception):
    """The model's own."""


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faulty: Callable[[], None]) -> Tensor:
        ctx.faulty = faulty
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.faulty()
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where, self.calls = nn.Linear(9, 9), where, 0

    def faulty(self) -> None:
        self.calls += 1
        if self.calls == 7:
            raise FaultError("the model's own error")

    def forward(self, x: Tensor) -> Tensor:
        real = not isinstance(x, FakeTensor) and torch.is_grad_enabled()
        if self.where == "forward" and real:
            self.faulty()
        x = torch.relu(self.linear(x))
        return Backward.apply(x, self.faulty) if self.where == "backward" and real else x


class Model(nn.Module):
    def __init__(self, at: int, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(where if index == at else "") for index in range(8)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("plan", "where", "at"),
    [
        ("pp=2 micro=8 schedule=interleaved", "forward", 0),
        ("pp=2 micro=8 schedule=zero-bubble", "backward", 7),
        *longer(
            ("pp=2 micro=8", "forward", 0),
            ("pp=4 micro=8", "backward", 7),
            ("pp=2 micro=8 recompute=full", "backward", 7),
            ("pp=2 fsdp=2 micro=4", "forward", 0),
        ),
    ],
)
def test_all_ranks_end_and_the_models_own_error_is_told(plan: str, where: str, at: int, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as raised:
        fit(plan, tmp_path / "run", model=lambda: Model(at, where))
    assert raised.value.kind == "FaultError"
    assert "the model's own error" in str(raised.value)
    assert "raise FaultError" in raised.value.traceback


def test_an_error_of_the_loss_is_that_of_the_last_stage(tmp_path: Path) -> None:
    calls: list[None] = []

    def loss(output: Tensor, batch: Any) -> Any:
        if not isinstance(output, FakeTensor) and not batch["y"].is_meta and output.grad_fn is not None:
            calls.append(None)
            if len(calls) == 6:  # in the second step: what fails in the first is told before it
                raise FaultError("the loss's own error")
        return nn.functional.cross_entropy(output, batch["y"])

    with pytest.raises(WorkerError, match="the loss's own error") as raised:
        fit("pp=2 micro=8", tmp_path / "run", loss=loss)
    assert raised.value.rank == 1
