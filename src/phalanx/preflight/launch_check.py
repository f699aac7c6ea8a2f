"""Whether training would fail where it is to be launched: hosts, links, folder, job and data, and a plan's memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config import Cluster, Group, Host, Job, Plan, RunSpec
from phalanx.device_kinds import on_host
from phalanx.errors import RunError, SpecError
from phalanx.hardware import entry
from phalanx.hardware.probe import Gpu, matched, measured
from phalanx.launch.check import CheckTime, HostAnswer, HostSurvey, ThisMachine, survey
from phalanx.launch.check_findings import HostFinding, Needs, findings
from phalanx.launch.restarts import allowed_plans
from phalanx.launch.runfile import settled
from phalanx.launch.side_process import Send, SideProcess, look_ahead
from phalanx.launch.targets.target import AttachedTarget, QueueTarget, Submission, Target
from phalanx.preflight.machine_forecast import cluster_for, one_line
from phalanx.preflight.plan_choice import PlanChoice, choose_plan
from phalanx.preflight.target_cluster import cluster_offered, cluster_there
from phalanx.train.assembly import refuse
from phalanx.train.build_model import size_of
from phalanx.train.lr_schedule import RunStart

_LOOK = 2.0  # least seconds for the look at the model, and for its forecast
_OF_QUEUE = 16.0  # seconds kept for the queue's answer
_STATE = 12.0  # bytes of a parameter and Adam's state in a checkpoint
_UNREAD = "the job's data could not be read"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchQuestion:
    """A launch to look at.

    Attributes:
        reference: of the job; empty: only hosts are looked at.
        job: with the run's values; ``None`` if there is none, or it does not load here.
        submission: of the job; its plan is a placeholder if ``plan`` is ``None``.
        plan: of the run; ``None``: none was given.
        folder: of the run.
        target: ``None``: this machine.
        time: for the whole check.
    """

    reference: str = ""
    job: Job | None = None
    submission: Submission | None = None
    plan: Plan | None = None
    folder: Path
    target: Target | None = None
    time: CheckTime = field(default_factory=CheckTime, compare=False)

    def under(self, plan: Plan) -> Submission:
        """Return the submission under ``plan``."""
        assert self.submission
        return self.submission.under(plan)

    @property
    def image(self) -> str:
        """Container image of a queue's machines; "" if they have the packages and paths of this one."""
        asks = isinstance(self.target, QueueTarget) and self.submission
        return self.target.image(self.submission.options) if asks else ""  # pyrefly: ignore

    @property
    def python(self) -> str:
        """Interpreter of the workers, if this machine has it; "" otherwise."""
        named = self.submission.python if self.submission else ""
        usual = self.image or named in ("", getattr(self.target, "python", ""))
        return sys.executable if usual else shutil.which(named) or ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCheck:
    """Result of a check.

    Attributes:
        findings: failures first.
        plan: the plan that was checked; ``None`` if there is none.
        not_looked_at: parts that were left out, and why.
    """

    survey: HostSurvey
    findings: tuple[HostFinding, ...]
    plan: Plan | None
    not_looked_at: tuple[str, ...]

    @property
    def would_fail(self) -> bool:
        """True if training would fail."""
        return any(one.fails for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "plan": str(self.plan or ""),
            "hosts": [asdict(one) for one in self.survey.hosts],
            "links": [asdict(one) for one in self.survey.links],
            "findings": [asdict(one) for one in self.findings],
            "not_looked_at": list(self.not_looked_at),
            "would_fail": self.would_fail,
        }


class BeforeLaunch(NamedTuple):
    """The planner's choice, if no plan was given and the machines are known, and the check, if one was asked for."""

    choice: PlanChoice | None
    check: LaunchCheck | None


def before_launch(question: LaunchQuestion, *, checks: bool, chooses: bool) -> BeforeLaunch:
    """Choose a plan if ``chooses``, and check the launch if ``checks``; hosts are asked once for both.

    Raises:
        SpecError: the plan needs more than there is, or the target cannot do it.
        RunError: a host does not answer, and there is no check to report it.
    """
    if not (checks or chooses):
        return BeforeLaunch(None, None)
    target, submission, job = question.target, question.submission, question.job
    assert target
    assert submission
    assert job
    if question.plan:
        target.prepare(submission)  # refuses before any host is asked
    said = cluster = choice = None
    if isinstance(target, AttachedTarget):
        said = _surveyed(question if checks else replace(question, reference=""))  # which is faster
        if chooses and not (checks and any(not one.facts for one in said.hosts)):
            cluster = cluster_there(said)
    elif chooses and (offer := target.offer(submission.options)):
        cluster = cluster_offered(offer)
    if cluster:
        choice = choose_plan(job, cluster)
        question = replace(question, plan=choice.plan)
        if not said:
            target.prepare(question.under(choice.plan))
    return BeforeLaunch(choice, launch_check(question, said) if checks and (said or question.plan) else None)


def _surveyed(question: LaunchQuestion) -> HostSurvey:
    """Ask the hosts of the run, or this machine if they are not known."""
    target, limit = question.target, question.time
    if isinstance(target, AttachedTarget):
        return survey(target.hosts(), question.folder, question.reference, limit)
    limit, here = CheckTime(limit.left - _OF_QUEUE) if target else limit, question.python or sys.executable
    return survey([ThisMachine(here)], question.folder, question.reference, limit)


def launch_check(question: LaunchQuestion, said: HostSurvey | None = None) -> LaunchCheck:
    """Find why training would fail; ``said``: the answers of the hosts, if they have been asked."""
    target, said, job = question.target, said or _surveyed(question), question.job
    queue = target if isinstance(target, QueueTarget) else None
    lacks = "the plan, and memory that it needs: the job does not load here"
    unknown = [] if job else [lacks if question.reference else "a job: none was named"]
    plan = question.plan or (_replicas(said.hosts, job) if job and not queue else None)
    unread = any(one.facts and not one.facts.data_read and not one.facts.missing for one in said.hosts)
    asked = question.under(plan) if job and plan else None
    needs, refused = Needs(plan=plan) if plan else None, list[HostFinding]()
    if job and asked:
        refused, missing = _refusals(job, asked, question, looks=not unread)
        unknown += [f"the model by a step of its own: {missing}"] if missing else []
    if job and asked and not refused and not queue:
        needs, missing = (needs, _UNREAD) if unread else host_needs(job, asked.run, said.hosts, question.time)
        unknown += [f"memory that the plan needs: {missing}"] if missing else []
    found = findings(said, None if queue else needs)
    if queue:
        apart = {"packages", "data"} if question.image and job else set[str]()
        found = [one for one in found if one.kind in {"job", "folder", "plan", "packages", "data"} - apart]
        unknown += _unknown_of_queue(queue, question)
    if queue and asked and not refused:
        refused, missing = _asked_of(queue, asked, question.time)
        unknown += [missing] if missing else []
    if refused:
        found = [one for one in found if one.kind != "plan"]  # the same in other words
    return LaunchCheck(survey=said, findings=(*refused, *found), plan=plan, not_looked_at=tuple(unknown))


def _asked_of(queue: QueueTarget, asked: Submission, time: CheckTime) -> tuple[list[HostFinding], str]:
    """Return the queue's refusal, and the reason if there is no answer."""
    until = CheckTime(max(_OF_QUEUE, time.left))
    said = queue.why_not(queue.prepare(asked), until.left)
    if said is None or not until.left:
        late = "" if said is None else ": it has not answered in time"
        return [], f"whether {queue.name} would take it{late}"
    words, _, fix = said.partition("\n    try: ")
    what = "; ".join(words.splitlines())
    return [HostFinding("queue", (), what, fix.partition("\n")[0])] if said else [], ""


def _unknown_of_queue(queue: QueueTarget, question: LaunchQuestion) -> list[str]:
    unknown = [f"the machines of {queue.name}, which chooses them only once a run begins"]
    if question.image:
        unknown += [f"the image {question.image}: its packages, and the data that the job reads there"]
    if not question.python and question.submission:
        unknown += [f"packages of {question.submission.python}, which is not on this machine"]
    if question.job and not question.plan:
        unknown += [f"whether {queue.name} would take it: no --plan was given"]
    return unknown


def _refusals(job: Job, asked: Submission, question: LaunchQuestion, *, looks: bool) -> tuple[list[HostFinding], str]:
    """Return why the plan is refused, and why not all was looked at; ``looks``: run the model on a few samples."""
    target, time = question.target, question.time
    until = CheckTime(max(_LOOK, time.left - (_OF_QUEUE if isinstance(target, QueueTarget) else 0.0)))
    try:
        refuse_plan(job, asked.run, target, until.left if looks else 0.0)
        if target:
            target.prepare(asked)
    except SpecError as error:
        rows = [(str(one).partition("\n    try: ")[0], one.fix) for one in error.problems]
        return [HostFinding("plan", (), what, fix) for what, fix in rows], "" if looks else _UNREAD
    except RunError as error:
        fix = "phalanx train JOB -n 1 --steps 1 says more"
        return [HostFinding("job", (), str(error).splitlines()[0], fix)], ""
    return [], _UNREAD if not looks else "" if until.left else "it took too long"


def refuse_plan(job: Job, run: RunSpec, target: Target | None, patience: float = 60.0) -> None:
    """Refuse a plan that cannot serve the job on any devices.

    ``patience``: seconds for a look at the model; 0: none.

    Raises:
        SpecError: as ``phalanx train``.
        RunError: the job fails.
    """
    plan = run.plan.on_any_device if target else run.plan
    if within := run.device_range:
        plans = allowed_plans(job, replace(run, plan=plan))
        if within.most not in plans:
            given, most = f"{within} with plan {run.plan}", max(plans)
            raise SpecError.of("-n", given, f"at most {most}, for this job", f"-n {min(within.least, most)}:{most}")
        plan = plans[within.most]
    refuse(job, plan, plan.world_size)
    if patience:
        look_ahead(job, plan, RunStart.of(settled(run)), patience)


def host_needs(job: Job, run: RunSpec, answers: Sequence[HostAnswer], time: CheckTime) -> tuple[Needs, str]:
    """Return the needs of each worker, and the reason if its memory is not known or not asked for."""
    plan = run.plan
    devices = [] if on_host(plan.device) else [device for one in answers for device in one.working]
    least = min(devices, key=lambda device: device.total, default=None)
    gpu = Gpu(name=least.name, memory=least.total) if least else None
    with SideProcess(lambda send: _send_needs(job, plan, gpu, send)) as side:
        message = side.next(max(_LOOK, time.left))
    if message is None:
        return Needs(plan=plan), "its forecast took too long"
    needs = Needs(plan=plan, memory=message.get("memory", 0.0), state=message["state"])
    if run.forecast != "refuse":
        return replace(needs, memory=0.0), "the run is to begin whatever its forecast says"
    return needs, message.get("missing", "")


def _replicas(answers: Sequence[HostAnswer], job: Job) -> Plan:
    """Return replicas on all devices, at most one for each sample of a batch; without devices one for each host."""
    places = sum(one.processes or len(one.facts.devices if one.facts else ()) for one in answers) or len(answers)
    return Plan(dp=max(1, min(places, job.batch)))


def _send_needs(job: Job, plan: Plan, gpu: Gpu | None, send: Send) -> None:
    state = {"state": _STATE * (size_of(job) or 0)}
    try:
        send({**state, "memory": _memory(job, plan, gpu)})
    except Exception as error:  # a job of any make
        send({**state, "missing": one_line(error)})


def _memory(job: Job, plan: Plan, gpu: Gpu | None) -> float:
    from phalanx.forecast import forecast
    from phalanx.train.traced_job import work_of

    work = work_of(job)
    if gpu is None:
        cluster = cluster_for(replace(plan, device="cpu"))
        return forecast(work, plan, cluster).reserved + cluster.groups[0].device.kept
    device, link = measured(gpu, matched(gpu)), matched(gpu).link
    group = Group(device=device, link=link, host=Host(name="a host"), nodes=1, per_node=plan.devices)
    # the memory of CUDA itself is not free any more
    return forecast(work, plan, Cluster(groups=(group,), network=entry("cpu").network(1))).reserved
