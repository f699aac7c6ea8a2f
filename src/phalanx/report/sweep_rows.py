"""What the runs of a sweep came to, best first: a row a combination of values and plan, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from rich.console import Group, RenderableType
from rich.markup import escape

from phalanx.config.job import Best
from phalanx.config.params import Value
from phalanx.errors import MissingExtraError, SpecError
from phalanx.report.run_results import Run
from phalanx.report.summary import summarise
from phalanx.report.tables import PlainConsole, headed
from phalanx.units import show_seconds

if TYPE_CHECKING:
    import pandas

Outcome = Literal["done", "stopped", "failed", "refused"]
_OUTCOMES: tuple[Outcome, ...] = ("done", "stopped", "failed", "refused")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination of a sweep.

    Attributes:
        values: what overrides the values that the job declares, as they were given, by name.
        plan: that it ran under; as given where it did not come to one.
        outcome: ``refused`` before anything ran, ``failed`` on the way, or ``stopped`` with the sweep.
        reason: why it is not done, in a line.
        loss: of the last step; ``None`` where none was taken.
        evaluation: ``step``, ``loss``, ``samples``, ``metrics`` of its best evaluation where the job has a
            ``px.Best``, else of its last; ``None`` where there was none.
        seconds: wall time, the start of its workers included.
        folder: the run folder; ``None`` where it came to none.
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
    """By which number runs are compared: what ``best`` names where a job has one; else loss.

    Attributes:
        best: of the jobs; ``None`` where they have none.
    """

    best: Best | None = None

    def number(self, row: SweepRow) -> float | None:
        """Of a run; ``None`` where it has none."""
        if row.evaluation is None:
            return None if self.best else row.loss
        metric = self.best.metric if self.best else "loss"
        return row.evaluation["loss"] if metric == "loss" else row.evaluation["metrics"].get(metric)

    def ranked(self, rows: Iterable[SweepRow]) -> list[SweepRow]:
        """Best first; those without a number after them, and then those that are not done."""

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
    """``loss`` and ``evaluation`` of the run in ``folder``, as a ``SweepRow`` has them."""
    summary = summarise(folder)
    evaluation = summary.evaluation
    if best and (found := Run(folder=folder).best):
        evaluation = {name: found[name] for name in ("step", "loss", "samples", "metrics")}
    return {"loss": summary.loss, "evaluation": evaluation}


def reason_of(error: Exception) -> str:
    """What went wrong, in a line; of what a job's own code raised, the end of its traceback."""
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
    """What a sweep came to: its rows, best first.

    Attributes:
        job: what was trained: the reference, or the name of the function that makes it.
        folder: with the runs' folders in it.
        yardstick: by which number rows are compared.
        combinations: how many there are, those not begun included.
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
        """The best row; ``None`` where no run was done with a number to compare."""
        first = next(iter(self.rows), None)
        number = self.yardstick.number(first) if first and first.outcome == "done" else None
        return None if number is None or math.isnan(number) else first

    def to_dict(self) -> dict[str, Any]:
        """As JSON: what ``phalanx sweep --json`` prints."""
        return {
            "job": self.job,
            "folder": str(self.folder),
            "best_by": str(self.yardstick),
            "combinations": self.combinations,
            "rows": [{**asdict(row), "number": self.yardstick.number(row)} for row in self.rows],
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """A row a combination, best first: a column a value, ``plan``, ``outcome``, ``reason``, ``loss``,
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
        console = PlainConsole(width=120)
        with console.capture() as shown:
            console.print(sweep_table(self.to_dict()), highlight=False)
        return shown.get().rstrip()


def sweep_table(answer: Mapping[str, Any]) -> RenderableType:
    """A sweep, from ``SweepResult.to_dict``: the rows, and why those that are not done are not."""
    rows = answer["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    metrics = list(dict.fromkeys(name for row in rows for name in (row["evaluation"] or {}).get("metrics", ())))
    evaluated = any(row["evaluation"] for row in rows)
    numbers = ("last loss", *(["evaluated\nloss"] if evaluated else []), *metrics, "time")
    table = headed(*names, "plan", numbers=numbers, after=("run",), narrow=True)
    for row in rows:
        evaluation = row["evaluation"] or {"loss": None, "metrics": {}}
        numbers = [row["loss"], *([evaluation["loss"]] if evaluated else [])]
        numbers += [evaluation["metrics"].get(name) for name in metrics]
        cells = [str(row["values"].get(name, "")) for name in names]
        cells += [row["plan"], *("" if one is None else f"{one:.4g}" for one in numbers), show_seconds(row["seconds"])]
        done = row["outcome"] == "done"
        last = Path(row["folder"]).name if done else f"{row['outcome']}: {row['reason']}"
        table.add_row(*map(escape, [*cells, last]), style=None if done else "yellow")
    notes = [f"best first: {answer['best_by']}", f"run folders: {escape(answer['folder'])}/N"]
    if left := answer["combinations"] - len(rows):
        notes.append(f"not begun: {left} of {answer['combinations']} combinations")
    return Group(table, *notes)
