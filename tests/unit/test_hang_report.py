"""Whom a report blames, from where ranks stand; who is a straggler, from what ranks spend their time on."""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.distributed_c10d as c10d

from phalanx.comm import Place
from phalanx.config import Plan
from phalanx.launch.hang_report import CollectiveCall, HangReport, RankStand, ranges
from phalanx.launch.hang_watch import in_run
from phalanx.launch.rank_probe import RankProbe, TimeSpent, collective_calls
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
    return RankStand(rank=rank, **{"step": 5, "frames": (JOB,), "calls": calls, **how})  # type: ignore[arg-type]


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


def test_report_says_which_exchange_of_which_step_and_where() -> None:
    report = HangReport.of([waits(0, call(7)), stands(1, call(6, pending=False), host="node2", pid=12)], 300.0)
    assert report.headline == (
        "rank 1 (process 12, host node2) did not come to all_reduce of float 3 (exchange 7 of its group) among ranks "
        "0-1 of step 5 for 300 s: it stands in me/train.py:41 forward"
    )


def test_replicas_that_step_by_themselves_count_their_ranks_from_0() -> None:
    """Each has process groups of its own: what its worker calls rank 1 is another rank of the run."""
    told = call(7, ranks=(0, 1))
    plan = Plan.parse("dp=2 fsdp=2 sync=local every=2")
    assert [in_run(plan, rank, told).ranks for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert in_run(plan, 1, told).group != in_run(plan, 2, told).group
    assert in_run(Plan.parse("dp=4"), 2, told) == told


def test_a_stand_goes_through_json() -> None:
    stand = stands(1, call(6), host="node2", busy=0.5)
    assert RankStand.from_json(stand.to_json()) == stand


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


def test_a_frame_between_two_lines_stands_in_the_first_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread runs may have no line: a thread that looks at it every tenth of a second meets that."""
    code = test_ranges.__code__
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    monkeypatch.setattr(sys, "_current_frames", lambda: {7: frame})
    (found,) = frames_of_thread(7)
    assert (found.line, found.function) == (code.co_firstlineno, "test_ranges")
    assert not RankStand(rank=0, frames=(found,)).waits


@pytest.mark.parametrize("collects", [True, False])
def test_a_thread_that_has_ended_stands_nowhere_and_garbage_is_collected_as_before(collects: bool) -> None:
    here = threading.get_ident()
    had = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert frames_of_thread(-1) == ()
        assert gc.isenabled() == collects
        assert frames_of_thread(here)[0].function == "frames_of_thread"
        assert gc.isenabled() == collects
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


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 6]) == "0-3, 6"


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


def test_time_spent_counts_looks() -> None:
    assert TimeSpent(1, 2, 3, 0.5, 0.6).looks == 6


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
