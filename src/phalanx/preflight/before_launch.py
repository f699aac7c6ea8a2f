"""Before a launch: the plan for what is there, where nobody gave one, and whether training would fail there.

Hosts are asked once for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config import Job
from phalanx.launch.targets.target import AttachedTarget
from phalanx.preflight.launch_check import LaunchCheck, LaunchQuestion, launch_check, surveyed
from phalanx.preflight.plan_choice import PlanChoice, choose_plan
from phalanx.preflight.target_cluster import cluster_offered, cluster_there


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeLaunch:
    """What was found.

    Attributes:
        choice: the plan for what is there; ``None`` where none was to be chosen, or what is there is not known.
        check: ``None`` where none was asked for.
    """

    choice: PlanChoice | None = None
    check: LaunchCheck | None = None

    @property
    def plan_looked_at(self) -> bool:
        """Return True if the check has held the plan against the job."""
        return self.check is not None and self.check.plan_looked_at


def before_launch(question: LaunchQuestion, *, checks: bool, chooses: bool) -> BeforeLaunch:
    """Choose a plan of its job where ``chooses``, and look where ``checks`` whether training would fail under it.

    Raises:
        SpecError: the plan needs more than there is, with what there is and the nearest plan; or the target cannot do
            what is asked for.
        RunError: a host does not answer, and no check is to say so.
    """
    if not (checks or chooses):
        return BeforeLaunch()
    assert question.target
    assert question.submission
    if isinstance(question.target, AttachedTarget):
        return _on_hosts(question, checks=checks, chooses=chooses)
    choice = None
    if chooses and (offer := question.target.offer(question.submission.options)):
        choice = choose_plan(_job_of(question), cluster_offered(offer))
    plan = choice.plan if choice else question.plan
    if plan:
        question.target.prepare(question.under(plan))  # refuses what is mistyped
    found = launch_check(replace(question, plan=plan)) if checks and plan else None
    return BeforeLaunch(choice=choice, check=found)


def _on_hosts(question: LaunchQuestion, *, checks: bool, chooses: bool) -> BeforeLaunch:
    if question.plan and question.target and question.submission:
        question.target.prepare(question.submission)  # refuses before any is asked
    asked = question if checks else replace(question, reference="")  # which takes less than to load the job there
    said, choice = surveyed(asked), None
    if chooses and not (checks and any(not one.facts for one in said.hosts)):
        choice = choose_plan(_job_of(question), cluster_there(said))
        question = replace(question, plan=choice.plan)
    return BeforeLaunch(choice=choice, check=launch_check(question, said) if checks else None)


def _job_of(question: LaunchQuestion) -> Job:
    assert question.job
    return question.job
