"""When a launcher asks ranks where they stand, and when it ends a run in which nobody gives up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.launch import hang_watch
from phalanx.launch.failure import Failure
from phalanx.launch.hang_watch import HangWatch, WatchedRank
from phalanx.launch.stack_frames import StackFrame

pytestmark = pytest.mark.quick

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


def test_a_server_without_steps_has_nobody_asked_while_others_go_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(lambda looks: [looks, looks // 2, None], clock, monkeypatch) == 0


def test_where_others_wait_for_a_rank_that_never_begins_all_are_asked(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("milliseconds", "idle_since"),
    [
        ([0, 0, 0, 0], 0.0),
        ([10, 10, 10, 10], 0.0),
        ([10, 20, 10, 20], 0.0),  # of half a second: what it takes to write down where it stands, in ticks of 10 ms
        ([20, 20, 10, 0], 1.0),
        ([20, 20, 20, 20], 2.0),
        ([0, 60, 0, 0], 1.0),
    ],
)
def test_what_counts_as_computing(milliseconds: list[int], idle_since: float, processes: Processes) -> None:
    progress = hang_watch._RankProgress.begun(PID, 3, 0.0)
    for looks in range(4):
        ticks = sum(milliseconds[: looks + 1]) // 10
        (processes.root / f"{PID}/stat").write_text(f"{PID} (a) S {'0 ' * 10}{ticks} 0 {'0 ' * 10}")
        progress.look(0.5 * (looks + 1))
    assert progress.idle_since == idle_since


def test_who_has_given_up_and_saves_stood_where_it_did_before() -> None:
    stack: list[StackFrame] = []
    answers: Any = SimpleNamespace(answer=lambda since: (9, tuple(stack)), read=lambda: (None, None))
    watched = {0: WatchedRank(PID, 3, answers)}
    watch = HangWatch(lambda: watched, TIMEOUT)
    for files in (["/home/me/train.py"], ["/x/phalanx/checkpoint/survivor.py", "/x/phalanx/train/survivor_save.py"]):
        stack[:] = [StackFrame(file, 7, "wait") for file in files]
        watch._ask(watched)
        assert watch._report is not None
        assert [frame.file for frame in watch._report.first.frames] == ["/home/me/train.py"]


@pytest.mark.parametrize("pid", [PID, CHILD])
def test_who_waits_for_a_disk_goes_on(processes: Processes, pid: int) -> None:
    processes.be(pid, "D")
    assert looked_at(processes) is None


def test_so_does_who_waits_in_another_thread(processes: Processes) -> None:
    thread = processes.root / f"{PID}/task/{CHILD + 1}"
    thread.mkdir()
    (thread / "stat").write_text(f"{CHILD + 1} (save) D 0")
    assert looked_at(processes) is None


@pytest.mark.parametrize("how", ["rchar", "wchar", "read_bytes", "write_bytes"])
@pytest.mark.parametrize("pid", [PID, CHILD])
def test_who_reads_or_writes_goes_on(processes: Processes, pid: int, how: str) -> None:
    assert looked_at(processes, lambda: processes.move(pid, 1 << 20, how)) is None


def test_what_a_worker_writes_down_of_itself_does_not_count(processes: Processes) -> None:
    assert looked_at(processes, lambda: processes.move(PID, 1 << 10, "wchar")) is not None
