"""Forecasts of many published runs, those of one model, cluster and framework at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.forecast import Forecast, Work, forecasts
from phalanx.profile import Profile
from phalanx.verify.published.rows import Row
from phalanx.verify.published.subject import Subject, subject


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


def foretell(rows: Sequence[Row], profile: Callable[[Subject], Profile] | None = None) -> tuple[Foretold, ...]:
    """A forecast for every row, in their order; ``profile`` gives a model's costs where they are known already."""
    subjects = [subject(row) for row in rows]
    alike: dict[Any, list[int]] = {}
    for index, one in enumerate(subjects):
        key = (one.shape, str(one.cluster.groups), one.cluster.network, one.habits.name, one.batch)
        alike.setdefault(key, []).append(index)
    found: dict[int, Forecast] = {}
    for indices in alike.values():
        first = subjects[indices[0]]
        costs = profile(first) if profile else first.shape.profile()
        work = Work(profile=costs, batch=first.batch, length=first.length)
        plans = [subjects[index].plan for index in indices]
        found.update(zip(indices, forecasts(work, plans, first.cluster, first.habits), strict=True))
    return tuple(
        Foretold(row=row, subject=subjects[index], forecast=found[index]) for index, row in enumerate(rows)
    )
