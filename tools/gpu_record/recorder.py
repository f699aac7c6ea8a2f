"""Run steps, each in a process of its own with a time limit, and keep the record on the disk whole at every moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
TRAINING = ("llama_1b", "gpt2_124m", "resnet50", "bert_base", "lora_8b")  # steps of steps/training.py
_POLL = 0.1  # seconds between looks at a step
_KEEP = 2.0  # seconds that are kept back for writing the record
_LONGEST = 20_000  # characters of a traceback


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step to be run.

    Attributes:
        limit: seconds after which it is killed.
        least: seconds below which it is not worth starting.
        gib: memory of the device that it needs.
        command: of its process; ``{messages}``, ``{record}`` and ``{limit}`` are filled in.
    """

    name: str
    limit: float
    command: tuple[str, ...]
    least: float = 5.0
    gib: float = 0.0


@dataclass(kw_only=True)
class Record:
    """The record and its file.

    Attributes:
        header: all keys but ``steps``, ``seconds`` and ``complete``.
        until: moment of the monotonic clock at which everything has ended.
    """

    path: Path
    header: dict[str, Any]
    until: float
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.until - time.monotonic() - _KEEP

    def write(self, *, complete: bool = False) -> None:
        """Replace the file: at every moment it is the old record or the new one."""
        whole = {**self.header, "seconds": round(time.monotonic() - self.begun, 1), "complete": complete}
        whole["steps"] = [{key: one for key, one in step.items() if key[0] != "_"} for step in self.steps]
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)


class Stopped(BaseException):
    """A signal asked the whole programme to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_steps(
    record: Record, steps: Sequence[PlannedStep], memory: float | None, environment: Mapping[str, str] | None = None
) -> int:
    """Run ``steps`` in order and record each; return the exit code: 0, 1 if a step failed, 130 or 143 by a signal.

    Args:
        memory: bytes of the device; ``None`` if not known, and then no step is left out for it.
        environment: of the steps' processes.
    """
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    record.steps = [_empty(step) for step in steps]
    record.write()
    try:
        for planned, entry in zip(steps, record.steps, strict=True):
            _run_step(record, planned, entry, memory, dict(environment or os.environ))
        record.write(complete=True)
    except Stopped as stopped:
        for entry in record.steps:
            if entry["status"] in ("running", "skipped"):
                entry["reason"] = entry["reason"] or f"stopped by {signal.Signals(stopped.number).name}"
                entry["status"] = "failed" if entry["status"] == "running" else "skipped"
        record.write()
        return 128 + stopped.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 1 if any(entry["status"] in ("failed", "timed out") for entry in record.steps) else 0


def _stop(number: int, frame: object) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # a second one must not disturb the last write
    raise Stopped(number)


def _empty(step: PlannedStep) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": step.name, "status": "skipped", "limit": round(step.limit, 1), "seconds": 0.0}
    return {**entry, "reason": "", "traceback": "", "facts": {}, "rows": [], "_keys": []}


def _run_step(
    record: Record, planned: PlannedStep, entry: dict[str, Any], memory: float | None, environment: dict[str, str]
) -> None:
    if memory is not None and memory < planned.gib * 2**30:
        entry["reason"] = f"needs {planned.gib:g} GiB of device memory, and there are {memory / 2**30:.1f} GiB"
    elif record.left < planned.least:
        entry["reason"] = f"{max(0.0, record.left):.0f} s are left, and it needs at least {planned.least:.0f} s"
    if entry["reason"]:
        record.write()
        return
    limit = min(planned.limit, record.left)
    entry |= {"status": "running", "limit": round(limit, 1)}
    record.write()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-record-") as name:
        messages, output = Path(name, "messages"), Path(name, "output")
        messages.touch()
        filled = {"messages": str(messages), "record": str(record.path.absolute()), "limit": f"{limit:.1f}"}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [_fill(word, filled) for word in planned.command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": name},  # what a killed step leaves there goes with it
                start_new_session=True,
            )
            try:
                code = _wait(process, begun + limit, lambda: _read_messages(messages, record, entry))
            finally:
                _kill(process)
                entry["seconds"] = round(time.monotonic() - begun, 2)
        _read_messages(messages, record, entry)
        _judge(entry, code, limit, output.read_text(encoding="utf-8", errors="replace"))
    record.write()


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def _wait(process: subprocess.Popen[bytes], until: float, look: Callable[[], object]) -> int | None:
    """Wait for ``process`` and return its exit code, or ``None`` once ``until`` has passed."""
    while time.monotonic() < until:
        try:
            return process.wait(timeout=min(_POLL, max(0.01, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            look()
    return process.poll()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the step's process and all of its group; also processes that a finished step left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_messages(messages: Path, record: Record, entry: dict[str, Any]) -> None:
    """Take new lines of a step into its entry, and write the record if there are any."""
    with messages.open("rb") as file:
        file.seek(entry.get("_read", 0))
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    entry["_read"] = entry.get("_read", 0) + len(whole)
    for line in whole.splitlines():
        try:
            _take(json.loads(line, parse_constant=lambda _: None), entry)  # NaN is no JSON
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a step that dies while it writes costs that line
    if whole:
        record.write()


def _take(message: dict[str, Any], entry: dict[str, Any]) -> None:
    entry["facts"].update(message.get("facts", {}))
    if "note" in message:
        entry["facts"]["note"] = " ".join(filter(None, [entry["facts"].get("note", ""), message["note"]]))
    if "skip" in message:
        entry["_skip"] = message["skip"]
    if "traceback" in message:
        entry["traceback"] = message["traceback"][-_LONGEST:]
    if "row" in message:
        key, values = message["row"], dict(message["values"])
        if key in entry["_keys"]:
            entry["rows"][entry["_keys"].index(key)].update(values)
        else:
            entry["_keys"].append(key)
            entry["rows"].append(values)


def _judge(entry: dict[str, Any], code: int | None, limit: float, output: str) -> None:
    """Set the status of a step that has ended, and why."""
    if code is None:
        entry |= {"status": "timed out", "reason": f"killed after {limit:.0f} s, its time limit"}
        if lines := entry["traceback"].strip().splitlines():
            entry["reason"] += f", as it ended by {lines[-1].strip()}"
        return
    if code == 0:
        entry |= {"status": "skipped" if "_skip" in entry else "done", "reason": entry.get("_skip", "")}
        entry["traceback"] = ""
        return
    text = entry["traceback"] or output[max(0, output.rfind("Traceback (most recent call last)")) :][-_LONGEST:]
    died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = died if code < 0 or not lines else lines[-1]
    entry |= {"status": "failed", "reason": reason, "traceback": text or died}
