"""Whom a report blames, from where ranks stand; who is a straggler, from what ranks spend their time on."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.distributed_c10d as c10d

from phalanx.comm import Place
from phalanx.config import Plan
from phalanx.launch import hang_watch
from phalanx.launch.failure import Failure
from phalanx.launch.hang_report import CollectiveCall, HangReport, RankStand
from phalanx.launch.hang_watch import HangWatch, WatchedRank, in_run
from phalanx.launch.rank_probe import RankProbe, collective_calls
from phalanx.launch.stack_frames import StackFrame, frames_of_thread, parse_stacks, parse_traceback
from phalanx.launch.straggler_watch import RankPace, straggler

pytestmark = pytest.mark.quick
JOB = StackFrame("/home/me/train.py", 41, "forward")
WAITING = StackFrame(str(Path(c10d.__file__)), 100, "all_reduce")


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
                stands(1, replace(EVERY, pending=False)),
                stands(2, replace(EVERY, number=6, pending=False)),
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
    report = HangReport.of(those, 300.0)
    assert (report.blamed, report.cause) == (blamed, cause)
    assert report.headline
    assert report.advice
    assert f"rank {blamed[0]}" in report.text


def test_replicas_that_step_by_themselves_count_their_ranks_from_0() -> None:
    """Each has process groups of its own: what its worker calls rank 1 is another rank of the run."""
    told = call(7, ranks=(0, 1))
    plan = Plan.parse("dp=2 fsdp=2 sync=local every=2")
    assert [in_run(plan, rank, told).ranks for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert in_run(plan, 1, told).group != in_run(plan, 2, told).group
    assert in_run(Plan.parse("dp=4"), 2, told) == told


def test_stacks_are_those_of_the_main_thread() -> None:
    inner, outer = '  File "/b.py", line 2 in inner\n', '  File "/b.py", line 9 in main\n'
    other = 'Thread 0x01 (most recent call first):\n  File "/a.py", line 1 in other\n\n'
    dump = f"{other}Current thread 0x02 (most recent call first):\n{inner}{outer}"
    assert parse_stacks(dump) == (StackFrame("/b.py", 2, "inner"), StackFrame("/b.py", 9, "main"))
    alone = dump.replace("Current thread 0x02", "Stack")
    assert parse_stacks(alone) == parse_stacks(dump)
    crash = dump.replace("Current thread", "Thread")  # in compiled code's own thread, which has no Python
    assert parse_stacks(f"Fatal Python error: Aborted\n\n{crash}") == parse_stacks(dump)
    assert parse_stacks("ready\n") == ()
    raised = f"Traceback (most recent call last):\n{outer}    inner()\n{inner}".replace(" in ", ", in ")
    assert parse_traceback(raised) == parse_stacks(dump)


@pytest.mark.parametrize("collects", [True, False])
def test_a_look_collects_no_garbage(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finalizers would let the thread that is looked at run on: until Python 3.11 the look then read freed memory."""
    here, had = threading.get_ident(), gc.isenabled()
    frames, meanwhile = sys._current_frames, list[bool]()
    monkeypatch.setattr(sys, "_current_frames", lambda: (meanwhile.append(gc.isenabled()), frames())[1])
    try:
        (gc.enable if collects else gc.disable)()
        assert frames_of_thread(-1) == ()
        assert frames_of_thread(here)
        assert gc.isenabled() == collects
        assert meanwhile == [False, False]
    finally:
        (gc.enable if had else gc.disable)()


def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = RankProbe(Place(rank=0, world_size=1), None)
    looks: list[int] = []

    def fails() -> None:
        looks.append(1)
        if len(looks) == 3:
            probe.end()
        raise AttributeError("'Slot' object has no attribute 'f_lineno'")

    monkeypatch.setattr("phalanx.launch.rank_probe.frames_of_thread", lambda _: fails())
    thread = threading.Thread(target=probe._run)
    thread.start()
    thread.join(30)
    assert len(looks) == 3


def pace(rank: int, computes: float, waits: float, *, loads: float = 0.0, queues: float = 0.0) -> RankPace:
    return RankPace(rank=rank, step=9, computes=computes, waits=waits, loads=loads, queues=queues, host="node2")


@pytest.mark.parametrize(
    ("paces", "rank", "words"),
    [
        ([pace(0, 10, 20), pace(1, 29, 1), pace(2, 11, 19)], 1, "computes for longer"),
        ([pace(0, 10, 20), pace(1, 29, 1, queues=15)], 1, "waits for a core"),
        ([pace(0, 10, 20), pace(1, 2, 1, loads=27)], 1, "waits for its data"),
        ([pace(0, 25, 5), pace(1, 29, 1)], None, ""),  # all ranks compute most of the time
        ([pace(0, 2, 28), pace(1, 2, 28)], None, ""),  # all wait for the network
        ([pace(0, 29, 1)], None, ""),  # nobody to compare with
    ],
)
def test_a_straggler_is_slower_than_its_peers_by_a_half(paces: list[RankPace], rank: int | None, words: str) -> None:
    found = straggler(paces, 30.0)
    assert (found.pace.rank if found else None) == rank
    if found:
        assert words in str(found.to_dict()["message"])
        assert "host node2" in str(found.to_dict()["message"])


ENTRY = {
    "process_group": ["0", "default"],
    "is_p2p": False,
    "input_sizes": [[3]],
    "input_dtypes": ["Float"],
    "profiling_name": "gloo:all_reduce",
    "collective_seq_id": 7,
    "retired": False,
}


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
def test_an_exchange_that_torch_tells_otherwise_ends_no_probe(odd: object, monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps({"entries": [ENTRY, odd]}).encode()
    recorder = SimpleNamespace(_dump_fr_trace_json=lambda: told)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    (known,) = collective_calls()
    assert (known.number, known.what, known.pending) == (7, "all_reduce of float 3", True)


TIMEOUT = 0.2
ENDED = -1  # in place of a step
PID, CHILD = 1 << 22, (1 << 22) + 1  # above any number that the kernel gives
SILENT: Any = SimpleNamespace(answer=lambda since: (0, ()), read=lambda: (None, None))


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
    monkeypatch.setattr(hang_watch, "time", made)
    return made


def asked(steps: Callable[[int], list[int | None]], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often ranks were asked, of which ``steps`` says at each look in which step they are."""
    times, looks = list[float](), 0
    monkeypatch.setattr(HangWatch, "_ask", lambda self, ranks: times.append(clock.now))

    def ranks() -> dict[int, WatchedRank]:
        files = lambda step: None if step == ENDED else SILENT  # noqa: E731
        return {rank: WatchedRank(PID, step, files(step)) for rank, step in enumerate(steps(looks))}

    watch = HangWatch(ranks, TIMEOUT)
    until = clock.now + 2 * TIMEOUT
    while clock.now < until:
        watch.look()
        looks += 1
        clock.sleep(0.01)
    return len(times)


def test_a_server_without_steps_has_nobody_asked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(lambda looks: [looks, looks // 2, None], clock, monkeypatch) == 0


def test_all_are_asked_where_a_rank_never_begins(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(lambda looks: [0, 0, None], clock, monkeypatch) > 0
    assert asked(lambda looks: [None, None, None], clock, monkeypatch) > 0
    assert asked(lambda looks: [ENDED, ENDED, None], clock, monkeypatch) > 0


class Processes:
    """What the kernel tells of a rank and a process that it has started: both sleep and never compute."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root, self.moved, self.clock = root, 0, clock
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
def processes(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Processes:
    monkeypatch.setattr(hang_watch, "_PROC", tmp_path)
    monkeypatch.setattr(hang_watch, "_LATER", 0.1)
    return Processes(tmp_path, clock)


def looked_at(processes: Processes, between: Callable[[], None] = lambda: None) -> Failure | None:
    """What comes of a rank that stays in its step for three timeouts."""
    watch = HangWatch(lambda: {0: WatchedRank(PID, 3, SILENT)}, TIMEOUT)
    clock = processes.clock
    until = clock.now + 3 * TIMEOUT
    while clock.now < until:
        if failure := watch.look():
            return failure
        between()
        clock.sleep(0.01)
    return None


def test_who_sleeps_is_blocked(processes: Processes) -> None:
    failure = looked_at(processes)
    assert failure is not None
    assert failure.hang is not None
    assert failure.hang["cause"] in ("blocked", "silent")


@pytest.mark.parametrize("pid", [PID, CHILD])
def test_who_waits_for_a_disk_goes_on(processes: Processes, pid: int) -> None:
    processes.be(pid, "D")
    assert looked_at(processes) is None


@pytest.mark.parametrize(("pid", "how"), [(PID, "rchar"), (PID, "wchar"), (PID, "read_bytes"), (CHILD, "write_bytes")])
def test_who_reads_or_writes_goes_on(processes: Processes, pid: int, how: str) -> None:
    assert looked_at(processes, lambda: processes.move(pid, 1 << 20, how)) is None


def test_what_a_worker_writes_down_of_itself_does_not_count(processes: Processes) -> None:
    assert looked_at(processes, lambda: processes.move(PID, 1 << 10, "wchar")) is not None
