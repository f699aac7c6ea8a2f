"""A run's forecast beside what was measured, part by part; plans between slow hosts beside this machine; as tables."""

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
from phalanx.files import read_json, read_toml
from phalanx.units import show_bytes, show_seconds

if TYPE_CHECKING:  # tables are for who prints them: not for every process that writes a forecast down
    from rich.console import RenderableType

    from phalanx.report.summary import RunSummary

FORECAST = "forecast.json"
"""The file of a run folder that holds its forecast, or says why there is none."""

LATE = "the run was over before its forecast was made"
"""Why short runs have none."""

COMPUTING = ("products", "attention", "memory", "recompute", "launches")
"""Parts of a forecast step in which a rank computes."""

_SHORT = 10.0  # seconds of steps: of a run that took less nobody need be told that it has no forecast
_AFTER = ("update", "rest")  # forward and backward

_MOST = 1e30  # of anything that is forecast
_SMALL = 0.005  # of a step: parts that are forecast to be less are not told of unless they were measured
_HELD = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One quantity, forecast and measured.

    Attributes:
        what: ``step``, in seconds, or ``memory``, in bytes.
        part: of it; ``whole`` for all.
        forecast: number; ``None`` where nobody forecasts it.
        measured: number; ``None`` where it was not measured.
    """

    what: str
    part: str
    forecast: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Forecast over measured; ``None`` where one of them is missing or zero."""
        return self.forecast / self.measured if self.forecast and self.measured else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def stored(folder: Path, plan: str = "") -> dict[str, Any] | None:
    """What ``forecast.json`` of a run holds: a ``forecast``, or why it is ``missing``; ``None`` without it.

    With ``plan``, the one that the run has gone on under, that of another plan is none.
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
    """Return True if it holds a forecast with what is read here, or says why there is none."""
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
    """Seconds of a step by part, of a stored ``forecast``.

    ``measured`` has those of ``whole`` and of the parts that were timed: ``passes``, which is forward and backward with
    all that they wait for, ``computing`` and ``pipeline`` within them, ``update`` and ``rest``.
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
    """Bytes by part on the rank that needs most of each, from what each held by part, as ``memory`` events have it."""
    if not ranks:
        return []
    held = dict(forecast["parts"])  # each at its own peak, as it is measured
    held["parameters"] += held.get("gathered", 0.0)  # measured parameters are those that were gathered, too
    most = {part: max(rank[part] for rank in ranks) for part in _HELD}
    return [Compared(what="memory", part=part, forecast=held[part], measured=float(most[part])) for part in _HELD]


def under_forecast(rows: Sequence[Compared]) -> Compared | None:
    """The part of memory that most bytes were missed of; ``None`` where none was."""
    short = [one for one in rows if one.what == "memory" and (one.measured or 0.0) > (one.forecast or 0.0)]
    return max(short, key=lambda one: (one.measured or 0.0) - (one.forecast or 0.0), default=None)


_WORDS = {
    "whole": "time per step",
    "passes": "  forward and backward",
    "computing": "    computing",
    "update": "  update",
    "rest": "  data and logging",
}


def runs_beside(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what each run came to, in which settings they differ, and the first step in which their losses do."""
    from phalanx.report.summary import run_log, summarise

    found, told, each_loss = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[int, float | None]]()
    for folder in folders:
        summary, log = summarise(folder), run_log(folder)
        evaluated = [event for event in log.events if event["event"] == "evaluate"]
        least = min((event["loss"] for event in evaluated if event["loss"] is not None), default=None)
        row = {"plan": summary.plan, "steps": summary.step, "loss": summary.loss, "best loss of evaluations": least}
        row |= {f"last {name}": value for event in evaluated[-1:] for name, value in event["metrics"].items()}
        found.append(row | {"seconds": summary.seconds, "samples/s": summary.samples_per_second})
        stated = read_toml(folder / RUN_TOML, where=RUN_TOML, fix=f"phalanx show {folder}", below=1)
        told.append({name: one for name, one in (log.part[0] | stated).items() if name not in _OWN_TO_A_RUN})
        each_loss.append({event["step"]: event["loss"] for event in log.events if event["event"] == "step"})
    differing = {name: [one.get(name) for one in told] for one in told for name in one}
    settings = {name: those for name, those in differing.items() if any(one != those[0] for one in those)}
    common = sorted(set[int].intersection(*map(set, each_loss)))
    parted = (step for step in common if not _alike(*(one[step] for one in each_loss)))
    runs = [str(one) for one in folders]
    return {"runs": runs, "rows": found, "settings": settings, "differ_from": next(parted, None)}


def _alike(one: float | None, other: float | None) -> bool:
    """True for losses that differ by no more than rounding; the log has null for one that is not finite."""
    return one is other if one is None or other is None else math.isclose(one, other, rel_tol=1e-4)


_OWN_TO_A_RUN = {"event", "time", "plan", "folder", "resume", "notes", "first_step"}


def runs_table(told: Mapping[str, Any]) -> RenderableType:
    """Return the table of ``runs_beside``, a column a run."""
    from rich.console import Group
    from rich.text import Text

    from phalanx.report.tables import headed

    table = headed("", *told["runs"])
    names = dict.fromkeys(name for one in told["rows"] for name in one)
    rows = {name: [one.get(name) for one in told["rows"]] for name in names} | told["settings"]
    for name, values in rows.items():
        shown = (f"{one:.6g}" if isinstance(one, float) else "" if one is None else str(one) for one in values)
        table.add_row(name, *map(Text, shown))
    step = told["differ_from"]
    return Group(table, "losses do not differ" if step is None else f"losses differ from step {step + 1} on")


def beside_table(summary: RunSummary, *, brief: bool = False) -> Iterator[RenderableType]:
    """Forecast and measurement side by side, or why there is no forecast; nothing where nobody asked for one.

    ``brief``: what the forecast takes to be so is counted, not told.
    """
    from rich.text import Text

    from phalanx.planner.explain import PARTS
    from phalanx.report.tables import headed

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
    table = headed("", numbers=("forecast", "measured", "forecast / measured"))
    for row in summary.beside:
        shown = ("" if number is None else _SHOW[row.what](number) for number in (row.forecast, row.measured))
        name = _WORDS.get(row.part) or f"    {PARTS.get(row.part, row.part)}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(f"memory: {row.part}" if row.what == "memory" else name, *shown, ratio)
    yield table
    notes = forecast.get("notes", ())
    if brief and notes:
        told = (
            f"{len(notes)} note{'s' * (len(notes) > 1)} on what the forecast leaves out: phalanx show {summary.folder}"
        )
        yield Text(told, style="dim")
    else:
        yield from (Text(f"note: {note}", style="dim") for note in notes)


_SHOW = {"step": show_seconds, "memory": show_bytes}
