"""The event log: whole lines, a schema, a disk that is full, readers of a log that grows."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import SpecError
from phalanx.events import EventLog, EventReader, RunLog, faults

pytestmark = pytest.mark.quick


def test_events_come_back_in_order(tmp_path: Path) -> None:
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.write("warning", message="a")
        log.write("resume", step=3, path="checkpoints/step-00000003")
    events = RunLog(tmp_path / "run").events
    assert [event["event"] for event in events] == ["warning", "resume"]
    assert [faults(event) for event in events] == [[], []]


def test_a_reader_waits_for_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.new() == []
    path.write_text('{"event": "warning", "message": "a"}\n{"event": "wa')
    assert len(reader.new()) == 1
    assert reader.new() == []
    with path.open("a") as file:
        file.write('rning", "message": "b"}\n')
    assert len(reader.new()) == 1


def test_numbers_that_json_lacks_become_null_at_any_depth(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log:
        log.write("evaluate", step=1, loss=float("inf"), samples=2, seconds=1.0, metrics={"accuracy": float("nan")})
    (event,) = EventReader(tmp_path / "e").new()
    assert (event["loss"], event["metrics"]) == (None, {"accuracy": None})
    assert faults(event) == []


def test_a_line_left_half_written_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b'{"event": "warning", "message": "whole"}\n{"event": "warning", "mess')
    with EventLog(tmp_path / "e") as log:
        log.write("warning", message="next")
    assert [event["message"] for event in EventReader(tmp_path / "e").new()] == ["whole", "next"]


def messages(path: Path) -> list[str]:
    return [event["message"] for event in EventReader(path).new() if event["event"] == "warning"]


class TestFullDisk:
    def test_events_wait_and_are_written_when_there_is_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        disk = FullDisk(monkeypatch)
        with EventLog(tmp_path / "e") as log:
            log.write("warning", message="0")
            disk.room = 20
            for number in range(1, 4):
                log.write("warning", message=str(number))
            disk.room = 10**9
            log.write("warning", message="4")
        assert messages(tmp_path / "e") == ["0", "1", "2", "3", "4"]
        said = capsys.readouterr().err
        assert said.count("cannot be written: No space left on device") == 1, "said once"

    def test_only_the_newest_wait_and_the_log_says_how_many_were_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = FullDisk(monkeypatch)
        with EventLog(tmp_path / "e") as log:
            disk.room = 0
            for number in range(1500):
                log.write("warning", message=str(number))
            disk.room = 10**9
        lost, *rest = EventReader(tmp_path / "e").new()
        assert (lost["event"], lost["events"], lost["reason"]) == ("lost", 500, "No space left on device")
        assert faults(lost) == []
        assert [event["message"] for event in rest] == [str(number) for number in range(500, 1500)]


class TestStrangersLogs:
    def test_what_is_no_plain_file_is_not_written(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text("mine")
        made = {
            "link": lambda path: path.symlink_to(victim),
            "fifo": os.mkfifo,
            "folder": Path.mkdir,
            "second name": lambda path: os.link(victim, path),
        }
        for kind, make in made.items():
            path = tmp_path / kind
            make(path)
            with pytest.raises(SpecError, match="plain files only"):
                EventLog(path)
            if kind in ("link", "fifo"):
                with pytest.raises(SpecError, match="plain files only"):
                    EventReader(path).new()
        assert victim.read_text() == "mine"

    LINES = (
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"event": "warning"}',
        b'{"event": "warning", "message": 5}',
        b'{"event": "warning", "message": "a", "message": "b"}',
        b'{"event": "warning", "message": "a", "time": NaN}',
        b'{"event": "resume", "path": "x", "step": 1e999}',
        b'{"event": "resume", "path": "x", "step": -1}',
        b'{"event": "resume", "path": "x", "step": true}',
        b'{"event": "resume", "path": "x", "step": ' + b"9" * 5000 + b"}",
        b'{"event": "timeline", "rank": 0, "step": 1, "actions": [["F", 0, 0, "a", 1]]}',
        b'{"event": "timeline", "rank": 0, "step": 1, "actions": [[]]}',
        b'{"event": "evaluate", "step": 1, "loss": 1.0, "samples": 1, "metrics": {"a": []}, "seconds": 1}',
        b'{"event": "memory", "rank": 0, "peak_bytes": 1, "parameters": 1}',
        b'{"event": ["start"]}',
        b"7",
    )

    def test_a_line_that_is_no_event_is_counted_and_left_out(self, tmp_path: Path) -> None:
        whole = b'{"event": "warning", "message": "whole"}'
        for line in self.LINES:
            (tmp_path / "e").write_bytes(b"\n".join([whole, line, whole, b""]))
            reader = EventReader(tmp_path / "e")
            assert [event["message"] for event in reader.new()] == ["whole", "whole"], line[:60]
            assert reader.skipped == 1, line[:60]

    def test_events_and_fields_of_a_later_version_are_taken(self, tmp_path: Path) -> None:
        (tmp_path / "e").write_text('{"event": "later"}\n{"event": "warning", "message": "m", "since_later": [1]}\n')
        assert len(EventReader(tmp_path / "e").new()) == 2


class FullDisk:
    """``os.write`` on a disk that holds so many more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self._write = 10**9, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, content: Any) -> int:
        if len(content) and not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(content[: self.room])
        self.room -= len(part)
        return self._write(file, part)
