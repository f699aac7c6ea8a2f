"""Summaries, progress and drawings, from canned events."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.events import EventLog, faults
from phalanx.events.following import Event, Follower, Viewer
from phalanx.report.drawing import Timeline, draw
from phalanx.report.progress import progress
from phalanx.report.samples_seen import SamplesSeen, samples_seen
from phalanx.report.shown_progress import TensorBoard
from phalanx.report.summary import RunSummary, summarise
from phalanx.report.tables import scaled, scaling_table, seen_table, summary_table

MIB = 2**20
SAVED = "checkpoints/step-00000008"
PARTS = {"parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer": 8 * MIB, "buffers": 0, "activations": 30 * MIB}


def start(**changes: Any) -> Event:
    fields: dict[str, Any] = {"schema": "1.2", "job": "digits", "plan": "dp=2", "exact": "yes", "world_size": 2}
    fields |= {"device": "cpu", "batch": 100, "samples": 250, "drop_last": False, "epoch_samples": None}
    fields |= {"repeats": False, "stretches": [], "batch_tokens": None, "whole_epochs": True, "workers": 0}
    fields |= {"total_steps": 8, "first_step": 0, "parameters": 1234, "notes": []}
    return {"event": "start", "time": 1000.0, **fields, **changes}


def step(number: int, seconds: float, **changes: Any) -> Event:
    fields = {
        "step": number,
        "epoch": 0,
        "loss": 2.0 / (number + 1),
        "count": 100.0,
        "samples": 100,
        "seconds": seconds,
        "lr": 0.003,
        "grad_norm": None,
        "skipped": False,
        "waited": 0.0,
        "losses": {},
    }
    return {"event": "step", "time": 1000.0 + number + 1, **fields, **changes}


def at(moment: float, name: str, **fields: Any) -> Event:
    return {"event": name, "time": moment, **fields}


def canned() -> list[Event]:
    """Eight steps of which the first three are slow, and one that an evaluation made slow."""
    seconds = [9.0, 5.0, 4.0, 0.5, 0.5, 0.25, 3.0, 0.5]
    return [
        start(notes=["dropout draws other random numbers"]),
        *(step(number, one) for number, one in enumerate(seconds)),
        at(1009.0, "evaluate", step=8, loss=0.3, samples=297, metrics={"accuracy": 0.95}, seconds=0.1),
        at(1009.5, "checkpoint", step=8, path=SAVED, bytes=3 * MIB, seconds=0.02, standstill=0.01),
        at(1009.6, "warning", message="the disk is [nearly] full"),
        at(1009.7, "memory", rank=0, peak_bytes=300 * MIB, **PARTS),
        at(1009.7, "memory", rank=1, peak_bytes=310 * MIB, **PARTS),
        at(1009.8, "end", step=8, samples=800, seconds=22.75, loss=0.25),
    ]


def write(folder: Path, events: list[Event]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "events.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return path


def summary_of(folder: Path, events: list[Event]) -> RunSummary:
    write(folder, events)
    return summarise(folder)


def rendered(something: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(something)
    return console.file.getvalue()


def test_canned_events_follow_the_schema() -> None:
    assert [fault for event in canned() for fault in faults(event)] == []


class TestIdle:
    def test_two_ranks(self, tmp_path: Path) -> None:
        first = [["F", 0, 0, 1.0, 2.0], ["B", 0, 0, 4.0, 5.0]]
        second = [["F", 1, 0, 2.0, 3.0], ["B", 1, 0, 3.0, 4.0]]
        events = [at(1.0, "timeline", rank=rank, step=3, actions=one) for rank, one in enumerate((first, second))]
        assert [fault for event in events for fault in faults(event)] == []
        found = Timeline.from_events(events)
        assert found is not None
        assert found.idle == 0.5  # 4 of 8 rank-seconds; the second before 1.0 does not count
        summary = summary_of(tmp_path, [start(), *events])
        assert summary.idle == 0.5
        assert "50% of its ranks' time idle" in rendered(summary_table(summary))


class TestSummary:
    def test_numbers(self, tmp_path: Path) -> None:
        write(tmp_path, canned())
        summary = summarise(tmp_path)
        assert summary.step_seconds == 0.5  # the slow first three are left out, the median ignores the one evaluated in
        assert summary.samples_per_second == 200.0
        assert summary.loss == 0.25
        assert summary.evaluation == {"step": 8, "loss": 0.3, "samples": 297, "metrics": {"accuracy": 0.95}}
        assert summary.peak_bytes == (300 * MIB, 310 * MIB)
        assert (summary.first_step, summary.step, summary.devices, summary.finished) == (0, 8, 2, True)
        assert summary.checkpoint == SAVED

    def test_only_the_part_since_the_resume_counts(self, tmp_path: Path) -> None:
        write(tmp_path, canned())
        write(tmp_path, [start(first_step=8, plan="threads=3"), step(8, 1.0), step(9, 2.0, loss=0.1)])
        summary = summarise(tmp_path)
        assert (summary.first_step, summary.step, summary.loss) == (8, 10, 0.1)
        assert summary.step_seconds == 2.0
        assert summary.devices == 3
        assert summary.evaluation is None
        assert not summary.finished

    def test_a_run_without_steps_has_no_times(self, tmp_path: Path) -> None:
        end = {"event": "end", "time": 1.0, "step": 8, "samples": 0, "seconds": 0.0, "loss": None}
        summary = summary_of(tmp_path, [start(first_step=8), end])
        assert (summary.step_seconds, summary.samples_per_second, summary.loss, summary.step) == (None, None, None, 8)
        assert "time per step" not in rendered(summary_table(summary))


def ledger(folder: Path, steps: list[list[int]], per_epoch: int = 3) -> None:
    with Ledger(folder / "ledger", rank=0, first_step=0, world_size=1) as book:
        for number, ids in enumerate(steps):
            part = MicroBatch(batch=None, ids=tuple(ids), samples=len(ids))
            book.record(StepBatch(step=number, epoch=number // per_epoch, samples=len(ids), parts=((part,),)))


class TestSeen:
    """Ten samples, four a step: three steps an epoch."""

    EPOCH = ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])

    def seen(self, tmp_path: Path, steps: list[list[int]], **changes: Any) -> SamplesSeen:
        write(tmp_path, [start(**{"samples": 10, "batch": 4, **changes})])
        ledger(tmp_path, steps)
        return samples_seen(tmp_path)

    @pytest.mark.parametrize(
        ("steps", "answer"),
        [
            (EPOCH, "yes, in 1 epoch"),
            ((*EPOCH, *EPOCH), "yes, in 2 epochs"),
            ((*EPOCH, EPOCH[0]), "yes, in 1 epoch and 1 step of the next"),
            (EPOCH[:2], "yes, in 2 steps of the first epoch"),
        ],
    )
    def test_yes(self, tmp_path: Path, steps: list[list[int]], answer: str) -> None:
        result = self.seen(tmp_path, steps)
        assert (result.once, result.answer) == (True, answer)
        assert f"each sample seen exactly once per epoch: {answer}" in rendered(seen_table(result))
        assert f"each sample seen exactly once per epoch: {answer}" in rendered(
            summary_table(summarise(tmp_path), result)
        )

    def test_no(self, tmp_path: Path) -> None:
        result = self.seen(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 1]])
        assert not result.once
        assert len(result.wrong) == 2
        text = rendered(seen_table(result), width=200)
        assert "per epoch: no" in text
        assert "sample seen more than once: 1" in text
        assert "sample never seen: 9" in text

    def test_a_stream(self, tmp_path: Path) -> None:
        result = self.seen(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]], samples=None)
        assert result.answer == "yes, in 2 steps of a stream"


class TestTables:
    def test_scaling_is_by_the_first_row(self, tmp_path: Path) -> None:
        slow = summary_of(tmp_path, [start(plan="single"), *(step(n, 1.0) for n in range(6))])
        fast = summary_of(tmp_path, [start(plan="dp=2"), *(step(n, 0.625) for n in range(6))])
        row = scaled(fast, slow)
        assert (row.speed_up, row.efficiency, row.devices) == (1.6, 0.8, 2)
        assert "80%" in rendered(scaling_table([scaled(slow, slow), row]))


class TestProgress:
    def show(self, tmp_path: Path, *, terminal: bool) -> str:
        output = io.StringIO()
        console = Console(file=output, width=120, force_terminal=terminal)
        viewer = progress(console, label="dp=2")
        with Follower(tmp_path / "run" / "events.jsonl", [viewer]) as follower:
            follower()
            for event in canned():
                write(tmp_path / "run", [event])
                follower()
        return output.getvalue()

    @in_one_test("terminal", [True, False])
    def test_canned_run(self, tmp_path: Path, terminal: bool) -> None:
        text = self.show(tmp_path, terminal=terminal)
        for word in ("loss 0.25", "lr 0.003", "samples/s", "accuracy 0.95", "step-00000008", "3.0 MiB"):
            assert word in text
        assert "dropout draws other random numbers" in text
        assert "the disk is [nearly] full" in text
        assert "8/8" in text
        assert ("\x1b[" in text) is terminal


class TestFollower:
    def test_what_was_there_before_is_no_news(self, tmp_path: Path) -> None:
        log = write(tmp_path, canned())
        seen = Recorder()
        with Follower(log, [seen]) as follower:
            follower()
            write(tmp_path, [start(first_step=8)])
        assert [event["event"] for event in seen.events] == ["start"]
        assert seen.closed

    def test_a_viewer_that_fails_is_left_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        seen = Recorder()
        log = tmp_path / "events.jsonl"
        with Follower(log, [Broken(), seen]) as follower:
            with EventLog(log) as writing:
                writing.write("warning", message="one")
                writing.write("warning", message="two")
            follower()
        assert [event["message"] for event in seen.events] == ["one", "two"]


class Recorder(Viewer):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def event(self, event: Event) -> None:
        self.events.append(event)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Broken(Viewer):
    def event(self, event: Event) -> None:
        raise OSError("no terminal any more")

    def tick(self) -> None:
        pytest.fail("called after it had failed")

    def close(self) -> None:
        pytest.fail("called after it had failed")


class TestTensorBoard:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_scalars_are_written(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        tracker = TensorBoard(tmp_path)
        assert list(tmp_path.iterdir()) == []  # nothing starts before the workers do
        for event in canned():
            tracker.event(event)
        tracker.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(tmp_path)).Reload()
        losses = [(point.step, point.value) for point in found.Scalars("train/loss")]
        assert losses == [(n + 1, pytest.approx(2.0 / (n + 1))) for n in range(8)]
        assert [point.step for point in found.Scalars("evaluation/accuracy")] == [8]


class TestDrawing:
    @in_one_test(
        ("plan", "words"),
        [
            ("single", ["1 process on cpu", "rank 0", "whole model", "samples 0:10"]),
            ("dp=3", ["3 processes", "replica 2 of 3", "samples 0:4", "samples 7:10"]),
            ("threads=2", ["1 process with 2 threads", "thread 1", "replica 1 of 2"]),
            ("fsdp=2", ["parameters shard 1 of 2", "gradients  shard", "optimizer  shard"]),
            ("fsdp=2 zero=2", ["parameters whole", "gradients  shard 1 of 2", "optimizer  shard 1 of 2"]),
            ("fsdp=2 zero=1 micro=5", ["gradients  shard 0 of 2"]),
            ("fsdp=2 zero=1 micro=2", ["parameters whole", "gradients  whole", "optimizer  shard 0 of 2"]),
            ("dp=2 fsdp=2 zero=1", ["replica 1 of 2", "shard 1 of 2", "between replicas"]),
            ("dp=2 shares=4,1", ["samples 0:8", "samples 8:10"]),
            ("dp=2 fsdp=2 shares=auto", ["samples 0:3 at first", "samples 8:10 at first"]),
            ("server=2 dp=2", ["2 servers", "5 samples a piece", "1/2 of the parameters", "lack no update"]),
            ("server=1 dp=3 backup=1 compress=int8", ["all parameters", "2 of its 3 pieces", "as int8"]),
            ("dp=2 sync=local every=5 after=9", ["first 9 steps", "steps by itself", "every 5 steps", "averaged"]),
            ("dp=2 fsdp=2 sync=diloco every=8", ["shard 1 of 2", "nesterov"]),
        ],
    )
    def test_says_who_holds_what(self, plan: str, words: list[str]) -> None:
        text = draw(Plan.parse(plan), batch=10, device="cpu", width=80)
        assert [word for word in words if word not in text] == []
        assert max(len(line) for line in text.splitlines()[1:]) <= 80  # the first holds the plan, as long as that is
