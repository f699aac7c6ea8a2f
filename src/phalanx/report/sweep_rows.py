"""The results of a sweep, best first: a row a combination of values and plan, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.config.job import Best
from phalanx.config.params import Value
from phalanx.errors import MissingExtraError, SpecError
from phalanx.report.render import as_text, table
from phalanx.report.run_results import Run
from phalanx.report.summary import summarise
from phalanx.units import show_seconds

if TYPE_CHECKING:
    import pandas

Outcome = Literal["done", "stopped", "failed", "refused"]
_OUTCOMES: tuple[Outcome, ...] = ("done", "stopped", "failed", "refused")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination of a sweep.

    Attributes:
        values: given values by the name that the job declares.
        outcome: ``refused`` before anything ran, ``failed`` on the way, or ``stopped`` with the sweep.
        reason: one line; empty if it is done.
        loss: of the last step.
        evaluation: ``step``, ``loss``, ``samples``, ``metrics`` of its best evaluation if the job has a ``px.Best``,
            else of its last.
        seconds: wall time, the start of its workers included.
    """

    values: Mapping[str, Value]
    plan: str
    outcome: Outcome
    reason: str = ""
    loss: float | None = None
    evaluation: Mapping[str, Any] | None = None
    seconds: float = 0.0
    folder: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Yardstick:
    """The number that compares runs: the metric of ``best``, the jobs' ``px.Best``; else the loss."""

    best: Best | None = None

    def number(self, row: SweepRow) -> float | None:
        """Return the number of a run; ``None`` if it has none."""
        if row.evaluation is None:
            return None if self.best else row.loss
        metric = self.best.metric if self.best else "loss"
        return row.evaluation["loss"] if metric == "loss" else row.evaluation["metrics"].get(metric)

    def ranked(self, rows: Iterable[SweepRow]) -> list[SweepRow]:
        """Return the rows, best first; then rows without a number, then those that are not done."""

        def key(row: SweepRow) -> tuple[int, bool, float]:
            number = self.number(row)
            lacking = number is None or math.isnan(number)
            sign = -1.0 if self.best and self.best.mode == "max" else 1.0
            return _OUTCOMES.index(row.outcome), lacking, 0.0 if lacking or number is None else sign * number

        return sorted(rows, key=key)

    def __str__(self) -> str:
        if self.best is None:
            return "least loss, of the last evaluation where there is one"
        return f"{'most' if self.best.mode == 'max' else 'least'} {self.best.metric}, of each run's best evaluation"


def numbers_of(folder: Path, best: Best | None) -> dict[str, Any]:
    """Return ``loss`` and ``evaluation`` of the run in ``folder`` for its ``SweepRow``."""
    summary = summarise(folder)
    evaluation = summary.evaluation
    if best and (found := Run(folder=folder).best):
        evaluation = {name: found[name] for name in ("step", "loss", "samples", "metrics")}
    return {"loss": summary.loss, "evaluation": evaluation}


def reason_of(error: Exception) -> str:
    """Return an error in one line; of an error in the job's own code, the last line of its traceback."""
    if not isinstance(error, SpecError):
        said = str(error).strip().splitlines()
        return said[0] if said else type(error).__name__
    first = error.problems[0]
    lines = [line.strip("| ") for line in first.given.splitlines()]
    if len(lines) > 1:
        return f"{first.where}: {lines[-1]}"
    return " ".join(str(first).replace("\n    try: ", "; try: ").split())


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult(Sequence[SweepRow]):
    """The rows of a sweep, best first.

    Attributes:
        job: the reference, or the name of the function that makes the job.
        folder: holds the runs' folders.
        combinations: their number, with those not begun.
    """

    job: str
    folder: Path
    rows: tuple[SweepRow, ...]
    yardstick: Yardstick
    combinations: int

    @overload
    def __getitem__(self, index: int) -> SweepRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SweepRow, ...]: ...
    def __getitem__(self, index: int | slice) -> SweepRow | tuple[SweepRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best(self) -> SweepRow | None:
        """The best row; ``None`` if no run was done with a number to compare."""
        first = next(iter(self.rows), None)
        number = self.yardstick.number(first) if first and first.outcome == "done" else None
        return None if number is None or math.isnan(number) else first

    def to_dict(self) -> dict[str, Any]:
        """Return the answer of ``phalanx sweep --json``."""
        return {
            "job": self.job,
            "folder": str(self.folder),
            "best_by": str(self.yardstick),
            "combinations": self.combinations,
            "rows": [{**asdict(row), "number": self.yardstick.number(row)} for row in self.rows],
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a row a combination, best first: a column a value, ``plan``, ``outcome``, ``reason``, ``loss``,
        ``evaluated_loss`` and a column a metric, ``number`` (which rows are compared by), ``seconds``, ``folder``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", "pandas") from None
        return pandas.DataFrame([self._columns(row) for row in self.rows])

    def _columns(self, row: SweepRow) -> dict[str, Any]:
        evaluation = row.evaluation or {"loss": None, "metrics": {}}
        told = {"plan": row.plan, "outcome": row.outcome, "reason": row.reason, "loss": row.loss}
        numbers = {"evaluated_loss": evaluation["loss"], **evaluation["metrics"], "number": self.yardstick.number(row)}
        told |= {**numbers, "seconds": row.seconds, "folder": row.folder}
        return {f"set.{name}" if name in told else name: value for name, value in row.values.items()} | told

    def __str__(self) -> str:
        return as_text(sweep_table(self.to_dict()), width=120)


def sweep_table(answer: Mapping[str, Any]) -> RenderableType:
    """Return the rows of ``SweepResult.to_dict`` as a table, each with its folder or the reason why it is not done."""
    names = list(dict.fromkeys(name for row in answer["rows"] for name in row["values"]))
    evaluated = [row["evaluation"] for row in answer["rows"] if row["evaluation"]]
    metrics = list(dict.fromkeys(name for one in evaluated for name in one["metrics"]))
    rows: list[dict[str, str]] = []
    for row in answer["rows"]:
        evaluation = row["evaluation"] or {"loss": None, "metrics": {}}
        numbers = {"last loss": row["loss"], **({"evaluated\nloss": evaluation["loss"]} if evaluated else {})}
        numbers |= {name: evaluation["metrics"].get(name) for name in metrics}
        cells = {name: str(row["values"].get(name, "")) for name in names} | {"plan": row["plan"]}
        cells |= {name: "" if one is None else f"{one:.4g}" for name, one in numbers.items()}
        run = Path(row["folder"]).name if row["outcome"] == "done" else f"{row['outcome']}: {row['reason']}"
        rows.append(cells | {"time": show_seconds(row["seconds"]), "run": run})
    notes = [f"best first: {answer['best_by']}", f"run folders: {answer['folder']}/N"]
    if left := answer["combinations"] - len(rows):
        notes.append(f"not begun: {left} of {answer['combinations']} combinations")
    styles = [None if row["outcome"] == "done" else "yellow" for row in answer["rows"]]
    right = ("last loss", "evaluated\nloss", *metrics, "time")
    return Group(table(rows, numbers=right, styles=styles, narrow=True), *map(Text, notes))
