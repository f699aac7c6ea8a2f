"""The forecast of a run beside its measurement, part by part, and runs beside each other; as tables."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.run_files import RUN_TOML
from phalanx.errors import SpecError
from phalanx.events import RunLog
from phalanx.files import read_json, read_toml
from phalanx.units import show_bytes, show_counted, show_seconds

if TYPE_CHECKING:  # processes that only write a forecast down load no tables
    from rich.console import RenderableType

    from phalanx.report.summary import RunSummary

FORECAST = "forecast.json"
"""The file of a run folder with its forecast, or with the reason why it is missing."""

LATE = "the run was over before its forecast was made"
"""The reason in short runs."""

COMPUTING = ("products", "attention", "memory", "recompute", "launches")
"""Parts of a forecast step in which a rank computes."""

_SHORT = 10.0  # seconds of steps: a shorter run does not mention a missing forecast
_AFTER = ("update", "rest")  # forward and backward
_MOST = 1e30  # of any forecast number
_SMALL = 0.005  # of a step: smaller forecast parts are shown only if they were measured
_HELD = ("parameters", "gradients", "optimizer", "activations")
_OWN_TO_A_RUN = {"event", "time", "plan", "folder", "resume", "notes", "first_step"}
_NUMBERS = ("forecast", "measured", "forecast / measured")  # headings
_WORDS = {
    "whole": "time per step",
    "passes": "  forward and backward",
    "computing": "    computing",
    "update": "  update",
    "rest": "  data and logging",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One quantity, forecast and measured; ``None`` if not known.

    Attributes:
        what: ``step``, in seconds, or ``memory``, in bytes.
        part: of it; ``whole`` for all.
    """

    what: str
    part: str
    forecast: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Forecast over measured; ``None`` if one of them is missing or zero."""
        return self.forecast / self.measured if self.forecast and self.measured else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def stored(folder: Path, plan: str = "") -> dict[str, Any] | None:
    """Return the content of ``forecast.json``: a ``forecast``, or why it is ``missing``; ``None`` without the file.

    ``plan``: plan of the run's last part; a forecast of another plan counts as missing.
    """
    path = folder / FORECAST
    if not os.path.lexists(path):
        return None
    try:
        found = read_json(path, where=FORECAST, fix=f"mv {path} {path}.away", below=1)
    except SpecError as error:
        return {"missing": f"{FORECAST} cannot be used (given {error.problems[0].given})"}
    if not _is_forecast(found):
        return {"missing": f"{FORECAST} is not as a run writes it"}
    made_for = (found.get("forecast") or {}).get("plan")
    if plan and made_for not in (None, plan):
        return {"missing": f"it was made for {made_for}, and the run has gone on under {plan}"}
    return found


def _is_forecast(found: Any) -> bool:
    """Return True if it holds a forecast with all fields that are read here, or a reason why it is missing."""
    if not isinstance(found, dict) or not isinstance(found.get("missing", ""), str):
        return False
    forecast = found.get("forecast")
    if forecast is None:
        return "missing" in found
    if not isinstance(forecast, dict):
        return False
    seconds, parts, notes = forecast.get("seconds"), forecast.get("parts"), forecast.get("notes", [])
    numbers = [forecast.get(name) for name in ("step", "reserved", "room")]
    for table, names in ((seconds, (*COMPUTING, *_AFTER)), (parts, _HELD)):
        if not isinstance(table, dict) or any(name not in table for name in names):
            return False
        numbers += table.values()
    said = isinstance(notes, list) and all(isinstance(note, str) for note in notes)
    return said and all(isinstance(one, int | float) and abs(one) < _MOST for one in numbers)


def step_beside(forecast: Mapping[str, Any], measured: Mapping[str, float]) -> list[Compared]:
    """Return the seconds of a step by part, of a stored ``forecast`` and ``measured``.

    ``measured``: seconds of ``whole`` and of the timed parts: ``passes`` (forward and backward with their waits),
    ``computing`` and ``pipeline`` within them, ``update`` and ``rest``.
    """
    seconds = forecast["seconds"]
    computing = sum(seconds[name] for name in COMPUTING)
    waiting = {name: each for name, each in seconds.items() if name not in (*COMPUTING, *_AFTER)}
    within = {"computing": computing, **waiting}
    parts = {"whole": forecast["step"], "passes": sum(within.values()), **within}
    parts |= {name: seconds[name] for name in _AFTER}
    return [
        Compared(what="step", part=part, forecast=each, measured=measured.get(part))
        for part, each in parts.items()
        if part == "whole" or part in measured or each > _SMALL * forecast["step"]
    ]


def memory_beside(forecast: Mapping[str, Any], ranks: Sequence[Mapping[str, int]]) -> list[Compared]:
    """Return the bytes of each part on the rank with most of it; ``ranks``: the ``memory`` event of each rank."""
    if not ranks:
        return []
    held = dict(forecast["parts"])  # each at its own peak, as it is measured
    held["parameters"] += held.get("gathered", 0.0)  # measured parameters are those that were gathered, too
    most = {part: max(rank[part] for rank in ranks) for part in _HELD}
    return [Compared(what="memory", part=part, forecast=held[part], measured=float(most[part])) for part in _HELD]


def under_forecast(rows: Sequence[Compared]) -> Compared | None:
    """Return the part of memory with the most bytes above its forecast; ``None`` if none is above."""
    short = [one for one in rows if one.what == "memory" and (one.measured or 0.0) > (one.forecast or 0.0)]
    return max(short, key=lambda one: (one.measured or 0.0) - (one.forecast or 0.0), default=None)


def runs_beside(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the results of each run, the settings that differ, and the first step with different losses."""
    from phalanx.report.summary import summarise

    found, told, each_loss = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[int, float | None]]()
    for folder in folders:
        summary, log = summarise(folder), RunLog(folder)
        evaluated = log.named("evaluate")
        least = min((event["loss"] for event in evaluated if event["loss"] is not None), default=None)
        row = {"plan": summary.plan, "steps": summary.step, "loss": summary.loss, "best loss of evaluations": least}
        row |= {f"last {name}": value for event in evaluated[-1:] for name, value in event["metrics"].items()}
        found.append(row | {"seconds": summary.seconds, "samples/s": summary.samples_per_second})
        stated = read_toml(folder / RUN_TOML, where=RUN_TOML, fix=f"phalanx show {folder}", below=1)
        told.append({name: one for name, one in (log.part[0] | stated).items() if name not in _OWN_TO_A_RUN})
        each_loss.append({event["step"]: event["loss"] for event in log.named("step")})
    differing = {name: [one.get(name) for one in told] for one in told for name in one}
    settings = {name: those for name, those in differing.items() if any(one != those[0] for one in those)}
    common = sorted(set[int].intersection(*map(set, each_loss)))
    parted = (step for step in common if not _alike(*(one[step] for one in each_loss)))
    runs = [str(one) for one in folders]
    return {"runs": runs, "rows": found, "settings": settings, "differ_from": next(parted, None)}


def _alike(one: float | None, other: float | None) -> bool:
    """Return True for losses that differ by rounding alone; the log has null for a loss that is not finite."""
    return one is other if one is None or other is None else math.isclose(one, other, rel_tol=1e-4)


def runs_table(told: Mapping[str, Any]) -> RenderableType:
    """Return the table of ``runs_beside``, a column a run."""
    from rich.console import Group

    from phalanx.report.render import table

    values = {name: [one.get(name) for one in told["rows"]] for row in told["rows"] for name in row} | told["settings"]
    rows = [{"": name, **dict(zip(told["runs"], map(_shown, each), strict=True))} for name, each in values.items()]
    step = told["differ_from"]
    return Group(table(rows), "losses do not differ" if step is None else f"losses differ from step {step + 1} on")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def beside_table(summary: RunSummary, *, brief: bool = False) -> Iterator[RenderableType]:
    """Yield forecast and measurement side by side, or why there is no forecast; nothing if none was asked for.

    ``brief``: count the notes of the forecast instead of listing them.
    """
    from rich.text import Text

    from phalanx.planner.explain import PARTS
    from phalanx.report.render import table

    if summary.forecast is None:
        return
    forecast = summary.forecast.get("forecast")
    if forecast is None:
        why, job = summary.forecast.get("missing", ""), "JOB"
        if why == LATE:
            if (summary.step - summary.first_step) * (summary.step_seconds or 0.0) < _SHORT:
                return
            with suppress(SpecError):
                job = read_toml(Path(summary.folder) / RUN_TOML, where=RUN_TOML, fix="--job JOB").get("job") or job
            why += f"; phalanx show {summary.folder} --job {shlex.quote(job)} makes it"
        yield Text(f"no forecast: {why}", style="dim")
        return
    rows: list[dict[str, str]] = []
    for row in summary.beside:
        show = show_bytes if row.what == "memory" else show_seconds
        name = _WORDS.get(row.part) or f"    {PARTS.get(row.part, row.part)}"
        told = {"": f"memory: {row.part}" if row.what == "memory" else name}
        forecast_and_measured = ("" if one is None else show(one) for one in (row.forecast, row.measured))
        numbers = (*forecast_and_measured, "" if row.ratio is None else f"{row.ratio:.2f}")
        rows.append(told | dict(zip(_NUMBERS, numbers, strict=True)))
    yield table(rows, numbers=_NUMBERS)
    notes = forecast.get("notes", ())
    if brief and notes:
        many = show_counted(len(notes), "note")
        yield Text(f"{many} on what the forecast leaves out: phalanx show {summary.folder}", style="dim")
    else:
        yield from (Text(f"note: {note}", style="dim") for note in notes)
