"""What becomes of an array of plans whose command is ended, or whose queue does not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from phalanx.cli import bench_queue
from phalanx.cli.bench_queue import QueueBench
from phalanx.config import Job, Plan
from phalanx.errors import RunError
from phalanx.launch.targets import TARGETS, ArrayTarget, Option, Prepared, Standing, Submission

pytestmark = pytest.mark.quick

PLANS = [Plan(), Plan(dp=2), Plan(dp=4)]
REFUSED = RunError("Slurm refuses it: slurm: warning: slow\nUnable to contact slurm controller\n    try: sinfo")


class Queue(ArrayTarget):
    """A queue that answers as a test says."""

    name = "queue"
    options: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, address: str) -> None:
        self.answers: list[Any] = []  # to looks at plans, in turn; the last again and again
        self.stopped: list[int] = []
        self.looks = 0

    def prepare(self, submission: Submission) -> Prepared:
        return Prepared(submission=submission, files={}, commands=())

    def prepare_array(self, submissions: Sequence[Submission], at_once: int) -> Prepared:
        return self.prepare(submissions[0])

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        raise NotImplementedError

    def submit_array(self, prepared: Prepared, count: int) -> Sequence[Mapping[str, Any]]:
        for number in range(count):
            (prepared.submission.run.folder.parent / str(number) / "launch").mkdir(parents=True)
        return [{"job": 7, "task": task} for task in range(count)]

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer()
            return Standing(state="running")
        if isinstance(answer, Exception):
            raise answer
        return Standing(state=answer)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        self.stopped.append(ticket["task"])
        if ticket["task"] == 1:
            raise REFUSED

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        return folder / "log"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setitem(TARGETS, "queue", "test_bench_queue:Queue")
    monkeypatch.setattr(bench_queue.time, "sleep", lambda seconds: None)
    return Queue("")


def measure(queue: Queue, folder: Path) -> Any:
    job = Job(name="job", model=list, data=list, loss=max, optimizer=list, batch=4, steps=3)
    how: dict[str, Any] = {"options": {}, "reference": "train.py", "at_once": 1}
    return QueueBench(target=queue, to="queue", folder=folder / "bench", job=job, plans=PLANS, **how).measure([])


def interrupted() -> None:
    raise KeyboardInterrupt


def ended() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("by", "raised"), [(interrupted, KeyboardInterrupt), (ended, SystemExit)])
def test_all_are_stopped_also_where_one_cannot_be_and_that_one_is_named(
    queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: Any, raised: type[BaseException]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    queue.answers = ["waiting", by]
    with pytest.raises(raised) as caught:
        measure(queue, tmp_path)
    assert getattr(caught.value, "code", 143) == 143
    assert queue.stopped == [2, 1, 0], "those first that wait"
    err = capsys.readouterr().err
    assert err.count("may still wait or run there") == 1
    assert "dp=2 may still wait or run there: Unable to contact slurm controller\n" in err
    assert f"try: phalanx stop {tmp_path}/bench/1" in err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_queue_that_answers_no_more_is_given_up_and_what_goes_on_is_said(queue: Queue, tmp_path: Path) -> None:
    queue.answers = ["running", REFUSED]
    with pytest.raises(RunError) as caught:
        measure(queue, tmp_path)
    assert queue.looks >= 30 * len(PLANS), "thirty looks at all of them"
    assert queue.stopped == []
    said = str(caught.value)
    assert said.startswith("queue has not answered 31 times: Unable to contact slurm controller; what it has goes on")
    assert f"try: the same command with --run {tmp_path}/bench, which finds it again" in said
    assert f"phalanx stop {tmp_path}/bench/0" in said


def test_one_answer_in_between_begins_the_count_anew(queue: Queue, tmp_path: Path) -> None:
    silence = [REFUSED] * len(PLANS) * 30
    queue.answers = [*silence, "running", *silence, "ended"]
    assert len(measure(queue, tmp_path).failed) == len(PLANS), "nothing was measured, and nothing was given up"
