"""A plan's effect on a job, found before a process starts by tracing its model.

``preview`` traces as ``show`` does, a model without values and for devices that need not be here; ``refusals`` returns
its problems. ``look`` is for a run that begins: if the model is small enough it takes the first step too
(``rehearsal``), and its findings go to the processes of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from phalanx.config import Job, Plan
from phalanx.config.losses import ModelLoss
from phalanx.errors import Problem, RefusedError
from phalanx.parallel import check, device_kind, global_batch_norm, notes, torch_compile
from phalanx.parallel.double_backward import no_double_backward
from phalanx.parallel.survey import survey
from phalanx.parallel.unwrapped_blocks import open_unwrapped
from phalanx.placement.ownership import Survey
from phalanx.placement.survey_file import survey_to_dict
from phalanx.train.build_model import begun, build_model, give_needed_values, size_of, without_values
from phalanx.train.elementwise import half_steps
from phalanx.train.few_samples import example_of, whole_loader
from phalanx.train.findings import Findings, known_facts
from phalanx.train.lr_schedule import START, RunStart
from phalanx.train.own_loss_trial import miscounted
from phalanx.train.phase_jobs import phase_jobs
from phalanx.train.refusals import job_problems
from phalanx.train.rehearsal import rehearse, try_evaluation
from phalanx.train.resumed_from import refuse_another_model, refuse_other_data
from phalanx.train.split_causes import LARGEST, causes, compared_before, splits_batches


def preview(job: Job, plan: Plan, look: Callable[[], Findings] = Findings) -> tuple[Survey, list[str]]:
    """Return each rank's part, and notes on differences of ``plan`` from one device and their causes.

    The model of ``job`` is built without values if possible; the devices need not be here. ``look`` returns known
    findings, which are used again.

    Raises:
        RefusedError: with every problem of the plan with the job on its devices.
        SpecError: if the job's functions return a wrong type.
    """
    problems = [problem for problem in check(job, plan) if problem.where != "plan.device"]
    if problems:
        raise RefusedError(problems)
    module, unbuilt = begun(job)
    _refuse(job, plan, module)
    findings, found = look(), notes(module, job, plan)
    if plan.kind != "split":
        return survey(module, plan)[0].for_batch(job.batch), [*found, *findings.causes]
    facts, example = known_facts(findings, module, plan), example_of(job, module)
    found += [*unbuilt, *([] if facts else give_needed_values(module, example)), *findings.causes]
    example = replace(example, facts=facts)
    open_unwrapped(module, plan, example)
    return survey(module, plan, example)[0].for_batch(job.batch), found


def refuse_job(job: Job, plan: Plan) -> None:
    """Raise the problems of ``plan`` with the model, the data and the optimizer of ``job``, without running them.

    Raises:
        RefusedError: with every problem found.
        SpecError: if the job's functions return a wrong type.
    """
    _refuse(job, plan, begun(without_values(job))[0])


def _refuse(job: Job, plan: Plan, module: nn.Module, start: RunStart = START) -> None:
    if problems := job_problems(job, plan, module, start):
        raise RefusedError(problems)


def refusals(job: Job, plan: Plan) -> list[Problem]:
    """Return the problems of ``plan`` with ``job`` on the plan's devices, by tracing the model.

    Options that are merely not run yet, such as ``precision=fp8``, are left to ``placement.limits.not_run_yet``.

    Raises:
        SpecError: if the job's functions return a wrong type.
    """
    # these ask for what is on this machine, but for a plan that compiles nowhere
    there = replace(plan, device="auto", compile=bool(torch_compile.slice_problems(plan)))
    if there.precision in ("fp8", "tf32"):
        there = replace(there, precision="bf16")
    try:
        preview(without_values(job), there)
    except RefusedError as error:
        return list(error.problems)
    return []


def _look_at_phases(job: Job, plan: Plan, start: RunStart) -> Findings:
    module = begun(without_values(job))[0]  # first: whether each parameter is of one phase
    if start.checkpoint:
        refuse_another_model(start.checkpoint, module)
        start = replace(start, checkpoint=None)
    found: dict[str, None] = {}
    for phase, one in zip(job.phases, phase_jobs(job), strict=True):
        found |= dict.fromkeys(f"phase {phase.name}: {cause}" for cause in _look(one, plan, start).causes)
    size = size_of(job)
    if (size or 0) <= LARGEST:
        try_evaluation(job, plan)
    placement = survey_to_dict(survey(module, plan)[0].for_batch(job.batch))
    return Findings(causes=tuple(found), size=size, placement=placement, looked=True)


def refuse_what_does_not_add_up(job: Job, plan: Plan) -> None:
    """Refuse losses that do not add up on a few samples, if no trial has checked that.

    For models of up to 50 million parameters, without servers. Initial values are drawn anew after it.

    Raises:
        RefusedError: if the loss of a whole batch is not the sum of its parts.
    """
    for one in phase_jobs(job):
        asks = isinstance(one.loss, ModelLoss) or one.loss_over == "batch"
        if asks and not plan.server and splits_batches(one, plan) and (size_of(one) or 0) <= LARGEST:
            _refuse_what_does_not_add_up(one, plan, build_model(one))


def _refuse_what_does_not_add_up(job: Job, plan: Plan, module: nn.Module) -> None:
    problems = compared_before(job, plan, module, whole_loader(job))
    if splits_batches(job, plan):
        problems += miscounted(job, module, whole_loader(job))
    if problems:
        raise RefusedError(problems)


def look(job: Job, plan: Plan, start: RunStart = START) -> Findings:
    """Trace ``job`` under ``plan``; if the model is small enough, run model and optimizer.

    ``start`` is the begin of the run.

    Raises:
        RefusedError: with the problems of the plan with the job.
        SpecError: if the job's functions fail or return a wrong type; or if the checkpoint to resume from belongs to
            another model, or to other data.
        LossError: if the loss is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    if start.checkpoint:
        refuse_other_data(start.checkpoint, job)
    with no_double_backward(plan):
        return _look_at_phases(job, plan, start) if job.phases else _look(job, plan, start)


def _look(job: Job, plan: Plan, start: RunStart) -> Findings:
    size = size_of(job)
    # With servers pieces are of other sizes: what their sums differ by is for the proof to say.
    small = (size or 0) <= LARGEST and not plan.server
    rehearsed = rehearse(job, plan, start) if small and plan.processes > 1 else None
    as_made = small and (rehearsed is not None or plan.processes == 1)
    module, found = rehearsed, list[str]()
    if module is None:
        module = build_model(job) if as_made else begun(without_values(job, size))[0]
    if start.checkpoint:
        refuse_another_model(start.checkpoint, module)
    if rehearsed is None or dist.is_initialized():
        _refuse(job, plan, module, start)
    if rehearsed is None and (size or 0) <= LARGEST:
        try_evaluation(job, plan, module if as_made else None)
    if problems := global_batch_norm.sync_problems(job, plan, module, device_kind(plan)):
        raise RefusedError(problems)
    if plan.server and (size or 0) <= LARGEST:
        found += causes(job, plan, build_model(job), whole_loader(job))
    if as_made:
        _refuse_what_does_not_add_up(job, plan, module)
        found += causes(job, plan, module, whole_loader(job))
        trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if plan.devices > 1 and (note := half_steps(job, trainable)):
            found.append(note)
    cuts = plan.kind == "split" or plan.zero == 3
    if not cuts and plan.recompute == "none":
        placement = survey_to_dict(survey(module, plan)[0].for_batch(job.batch)) if plan.kind != "split" else None
        return Findings(causes=tuple(found), module=module, size=size, placement=placement, looked=True)

    from phalanx.parallel.split_facts import Facts, identity

    of, example = identity(module, plan), example_of(job, module)  # before the look leaves its marks
    give_needed_values(module, example)
    opened = open_unwrapped(module, plan, example)
    surveyed, parts = survey(module, plan, example)
    facts = Facts(of=of, opened=opened, parts=parts)
    return Findings(
        causes=tuple(found),
        facts=facts.to_dict(),
        module=None if parts is not None and parts.experts else module,
        size=size,
        placement=survey_to_dict(surveyed.for_batch(job.batch)),
        looked=True,
    )
