"""The measures that forecasts are held to: what is asked, what the best peers reach on the same rows, and the value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from published.accuracy import Accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One measure.

    Attributes:
        name: what is measured.
        peer: what the best other tools reach on the same or similar rows.
        least: the lowest value that is good enough.
        most: the highest.
        value: reached; not a number where no row is of this kind.
    """

    name: str
    peer: str
    least: float
    most: float
    value: float

    @property
    def reached(self) -> bool:
        """Whether the value is good enough."""
        return not math.isnan(self.value) and self.least <= self.value <= self.most

    @property
    def asked(self) -> str:
        """The bounds in words."""
        if self.least > 0 and self.most < 1:
            return f"{100 * self.least:.0f}–{100 * self.most:.0f} %"
        return f"≥ {100 * self.least:.0f} %" if self.least > 0 else f"≤ {100 * self.most:.0f} %"

    @property
    def shown(self) -> str:
        """The value as a share."""
        return "–" if math.isnan(self.value) else f"{100 * self.value:.1f} %"


_SOURCES = (
    ("sequence-parallel paper, Table 5", "calculon 3.65 %, SimuMax 5.6 %, llm-analysis 25.6 %", 0.03),
    ("SC21 Table 1", "SimuMax 7.7 %, calculon 10.3 %", 0.05),
    ("Megatron-DeepSpeed, 64-512 GPUs", "SimuMax 13.5 %, vTrain 14.7 %, calculon 19.6 %", 0.06),
    ("Megatron-DeepSpeed, <= 8 GPUs", "vTrain 8.4 %, SimuMax 25.9 %, calculon 38.9 %", 0.07),
)


def measures(found: Accuracy) -> tuple[Measure, ...]:
    """Every measure for ``found``; step times are mean absolute errors unless they say otherwise."""

    def at_most(name: str, peer: str, most: float, value: float) -> Measure:
        return Measure(name=name, peer=peer, least=0.0, most=most, value=value)

    def at_least(name: str, peer: str, least: float, value: float) -> Measure:
        return Measure(name=name, peer=peer, least=least, most=1.0, value=value)

    sources = [
        at_most(f"step time, {name}", peer, most, found.sources[name].mean if name in found.sources else math.nan)
        for name, peer, most in _SOURCES
    ]
    random = "" if math.isnan(found.choice.random) else f", a random pick {100 * found.choice.random:.0f} %"
    return (
        *sources,
        at_most("step time, the rest, median", "SimuMax 16.5 %, calculon 21.5 %", 0.08, found.rest.median),
        at_most("step time, the rest, nine of ten", "", 0.20, found.rest.most),
        at_least("fits or not, layout sweep", "calculon 84 %, SimuMax 84 %", 0.95, found.feasible),
        at_least("runs that ran are forecast to fit", "", 0.99, found.ran),
        at_most(
            "regret of the plan picked, mean", f"SimuMax 6.2 %, calculon 10.5 %{random}", 0.03, found.choice.regret
        ),
        at_least("groups in which the best is picked", "", 0.70, found.choice.best),
        at_most("peak memory, median", "", 0.05, found.memory.median),
        Measure(name="measured times in the 80 % interval", peer="", least=0.75, most=0.85, value=found.inside),
    )
