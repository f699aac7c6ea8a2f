"""A metric of an evaluation that is computed once, from what was added up or collected over all samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import Problem, SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What ``job.metrics`` gives for a metric that is no ratio of sums, such as F1, perplexity or AUC.

    Each call gives what is known of some of the samples; ``compute`` is called once in an evaluation, with all of it.

    Attributes:
        compute: ``compute(name=tensor, ...)`` with a tensor on the host for each name of ``sums`` and ``rows`` gives
            the metric: a number, or a dict of name → number, which are logged as ``metric.name``.
        sums: name → a tensor that is added up over all samples: counts of right and wrong answers, a confusion matrix.
            ``compute`` gets whole numbers as int64, others as float64.
        rows: name → a tensor of at least one dimension, of which all are joined along the first, in the order of the
            evaluation data: scores and labels. They are held on the host until the evaluation ends.

    Raises:
        SpecError: if ``compute`` is no function, or there is nothing to compute from, or a name is in both.
    """

    compute: Callable[..., Any]
    sums: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        problems: list[Problem] = []

        def wrong(name: str, given: Any, allowed: str) -> None:
            fix = "px.Metric(sums={'right': right, 'all': count}, compute=lambda right, all: right / all)"
            problems.append(Problem(where=f"metric.{name}", given=str(given), allowed=allowed, fix=fix))

        if not callable(self.compute):
            wrong("compute", repr(self.compute), "a function of what was added up and collected")
        for name in ("sums", "rows"):
            given: Any = getattr(self, name)
            if not hasattr(given, "items") or not all(type(key) is str for key in given):
                wrong(name, type(given).__name__, "a dict of name → tensor")
        if not problems and (both := sorted({*self.sums} & {*self.rows})):
            wrong("rows", ", ".join(both), "names that sums does not have")
        if not problems and not (self.sums or self.rows):
            wrong("sums", "neither sums nor rows", "a dict of name → tensor, or rows")
        if problems:
            raise SpecError(problems)
