"""Before a launch: the plan for what is there, where nobody gave one, and whether training would fail there.

Hosts are asked once for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config import Job
from phalanx.launch.targets import AttachedTarget, Target
from phalanx.preflight.launch_check import LaunchCheck, LaunchQuestion, launch_check, submission_of, surveyed
from phalanx.preflight.plan_choice import PlanChoice, choose
from phalanx.preflight.there import cluster_offered, cluster_there


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeLaunch:
    """What was found.

    Attributes:
        choice: the plan for what is there; ``None`` where none was to be chosen, or what is there is not known.
        check: ``None`` where none was asked for.
    """

    choice: PlanChoice | None = None
    check: LaunchCheck | None = None


def before_launch(question: LaunchQuestion, job: Job, *, checks: bool, chooses: bool) -> BeforeLaunch:
    """Choose a plan of ``job`` where ``chooses``, and look where ``checks`` whether training would fail under it.

    Raises:
        SpecError: the plan needs more than there is; it names what there is, and the nearest plan.
        RunError: a host does not answer, and no check is to say so.
    """
    if not (checks or chooses):
        return BeforeLaunch()
    assert question.target
    if isinstance(question.target, AttachedTarget):
        return _on_hosts(question, question.target, job, checks=checks, chooses=chooses)
    choice = None
    if chooses and (offer := question.target.offer(question.options)):
        choice = choose(job, cluster_offered(offer))
    plan = choice.plan if choice else question.plan
    if plan:
        question.target.prepare(submission_of(job, plan, question, question.target.python))  # refuses what is mistyped
    found = launch_check(replace(question, plan=plan)) if checks and plan else None
    return BeforeLaunch(choice=choice, check=found)


def _on_hosts(question: LaunchQuestion, target: Target, job: Job, *, checks: bool, chooses: bool) -> BeforeLaunch:
    if question.plan:
        target.prepare(submission_of(job, question.plan, question, target.python))  # refuses before any is asked
    asked = question if checks else replace(question, reference="")  # which takes less than to load the job there
    said, choice = surveyed(asked), None
    if chooses and not (checks and any(not one.told for one in said.hosts)):
        choice = choose(job, cluster_there(said))
        question = replace(question, plan=choice.plan)
    return BeforeLaunch(choice=choice, check=launch_check(question, said) if checks else None)
