"""The best evaluation of a run so far, kept in a file of the run folder, so that its checkpoint is found and kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from phalanx.config import Best
from phalanx.config.fields import is_number, is_whole
from phalanx.errors import SpecError
from phalanx.files import json_value, read_text, replace_text

BEST = "best.json"
"""The file, in the run's folder."""


@final
class BestSoFar:
    """The evaluations of a run, as values of the metric by which they are compared.

    Attributes:
        metric: its name.
        evaluations: (step, value) in the order of steps; ``None`` for a value that is not finite.
    """

    def __init__(self, best: Best, evaluations: Iterable[tuple[int, float | None]] = ()) -> None:
        self._by, self.metric = best, best.metric
        self.evaluations = list(evaluations)

    @classmethod
    def read(cls, best: Best, folder: Path) -> BestSoFar:
        """Read the evaluations of the run in ``folder``; none if they were compared by another metric.

        Raises:
            SpecError: its file cannot be read.
        """
        told = _read(folder)
        if told is None or (told["metric"], told["mode"]) != (best.metric, best.mode):
            return cls(best)
        return cls(best, ((step, value) for step, value in told["evaluations"]))

    @property
    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best evaluation; ``None`` if no evaluation gave a number."""
        return self._judged()[0]

    @property
    def without_better(self) -> int:
        """Return the number of evaluations since the best one."""
        return self._judged()[1]

    @property
    def exhausted(self) -> bool:
        """Return True if patience has run out."""
        return self._by.patience is not None and self.without_better >= self._by.patience

    def add(self, step: int, value: float) -> bool:
        """Add an evaluation; return True if it is the best."""
        self.go_back(step - 1)
        self.evaluations.append((step, value if math.isfinite(value) else None))
        return self.best is not None and self.best[0] == step

    def knows(self, step: int) -> bool:
        """Return True if the evaluation after ``step`` is known."""
        return any(at == step for at, _ in self.evaluations)

    def value_of(self, evaluation: Mapping[str, Any]) -> float:
        """Return the value by which ``evaluation``, with ``loss`` and ``metrics``, is compared.

        Raises:
            SpecError: it has no value of that name.
        """
        self.refuse_unknown(evaluation["metrics"])
        return float(evaluation["loss"] if self._by.metric == "loss" else evaluation["metrics"][self._by.metric])

    def refuse_unknown(self, metrics: Iterable[str]) -> None:
        """Refuse a metric that is neither ``loss`` nor among these ``metrics``.

        Raises:
            SpecError: with the available names.
        """
        names = ["loss", *metrics]
        if self._by.metric not in names:
            fix = f"best=px.Best({names[-1]!r})"
            raise SpecError.of("best.metric", repr(self._by.metric), ", ".join(names), fix)

    def go_back(self, step: int) -> None:
        """Forget evaluations after ``step``, which will be repeated."""
        self.evaluations = [one for one in self.evaluations if one[0] <= step]

    def write(self, folder: Path) -> None:
        """Write the evaluations into the run folder ``folder``.

        Raises:
            OSError: the file cannot be written.
        """
        step, value = self.best or (None, None)
        by = {"metric": self._by.metric, "mode": self._by.mode}
        told = {**by, "step": step, "value": value, "evaluations": self.evaluations}
        replace_text(folder / BEST, json.dumps(told) + "\n")

    def _judged(self) -> tuple[tuple[int, float] | None, int]:
        best, since = None, 0
        sign = 1.0 if self._by.mode == "max" else -1.0
        for step, value in self.evaluations:
            if value is not None and (best is None or sign * (value - best[1]) > self._by.min_delta):
                best, since = (step, value), 0
            else:
                since += 1
        return best, since


def best_step(folder: Path) -> int | None:
    """Return the step of the best evaluation in ``folder``; ``None`` if evaluations are not compared.

    Raises:
        SpecError: its file cannot be read.
    """
    told = _read(folder)
    return told["step"] if told else None


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / BEST
    if not path.exists() and not path.is_symlink():
        return None
    fix = f"remove {path}: which evaluation was the best is then found anew"
    text = read_text(path, where=BEST, fix=fix)
    try:
        told = json_value(text)
        wrong = not isinstance(told, dict) or not _is_one(told)
    except ValueError:
        wrong, told = True, None
    if wrong:
        raise SpecError.of(BEST, f"{path}, which is damaged", "what a run has written there", fix)
    return told


def _is_one(told: dict[str, Any]) -> bool:
    evaluations, step = told.get("evaluations"), told.get("step")
    return (
        isinstance(told.get("metric"), str)
        and told.get("mode") in ("min", "max")
        and (step is None or is_whole(step, 0))
        and isinstance(evaluations, list)
        and all(
            isinstance(one, list) and len(one) == 2 and is_whole(one[0], 0) and (one[1] is None or is_number(one[1]))
            for one in evaluations
        )
    )
