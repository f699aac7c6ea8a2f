"""Steps of a GPU record, and the reader that checks a record file before the page uses it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_record.recorder import SCHEMA

_NULL, _NUMBER, _TEXT = type(None), "number", "text"
_OPTIONAL = (_NULL, _NUMBER)
_FORECAST = {
    **dict.fromkeys(("step_seconds", "low_seconds", "high_seconds", "peak_bytes"), _OPTIONAL),
    "blame": (_NULL, _TEXT),
}
_TRAINING = {
    **dict.fromkeys(("model", "method", "plan", "rate_unit"), _TEXT),
    **dict.fromkeys(("step_seconds", "rate", "mfu", "peak_bytes", "time_error", "memory_error", "ratio"), _OPTIONAL),
    "rounds": [_OPTIONAL],
    "forecast": (_NULL, _FORECAST),
}


class RecordError(Exception):
    """A record file that cannot be used: one line with the file and the fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the programme.

    Attributes:
        measures: one line for readers.
        row: keys of each row and the form of their values; a key whose value may be null may also be missing.
    """

    title: str
    measures: str
    row: Mapping[str, Any] = field(default_factory=dict)


STEPS = {
    "environment": Step(
        title="Environment",
        measures="GPU, driver, CUDA, torch, clocks; TFLOP/s of a bf16 matrix product, GB/s of a copy",
    ),
    "overhead": Step(
        title="Step overhead",
        measures="a tiny MLP and a 10 M GPT beside a bare loop: time per step, host synchronisations per step",
        row={
            **dict.fromkeys(("model", "method"), _TEXT),
            **dict.fromkeys(("step_seconds", "steps", "host_waits_per_step", "ratio"), _OPTIONAL),
        },
    ),
    "proof": Step(
        title="Proofs",
        measures="`phalanx prove` of a GPT, a ResNet and a LoRA model under each plan: the largest difference",
        row={
            **dict.fromkeys(("model", "plan", "where", "reason"), _TEXT),
            "result": frozenset({"equal", "not equal", "refused", "failed"}),
            **dict.fromkeys(("difference", "seconds"), _OPTIONAL),
        },
    ),
    "llama_1b": Step(
        title="Llama, 1 B parameters",
        measures="tokens/s, MFU, peak memory of plain PyTorch and of Phalanx, eager and compiled; each forecast",
        row=_TRAINING,
    ),
    "gpt2_124m": Step(title="GPT-2, 124 M parameters", measures="the same as for the 1 B Llama", row=_TRAINING),
    "resnet50": Step(title="ResNet-50", measures="the same as for the 1 B Llama, in samples/s", row=_TRAINING),
    "bert_base": Step(title="BERT-base", measures="the same as for the 1 B Llama", row=_TRAINING),
    "lora_8b": Step(
        title="LoRA on 8 B parameters",
        measures="tokens/s and peak memory with recomputation; the forecast",
        row=_TRAINING,
    ),
    "checkpoint": Step(
        title="Checkpoint",
        measures="an asynchronous checkpoint of 4 GB: standstill, seconds, memory",
        row=dict.fromkeys(
            ("bytes", "standstill_seconds", "seconds", "peak_bytes_before", "peak_bytes_during", "host_bytes"),
            _OPTIONAL,
        ),
    ),
    "calibrate": Step(
        title="Calibration",
        measures="`phalanx calibrate`: forecast errors with the catalog and with the measured cluster file",
        row={
            **dict.fromkeys(("model", "method"), _TEXT),
            **dict.fromkeys(("measured_seconds", "forecast_catalog", "forecast_calibrated"), _OPTIONAL),
            **dict.fromkeys(("error_catalog", "error_calibrated"), _OPTIONAL),
        },
    ),
    "gpu_tests": Step(title="GPU tests", measures="`pytest -m gpu -x`: passed, failed, skipped"),
    "trace": Step(
        title="Trace of one step",
        measures="one step of the 1 B model: share of compute, launch gaps and host waits; the five costliest kernels",
        row={"kernel": _TEXT, "seconds": _OPTIONAL, "share": _OPTIONAL},
    ),
}
_STEP = {
    "name": frozenset(STEPS),
    "status": frozenset({"done", "failed", "timed out", "skipped", "running"}),
    **dict.fromkeys(("limit", "seconds"), _OPTIONAL),
    **dict.fromkeys(("reason", "traceback"), _TEXT),
    "facts": {},
}
_RECORD = {
    "started": _TEXT,
    **dict.fromkeys(("seconds", "minutes"), _OPTIONAL),
    "device": frozenset({"cuda", "cpu"}),
    **dict.fromkeys(("small", "complete"), "truth"),
    "phalanx": {"version": _TEXT, "commit": _TEXT},
    "steps": [_STEP],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One checked record file.

    Attributes:
        name: file name without its folder.
        content: content of the file.
    """

    name: str
    started: datetime
    content: Mapping[str, Any]

    @property
    def counts(self) -> bool:
        """True for full-size runs on a GPU; only these stand for Phalanx's speed."""
        return self.content["device"] == "cuda" and not self.content["small"]

    @property
    def steps(self) -> dict[str, Mapping[str, Any]]:
        return {step["name"]: step for step in self.content["steps"]}

    def facts(self, step: str) -> Mapping[str, Any]:
        """Return the facts of ``step``; empty if it did not run."""
        return self.steps.get(step, {}).get("facts", {})

    def rows(self, *steps: str) -> list[Mapping[str, Any]]:
        """Return all rows of ``steps``, in this order."""
        return [row for name in steps for row in self.steps.get(name, {}).get("rows", ())]


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records in ``paths``, newest first.

    Raises:
        RecordError: if a file is unreadable, no JSON, or not of this schema.
    """
    return sorted((_read(path) for path in paths), key=lambda record: record.started, reverse=True)


def _read(path: Path) -> Record:
    try:
        # NaN and infinities are no measurement.
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise RecordError(f"{path}: not a GPU record: it has no key 'schema'")
    if content["schema"] != SCHEMA:
        raise RecordError(f"{path}: schema {content['schema']!r}; this page reads schema {SCHEMA}")
    fault = next(_faults(content), "")
    if fault:
        raise RecordError(f"{path}: {fault}")
    try:
        started = datetime.fromisoformat(content["started"])
    except ValueError:
        raise RecordError(f"{path}: started is no time: {content['started']!r}") from None
    _fill(content, _RECORD)
    for step in content["steps"]:
        _fill(step, {"rows": [STEPS[step["name"]].row]})
    utc = started.astimezone(UTC) if started.tzinfo else started.replace(tzinfo=UTC)
    return Record(name=path.name, started=utc, content=content)


def _faults(content: Any) -> Iterator[str]:
    yield from _unlike(content, _RECORD, "the record")
    for step in content["steps"]:
        yield from _unlike(step, {"rows": [STEPS[step["name"]].row]}, f"step {step['name']}")
    names = [step["name"] for step in content["steps"]]
    yield from (f"step {name} is there twice" for name in STEPS if names.count(name) > 1)


def _fill(value: Any, form: Any) -> None:
    # A record made before a column was added has no value for it.
    if isinstance(form, list):
        for item in value:
            _fill(item, form[0])
    elif isinstance(form, tuple):
        if value is not None:
            _fill(value, form[1])
    elif isinstance(form, Mapping):
        for key, inner in form.items():
            if isinstance(inner, tuple):
                value.setdefault(key, None)
            _fill(value[key], inner)


def _unlike(value: Any, form: Any, where: str) -> Iterator[str]:
    if isinstance(form, Mapping):
        if not isinstance(value, Mapping):
            yield f"{where} is no object"
            return
        for key, inner in form.items():
            if key not in value:
                if not isinstance(inner, tuple):
                    yield f"{where} has no key {key!r}"
            else:
                yield from _unlike(value[key], inner, key if where == "the record" else f"{where}, {key}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{where} is no list"
            return
        for index, item in enumerate(value):
            yield from _unlike(item, form[0], f"{where}[{index}]")
    elif isinstance(form, tuple):
        if value is not None:
            yield from _unlike(value, form[1], where)
    elif isinstance(form, frozenset):
        if not isinstance(value, str) or value not in form:
            yield f"{where} is {value!r}, not one of {', '.join(sorted(form))}"
    elif not _has_kind(value, form):
        yield f"{where} is {value!r}, not a {form}"


def _has_kind(value: Any, kind: str) -> bool:
    if kind == _NUMBER:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, str if kind == _TEXT else bool)
