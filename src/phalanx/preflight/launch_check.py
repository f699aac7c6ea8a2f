"""Whether training would fail where it is to be launched: hosts, links, folder, job and data, and a plan's memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.config import Cluster, Group, Host, Job, Plan, RunSpec
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RunError, SpecError
from phalanx.hardware import entry
from phalanx.hardware.probe import Gpu, matched, measured
from phalanx.launch.check_hosts.asked_program import CheckTime, ThisMachine
from phalanx.launch.check_hosts.group_findings import HostFinding, Needs
from phalanx.launch.check_hosts.host_answer import HostAnswer
from phalanx.launch.check_hosts.host_findings import findings
from phalanx.launch.check_hosts.host_survey import HostSurvey, survey
from phalanx.launch.restarts import allowed_plans
from phalanx.launch.runfile import settled
from phalanx.launch.side_process import Send, SideProcess, look_ahead
from phalanx.launch.targets.target import AttachedTarget, QueueTarget, Submission, Target
from phalanx.preflight.machine_forecast import cluster_for, one_line
from phalanx.train.assembly import refuse
from phalanx.train.build_model import size_of
from phalanx.train.lr_schedule import RunStart

_LOOK = 2.0  # seconds that a look at the model is given in any case
_OF_QUEUE = 16.0  # seconds that are kept for what a queue says
_UNREAD = "the job's data could not be read"
_HANDED_OVER: set[str] = {"job", "folder", "plan"}
"""What is wrong for a queue where it is wrong on the machine that hands a run to it."""
_SHARED: set[str] = {"packages", "data"}
"""The same where the queue's machines have the packages and data of that machine."""
_SEEN_ALIKE: set[str] = {"data"}
"""The same where they have its data alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchQuestion:
    """What is to be launched, and where.

    Attributes:
        reference: of the job; empty where only hosts are looked at.
        job: with what the run has in place of its own; ``None`` where there is none, or it does not load here.
        submission: what is handed over, of a job that there is; without a plan it has one only in its place.
        plan: of the run; ``None``: none was asked for.
        folder: of the run.
        target: ``None``: this machine.
        time: that all may take.
    """

    reference: str = ""
    job: Job | None = None
    submission: Submission | None = None
    plan: Plan | None = None
    folder: Path
    target: Target | None = None
    time: CheckTime = field(default_factory=CheckTime, compare=False)

    def under(self, plan: Plan) -> Submission:
        """What is handed over where the run is under ``plan``."""
        assert self.submission
        return self.submission.under(plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCheck:
    """What was found.

    Attributes:
        survey: what hosts said.
        findings: what is wrong, what fails first.
        plan: that it was looked at for; ``None`` where for none.
        not_looked_at: what could not be looked at, and why.
        plan_looked_at: whether a plan was held against the job, also by a step of its model.
    """

    survey: HostSurvey
    findings: tuple[HostFinding, ...]
    plan: Plan | None
    not_looked_at: tuple[str, ...]
    plan_looked_at: bool = False

    @property
    def would_fail(self) -> bool:
        """Return True if training would fail by something that was found."""
        return any(one.fails for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "plan": str(self.plan or ""),
            "hosts": [
                {"name": one.name, "facts": one.facts and asdict(one.facts), "error": one.error, "ahead": one.ahead}
                for one in self.survey.hosts
            ],
            "links": [asdict(one) for one in self.survey.links],
            "findings": [asdict(one) for one in self.findings],
            "not_looked_at": list(self.not_looked_at),
            "would_fail": self.would_fail,
        }


def surveyed(question: LaunchQuestion) -> HostSurvey:
    """Ask the hosts that a run would be on, or this machine where they are not known."""
    target, limit = question.target, question.time
    if isinstance(target, AttachedTarget):
        return survey(target.hosts(), question.folder, question.reference, limit)
    limit, here = CheckTime(limit.left - _OF_QUEUE) if target else limit, _python_here(question) or sys.executable
    return survey([ThisMachine(here)], question.folder, question.reference, limit)


def launch_check(question: LaunchQuestion, said: HostSurvey | None = None) -> LaunchCheck:
    """What training would fail by on the hosts that a run would be on.

    ``said``: what they said, where they have been asked.
    """
    target, said = question.target, said or surveyed(question)
    there = [one.facts for one in said.hosts if one.facts]
    lacks = "the plan, and memory that it needs: the job does not load here"
    job, unknown = question.job, [] if question.job else [lacks if question.reference else "a job: none was named"]
    queue = target if isinstance(target, QueueTarget) else None
    plan = question.plan or (replicas_on(said.hosts, job) if job and not queue else None)
    unread = any(not one.data_read and not one.missing for one in there)
    asked = question.under(plan) if job and plan else None
    refused, looked_at = list[HostFinding](), False
    if job and asked:
        refused, missing = refusals(job, asked, target, question.time, looks=not unread)
        looked_at = not missing
        unknown += [f"the model by a step of its own: {missing}"] if missing else []
    needs = Needs(plan=plan) if plan else None
    if queue:
        unknown += _unknown_of_queue(queue, question)
    elif job and asked and not refused:
        needs, missing = (needs, _UNREAD) if unread else host_needs(job, asked.run, said.hosts, question.time)
        unknown += [f"memory that the plan needs: {missing}"] if missing else []
    unknown += said.not_looked_at
    found = [*findings(said, None if queue else needs)]
    if queue:
        found = [*_of_interpreter(question), *(one for one in found if one.kind in _kinds_of(question))]
    if queue and asked and not refused:
        refused, missing = _asked_of(queue, asked, question.time)
        unknown += [missing] if missing else []
    if refused:
        found = [one for one in found if one.kind != "plan"]  # the same in other words
    return LaunchCheck(
        survey=said,
        findings=(*refused, *found),
        plan=plan,
        not_looked_at=tuple(unknown),
        plan_looked_at=looked_at,
    )


def _asked_of(queue: QueueTarget, asked: Submission, time: CheckTime) -> tuple[list[HostFinding], str]:
    """What the queue refuses, and what it could not be asked."""
    until = CheckTime(max(_OF_QUEUE, time.left))
    words = queue.why_not(queue.prepare(asked), until.left)
    if words is None or not until.left:
        late = "" if words is None else ": it has not answered in time"
        return [], f"whether {queue.name} would take it{late}"
    what = f"{queue.name} says: {words}"
    return [HostFinding(kind="queue", hosts=(), what=what, fix="ask for what there is")] if words else [], ""


def _kinds_of(question: LaunchQuestion) -> set[str]:
    """What of this machine's findings is wrong for a queue; a job that does not load here is not handed over."""
    if question.reference and not question.job:
        return _HANDED_OVER | _SHARED
    if _image_of(question):
        return _HANDED_OVER
    return _HANDED_OVER | (_SHARED if _python_here(question) else _SEEN_ALIKE)


def _image_of(question: LaunchQuestion) -> str:
    target, given = question.target, question.submission
    return target.image(given.options) if given and isinstance(target, QueueTarget) else ""


def _unknown_of_queue(queue: QueueTarget, question: LaunchQuestion) -> list[str]:
    unknown = [f"the machines of {queue.name}, which chooses them only once a run begins"]
    if image := _image_of(question):
        unknown += [f"the image {image}: its packages, and the data that the job reads there"]
    if question.job and not question.plan:
        unknown += [f"whether {queue.name} would take it: no --plan was given"]
    return unknown


def _python_here(question: LaunchQuestion) -> str:
    """The interpreter that workers are started by, where this machine has it; empty else."""
    named = question.submission.python if question.submission else ""
    usual = _image_of(question) or named in ("", getattr(question.target, "python", ""))
    return sys.executable if usual else shutil.which(named) or ""


def _of_interpreter(question: LaunchQuestion) -> list[HostFinding]:
    if _python_here(question) or not question.submission:
        return []
    what = f"{question.submission.python} is not on this machine: its packages were not looked at"
    fix = "--python with the path of an interpreter there, if this is none"
    return [HostFinding(kind="packages", hosts=(), what=what, fix=fix, fails=False)]


def refusals(
    job: Job, asked: Submission, target: Target | None, time: CheckTime, *, looks: bool
) -> tuple[list[HostFinding], str]:
    """What a run of ``job`` is refused for there, whatever devices there are here, and why not all was looked at.

    ``looks``: also by running the model on a few samples.
    """
    problems: list[Problem] = []
    missing = "" if looks else _UNREAD
    patience = max(_LOOK, time.left - (_OF_QUEUE if isinstance(target, QueueTarget) else 0.0))
    until = CheckTime(patience)
    try:
        refuse_plan(job, asked.run, target, patience if looks else 0.0)
    except SpecError as error:
        problems += error.problems
    except RunError as error:
        fix = "phalanx train JOB -n 1 --steps 1 says more"
        return [HostFinding(kind="job", hosts=(), what=str(error).splitlines()[0], fix=fix)], ""
    try:
        if target and not problems:
            target.prepare(asked)
    except SpecError as error:
        problems += error.problems
    found = [
        HostFinding(kind="plan", hosts=(), what=str(one).partition("\n    try: ")[0], fix=one.fix) for one in problems
    ]
    return found, missing or ("" if found or until.left else "it took too long")


def refuse_plan(job: Job, run: RunSpec, target: Target | None, patience: float = 60.0) -> None:
    """Refuse a plan that cannot serve the job, whatever devices there are here.

    ``patience``: seconds that one look at the model may take, too; 0: it is not looked at.

    Raises:
        SpecError: as of ``phalanx train``.
        RunError: the job fails as it is looked at.
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


_LEAST = 2.0  # seconds that a forecast is given in any case
_STATE = 12.0  # bytes of a parameter and Adam's state in a checkpoint


def host_needs(job: Job, run: RunSpec, answers: Sequence[HostAnswer], time: CheckTime) -> tuple[Needs, str]:
    """What each worker needs there, and why its memory is not known, or asked for; empty where it is."""
    plan = run.plan
    gpu = _smallest(answers) if not on_host(plan.device) else None
    with SideProcess(lambda send: _send_needs(job, plan, gpu, send)) as side:
        message = side.next(max(_LEAST, time.left))
    if message is None:
        return Needs(plan=plan), "its forecast took too long"
    needs = Needs(plan=plan, memory=message.get("memory", 0.0), state=message["state"])
    if run.forecast != "refuse":
        return replace(needs, memory=0.0), "the run is to begin whatever its forecast says"
    return needs, message.get("missing", "")


def replicas_on(answers: Sequence[HostAnswer], job: Job | None) -> Plan:
    """Plain replicas on all devices, as far as a batch goes round; a process for each host that has none."""
    places = sum(one.processes or len(one.facts.devices if one.facts else ()) for one in answers) or len(answers)
    return Plan(dp=max(1, min(places, job.batch if job else places)))


def _smallest(answers: Sequence[HostAnswer]) -> Gpu | None:
    devices = [device for one in answers for device in one.working]
    least = min(devices, key=lambda device: device.total, default=None)
    return Gpu(name=least.name, memory=least.total) if least else None


def _send_needs(job: Job, plan: Plan, gpu: Gpu | None, send: Send) -> None:
    told: dict[str, Any] = {"state": _STATE * (size_of(job) or 0)}
    try:
        send({**told, "memory": _memory(job, plan, gpu)})
    except Exception as error:  # a job of any make
        send({**told, "missing": one_line(error)})


def _memory(job: Job, plan: Plan, gpu: Gpu | None) -> float:
    from phalanx.forecast import forecast
    from phalanx.train.traced_job import work_of

    work = work_of(job)
    if gpu is None:
        cluster = cluster_for(replace(plan, device="cpu"))
        return forecast(work, plan, cluster).reserved + cluster.groups[0].device.kept
    known = matched(gpu)
    group = Group(
        device=measured(gpu, known), link=known.link, host=Host(name="a host"), nodes=1, per_node=plan.devices
    )
    # what CUDA itself takes is not free there any more
    return forecast(work, plan, Cluster(groups=(group,), network=entry("cpu").network(1))).reserved
