"""What is trained, and the question that the planner is asked about it: refused first, traced then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from phalanx.config import Cluster, Job, Plan
from phalanx.config.plan import Precision
from phalanx.errors import Problem, RefusedError
from phalanx.forecast import Work
from phalanx.planner import Prices, Question
from phalanx.planner.question import precision_for
from phalanx.planner.rules import refusals_by_look
from phalanx.train.look_ahead import refusals
from phalanx.train.rehearsal import told
from phalanx.train.traced_job import steps_of, work_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is trained.

    Attributes:
        name: for headings.
        steps: of the whole training; 0 where nobody knows.
        work: gives that of each step, for which a job's model is traced.
        look: what keeps a plan from the job; ``None`` for a configuration.
    """

    name: str
    steps: int
    work: Callable[[], Work]
    look: Callable[[Plan], list[Problem]] | None = None

    @classmethod
    def of(cls, job: Job, *, batch: int = 0, length: int = 0, steps: int = 0, values: bool = False) -> Subject:
        """``job``, with this batch, length of samples and number of steps in place of its own where they are not 0.

        ``values``: its model is run on samples of the data, for shapes that depend on values.
        """
        job = replace(job, data=told("job.data")(job.data), model=told("job.model")(job.model))
        asked = replace(job, batch=batch) if batch else job
        return cls(
            name=job.name,
            steps=steps or steps_of(job, batch) or 0,
            work=cache(lambda: work_of(job, batch=batch, length=length, values=values)),
            look=cache(lambda plan: refusals(asked, plan)),
        )

    def question(
        self,
        cluster: Cluster,
        plan: Plan | None = None,
        *,
        precision: Precision | None = None,
        prices: Prices | None = None,
    ) -> Question:
        """The question about it on ``cluster``; before the model is traced, ``plan`` is refused where it cannot serve.

        Raises:
            RefusedError: with every problem found.
            ProfileError: if the model's operations or shapes depend on values.
        """
        if plan and self.look and (wrong := refusals_by_look(plan, cluster, self.look)):
            raise RefusedError(wrong)
        return Question(
            work=self.work(),
            cluster=cluster,
            precision=precision or precision_for(cluster),
            steps=self.steps,
            prices=prices or Prices(),
            look=self.look,
        )
