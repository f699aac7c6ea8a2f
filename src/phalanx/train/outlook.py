"""What a plan would make of a job: everything that can be told before a process starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config import Job, Plan
from phalanx.data import Lane, Loader
from phalanx.errors import Problem, RefusedError
from phalanx.parallel import check, notes
from phalanx.parallel.survey import Survey, survey
from phalanx.train.assembly import begun, build_model, example_of, looked_at
from phalanx.train.causes import LARGEST, causes
from phalanx.train.elementwise import half_steps
from phalanx.train.refusals import model_problems, optimizer_problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """A job under a plan.

    Attributes:
        survey: what each rank would hold, and the stages of a pipeline.
        notes: what this plan does not keep of one device's result.
    """

    survey: Survey
    notes: tuple[str, ...]


def outlook(job: Job, plan: Plan) -> Outlook:
    """Build the model of ``job``, without values where that can be, and look at it as the plan's ranks would.

    The devices need not be here.

    Raises:
        RefusedError: with everything that keeps the plan from serving the job on the devices it is for.
        SpecError: if the job's functions give something else than they must.
    """
    problems = [problem for problem in check(job, plan) if problem.where != "plan.device"]
    if problems:
        raise RefusedError(problems)
    module, unbuilt = begun(job)
    trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
    if problems := [*model_problems(module, plan), *optimizer_problems(job, plan, trainable)]:
        raise RefusedError(problems)
    found = notes(module, job, plan)
    if plan.kind != "split":
        return Outlook(survey=survey(module, plan), notes=tuple(found))
    found += unbuilt
    loader = Loader(job.data(), job, Lane(), micro=plan.micro)
    example = looked_at(example_of(job, module, loader), module, found)
    return Outlook(survey=survey(module, plan, example), notes=tuple(found))


def refusals(job: Job, plan: Plan) -> list[Problem]:
    """What keeps ``plan`` from ``job`` on the devices it is for, by a look at the model; empty where nothing does.

    What is merely not run yet, such as ``precision=fp8``, is left to ``placement.limits.not_run_yet``.

    Raises:
        SpecError: if the job's functions give something else than they must.
    """
    there = replace(plan, device="auto", compile=False)  # these ask for what is on this machine
    if there.precision in ("fp8", "tf32"):
        there = replace(there, precision="bf16")
    from phalanx.train.work import without_values

    try:
        outlook(without_values(job), there)
    except RefusedError as error:
        return list(error.problems)
    return []


def ahead(job: Job, plan: Plan) -> list[str]:
    """What only a look at values shows of ``job`` under ``plan``: causes of a difference. It runs model and optimizer.

    Raises:
        RefusedError: with what keeps the plan from serving the job.
        SpecError: if the job's functions fail, or give something else than they must.
        LossError: if the loss is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    from phalanx.train.work import size_of, without_values

    small = (size_of(job) or 0) <= LARGEST
    module = None
    if small and plan.processes > 1:
        from phalanx.train.rehearsal import rehearse

        module = rehearse(job, plan)
    if plan.kind == "split" or plan.zero == 3:
        outlook(without_values(job), plan)
    if not small or (module is None and plan.processes > 1):
        return []
    module = module or build_model(job)
    trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
    found = causes(job, plan, module, Loader(job.data(), job, Lane(), micro=None))
    if plan.devices > 1 and (note := half_steps(job, trainable)):
        found.append(note)
    return found
