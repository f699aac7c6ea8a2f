"""The plan of a run that nobody gave one: the planner's for the GPUs here, or one process on CPUs.

One process computes with all cores of a CPU as it is, so that splitting gains little there: the planner is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import RefusedError
from phalanx.foresight.here import cluster_for
from phalanx.foresight.question import one_line
from phalanx.launch.aside import Aside, Say
from phalanx.spec import Job, Plan

PATIENCE = 20.0
"""Seconds that planning may take."""
WORTH = 0.2
"""Share of the time of a step that another plan must save to be taken instead of plain replicas that fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan that nobody gave.

    Attributes:
        plan: it.
        source: ``planner`` or ``default``.
        why: in a sentence; empty where there was nothing to choose.
    """

    plan: Plan
    source: str
    why: str = ""


def plain(batch: int) -> Plan:
    """All CUDA devices as replicas, as far as a batch goes round; one process where there is none."""
    from phalanx.hardware import cuda_devices

    return Plan(dp=min(max(1, cuda_devices()), batch))


def choose(job: Job) -> Choice:
    """The best plan for ``job`` on the CUDA devices here; ``plain`` where there are none or none can be made."""
    from phalanx.hardware import cuda_devices

    given = plain(job.batch)
    if not cuda_devices():
        return Choice(plan=given, source="default")
    with Aside(lambda say: _tell(job, given, say)) as aside:
        heard = aside.next(PATIENCE)
    if heard is None:
        why = f"planning took more than {PATIENCE:g} s"
    elif "missing" in heard:
        why = f"no plan was made: {heard['missing']}"
    else:
        plan = Plan.parse(heard["plan"])
        return Choice(plan=plan, source="planner" if plan != given else "default", why=heard["why"])
    return Choice(plan=given, source="default", why=f"{why}; {given} is taken")


def _tell(job: Job, given: Plan, say: Say) -> None:
    try:
        say(_best(job, given))
    except Exception as error:  # a job of any make
        say({"missing": one_line(error)})


def _best(job: Job, given: Plan) -> dict[str, Any]:
    from phalanx.forecast import forecast
    from phalanx.planner import Question, rank
    from phalanx.train.work import work_of

    work, cluster = work_of(job), cluster_for(given)
    there = forecast(work, given, cluster)
    # in the precision of the plain plan: another would train other numbers
    ranking = rank(Question(work=work, cluster=cluster, precision=given.precision))
    fewer = [ranking.fewer.forecast] if ranking.fewer else []
    for found in (*fewer, *ranking.plans):
        if there.fits and found.step > (1 - WORTH) * there.step:
            break
        if _can_run(job, found.plan):
            gain = f"{there.step / found.step:.1f} times as fast as" if there.fits else "it fits, unlike"
            return {"plan": str(found.plan), "why": f"{found.plan} is forecast to be the best: {gain} {given}"}
    why = (
        f"{given}: no other plan is forecast to save {WORTH:.0%} of a step" if there.fits else f"{given}: nothing fits"
    )
    return {"plan": str(given), "why": why}


def _can_run(job: Job, plan: Plan) -> bool:
    from phalanx.train.assembly import refuse

    try:
        refuse(job, plan, plan.world_size)
    except RefusedError:
        return False
    return True
