"""Which evaluation of a run is the best so far: in a file of its folder, so that its checkpoint stays, and is found."""

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
    """The evaluations of a run, as numbers of the one metric by which they are compared.

    Attributes:
        metric: what it is called.
        evaluations: (step, value) in the order of steps; ``None`` for a number that is not finite.
    """

    def __init__(self, best: Best, evaluations: Iterable[tuple[int, float | None]] = ()) -> None:
        self._by, self.metric = best, best.metric
        self.evaluations = list(evaluations)

    @classmethod
    def read(cls, best: Best, folder: Path) -> BestSoFar:
        """Those that the run in ``folder`` has had; none where they were compared by another metric.

        Raises:
            SpecError: its file cannot be read.
        """
        told = _read(folder)
        if told is None or (told["metric"], told["mode"]) != (best.metric, best.mode):
            return cls(best)
        return cls(best, ((step, value) for step, value in told["evaluations"]))

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best one; ``None`` where none gave a number."""
        return self._judged()[0]

    @property
    def without_better(self) -> int:
        """How many there were since."""
        return self._judged()[1]

    @property
    def exhausted(self) -> bool:
        """Return True if there is nothing to be waited for any more."""
        return self._by.patience is not None and self.without_better >= self._by.patience

    def add(self, step: int, value: float) -> bool:
        """Take in an evaluation; whether it is the best."""
        self.go_back(step - 1)
        self.evaluations.append((step, value if math.isfinite(value) else None))
        return self.best is not None and self.best[0] == step

    def knows(self, step: int) -> bool:
        """Return True if there was one after ``step``."""
        return any(at == step for at, _ in self.evaluations)

    def value_of(self, evaluation: Mapping[str, Any]) -> float:
        """The number by which ``evaluation``, with ``loss`` and ``metrics``, is compared.

        Raises:
            SpecError: it has none of that name.
        """
        self.refuse_unknown(evaluation["metrics"])
        return float(evaluation["loss"] if self._by.metric == "loss" else evaluation["metrics"][self._by.metric])

    def refuse_unknown(self, metrics: Iterable[str]) -> None:
        """Refuse to compare by a number that no evaluation has, beside these ``metrics``.

        Raises:
            SpecError: with the numbers that there are.
        """
        names = ["loss", *metrics]
        if self._by.metric not in names:
            fix = f"best=px.Best({names[-1]!r})"
            raise SpecError.of("best.metric", repr(self._by.metric), ", ".join(names), fix)

    def go_back(self, step: int) -> None:
        """What came after ``step`` is taken anew."""
        self.evaluations = [one for one in self.evaluations if one[0] <= step]

    def write(self, folder: Path) -> None:
        """Keep them in the run folder ``folder``.

        Raises:
            OSError: they cannot be.
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
    """The step after which the run in ``folder`` was evaluated best; ``None`` where it does not compare evaluations.

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
