"""Tables of a GPU record: one function per kind of step, and how numbers and texts become cells."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpu_record.page_records import STEPS
from gpu_record.recorder import TRAINING
from phalanx.units import show_bytes, show_count, show_number, show_seconds, visible

NONE = "–"
_LONGEST = 160  # characters of a reason
_SPECIAL = re.compile(r"([\\`*_\[\]|])")


def text(value: Any, longest: int = _LONGEST) -> str:
    """Return ``value`` as one line of Markdown that is safe in a cell; long text is cut."""
    line = visible(" ".join(str("" if value is None else value).split()))
    line = line if len(line) <= longest else line[: longest - 1] + "…"
    return _SPECIAL.sub(r"\\\1", line).replace("<", "&lt;") or NONE


def code(value: str) -> str:
    """Return ``value`` as a code span that is safe in a cell."""
    return f"`{' '.join(value.split())}`".replace("|", "\\|") if value.strip() and "`" not in value else text(value)


def shown(value: Any, form: Callable[[float], str]) -> str:
    """Return ``form(value)``, or a dash if the value is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return NONE
    return form(value)


def share(value: float) -> str:
    """Return ``47.2 %`` for ``0.472``."""
    return f"{100 * value:.1f} %"


def off(value: float) -> str:
    """Return ``-4.0 %`` for ``-0.04``; positive numbers have a sign, too."""
    return f"{100 * value:+.1f} %"


def ratio(value: float) -> str:
    """Return three digits after the point."""
    return f"{value:.3f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; a heading that begins with ``>`` is of a column of numbers."""
    names = " | ".join(name.removeprefix(">") for name in headings)
    rules = " | ".join("---:" if name.startswith(">") else "---" for name in headings)
    return ["", f"| {names} |", f"| {rules} |", *(f"| {' | '.join(row)} |" for row in rows), ""]


def step_lines(step: Mapping[str, Any]) -> list[str]:
    """Return the section of one step that ran: heading, why it is not whole, and its tables."""
    name = step["name"]
    lines = [f"### {STEPS[name].title}", ""]
    if step["status"] != "done":
        lines += [f"**{_status(step['status'])}** {text(step['reason'])}", ""]
    make = training if name in TRAINING else _MAKERS[name]
    return [*lines, *make(step["facts"], step["rows"])]


def status_table(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of all steps: status, seconds, limit, reason."""
    rows = [
        (
            STEPS[step["name"]].title,
            step["status"] if step["status"] == "done" else f"**{step['status']}**",
            shown(step["seconds"], lambda value: f"{value:.1f}"),
            shown(step["limit"], show_number),
            text(step["reason"]),
        )
        for step in steps
    ]
    return table(("step", "status", ">seconds", ">limit", "reason"), rows)


def _status(status: str) -> str:
    return {"running": "The record ends within this step."}.get(status, f"{status.capitalize()}:")


def _counted(value: float) -> str:
    return f"{value:,.0f}"


_FACTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("gpu", "GPU", show_number),
    ("gpus", "number of GPUs", _counted),
    ("memory_bytes", "memory of each", show_bytes),
    ("capability", "compute capability", str),
    ("driver", "driver", str),
    ("cuda", "CUDA", str),
    ("hip", "HIP", str),
    ("torch", "torch", str),
    ("python", "Python", str),
    ("cores", "CPU cores", _counted),
    ("sm_mhz", "clock of its processors", lambda value: f"{value:,.0f} MHz"),
    ("memory_mhz", "clock of its memory", lambda value: f"{value:,.0f} MHz"),
    ("power_limit_w", "power limit", lambda value: f"{value:.0f} W"),
    ("matmul_tflops", "matrix product", lambda value: f"{show_number(value)} TFLOP/s"),
    ("peak_tflops", "its peak in the catalog", lambda value: f"{show_number(value)} TFLOP/s"),
    ("copy_gbps", "copy within the device", lambda value: f"{show_number(value)} GB/s"),
)


def environment(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of the device."""
    cells = [
        (label, text(facts[key]) if isinstance(facts.get(key), str | list) else shown(facts.get(key), form))
        for key, label, form in _FACTS
    ]
    return table(("fact", "value"), cells) if facts else []


def overhead(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of small models beside a bare loop."""
    cells = [
        (
            text(row["model"]),
            text(row["method"]),
            shown(row["step_seconds"], show_seconds),
            shown(row["steps"], _counted),
            shown(row["host_waits_per_step"], show_number),
            shown(row["ratio"], ratio),
        )
        for row in rows
    ]
    headings = (
        "model",
        "method",
        ">time per step",
        ">steps",
        ">host synchronisations per step",
        ">times the bare loop",
    )
    return table(headings, cells) if rows else []


def proof(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the grid of plans and models, and the reasons of the proofs that are not equal."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    cell = {(row["plan"], row["model"]): _proof(row) for row in rows}
    grid = [(code(plan), *(cell.get((plan, model), NONE) for model in models)) for plan in plans]
    lines = table(("plan", *(text(model) for model in models)), grid) if rows else []
    why = [
        f"- {text(row['model'])}, {code(row['plan'])}, {row['result']}: {text(row['reason'])}"
        for row in rows
        if row["result"] != "equal" and row["reason"]
    ]
    head = [proof_summary(rows), "", "A cell holds the largest relative difference from one device."] if rows else []
    return [*head, *lines, *why, *([""] if why else [])]


def proof_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence: the number of proofs by result."""
    counts = {name: sum(row["result"] == name for row in rows) for name in ("not equal", "refused", "failed")}
    others = "".join(f", {count} {name}" for name, count in counts.items() if count)
    return f"{len(rows) - sum(counts.values())} of {len(rows)} proofs equal{others}."


def _proof(row: Mapping[str, Any]) -> str:
    result = row["result"] if row["result"] in ("equal", "refused") else f"**{row['result']}**"
    size = shown(row["difference"], lambda value: f", {value:.1e}")
    where = f" in {code(row['where'])}" if row["where"] else ""
    return f"{result}{'' if size == NONE else size}{where}"


def training(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of measured numbers, and the table of forecasts beside them."""
    head = [f"{key.replace('_', ' ')} {_fact(value)}" for key, value in facts.items() if _fact(value) != NONE]
    measured = [
        (
            text(row["model"]),
            text(row["method"]),
            code(row["plan"]),
            shown(row["rate"], lambda value, unit=row["rate_unit"]: f"{show_number(value)} {text(unit)}"),
            shown(row["step_seconds"], show_seconds),
            ", ".join(shown(each, show_seconds) for each in row["rounds"]) or NONE,
            shown(row["mfu"], share),
            shown(row["peak_bytes"], show_bytes),
            shown(row["ratio"], ratio),
        )
        for row in rows
    ]
    headings = (
        "model",
        "method",
        "plan",
        ">rate",
        ">time per step",
        "rounds",
        ">MFU",
        ">peak memory",
        ">of plain PyTorch",
    )
    lines = table(headings, measured) if rows else []
    return [*([f"{'; '.join(head)}."] if head else []), *lines, *_forecasts([row for row in rows if row["forecast"]])]


def _forecasts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        (
            f"{text(row['model'])}, {text(row['method'])}",
            shown(row["step_seconds"], show_seconds),
            shown(row["forecast"]["step_seconds"], show_seconds),
            " to ".join(shown(row["forecast"][key], show_seconds) for key in ("low_seconds", "high_seconds")),
            shown(row["time_error"], off),
            shown(row["peak_bytes"], show_bytes),
            shown(row["forecast"]["peak_bytes"], show_bytes),
            shown(row["memory_error"], off),
            text(row["forecast"]["blame"]),
        )
        for row in rows
    ]
    headings = ("row", ">time", ">forecast", ">4 of 5 within", ">error", ">memory", ">forecast", ">error", "bound by")
    return table(headings, cells) if rows else []


def checkpoint(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of asynchronous checkpoints."""
    cells = [
        (
            shown(row["bytes"], show_bytes),
            shown(row["standstill_seconds"], show_seconds),
            shown(row["seconds"], show_seconds),
            *(shown(row[key], show_bytes) for key in ("peak_bytes_before", "peak_bytes_during", "host_bytes")),
        )
        for row in rows
    ]
    headings = (">size", ">standstill", ">until written", ">peak before", ">peak during", ">host memory")
    return table(headings, cells) if rows else []


def calibrate(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of forecasts with and without the cluster file, and that file."""
    cells = [
        (
            f"{text(row['model'])}, {text(row['method'])}",
            shown(row["measured_seconds"], show_seconds),
            shown(row["forecast_catalog"], show_seconds),
            shown(row["error_catalog"], off),
            shown(row["forecast_calibrated"], show_seconds),
            shown(row["error_calibrated"], off),
        )
        for row in rows
    ]
    headings = ("row", ">measured", ">with the catalog", ">error", ">with the cluster file", ">error")
    took = shown(facts.get("seconds"), lambda value: f"`phalanx calibrate` took {show_seconds(value)}.")
    lines = [] if took == NONE else [took]
    return [*lines, *(table(headings, cells) if rows else []), *_block("toml", facts.get("cluster"))]


def gpu_tests(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the counts of ``pytest -m gpu`` and its last lines."""
    names = ("passed", "failed", "skipped", "errors")
    counts = table(names, [[shown(facts.get(name), _counted) for name in names]]) if facts else []
    return [*counts, *_block("text", facts.get("tail"))]


def trace(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the shares of one step's time, and its costliest kernels."""
    keys = ("compute_share", "launch_gap_share", "host_wait_share")
    cells = [shown(facts.get("step_seconds"), show_seconds), *(shown(facts.get(key), share) for key in keys)]
    lines = table((">time of the step", ">compute", ">launch gaps", ">host waits"), [cells]) if facts else []
    kernels = [
        (text(row["kernel"], 100), shown(row["seconds"], show_seconds), shown(row["share"], share)) for row in rows
    ]
    return [*lines, *(table(("kernel", ">time", ">share"), kernels) if rows else [])]


_MAKERS = {
    "environment": environment,
    "overhead": overhead,
    "proof": proof,
    "checkpoint": checkpoint,
    "calibrate": calibrate,
    "gpu_tests": gpu_tests,
    "trace": trace,
}


def _fact(value: Any) -> str:
    if isinstance(value, str):
        return text(value)
    return shown(value, lambda number: show_count(number) if abs(number) >= 1e6 else f"{number:,.10g}")


def _block(language: str, content: Any) -> list[str]:
    if not isinstance(content, str) or not content.strip():
        return []
    return ["", f"```{language}", visible(content).replace("```", "'''").strip("\n"), "```", ""]
