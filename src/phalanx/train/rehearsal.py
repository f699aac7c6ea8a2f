"""What a plan would make of a job, told before a process starts; a backward on two samples.

What would stop a run in its first step, found before any process starts: a backward on a few samples. A loss of a wrong
form, a parameter that nothing uses, an optimizer over another model, a key that the batch does not have: each stops
every rank at once, after all of them have been started. Two samples show it. What they show is then tried once more on
exactly what rank 0 computes first, so that nothing is refused that would run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from phalanx.config import Job, Plan
from phalanx.data import Lane, Loader, MicroBatch, evaluation_batches
from phalanx.errors import LossError, PhalanxError, Problem, RefusedError, SpecError
from phalanx.parallel import Example, check, device_kind, notes, torch_compile, without_gradient
from phalanx.parallel.survey import Survey, survey
from phalanx.train.assembly import (
    Findings,
    begun,
    build_model,
    example_of,
    give_needed_values,
    known_facts,
    optimizer_over,
)
from phalanx.train.elementwise import half_steps
from phalanx.train.evaluate import evaluation_mode, measure
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context
from phalanx.train.refusals import model_problems, optimizer_problems, rank_0, server_problems
from phalanx.train.split_causes import LARGEST, causes

if TYPE_CHECKING:  # loaded by plans that have some
    from phalanx.parallel.found import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPreview:
    """A job under a plan.

    Attributes:
        survey: what each rank would hold, and the stages of a pipeline.
        notes: what this plan does not keep of one device's result, and why else it may differ.
    """

    survey: Survey
    notes: tuple[str, ...]


def preview(job: Job, plan: Plan, look: Callable[[], Findings] = Findings) -> PlanPreview:
    """Build the model of ``job``, without values where that can be, and look at it as the plan's ranks would.

    The devices need not be here. ``look`` gives what is known of the job; that is not looked for again.

    Raises:
        RefusedError: with everything that keeps the plan from serving the job on the devices it is for.
        SpecError: if the job's functions give something else than they must.
    """
    problems = [problem for problem in check(job, plan) if problem.where != "plan.device"]
    if plan.server and not problems:
        problems = server_problems(job, plan)
    if problems:
        raise RefusedError(problems)
    module, unbuilt = begun(job)
    _refuse(job, module, plan)
    findings, found = look(), notes(module, job, plan)
    if plan.kind != "split":
        return PlanPreview(survey=survey(module, plan), notes=(*found, *findings.causes))
    example = replace(_example(job, module), facts=known_facts(findings, module, plan))
    found += [*unbuilt, *give_needed_values(module, example), *findings.causes]
    return PlanPreview(survey=survey(module, plan, example), notes=tuple(found))


def _refuse(job: Job, module: nn.Module, plan: Plan) -> None:
    if problems := [*model_problems(module, plan), *optimizer_problems(job, plan, _trainable(module))]:
        raise RefusedError(problems)


def _trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


def _example(job: Job, module: nn.Module) -> Example:
    return example_of(job, module, Loader(job.data(), job, Lane(), micro=None))


def refusals(job: Job, plan: Plan) -> list[Problem]:
    """What keeps ``plan`` from ``job`` on the devices it is for, by a look at the model; empty where nothing does.

    What is merely not run yet, such as ``precision=fp8``, is left to ``placement.limits.not_run_yet``.

    Raises:
        SpecError: if the job's functions give something else than they must.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a look at a job under a plan left in the process that took it.

    Attributes:
        findings: what there is to tell of it.
        module: the model that it built, as the job makes it; ``None`` where it built none, or has changed it.
        size: elements of the model's parameters; ``None`` where that is not known.
    """

    findings: Findings = field(default_factory=Findings)
    module: nn.Module | None = None
    size: int | None = None


def ahead(job: Job, plan: Plan) -> Look:
    """Look at ``job`` under ``plan``; where the model is small enough it runs model and optimizer.

    Raises:
        RefusedError: with what keeps the plan from serving the job.
        SpecError: if the job's functions fail, or give something else than they must.
        LossError: if the loss is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    size = size_of(job)
    small = (size or 0) <= LARGEST
    module = rehearse(job, plan) if small and plan.processes > 1 else None
    tried, found = module is not None and not dist.is_initialized(), list[str]()
    if small and (module is not None or plan.processes == 1):
        module = build_model(job) if module is None else module
        found += causes(job, plan, module, Loader(job.data(), job, Lane(), micro=None))
        if plan.devices > 1 and (note := half_steps(job, _trainable(module))):
            found.append(note)
    cuts = plan.kind == "split" or plan.zero == 3
    if not cuts and plan.recompute == "none":
        return Look(findings=Findings(causes=tuple(found)), module=module, size=size)
    module = begun(without_values(job, size))[0] if module is None else module
    if cuts and not tried:
        _refuse(job, module, plan)
    facts = _facts(module, plan, _example(job, module))
    by_rows = facts.parts is not None and facts.parts.experts
    findings = Findings(causes=tuple(found), facts=facts.to_dict())
    return Look(findings=findings, module=None if by_rows else module, size=size)


def _facts(module: nn.Module, plan: Plan, example: Example) -> Facts:
    """What the processes that run ``module`` under ``plan`` need not look for."""
    from phalanx.parallel.found import Facts, identity
    from phalanx.parallel.opened import look_inside

    of = identity(module, plan)
    give_needed_values(module, example)
    opened = look_inside(module, example) if plan.zero == 3 or plan.recompute != "none" else ()
    return Facts(of=of, opened=opened, parts=survey(module, plan, example).parts)


_LARGE = 2e8  # elements: some seconds of random numbers


def without_values(job: Job, size: int | None = None) -> Job:
    """``job``; its model is made without values if drawing them would take long, and it can be made so.

    ``size`` is the model's, where it is known.
    """
    size = size_of(job) if size is None else size
    return replace(job, model=lambda: _on_meta(job)) if (size or 0) > _LARGE else job


def size_of(job: Job) -> int | None:
    """Elements of the model's parameters, which are not made; ``None`` where it cannot be made without."""
    try:
        return sum(tensor.numel() for tensor in _on_meta(job).parameters())
    except Exception:  # some models need values
        return None


def _on_meta(job: Job) -> nn.Module:
    with torch.device("meta"), _NothingDrawn():
        return job.model()


class _NothingDrawn(TorchFunctionMode):
    """Leaves out random initial values, for which torch would load its compiler, though there are none on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("tensor")
        if isinstance(first, torch.Tensor) and first.is_meta and getattr(func, "__name__", "") in _DRAWS:
            return first
        return func(*args, **given)


_DRAWS = (
    "normal_",
    "uniform_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
)


_HOST = torch.device("cpu")
_FEW = 2


def rehearse(job: Job, plan: Plan) -> nn.Module | None:
    """Take the first samples of ``job`` through model, loss, backward and evaluation, and try its optimizer.

    To be called in a process that is thrown away: it draws random numbers. Returns the model, with its initial values;
    ``None`` where that only runs as a rank does.

    Raises:
        SpecError: if the job's own code fails, or gives something else than it must.
        RefusedError: if the optimizer cannot step what ranks would hold.
        LossError: if the loss or a metric is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    alone = replace(job, workers=0)
    if dist.is_initialized():  # a group that the user has made, which is not to be used from here
        return build_model(alone)
    try:
        module = build_model(alone)
        before = [one.clone() for one in module.buffers()]
        _First(job, plan).run(module, [_few(Loader(job.data(), alone, Lane(), micro=None))])
    except Exception as error:
        if device_kind(plan) != "cpu":  # what cannot be done on the host may well be done there
            if isinstance(error, LossError | SpecError):
                raise
            return None
        with rank_0(plan):
            first = _First(job, plan, final=True)
            with first.code_of("job.model"):
                module = build_model(alone)
            first.run(module, first.of_rank_0(alone))
        return None
    for one, value in zip(module.buffers(), before, strict=True):
        one.copy_(value)
    for one in module.parameters():
        one.grad = None
    return module


class _First:
    """The first step of a job, as far as one process can take it; a ``final`` one says what its code fails with."""

    def __init__(self, job: Job, plan: Plan, *, final: bool = False) -> None:
        self._job, self._plan, self._final = job, plan, final

    def run(self, module: nn.Module, micros: Iterable[MicroBatch]) -> None:
        """Forward, loss and backward of these micro-batches; then the first ones of evaluation."""
        job = self._job
        trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if problems := model_problems(module, self._plan):
            raise RefusedError(problems)
        self._optimizer(trainable)
        inputs = Inputs(job, module)
        for micro in micros:
            with compute_context(self._plan, _HOST):
                with self.code_of("job.inputs" if job.inputs else "job.model"):
                    args, kwargs, batch = inputs(micro.batch, _HOST)
                with self.code_of("job.model"):
                    output = module(*args, **kwargs)
                with self.code_of("job.loss"):
                    read = read_loss(job.loss(output, batch), micro.samples, 0)
            if not read.value.requires_grad:
                raise LossError(_NO_GRAPH)
            with self.code_of("job.model"):
                read.value.backward()
        without = [name for name, one in trainable.items() if one.grad is None]
        if without and job.unused == "error":
            raise without_gradient(without, "in the first step")
        if job.evaluate is not None:
            self._evaluate(module, inputs)

    def _optimizer(self, trainable: Mapping[str, torch.Tensor]) -> None:
        job, plan = self._job, self._plan
        with self.code_of("job.optimizer"):
            optimizer_over(job, trainable)
        problems = optimizer_problems(job, plan, trainable)
        if problems:
            raise RefusedError(problems)

    def of_rank_0(self, job: Job) -> Iterator[MicroBatch]:
        """What rank 0 computes in the first step."""
        with self.code_of("job.data"):
            loader = Loader(job.data(), job, Lane.of(self._plan, 0), micro=self._plan.micro)
            for batch in islice(loader, 1):
                yield from (micro for micro in batch.parts[0] if micro.samples)

    def _evaluate(self, module: nn.Module, inputs: Inputs) -> None:
        job = replace(self._job, workers=0, batch=min(self._job.batch, _FEW))
        assert job.evaluate is not None
        with self.code_of("job.evaluate"):
            batch = next(evaluation_batches(job.evaluate(), job, Lane(), micro=None))
        micro = batch.parts[0][0]
        with torch.no_grad(), evaluation_mode(module), compute_context(self._plan, _HOST):
            with self.code_of("job.evaluate"):
                args, kwargs, on_host = inputs(micro.batch, _HOST)
                output = module(*args, **kwargs)
            with self.code_of("job.metrics" if job.metrics else "job.loss"):
                measure(job, output, on_host, micro.samples)

    @contextmanager
    def code_of(self, field: str) -> Generator[None]:
        """Around code of the job's ``field``: what it raises is told with the line that it comes from."""
        try:
            yield
        except Exception as error:
            if isinstance(error, PhalanxError) or not self._final:
                raise
            raise SpecError([_problem(field, error)]) from error


def _few(loader: Loader) -> MicroBatch:
    size = _FEW if loader.length is None else min(_FEW, loader.length)
    return MicroBatch(batch=loader.example(size), ids=tuple(range(size)), samples=size)


def _problem(field: str, error: Exception) -> Problem:
    text = next(iter(str(error).strip().splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if "site-packages" not in one.filename and not one.filename.startswith(_OURS)]
    at = f", in {own[-1].filename} line {own[-1].lineno}: {own[-1].line}" if own else ""
    return Problem(
        where=field,
        given=f"code that fails on the first samples: {type(error).__name__}: {text}{at}",
        allowed="code that runs without an error on every batch of the data",
        fix="--plan single, which shows the whole traceback",
    )


_OURS = str(Path(__file__).parents[1])
_NO_GRAPH = (
    "the loss depends on no parameter: nothing that it is computed from requires a gradient.\n"
    "    Usual causes: detach(), .item() or torch.no_grad() on the way to it.\n"
    '    try: loss=lambda output, batch: px.cross_entropy(output, batch["label"])'
)
