"""``phalanx status`` and ``logs`` of runs in each state: what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from phalanx.cli import main, status
from phalanx.events import EventLog
from phalanx.files import Token, release, take
from phalanx.launch import targets
from phalanx.report import run_standing

pytestmark = pytest.mark.quick
START: dict[str, Any] = {
    "event": "start",
    "time": 1.0,
    "schema": "1.10",
    "job": "j",
    "plan": "dp=2",
    "world_size": 2,
    "device": "cpu",
    "batch": 3,
    "total_steps": 20,
    "first_step": 0,
    "parameters": 1,
    "notes": [],
}


def run_of(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (START, *events)))
    return folder


def step(number: int) -> dict[str, Any]:
    beside = {"epoch": 0, "count": 3, "samples": 3, "seconds": 0.1, "lr": 0.1, "grad_norm": 1.0, "skipped": False}
    return {"event": "step", "time": 2.0, "step": number, "loss": 0.5, **beside}


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


class TestStatus:
    def test_steps_are_counted_as_progress_counts_them(self, tmp_path: Path) -> None:
        run_of(tmp_path, step(0), step(1))
        said = " ".join(invoke("status", str(tmp_path)).stdout.split())
        assert "steps 2 of 20 loss 0.5" in said
        assert "plan dp=2" in said
        told = json.loads(invoke("status", str(tmp_path), "--json").stdout)
        assert (told["step"], told["steps"], told["plan"]) == (1, 20, "dp=2")

    def test_one_that_stops_as_its_log_is_read_goes_on_or_has_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not that its log has no end."""
        run_of(tmp_path, step(0))
        read, trained = run_standing._events, [True]

        def read_and_stop(folder: Path) -> list[dict[str, Any]]:
            found = read(folder)
            run_of(folder, step(0), {"event": "stopped", "time": 3.0, "step": 1, "signal": "SIGTERM"})
            trained.clear()
            return found

        monkeypatch.setattr(run_standing, "is_written", lambda folder: bool(trained))
        monkeypatch.setattr(run_standing, "_events", read_and_stop)
        assert [run_standing.run_standing(tmp_path).state for _ in range(2)] == ["running", "stopped"]

    def test_one_that_has_not_begun_leads_to_what_was_printed(self, tmp_path: Path) -> None:
        (tmp_path / "launch").mkdir()
        done = invoke("status", str(tmp_path), "--json")
        assert done.exit_code == 0
        assert json.loads(done.stdout)["detail"] == f"it has not begun; phalanx logs {tmp_path}"

    def test_one_that_ends_while_it_is_looked_at_does_not_lack_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        done = invoke("status", str(tmp_path))
        assert done.exit_code == 2
        assert "in which there is no run" in done.stderr
        assert f"try: ls {tmp_path}" in done.stderr


class TestLogs:
    def test_a_run_that_has_printed_nothing(self, tmp_path: Path) -> None:
        done = invoke("logs", str(run_of(tmp_path, step(0))))
        assert (done.exit_code, done.stdout) == (0, "")
        assert f"its workers have printed nothing\n    phalanx status {tmp_path}" in done.stderr

    def test_a_rank_that_has(self, tmp_path: Path) -> None:
        (run_of(tmp_path) / "launch").mkdir()
        (tmp_path / "launch" / "rank-1.log").write_text("hello\n")
        assert invoke("logs", str(tmp_path), "--rank", "1").stdout == "hello\n"
        assert "rank 0 has printed nothing" in invoke("logs", str(tmp_path), "--rank", "0").stderr

    def test_a_file_that_comes_while_it_is_waited_for_is_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of pods whose volume is not seen here: first there is neither what they print nor what workers leave."""
        files = [tmp_path / "rank-1.log", tmp_path / "pods-rank-1.log"]
        (run_of(tmp_path) / files[1]).write_text("hello\n")
        monkeypatch.setattr(targets, "log_of", lambda *_: files.pop(0))
        monkeypatch.setattr(status, "_SOON", 0.001)
        assert invoke("logs", str(tmp_path), "--rank", "1", "--follow").stdout == "hello\n"

    def test_a_rank_that_is_not_there(self, tmp_path: Path) -> None:
        done = invoke("logs", str(run_of(tmp_path)), "--rank", "7")
        assert done.exit_code == 2
        assert "given 7; allowed: 0 to 1" in done.stderr

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        done = invoke("logs", str(tmp_path))
        assert done.exit_code == 2
        assert "in which there is no run" in done.stderr
