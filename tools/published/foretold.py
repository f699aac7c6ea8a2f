"""Forecasts of many published runs, those of one model, cluster and framework at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.forecast import Forecast, Habits, Work, forecasts
from phalanx.trace import Profile, Shape
from published.rows import Row
from published.subject import Subject, subject


@dataclass(frozen=True, kw_only=True, slots=True)
class Foretold:
    """A row and what was forecast for it.

    Attributes:
        row: with what was measured.
        subject: it in our nouns.
        forecast: of it.
    """

    row: Row
    subject: Subject
    forecast: Forecast

    @property
    def error(self) -> float:
        """Forecast over measured step time, less 1; only where a time was measured."""
        return self.forecast.step / self.row.step - 1

    @property
    def log_error(self) -> float:
        """Logarithm of measured over forecast."""
        return math.log(self.row.step / self.forecast.step)

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval that holds four of five."""
        return self.forecast.low <= self.row.step <= self.forecast.high

    @property
    def memory_error(self) -> float:
        """Forecast over measured peak memory, less 1; only where one was measured."""
        found = self.forecast
        return (found.reserved if self.subject.habits.prints_reserved else found.allocated) / self.row.peak - 1

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        found = self.forecast
        return {
            "id": self.row.id,
            "step_s": found.step,
            "low_s": found.low,
            "high_s": found.high,
            "peak_gib": found.reserved / 2**30,
            "allocated_gib": found.allocated / 2**30,
            "fits": found.fits,
            "limits": list(found.limits),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of the rows of a table.

    Attributes:
        found: rows with their forecasts, in order.
        refused: rows that cannot be forecast, and why.
    """

    found: tuple[Foretold, ...]
    refused: dict[str, str]


@cache
def traced(shape: Shape) -> Profile:
    """The costs of a model; traced once."""
    return shape.profile()


def foretell(
    rows: Sequence[Row], profile: Callable[[Subject], Profile] | None = None, *, habits: Habits | None = None
) -> Outcome:
    """A forecast for every row.

    Args:
        rows: of a table.
        profile: gives a model's costs where they are known already.
        habits: in place of those of each row's framework; the network that these imply is not used then either.
    """
    subjects: dict[str, Subject] = {}
    refused: dict[str, str] = {}
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        try:
            one = subject(row, network=habits is None)
            one = subjects[row.id] = replace(one, habits=habits) if habits else one
        except PhalanxError as error:
            refused[row.id] = str(error)
            continue
        key = (one.shape, str(one.cluster.groups), one.cluster.network, one.habits.name, one.batch)
        alike.setdefault(key, []).append(row)
    found: dict[str, Forecast] = {}
    for some in alike.values():
        first = subjects[some[0].id]
        try:
            costs = profile(first) if profile else traced(first.shape)
            work = Work(profile=costs, batch=first.batch, length=first.length)
            plans = [subjects[row.id].plan for row in some]
            made = forecasts(work, plans, first.cluster, first.habits)
        except PhalanxError as error:
            refused |= {row.id: str(error) for row in some}
            continue
        found |= {row.id: forecast for row, forecast in zip(some, made, strict=True)}
    return Outcome(
        found=tuple(
            Foretold(row=row, subject=subjects[row.id], forecast=found[row.id]) for row in rows if row.id in found
        ),
        refused=refused,
    )
