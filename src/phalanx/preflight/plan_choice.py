"""The plan of a run that nobody gave one: the planner's for the GPUs here, or one process on CPUs.

One process computes with all cores of a CPU as it is, so that splitting gains little there: the planner is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.config import Cluster, Job, Plan
from phalanx.device_kinds import accelerator_count
from phalanx.errors import RefusedError
from phalanx.launch.side_process import Send, SideProcess
from phalanx.preflight.machine_forecast import cluster_for, one_line

if TYPE_CHECKING:
    from phalanx.forecast import Forecast

PATIENCE = 20.0
"""Seconds that planning may take."""
WORTH = 0.2
"""Share of the time of a step that another plan must save to be taken instead of plain replicas that fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """A plan that nobody gave."""

    plan: Plan
    source: str  # ``planner`` or ``default``
    why: str = ""  # in a sentence; empty where there was nothing to choose


def plain_replicas(batch: int) -> Plan:
    """All accelerators as replicas, as far as a batch goes round; one process where there is none."""
    return Plan(dp=min(max(1, accelerator_count()), batch))


def choose_plan(job: Job, there: Cluster | None = None) -> PlanChoice:
    """The best plan for ``job`` on the accelerators here; ``plain_replicas`` where there are none or none can be made.

    ``there``: the best on all of these devices instead, of which no plan may leave one out.
    """
    given = plain_replicas(job.batch) if there is None else Plan(dp=min(there.devices, job.batch))
    if (accelerator_count() if there is None else there.devices - 1) == 0:
        return PlanChoice(plan=given, source="default")
    on = "" if there is None else f"on {there}: "
    with SideProcess(lambda send: _send_best(job, given, there, send)) as side:
        message = side.next(PATIENCE)
    if message is None:
        why = f"planning took more than {PATIENCE:g} s"
    elif "missing" in message:
        why = f"no plan was made: {message['missing']}"
    else:
        plan = Plan.parse(message["plan"])
        source = "planner" if plan != given else "default"
        return PlanChoice(plan=plan, source=source, why=f"{on}{message['why']}")
    return PlanChoice(plan=given, source="default", why=f"{on}{why}; {given} is taken")


def _send_best(job: Job, given: Plan, there: Cluster | None, send: Send) -> None:
    try:
        send(_best(job, given, there))
    except Exception as error:  # a job of any make
        send({"missing": one_line(error)})


def _best(job: Job, given: Plan, there: Cluster | None) -> dict[str, Any]:
    from phalanx.forecast import forecast
    from phalanx.planner import Question, rank
    from phalanx.train.traced_job import work_of

    work, cluster = work_of(job), there or cluster_for(given)
    plain_one = forecast(work, given, cluster) if given.devices == cluster.devices else None
    # in the precision of the plain plan: another would train other numbers
    ranking = rank(Question(work=work, cluster=cluster, precision=given.precision))
    fewer = [ranking.fewer.forecast] if ranking.fewer and there is None else []
    for found in (*fewer, *ranking.plans):
        if plain_one and plain_one.fits and found.step > (1 - WORTH) * plain_one.step:
            break
        if _can_run(job, found.plan if there is None else found.plan.on_any_device):
            return {"plan": str(found.plan), "why": f"{found.plan} is forecast to be the best{_gain(plain_one, found)}"}
    fits = plain_one is not None and plain_one.fits
    why = f"{given}: no other plan is forecast to save {WORTH:.0%} of a step" if fits else f"{given}: nothing fits"
    return {"plan": str(given), "why": why}


def _gain(plain_one: Forecast | None, found: Forecast) -> str:
    """What is better with ``found`` than with plain replicas, where these are for as many devices."""
    if plain_one is None:
        return ""
    gain = f"{plain_one.step / found.step:.1f} times as fast as" if plain_one.fits else "it fits, unlike"
    return f": {gain} {plain_one.plan}"


def _can_run(job: Job, plan: Plan) -> bool:
    from phalanx.train.assembly import refuse

    try:
        refuse(job, plan, plan.world_size)
    except RefusedError:
        return False
    return True
