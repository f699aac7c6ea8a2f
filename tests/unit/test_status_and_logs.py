"""``phalanx status`` and ``logs`` of runs in each state: what they say, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from tqdm import tqdm

import phalanx as px
from phalanx.cli import main, run_verbs
from phalanx.errors import RunError
from phalanx.events import EventLog, RunLog
from phalanx.files import Token, release, take
from phalanx.launch.targets import handed_over
from phalanx.launch.targets.target import QueueTarget, Standing
from phalanx.launch.worker_process import OutputRelay, leave_warnings_to_rank_0
from phalanx.report import run_standing
from phalanx.train.user_traceback import format_for_user, origin, users_frames

pytestmark = pytest.mark.quick
START: dict[str, Any] = {"event": "start", "time": 1.0, "schema": "1.10", "job": "j", "plan": "dp=2", "world_size": 2}
START |= {"device": "cpu", "batch": 3, "total_steps": 20, "first_step": 0, "parameters": 1, "notes": []}


def run_of(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (START, *events)))
    return folder


def step(number: int) -> dict[str, Any]:
    beside = {"epoch": 0, "count": 3, "samples": 3, "seconds": 0.1, "lr": 0.1, "grad_norm": 1.0, "skipped": False}
    return {"event": "step", "time": 2.0, "step": number, "loss": 0.5, **beside}


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_the_outcome_of_a_run_is_that_of_its_last_start(tmp_path: Path) -> None:
    told: dict[str, dict[str, Any]] = {"start": START, "warning": {"message": "m"}, "resume": {"step": 3, "path": ""}}
    told["error"] = {"rank": 0, "step": 3, "kind": "ValueError", "message": "wrong", "lost": False}
    told["stopped"] = {"step": 3, "signal": "SIGTERM"}
    told["end"] = {"step": 9, "samples": 27, "seconds": 1.0, "loss": 0.5}
    cases = {"": "unknown", "end warning": "ended", "error": "failed", "stopped": "stopped", "error resume": "unknown"}
    for words, outcome in {**cases, "end start": "unknown", "stopped start end": "ended"}.items():
        run = RunLog(run_of(tmp_path, *({"time": 1.0, **told[word], "event": word} for word in words.split())))
        assert (run.outcome, run.ended_since(0.0)) == (outcome, "end" in words.split()), words
        assert [event["event"] for event in run.part] == ["start", *words.split("start")[-1].split()]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "events.jsonl").symlink_to(tmp_path / "events.jsonl")
    assert (RunLog(tmp_path / "linked").outcome, RunLog(tmp_path / "none").outcome) == ("", "")


class TestStatus:
    def test_steps_are_counted_as_progress_counts_them(self, tmp_path: Path) -> None:
        run_of(tmp_path, step(0), step(1))
        said = " ".join(invoke("status", str(tmp_path)).stdout.split())
        assert "steps 2 of 20 loss 0.5" in said
        assert "plan dp=2" in said
        told = json.loads(invoke("status", str(tmp_path), "--json").stdout)
        assert (told["step"], told["steps"], told["plan"]) == (1, 20, "dp=2")

    def test_one_that_has_not_begun_leads_to_what_was_printed(self, tmp_path: Path) -> None:
        (tmp_path / "launch").mkdir()
        done = invoke("status", str(tmp_path), "--json")
        assert done.exit_code == 0
        assert json.loads(done.stdout)["detail"] == f"it has not begun; phalanx logs {tmp_path}"

    def test_one_that_ends_while_it_is_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        token = take(run_of(tmp_path, step(0)))

        def events(folder: Path, own: Any = run_standing._events) -> list[dict[str, Any]]:
            found = own(folder)
            with EventLog(folder / "events.jsonl") as log:
                log.write("end", step=1, samples=3, seconds=1.0, loss=0.5)
            release(token)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(run_standing, "_events", events)
            assert run_standing.run_standing(tmp_path).state == "running"
        assert run_standing.run_standing(tmp_path).state == "ended"

    def test_one_that_begins_while_it_is_looked_at_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        begun: list[Token] = []

        def events(folder: Path, own: Any = run_standing._events) -> list[dict[str, Any]]:
            begun.append(take(run_of(folder)))
            return own(folder)

        (tmp_path / "launch").mkdir()
        monkeypatch.setattr(run_standing, "_events", events)
        assert run_standing.run_standing(tmp_path).state == "running"
        release(*begun)

    def test_one_that_its_target_knows_nothing_of_is_asked_to_stop(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = create_autospec(QueueTarget, instance=True)
        target.standing.return_value = Standing(state="unknown")
        monkeypatch.setattr(run_standing, "_ticket", lambda folder: (target, {"to": "slurm"}))
        assert not run_standing.stop_run(run_of(tmp_path, step(0)))
        target.stop.assert_called_once_with({"to": "slurm"}, tmp_path)

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        done = invoke("status", str(tmp_path))
        assert done.exit_code == 2
        assert "in which there is no run" in done.stderr
        assert f"try: ls {tmp_path}" in done.stderr


def test_stop_signals_only_who_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, sent = take(run_of(tmp_path)), list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    assert run_standing.stop_run(tmp_path)
    assert sent.pop() == (os.getpid(), signal.SIGTERM)
    path = tmp_path / "writer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": os.getppid()}))
    with pytest.raises(RunError, match="does not hold its lock"):
        run_standing.stop_run(tmp_path)
    assert not any(number for _, number in sent)
    release(token)


class TestLogs:
    def test_nothing_that_was_printed_steers_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        run_verbs.show_output("a\x1b]0;evil\x07\rb\n")
        assert capsys.readouterr().out == "a\\x1b]0;evil\\x07\nb\n"

    def test_no_link_and_no_fifo_is_read(self, tmp_path: Path) -> None:
        path = run_of(tmp_path) / "launch" / "output.log"
        path.parent.mkdir()
        for kind in ("link", "FIFO"):
            path.symlink_to(tmp_path / "events.jsonl") if kind == "link" else os.mkfifo(path)
            done = invoke("logs", str(tmp_path))
            assert (done.exit_code, done.stdout) == (2, "")
            assert kind in done.stderr
            path.unlink()

    def test_a_run_that_has_printed_nothing(self, tmp_path: Path) -> None:
        done = invoke("logs", str(run_of(tmp_path, step(0))))
        assert (done.exit_code, done.stdout) == (0, "")
        assert f"its workers have printed nothing\n    phalanx status {tmp_path}" in done.stderr

    def test_a_file_that_comes_late_is_followed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As of pods whose volume is not seen here: first there is neither what they print nor what workers leave."""
        files = [tmp_path / "rank-1.log", tmp_path / "pods-rank-1.log"]
        (run_of(tmp_path) / files[1]).write_text("hello\n")
        monkeypatch.setattr(handed_over, "log_of", lambda *_: files.pop(0))
        monkeypatch.setattr(run_verbs, "_SOON", 0.001)
        assert invoke("logs", str(tmp_path), "--rank", "1", "--follow").stdout == "hello\n"

    def test_a_rank_that_is_not_there(self, tmp_path: Path) -> None:
        done = invoke("logs", str(run_of(tmp_path)), "--rank", "7")
        assert done.exit_code == 2
        assert "given 7; allowed: 0 to 1" in done.stderr


def printed(rank: int, pieces: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    relay = OutputRelay(rank, "stdout")
    for piece in pieces:
        relay.feed(piece.encode())
    relay.close()
    return capsys.readouterr().out


def test_other_ranks_print_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(1, ["one\ntw", "o\nthree"], capsys) == "[rank 1] one\n[rank 1] two\n[rank 1] three\n"
    assert printed(0, ["one\ntw", "o"], capsys) == "one\ntwo"


def test_a_progress_bar_is_drawn_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in tqdm(range(3), desc="Loading weights", file=sys.stdout, mininterval=0):
        pass
    bar = capsys.readouterr().out
    assert "100%" in bar
    assert printed(0, [bar], capsys) == bar
    assert (
        printed(1, ["before\n", bar, "\nafter\n"], capsys).replace("[rank 1] \n", "")
        == "[rank 1] before\n[rank 1] after\n"
    )
    assert printed(1, [bar], capsys) == ""


def test_other_ranks_leave_the_warnings_of_libraries_to_rank_0() -> None:
    def said(rank: int, module: str) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            leave_warnings_to_rank_0(rank)
            warnings.warn_explicit("tied", UserWarning, "a.py", 1, module=module)
        return len(caught)

    assert [said(0, "peft.tuners.lora"), said(1, "peft.tuners.lora"), said(1, "mine.model")] == [1, 0, 1]


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.layer(x[:, :3])
        except RuntimeError as error:
            raise ValueError("of three columns") from error


def test_frames_of_phalanx_and_of_module_calls_are_left_out() -> None:
    def work() -> None:
        nn.Sequential(Narrow())(torch.ones(2, 4))

    with pytest.raises(ValueError, match="three columns") as caught:
        px.build(_job(work), "single")
    text = format_for_user(caught.value)
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    assert not any("_call_impl" in line or ("/phalanx/" in line and "/tests/" not in line) for line in frames)
    assert "frames of Phalanx and PyTorch are left out" in text
    assert "RuntimeError: mat1 and mat2" in text
    assert text.index("RuntimeError: mat1") < text.index("direct cause") < text.index("ValueError: of three columns")
    assert "self.layer(x[:, :3])" in text
    assert users_frames(caught.value)[-1].name == "forward"


def _job(work: object) -> px.Job:
    def model() -> nn.Module:
        assert callable(work)
        work()
        return nn.Linear(1, 1)

    return px.Job(
        model=model,
        data=lambda: [(torch.ones(1),)],
        loss=lambda output, batch: output.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=1,
        steps=1,
    )


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (px.__file__, "phalanx"),
        (torch.__file__, "torch"),
        (pytest.__file__, "library"),
        ("<frozen importlib._bootstrap>", "library"),
        ("<ipython-input-3-1f2e>", "user"),
        (f"{Path(px.__file__).parent}/demo/jobs/images.py", "user"),
        (__file__, "user"),
    ],
)
def test_whose_code_a_file_is(file: str, whose: str) -> None:
    assert origin(file) == whose
