"""Whom a report blames, from the stands of ranks; when ranks are asked, and when a run is ended."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace

import pytest
import torch.distributed.distributed_c10d as c10d

from phalanx.comm import Place
from phalanx.launch import hangs
from phalanx.launch.failure import Failure, failure_of_exit, gave_up
from phalanx.launch.hangs import (
    CollectiveCall,
    HangProbe,
    HangReport,
    HangWatch,
    RankStand,
    WatchedRank,
    collective_calls,
    parse_stacks,
)

pytestmark = pytest.mark.quick
JOB = FrameSummary("/home/me/train.py", 41, "forward")
WAITING = FrameSummary(str(Path(c10d.__file__)), 100, "all_reduce")


def call(number: int, *, group: str = "0", ranks: tuple[int, ...] = (0, 1), pending: bool = True) -> CollectiveCall:
    return CollectiveCall(group=group, ranks=ranks, number=number, what="all_reduce of float 3", pending=pending)


def waits(rank: int, *calls: CollectiveCall, step: int = 5) -> RankStand:
    return RankStand(rank=rank, step=step, frames=(WAITING, JOB), calls=calls)


def stands(rank: int, *calls: CollectiveCall, **how: object) -> RankStand:
    return RankStand(rank=rank, **{"step": 5, "frames": (JOB,), "calls": calls, **how})


EVERY = call(7, ranks=(0, 1, 2))


@pytest.mark.parametrize(
    ("those", "blamed", "cause"),
    [
        ([waits(0, call(7)), stands(1, call(6, pending=False))], (1,), "absent"),
        ([waits(0), stands(1)], (1,), "absent"),  # without torch's flight recorder
        ([waits(0, call(7)), stands(1, state="T")], (1,), "stopped"),
        ([waits(0, call(7)), stands(1, frames=())], (1,), "silent"),
        ([stands(0), stands(1)], (0, 1), "blocked"),
        ([waits(0, call(7)), waits(1, call(7))], (0, 1), "link"),
        ([waits(0, call(7)), waits(1, call(7, group="1"), step=4)], (1,), "mismatch"),
        # 1 has come to what 0 is in, and computes
        (
            [
                waits(0, EVERY),
                stands(1, EVERY._replace(pending=False)),
                stands(2, EVERY._replace(number=6, pending=False)),
            ],
            (2,),
            "absent",
        ),
        # 0 waits for 1 in one group, 1 for 2 in another: 2 is to blame, whom rank 0 does not even know
        (
            [
                waits(0, call(7)),
                waits(1, call(6, pending=False), call(3, group="1", ranks=(1, 2))),
                stands(2, call(2, group="1", ranks=(1, 2), pending=False)),
            ],
            (2,),
            "absent",
        ),
        # 2 computes as well, and nobody waits for it
        (
            [waits(0, call(7)), stands(1, call(6, pending=False)), stands(2, call(9, group="2", ranks=(2, 3)))],
            (1,),
            "absent",
        ),
    ],
)
def test_who_is_to_blame(those: list[RankStand], blamed: tuple[int, ...], cause: str) -> None:
    report = HangReport(those, 300.0)
    failure = report.failure()
    assert (failure.hang["ranks"], failure.hang["cause"], failure.rank) == ([*blamed], cause, blamed[0])
    assert failure.hang["advice"]
    assert f"rank {blamed[0]}" in failure.traceback


def test_ranks_that_wait_in_the_same_exchange_share_a_line() -> None:
    ranks = (0, 1, 2, 3)
    those = [waits(rank, call(7, ranks=ranks)) for rank in range(3)]
    text = HangReport([*those, stands(3, call(6, ranks=ranks, pending=False))], 300.0).failure().traceback
    assert "rank 0, rank 1, rank 2, step 5: waits in all_reduce" in text


def test_a_rank_of_nccl_that_gives_up_is_no_culprit() -> None:
    """Its watchdog ends the process by SIGABRT."""
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 300 s"
    assert gave_up(failure_of_exit(0, 5, -signal.SIGABRT, said=said))


def test_stacks_are_those_of_the_main_thread() -> None:
    inner, outer = '  File "/b.py", line 2 in inner\n', '  File "/b.py", line 9 in main\n'
    other = 'Thread 0x01 (most recent call first):\n  File "/a.py", line 1 in other\n\n'
    dump = f"{other}Current thread 0x02 (most recent call first):\n{inner}{outer}"
    assert parse_stacks(dump) == (FrameSummary("/b.py", 2, "inner"), FrameSummary("/b.py", 9, "main"))
    alone = dump.replace("Current thread 0x02", "Stack")
    assert parse_stacks(alone) == parse_stacks(dump)
    crash = dump.replace("Current thread", "Thread")  # in compiled code's own thread, which has no Python
    assert parse_stacks(f"Fatal Python error: Aborted\n\n{crash}") == parse_stacks(dump)
    assert parse_stacks("ready\n") == ()
    raised = f"Traceback (most recent call last):\n{outer}    inner()\n{inner}".replace(" in ", ", in ")
    failure = Failure(rank=0, step=5, kind="RuntimeError", message="timed out", traceback=raised, time=0.0)
    assert RankStand(rank=0).after(failure).frames == parse_stacks(dump)


ENTRY = {
    "process_group": ["0", "default"],
    "is_p2p": False,
    "input_sizes": [[3]],
    "input_dtypes": ["Float"],
    "profiling_name": "gloo:all_reduce",
    "collective_seq_id": 7,
    "retired": False,
}


def recorded(monkeypatch: pytest.MonkeyPatch, *entries: object) -> None:
    recorder = SimpleNamespace(_dump_fr_trace_json=lambda: json.dumps({"entries": entries}).encode())
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)


@pytest.mark.parametrize(
    "odd",
    [
        {name: value for name, value in ENTRY.items() if name != "collective_seq_id"},
        ENTRY | {"process_group": []},
        ENTRY | {"input_sizes": None},
        ENTRY | {"profiling_name": 7},
        "an entry of another kind",
    ],
)
def test_a_collective_in_an_unknown_format_is_left_out(odd: object, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, ENTRY, odd)
    (known,) = collective_calls(2)
    assert (known.number, known.what, known.pending) == (7, "all_reduce of float 3", True)


def test_replicas_that_step_by_themselves_count_their_ranks_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch calls rank 1 in such a replica may be another rank of the run."""
    recorded(monkeypatch, ENTRY)
    world = SimpleNamespace(pg_names={"group": "0"}, pg_group_ranks={"group": {0: 0, 1: 1}})
    monkeypatch.setattr(c10d, "_world", world)
    assert [collective_calls(size)[0].ranks for size in (2, 4)] == [(0, 1), ()]


@pytest.fixture
def stacks() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()
        faulthandler.unregister(signal.SIGUSR2)


def test_a_quiet_rank_publishes_its_stack_and_once_more_when_it_goes_on(
    stacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangProbe, "_run", lambda self: None)
    recorded(monkeypatch, ENTRY)
    told = list[str]()
    probe = HangProbe(Place(rank=3, world_size=4, timeout=100.0), stacks, lambda text: told.append(text) or True)
    for seconds in (0.0, 0.0, 60.0, 0.0, 0.0):
        probe.report_step(5)
        probe._since -= seconds
        probe._look()
    begun, quiet, again = (RankStand.from_text(text, 3) for text in told)
    assert begun.frames == again.frames == ()
    assert (quiet.rank, quiet.step, quiet.pid, quiet.calls[0].number) == (3, 5, os.getpid(), 7)
    assert "test_a_quiet_rank" in " ".join(frame.name for frame in quiet.frames)


TIMEOUT = 0.2
ENDED = -1  # in place of a step
PID, CHILD = 1 << 22, (1 << 22) + 1  # above any number that the kernel gives


class Clock:
    """Goes on by what is slept: a test that something else holds up sees no time pass meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hangs, "time", made)
    return made


@pytest.fixture
def silent() -> Iterator[int]:
    """A file of a rank that never writes."""
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


Steps = Callable[[int], list[int | None]]


@pytest.fixture
def asked(clock: Clock, silent: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[Steps], int]:
    return lambda steps: _asked(steps, clock, silent, monkeypatch)


def _asked(steps: Steps, clock: Clock, silent: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often ranks were asked, of which ``steps`` says at each look in which step they are."""
    times, looks = list[float](), 0
    monkeypatch.setattr(HangWatch, "_ask", lambda self, ranks: times.append(clock.now))

    def ranks() -> dict[int, WatchedRank]:
        return {
            rank: WatchedRank(PID, step, None if step == ENDED else silent) for rank, step in enumerate(steps(looks))
        }

    watch = HangWatch(ranks, TIMEOUT)
    until = clock.now + 2 * TIMEOUT
    while clock.now < until:
        watch.look()
        looks += 1
        clock.sleep(0.01)
    return len(times)


def test_a_server_without_steps_has_nobody_asked(asked: Callable[[Steps], int]) -> None:
    assert asked(lambda looks: [looks, looks // 2, None]) == 0


def test_all_are_asked_where_a_rank_never_begins(asked: Callable[[Steps], int]) -> None:
    assert asked(lambda looks: [0, 0, None]) > 0
    assert asked(lambda looks: [None, None, None]) > 0
    assert asked(lambda looks: [ENDED, ENDED, None]) > 0


class Processes:
    """What the kernel tells of a rank and a process that it has started: both sleep and never compute."""

    def __init__(self, root: Path, clock: Clock, silent: int) -> None:
        self.root, self.moved, self.clock, self.silent = root, 0, clock, silent
        for pid in (PID, CHILD):
            (root / f"{pid}/task/{pid}").mkdir(parents=True)
            self.be(pid, "S")
        (root / f"{PID}/task/{PID}/children").write_text(f"{CHILD} ")

    def be(self, pid: int, state: str) -> None:
        for folder in (self.root / f"{pid}", self.root / f"{pid}/task/{pid}"):
            (folder / "stat").write_text(f"{pid} (a (b) c) {state} {' '.join(['0'] * 20)}")

    def move(self, pid: int, size: int, how: str) -> None:
        self.moved += size
        (self.root / f"{pid}/io").write_text(f"syscr: {self.moved}\n{how}: {self.moved}\n")


@pytest.fixture
def processes(tmp_path: Path, clock: Clock, silent: int, monkeypatch: pytest.MonkeyPatch) -> Processes:
    monkeypatch.setattr(hangs, "_PROC", tmp_path)
    monkeypatch.setattr(hangs, "_LATER", 0.1)
    return Processes(tmp_path, clock, silent)


def looked_at(processes: Processes, between: Callable[[], None] = lambda: None) -> Failure | None:
    """What comes of a rank that stays in its step for three timeouts."""
    watch = HangWatch(lambda: {0: WatchedRank(PID, 3, processes.silent)}, TIMEOUT)
    clock = processes.clock
    until = clock.now + 3 * TIMEOUT
    while clock.now < until:
        if failure := watch.look():
            return failure
        between()
        clock.sleep(0.01)
    return None


def test_who_sleeps_is_blocked(processes: Processes) -> None:
    assert looked_at(processes)


@pytest.mark.parametrize("pid", [PID, CHILD])
def test_who_waits_for_a_disk_goes_on(processes: Processes, pid: int) -> None:
    processes.be(pid, "D")
    assert looked_at(processes) is None


@pytest.mark.parametrize(("pid", "how"), [(PID, "rchar"), (PID, "wchar"), (PID, "read_bytes"), (CHILD, "write_bytes")])
def test_who_reads_or_writes_goes_on(processes: Processes, pid: int, how: str) -> None:
    assert looked_at(processes, lambda: processes.move(pid, 1 << 20, how)) is None


def test_what_a_worker_writes_down_of_itself_does_not_count(processes: Processes) -> None:
    assert looked_at(processes, lambda: processes.move(PID, 1 << 10, "wchar")) is not None
