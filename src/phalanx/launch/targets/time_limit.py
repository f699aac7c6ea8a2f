"""A time limit of a launch, and whether a run can save before it is over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.config import RunSpec
from phalanx.errors import Problem
from phalanx.launch.targets.launch_folder import slowest_save

SAVE_MARGIN = 30
"""Seconds, beside those of a save, for what comes before it and after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """A time limit as a target keeps it.

    Attributes:
        seconds: of it; ``None``: there is none.
        kept: seconds of it that are kept to save in.
        said: the limit and what is kept of it, in words.
        most_grace: seconds that the target itself gives at most to save in.
    """

    seconds: float | None
    kept: float
    said: str
    most_grace: float = math.inf

    def problems(self, run: RunSpec) -> list[Problem]:
        """Whether ``run`` has no time to save, by the slowest checkpoint that it has saved."""
        took, problems = slowest_save(run.folder), list[Problem]()
        if 0 < run.grace < took:
            given = f"{run.grace:g} seconds, in which no checkpoint is whole: the slowest of this run took {took:.0f}"
            enough = min(math.ceil(1.5 * took), self.most_grace)
            fix = f"--grace {enough:g}" if enough > took else "--grace 0 --checkpoint-every 10m"
            problems.append(Problem(where="--grace", given=given, allowed="more than that", fix=fix))
        if self.seconds is None:
            return problems
        if self.seconds <= max(self.kept, took):
            slow = f"; the slowest checkpoint of this run took {took:.0f} seconds" if took > self.kept else ""
            between = 0 if run.grace else run.save_seconds
            least = math.ceil(max(self.kept, between, 1.5 * took + SAVE_MARGIN) / 60) + 5
            given, fix = f"{self.said}{slow}", f"--time {least}m"
            problems.append(Problem(where="--time", given=given, allowed="more than that", fix=fix))
        elif not run.grace and run.save_seconds >= self.seconds:
            given = f"{self.said}, with grace = 0 and a checkpoint every {run.checkpoint_every}"
            allowed = "more than that, or the run never goes on"
            problems.append(Problem(where="--time", given=given, allowed=allowed, fix="--grace 30"))
        return problems
