"""Whatever goes wrong in a worker, everything ends within 3 s, nothing is left, and the first failure is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
    hang_on,
    leave_silently,
    note,
    noted,
    raise_error,
    start_child,
    wait_until,
)

from phalanx.comm import Place, default_process_group, device_for
from phalanx.errors import DataError, Problem, RefusedError, RunError, WorkerError
from phalanx.launch.failure import Failure, advice, worker_error
from phalanx.launch.local import launch
from phalanx.launch.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def _torch_warm() -> None:
    """The first store of a process opens a pipe that torch then keeps."""
    launch(lambda place, report: None, 1)


@pytest.fixture(autouse=True)
def _nothing_left(_torch_warm: None, tmp_path: Path) -> Iterator[None]:
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert psutil.Process().children(recursive=True) == []
    # what a worker had started is killed, not waited for: it is gone as soon as it has its turn
    assert wait_until(lambda: alive(noted(tmp_path)) == [], 2.0)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def fails(target: Callable[..., object], world_size: int) -> tuple[WorkerError, float]:
    """The error of a launch, and the seconds it took after the fault, which is its only event of any length."""
    began = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        launch(target, world_size)
    return raised.value, time.monotonic() - began


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
@pytest.mark.parametrize("world_size", [1, 3])
def test_fault(how: Callable[[], None], kind: str, words: list[str], world_size: int, tmp_path: Path) -> None:
    rank = world_size - 1
    error, seconds = fails(striking(Fault(rank=rank, step=3, how=how), tmp_path), world_size)
    assert seconds < LIMIT
    assert (error.rank, error.step, error.kind, error.exit_code) == (rank, 3, kind, 3)
    assert f"rank {rank} of {world_size}" in str(error)
    for word in words:
        assert word in str(error)
    assert ('plan="single"' in str(error)) == (world_size > 1 and how in (raise_error, crash))
    assert len(noted(tmp_path)) == 2 * world_size


_KILLED = "DataLoader worker (pid 7) is killed by signal: "


@pytest.mark.parametrize(
    ("kind", "message", "world_size", "words"),
    [
        ("RuntimeError", _KILLED + "Killed. ", 2, "a data loading process ran out of memory"),
        ("RuntimeError", _KILLED + "Bus error. It is possible that", 2, "enlarge /dev/shm"),
        ("RuntimeError", "DataLoader worker (pid(s) 7, 8) exited unexpectedly", 1, "a data loading process died"),
        ("ValueError", "Caught ValueError in DataLoader worker process 0.\nOriginal ...", 2, 'plan="single"'),
        ("ValueError", "Caught ValueError in DataLoader worker process 0.\nOriginal ...", 1, ""),
        ("RuntimeError", "stack expects each tensor to be equal size, but got", 1, "collate= of the"),
    ],
)
def test_advice(kind: str, message: str, world_size: int, words: str) -> None:
    failure = Failure(rank=0, step=3, kind=kind, message=message, traceback="", time=0.0)
    said = advice(failure, world_size, memory_kills=0)
    assert words in said
    assert bool(said) == bool(words)
    assert ("data loading process" in said) == ("(pid" in message)


def test_worker_that_ignores_sigterm(tmp_path: Path) -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        note(tmp_path, os.getpid())
        if place.rank == 0:
            time.sleep(0.2)  # until the other ignores it
            raise_error()
        hang_on()

    error, seconds = fails(target, 2)
    assert seconds < LIMIT
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

    error, seconds = fails(target, 2)
    assert seconds < LIMIT
    assert (error.rank, error.step) == (1, 2)
    assert "Connection closed" not in str(error)


def test_a_launcher_that_was_held_looks_once_more_before_it_says_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of a lost peer, has no core for longer than it waits for others, and who was lost has ended by then."""

    def target(place: Place, report: Callable[[int], None]) -> None:
        if place.rank == 0:
            raise ConnectionResetError("connection reset by peer")
        time.sleep(0.5)
        be_killed()

    monkeypatch.setattr(WorkerPool, "_tell_of_the_lost", lambda pool: time.sleep(1.5))
    error, _ = fails(target, 2)
    assert (error.rank, error.kind) == (1, "signal 9")


def test_lost_peer_is_named_where_nothing_else_is_known() -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        if place.rank == 1:
            hang()
        raise ConnectionResetError("connection reset by peer")

    error, seconds = fails(target, 2)
    assert seconds < LIMIT
    assert error.rank == 0
    assert "network" in str(error)


def test_a_worker_without_a_launcher_does_not_call_itself_the_one_that_failed() -> None:
    message = "gloo: Connection closed by peer"
    failure = Failure(rank=0, step=5, kind="RuntimeError", message=message, traceback="", time=0.0, lost_peer=True)
    said = str(worker_error(failure, 2, memory_kills=0, launched=False))
    assert "rank 0 lost its connection to another rank in step 5, which may have died: gloo: Connection" in said
    assert "failed" not in said
    assert "none of them died" not in said
    assert "torchrun" in said
    assert "rank 0 of 2 failed in step 5" in str(worker_error(failure, 2, memory_kills=0))


def test_error_of_ours_keeps_its_message_and_exit_code() -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        report(6)
        raise DataError("the stream ended early\n    try: drop_last=True")

    error, _ = fails(target, 1)
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


def test_result_that_is_no_json() -> None:
    error, _ = fails(lambda place, report: torch.ones(1), 1)
    assert "not JSON serializable" in str(error)


def test_sys_exit_is_a_failure() -> None:
    error, _ = fails(lambda place, report: exit(0), 1)
    assert error.kind == "SystemExit"


def test_missing_package() -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        import no_such_package  # noqa: F401  # pyright: ignore[reportMissingImports]

    error, _ = fails(target, 1)
    assert "install the missing package" in str(error)


def test_error_in_watch_ends_the_workers(tmp_path: Path) -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        note(tmp_path, os.getpid())
        hang()

    def watch() -> None:
        if noted(tmp_path):
            raise LookupError("nobody to show it to")

    began = time.monotonic()
    with pytest.raises(LookupError):
        launch(target, 1, watch=watch)
    assert time.monotonic() - began < LIMIT


def test_launcher_that_uses_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RunError, match="module level of the job file"):
        launch(lambda place, report: None, 1)


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

    error, seconds = fails(target, 2)
    assert seconds < LIMIT
    assert error.kind == "ValueError"


def test_process_limit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = iter([os.fork, os.fork])  # the reaper and the first worker

    def fork() -> int:
        try:
            real = next(forks)
        except StopIteration:
            raise BlockingIOError(11, "Resource temporarily unavailable") from None
        return real()

    from phalanx.launch import reaper, worker_pool

    monkeypatch.setattr(reaper, "fork", fork)
    monkeypatch.setattr(worker_pool, "fork", fork)
    with pytest.raises(RunError, match=r"could not start worker 1 of 2.*\n.*ulimit -u"):
        launch(lambda place, report: hang(), 2)
