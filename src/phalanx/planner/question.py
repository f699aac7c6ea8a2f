"""What is asked: a work, the devices it may use, and in which precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phalanx.errors import Problem
from phalanx.forecast import PHALANX, Habits, Work
from phalanx.planner.clusters import mixed, resized
from phalanx.planner.cost import Prices
from phalanx.spec import Cluster, Plan
from phalanx.spec.plan import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A work and a cluster for it.

    Attributes:
        work: what is done in each step.
        cluster: what there is.
        precision: that plans compute in.
        steps: optimizer steps of the whole training; 0 where nobody knows.
        prices: what devices cost; none where nobody says.
        habits: of the framework.
        look: what keeps a plan from the job, by a look at its model; ``None`` where there is none to look at.
    """

    work: Work
    cluster: Cluster
    precision: Precision
    steps: int = 0
    prices: Prices = field(default_factory=Prices)
    habits: Habits = PHALANX
    look: Callable[[Plan], list[Problem]] | None = field(default=None, compare=False)

    @property
    def mixed(self) -> bool:
        """Whether devices differ."""
        return mixed(self.cluster)

    def on(self, devices: int) -> Question | None:
        """The same on that many of the devices, in as few nodes as hold them; ``None`` if they fill no nodes."""
        cluster = resized(self.cluster, devices)
        return replace(self, cluster=cluster) if cluster else None
