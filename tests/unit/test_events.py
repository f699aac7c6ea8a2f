"""The event log: whole lines, a schema, readers of a log that grows."""

from __future__ import annotations

from pathlib import Path

from phalanx.events import EventLog, EventReader, faults, read


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


def test_faults() -> None:
    assert faults({"event": "colour"}) == ["unknown event 'colour'"]
    assert faults({"event": "warning", "time": 1.0, "message": 3}) == ["warning: 'message' is 3"]
    assert faults({"event": "warning", "time": 1.0, "message": "m", "x": 1}) == ["warning: unknown field 'x'"]
    assert faults({"event": "warning", "time": 1.0}) == ["warning: 'message' is missing"]
