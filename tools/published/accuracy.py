"""Forecasts of published runs, and how far off: by source, in the choice of a plan, in memory, in their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.forecast import Forecast, Preset, Work, forecasts
from phalanx.trace import Profile, Shape
from published.rows import Row
from published.subject import Subject, subject

_PRINT_ALLOCATED = ("llm-foundry", "llm-foundry-hopper")  # as their peak; others what the allocator reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A row and what was forecast for it.

    Attributes:
        row: with what was measured.
        subject: what it is to Phalanx.
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
        return (found.allocated if self.subject.preset.name in _PRINT_ALLOCATED else found.reserved) / self.row.peak - 1

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

    found: tuple[Comparison, ...]
    refused: dict[str, str]


@cache
def traced(shape: Shape) -> Profile:
    """The costs of a model; traced once."""
    return shape.profile()


def forecast_rows(
    rows: Sequence[Row], profile: Callable[[Subject], Profile] | None = None, *, preset: Preset | None = None
) -> Outcome:
    """A forecast for every row.

    Args:
        rows: of a table.
        profile: gives a model's costs where they are known already.
        preset: in place of those of each row's framework; the network that these imply is not used then either.
    """
    subjects: dict[str, Subject] = {}
    refused: dict[str, str] = {}
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        try:
            one = subject(row, network=preset is None)
            one = subjects[row.id] = replace(one, preset=preset) if preset else one
        except PhalanxError as error:
            refused[row.id] = str(error)
            continue
        key = (one.shape, str(one.cluster.groups), one.cluster.network, one.preset.name, one.batch)
        alike.setdefault(key, []).append(row)
    found: dict[str, Forecast] = {}
    for some in alike.values():
        first = subjects[some[0].id]
        try:
            costs = profile(first) if profile else traced(first.shape)
            work = Work(profile=costs, batch=first.batch, length=first.length)
            plans = [subjects[row.id].plan for row in some]
            made = forecasts(work, plans, first.cluster, first.preset)
        except PhalanxError as error:
            refused |= {row.id: str(error) for row in some}
            continue
        found |= {row.id: forecast for row, forecast in zip(some, made, strict=True)}
    return Outcome(
        found=tuple(
            Comparison(row=row, subject=subjects[row.id], forecast=found[row.id]) for row in rows if row.id in found
        ),
        refused=refused,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of step times.

    Attributes:
        rows: how many.
        mean: of their sizes.
        median: of their sizes.
        most: nine of ten are no larger.
        bias: mean with sign.
    """

    rows: int
    mean: float
    median: float
    most: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Of these errors."""
        if not errors:
            return cls(rows=0, mean=math.nan, median=math.nan, most=math.nan, bias=math.nan)
        sizes = sorted(abs(one) for one in errors)
        return cls(
            rows=len(sizes),
            mean=statistics.fmean(sizes),
            median=statistics.median(sizes),
            most=sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)],
            bias=statistics.fmean(errors),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Of groups of runs of the same model on as many devices, the plan that forecasts call fastest.

    Attributes:
        groups: with two measured runs or more.
        regret: mean of its measured time over the best measured, less 1.
        best: share of groups in which it is the best measured.
        random: mean regret of a pick at random.
    """

    groups: int
    regret: float
    best: float
    random: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """All of it, for some rows.

    Attributes:
        sources: errors of step times by source, see ``source``.
        rest: of the sources that have no measure of their own.
        feasible: share of runs whose running out of memory was called right, where half of them do.
        ran: share of runs that ran which are forecast to fit.
        choice: of plans.
        memory: errors of the peak, where stated.
        inside: share of measured times in the interval that should hold 80 %.
    """

    sources: dict[str, Errors]
    rest: Errors
    feasible: float
    ran: float
    choice: Choice
    memory: Errors
    inside: float


_REST = ("AA-Megatron", "llm-foundry", "torchtitan", "InternEvo", "ZeroBubble-Megatron", "PyTorch (NVIDIA examples)")


def source(row: Row) -> str:
    """What a row is counted under."""
    text, framework = row.text("source"), row.text("framework").removesuffix("-memory")
    if framework == "Megatron-LM":
        for mark, name in (("Table 1", "SC21 Table 1"), ("Table 2", "SC21 Table 2"), ("2205.05198", "Table 5")):
            if mark in text:
                return {"Table 5": "sequence-parallel paper, Table 5"}.get(name, name)
        return "Megatron-LM on H100"
    if framework == "Megatron-DeepSpeed":
        return f"{framework}, {'64-512 GPUs' if row.whole('devices') >= 64 else '<= 8 GPUs'}"
    return "DeepSpeed ZeRO-3 (SC21 Table 2)" if framework == "DeepSpeed" else framework


def accuracy(found: Iterable[Comparison]) -> Accuracy:
    """The accuracy over ``found``."""
    every = list(found)
    timed = [one for one in every if one.row.step and not one.row.ran_out]
    groups = _grouped(timed, lambda one: source(one.row))
    swept = [one for one in every if one.row.text("framework") == "AA-Megatron"]
    ran = [one for one in every if not one.row.ran_out]
    return Accuracy(
        sources={name: Errors.of([one.error for one in some]) for name, some in groups.items()},
        rest=Errors.of([one.error for name in _REST for one in groups.get(name, [])]),
        feasible=_share([one.forecast.fits != one.row.ran_out for one in swept]),
        ran=_share([one.forecast.fits for one in ran]),
        choice=choice(timed),
        memory=Errors.of([one.memory_error for one in every if one.row.peak and not one.row.ran_out]),
        inside=_share([one.inside for one in timed]),
    )


def choice(timed: Sequence[Comparison]) -> Choice:
    """What is lost by running the plan that is forecast to be fastest, in place of the fastest measured.

    Rows of one plan (of several runs, or of schedules that the source does not name) count as one, with their mean.
    """
    regrets: list[float] = []
    randoms: list[float] = []
    for some in _grouped(timed, _question).values():
        plans = _grouped(some, lambda one: (one.subject.plan, one.subject.preset.name)).values()
        times = [statistics.fmean(one.row.step for one in same) for same in plans]
        if len(times) < 2:
            continue
        forecasts = [same[0].forecast.step for same in plans]
        picked = times[forecasts.index(min(forecasts))]
        regrets.append(picked / min(times) - 1)
        randoms.append(statistics.fmean(times) / min(times) - 1)
    return Choice(
        groups=len(regrets),
        regret=statistics.fmean(regrets) if regrets else math.nan,
        best=_share([regret == 0 for regret in regrets]),
        random=statistics.fmean(randoms) if randoms else math.nan,
    )


def _question(one: Comparison) -> tuple[object, ...]:
    row = one.row
    return (source(row), one.subject.shape, row.text("device"), row.text("devices"), row.text("batch"))


def _grouped(found: Iterable[Comparison], key: Callable[[Comparison], Hashable]) -> dict[Any, list[Comparison]]:
    groups: dict[Any, list[Comparison]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return groups


def _share(truths: Sequence[bool]) -> float:
    return sum(truths) / len(truths) if truths else math.nan
