"""All parts of a step, built from a job and a plan at one worker's place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from phalanx.comm import Counterparts, Place, alike, from_every_rank, place_within
from phalanx.config import Job, Phase, Plan
from phalanx.config.optimizing import never_averaged
from phalanx.config.sync import within
from phalanx.data import Lane, Loader
from phalanx.device_kinds import kind_of
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.parallel import Example, Layout, LocalSgd, advice, assemble, assemble_phases, check, notes
from phalanx.parallel.buffer_sync import buffers_kept
from phalanx.train.build_model import begun, build_model, give_needed_values, make_data
from phalanx.train.build_optimizer import build_optimizer, optimizer_over
from phalanx.train.consistency import Everyone, same_data, same_groups, same_initial_values, same_places
from phalanx.train.few_samples import example_of
from phalanx.train.findings import Findings, known_facts
from phalanx.train.lr_schedule import START, RunStart, scheduler_notes
from phalanx.train.phase_jobs import parameters_of_phases, phase_jobs, unowned_advice
from phalanx.train.phased_step import PhasedStep
from phalanx.train.refusals import OptimizerTrial, model_problems
from phalanx.train.row_gather import RowGather, which_have_rows
from phalanx.train.step import Step, StepPlan
from phalanx.train.torch_scheduler import MadeOptimizer, TorchScheduler
from phalanx.train.uneven_shares import Sharing

if TYPE_CHECKING:  # loaded by plans that have some
    from phalanx.parallel.split_facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """A job laid out on this worker.

    Attributes:
        notes: differences of this plan from one device.
        advice: settings that waste devices or have no effect.
        parameters: elements of the whole model's.
        local_sgd: synchronises independent replicas; ``None`` without such.
        frozen: the fingerprint of each parameter missing in checkpoints; empty if they hold all.
    """

    step: Step
    loader: Loader
    layout: Layout
    optimizer: torch.optim.Optimizer
    device: str
    notes: list[str]
    advice: list[str]
    parameters: int
    local_sgd: LocalSgd | None = None
    frozen: dict[str, str] = field(default_factory=dict[str, str])

    def from_every_rank(self, value: Any) -> list[Any]:
        """Return a small JSON-like value from each worker, in rank order. Collective."""
        return self.local_sgd.from_every_rank(value) if self.local_sgd else from_every_rank(value)


def refuse(job: Job, plan: Plan, world_size: int, here: int | None = None) -> None:
    """Raise all problems of ``plan`` with ``job`` and this many workers at once.

    ``here`` is the number of the plan's replicas on this machine; by default all.

    Raises:
        RefusedError: with every problem found.
    """
    problems = check(job, plan, here)
    if world_size not in (plan.world_size, plan.processes):
        given, fix = f"{plan} for {world_size} workers", f"dp={world_size}" if world_size > 1 else "single"
        beside = f", and {plan.server} servers beside them" if plan.server else ""
        allowed = f"a mesh that multiplies to the workers: pp × dp × fsdp × ep × cp × tp = {world_size}{beside}"
        problems.append(Problem(where="plan", given=given, allowed=allowed, fix=fix))
    if problems:
        raise RefusedError(problems)


def build(
    job: Job,
    plan: Plan,
    place: Place,
    device: torch.device,
    *,
    start: RunStart = START,
    findings: Findings | None = None,
) -> Assembly:
    """Build model, layout, optimizer, loader and step. Collective with several workers.

    Call ``refuse`` before; ``device`` is this worker's. Facts missing in ``findings`` are searched for here.

    Raises:
        RefusedError: if the plan cannot serve the job.
        SpecError: if the job's functions return a wrong type, or a decay has no end.
        DataError: if the data or the initial values differ between ranks.
        GradientError: if the optimizer holds other parameters than it was given.
    """
    own, there = within(plan), place_within(plan, place)
    _refuse_unlooked(job, plan, findings)
    module, unbuilt = begun(job) if own.kind in ("split", "shard") else (build_model(job), [])
    if problems := model_problems(job, plan, module):
        raise RefusedError(problems)
    across = Counterparts(plan, place) if plan.sync != "each" else None
    everyone = across.from_every_rank if across else from_every_rank
    same_initial_values(module, everyone)
    found, size = [*notes(module, job, plan), *unbuilt], sum(tensor.numel() for tensor in module.parameters())
    lane, first, kind = Lane.of(plan, place.rank), start.step, kind_of(device, plan.device)
    loader = Loader(make_data(job, job.data), job, lane, micro=plan.micro, first_step=first, pin_memory=kind.pinned)
    same_data(loader.told, everyone)

    site = _Site(plan=plan, own=own, rank=there.rank, device=device, start=start, lane=lane, loader=loader)
    if job.phases:
        step, apart = _phased(job, site, module), None
    else:
        step, remarks = _plain(job, site, module, findings, across)
        apart = step.sync if isinstance(step.sync, LocalSgd) else None
        found += remarks
    if plan.shares:
        step.sharing = Sharing(job, plan, place, loader, first, apart.from_every_rank if apart else everyone)
        step.sharing.watch(step.layout.holdings, step.optimizer, kind)
    (everyone if across else alike)(None)  # who ended at once would cut connections that others are still making
    return Assembly(
        step=step,
        loader=loader,
        layout=step.layout,
        optimizer=step.optimizer,
        device=kind.name,
        notes=found,
        advice=[
            *advice(job, plan, kind.name, loader.epoch_samples),
            *loader.remarks,
            *never_averaged(job.average, loader.total_steps),
            *step.layout.holdings.remarks,
            *unowned_advice(job, module),
        ],
        parameters=size,
        local_sgd=apart,
    )


def _refuse_unlooked(job: Job, plan: Plan, findings: Findings | None) -> None:
    if findings is None or not findings.looked:
        from phalanx.train.look_ahead import refuse_what_does_not_add_up

        refuse_what_does_not_add_up(job, plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """The place where a step is built: ``rank`` of the replica group laid out by ``own``, plan and data."""

    plan: Plan
    own: Plan
    rank: int
    device: torch.device
    start: RunStart
    lane: Lane
    loader: Loader

    def course(self, job: Job, scheduler: TorchScheduler | None = None, *streams: int) -> StepPlan:
        return StepPlan(
            first_step=self.start.step,
            total_steps=_total_steps(job, self.loader),
            lr_scale=self.start.lr_scale,
            first_part=self.lane.first,
            scheduler=scheduler,
            streams=streams,
        )

    def optimizer(self, job: Job, layout: Layout, whole: Iterable[str], *, tried: bool) -> MadeOptimizer:
        made = build_optimizer(job, layout, whole)
        trial = OptimizerTrial.of_rank(made.optimizer, made.scheduler, layout.holdings, tried=tried)
        if problems := trial.problems(job, self.plan, self.start):
            raise RefusedError(problems)
        return made


def _plain(
    job: Job, site: _Site, module: nn.Module, findings: Findings | None, across: Counterparts | None
) -> tuple[Step, list[str]]:
    own, loader, device, found = site.own, site.loader, site.device, list[str]()
    facts = known_facts(findings, module, own)
    whole = {name: tensor.shape for name, tensor in module.named_parameters() if tensor.requires_grad}
    rows = None
    if job.loss_over != "samples":  # collective
        rows = RowGather.of(own, site.rank, device, which_have_rows(module, example_of(job, module, loader)))
    with buffers_kept(module):
        layout = assemble(module, job, own, site.rank, device, lambda: _look_with(job, module, loader, facts, found))
    optimizer, scheduler = site.optimizer(job, layout, whole, tried=facts is not None)
    found += [] if scheduler else scheduler_notes(optimizer)
    everyone = across.from_every_rank if across else from_every_rank
    course = site.course(job, _followed(job, optimizer, scheduler, everyone))
    if layout.holdings.stages is not None and _knows_groups_by_place(job, scheduler):
        empty = {name: nn.Parameter(torch.zeros(()).expand(shape)) for name, shape in whole.items()}
        there = _groups_of_names(empty, optimizer_over(job, empty).optimizer)
        same_places(_groups_of_names(layout.parameters, optimizer), there, everyone)
    apart = LocalSgd(site.plan, layout, across, site.start.step, loader.total_steps) if across else None
    return Step(job, own, layout, optimizer, course, apart, rows), found


def _phased(job: Job, site: _Site, module: nn.Module) -> PhasedStep:
    jobs, parameters = phase_jobs(job), parameters_of_phases(job, module)

    def examples() -> Iterator[Example]:
        for one in jobs:
            example = example_of(one, module, site.loader)
            give_needed_values(module, example)
            yield example

    with buffers_kept(module):
        layout = assemble_phases(module, job, site.own, site.device, parameters, examples)
    phases: list[tuple[Phase, Step]] = []
    for index, (phase, one, own) in enumerate(zip(job.phases, jobs, layout.phases, strict=True)):
        optimizer, scheduler = site.optimizer(one, own, parameters[index], tried=False)
        followed = _followed(one, optimizer, scheduler, from_every_rank)
        phases.append((phase, Step(one, site.own, own, optimizer, site.course(one, followed, index))))
    return PhasedStep(job, site.own, layout, phases, site.course(job))


def _followed(
    job: Job, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, everyone: Everyone
) -> TorchScheduler | None:
    """Return the scheduler that the job provides beside its optimizer, if any.

    Then, and if gradients are clipped by group, this is collective: both identify groups by position.
    """
    if _knows_groups_by_place(job, scheduler):
        same_groups(len(optimizer.param_groups), everyone)
    return None if scheduler is None else TorchScheduler(scheduler, job.evaluate_every)


def _knows_groups_by_place(job: Job, scheduler: LRScheduler | None) -> bool:
    return scheduler is not None or (job.clipping is not None and job.clipping.per == "group")


def _groups_of_names(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    places = {id(one): place for place, group in enumerate(optimizer.param_groups) for one in group["params"]}
    return {name: places[id(tensor)] for name, tensor in parameters.items() if id(tensor) in places}


def _look_with(job: Job, module: nn.Module, loader: Loader, facts: Facts | None, found: list[str]) -> Example:
    example = replace(example_of(job, module, loader), facts=facts)
    found += [] if facts else give_needed_values(module, example)
    return example


def _total_steps(job: Job, loader: Loader) -> int:
    schedule = job.lr_schedule
    if loader.total_steps is not None:
        return loader.total_steps
    if schedule.total_steps is None and schedule.decay in ("linear", "cosine"):
        given = f"decay={schedule.decay!r} without total_steps, over a stream of unknown length"
        allowed = "total_steps given in the schedule, or job.steps in place of job.epochs"
        fix = f"schedule=px.Schedule(decay={schedule.decay!r}, total_steps=1000)"
        raise SpecError([Problem(where="job.schedule", given=given, allowed=allowed, fix=fix)])
    return schedule.total_steps or 1  # where it is 1, the schedule does not ask
