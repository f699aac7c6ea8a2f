"""The event log: whole lines, a schema, readers of a log that grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.events import EventLog, EventReader, faults, read

pytestmark = pytest.mark.quick


def test_events_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        log.write("warning", message="a")
        log.write("resume", step=3, path="checkpoints/step-00000003")
    events = list(read(path))
    assert [event["event"] for event in events] == ["warning", "resume"]
    assert [faults(event) for event in events] == [[], []]


def test_a_reader_waits_for_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.new() == []
    path.write_text('{"event": "warning"}\n{"event": "wa')
    assert len(reader.new()) == 1
    assert reader.new() == []
    with path.open("a") as file:
        file.write('rning"}\n')
    assert len(reader.new()) == 1


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log:
        log.write("end", step=1, samples=1, seconds=1.0, loss=float("nan"))
    assert next(iter(read(tmp_path / "e")))["loss"] is None


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    for _ in range(2):
        with EventLog(tmp_path / "e") as log:
            log.write("warning", message="x")
    assert len(list(read(tmp_path / "e"))) == 2


def test_numbers_that_json_lacks_become_null_at_any_depth(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log:
        log.write("evaluate", step=1, loss=float("inf"), samples=2, seconds=1.0, metrics={"accuracy": float("nan")})
    (event,) = read(tmp_path / "e")
    assert (event["loss"], event["metrics"]) == (None, {"accuracy": None})
    assert faults(event) == []


def test_a_line_left_half_written_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b'{"event": "warning", "message": "whole"}\n{"event": "warning", "mess')
    with EventLog(tmp_path / "e") as log:
        log.write("warning", message="next")
    assert [event["message"] for event in read(tmp_path / "e")] == ["whole", "next"]


class ShortWrites:
    """A file that takes three bytes a call."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: Any) -> int:
        return self._file.write(bytes(content[:3]))

    def close(self) -> None:
        self._file.close()


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log:
        log._file = ShortWrites(log._file)  # pyright: ignore
        log.write("warning", message="a message of more than three bytes")
    assert [event["message"] for event in read(tmp_path / "e")] == ["a message of more than three bytes"]


def test_faults() -> None:
    assert faults({"event": "colour"}) == ["unknown event 'colour'"]
    assert faults({"event": "warning", "time": 1.0, "message": 3}) == ["warning: 'message' is 3"]
    assert faults({"event": "warning", "time": 1.0, "message": "m", "x": 1}) == ["warning: unknown field 'x'"]
    assert faults({"event": "warning", "time": 1.0}) == ["warning: 'message' is missing"]
