"""Errors of a run's first step, found before any process starts: a backward on a few samples.

A loss of a wrong form, an unused parameter, an optimizer over another model, a key missing in the batch: each stops
every rank at once, after all of them have been started. Two samples show it. An error is then repeated on exactly rank
0's first computation, so that no valid job is refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import BestSoFar
from phalanx.config import Best, Job, Metric, Plan
from phalanx.data import Lane, Loader, MicroBatch, evaluation_batches
from phalanx.device_kinds import all_kinds, on_host
from phalanx.errors import LossError, PhalanxError, Problem, RefusedError, SpecError
from phalanx.parallel import device_kind, without_gradient
from phalanx.train.build_model import build_model, make_data
from phalanx.train.build_optimizer import optimizer_over
from phalanx.train.column_types import float64_named
from phalanx.train.evaluate import evaluation_mode, measure, refuse_metrics
from phalanx.train.evaluation_sums import EvaluationSums, Found
from phalanx.train.few_samples import FEW, HOST, few_of, whole_loader
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context
from phalanx.train.lr_schedule import START, RunStart
from phalanx.train.phase_jobs import evaluated_job, in_even_batches
from phalanx.train.refusals import job_problems, rank_0
from phalanx.train.user_traceback import users_frames
from phalanx.units import show_names


def rehearse(job: Job, plan: Plan, start: RunStart = START) -> nn.Module | None:
    """Take the first samples of ``job`` through model, loss, backward and evaluation, and try its optimizer.

    Call it in a process that is thrown away: it draws random numbers. Returns the model, with its initial values;
    ``None`` if it only runs as a rank does.

    Raises:
        SpecError: if the job's own code fails, or returns a wrong type.
        RefusedError: if the optimizer cannot step the ranks' parameters.
        LossError: if the loss or a metric is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    alone = replace(job, workers=0)
    if dist.is_initialized():  # a group that the user has made, which is not to be used from here
        return build_model(alone)
    try:
        module = build_model(alone)
        before = [one.clone() for one in module.buffers()]
        _FirstStep(job, plan, start).run(module, [few_of(whole_loader(alone))])
    except Exception as error:
        if not on_host(device_kind(plan)):  # what cannot be done on the host may well be done there
            if isinstance(error, LossError | SpecError):
                raise
            return None
        with rank_0(plan):
            first = _FirstStep(job, plan, start, final=True)
            with first.code_of("job.model"):
                module = build_model(alone)
            first.run(module, first.of_rank_0(alone))
        return None
    for one, value in zip(module.buffers(), before, strict=True):
        one.copy_(value)
    for one in module.parameters():
        one.grad = None
    return module


def try_evaluation(job: Job, plan: Plan, module: nn.Module | None = None) -> None:
    """Evaluate two samples, for ``best`` and ``metrics``, if no other part of the first step is tried.

    ``module`` is the job's model with values, if there is one. Computations that the host cannot do are left to the
    workers.

    Raises:
        SpecError: if no evaluation has the number for the best one.
        LossError: if metrics have a form that ``plan`` cannot compute.
    """
    if dist.is_initialized() or job.evaluate is None or not (job.best or job.metrics):
        return
    one = replace(evaluated_job(job), workers=0)
    try:
        module = module or build_model(job)
        _FirstStep(one, plan, START).evaluate(module, Inputs(one, module))
    except (SpecError, LossError):
        raise
    except Exception:  # the job's own error, which a worker shows with its traceback
        return


class _FirstStep:
    """The first step of a job in one process; a ``final`` one reports the errors of the job's code."""

    def __init__(self, job: Job, plan: Plan, start: RunStart, *, final: bool = False) -> None:
        self._job, self._plan, self._start, self._final = job, plan, start, final

    def run(self, module: nn.Module, micros: Iterable[MicroBatch]) -> None:
        job = self._job
        trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if problems := job_problems(job, self._plan, module, self._start):
            raise RefusedError(problems)
        with self.code_of("job.optimizer"):
            optimizer_over(job, trainable)
        inputs = Inputs(job, module)
        for micro in micros:
            with compute_context(self._plan, HOST):
                with self.code_of("job.inputs" if job.inputs else "job.model"):
                    args, kwargs, batch = inputs(micro.batch, HOST)
                with self.code_of("job.model"), float64_named(micro.batch, module):
                    output = module(*args, **kwargs)
                with self.code_of("job.loss", batch), float64_named(micro.batch, module):
                    read = read_loss(job.loss(output, batch), micro.samples, 0)
            if not read.value.requires_grad:
                raise LossError(_NO_GRAPH)
            with self.code_of("job.model"), float64_named(micro.batch, module):
                read.value.backward()
        without = [name for name, one in trainable.items() if one.grad is None]
        if without and job.unused == "error":
            raise without_gradient(without, "in the first step")
        if job.evaluate is not None:
            self.evaluate(module, inputs)

    def of_rank_0(self, job: Job) -> Iterator[MicroBatch]:
        with self.code_of("job.data"):
            whole = job.loss_over == "batch"
            lane, micro = (Lane(), None) if whole else (Lane.of(self._plan, 0), self._plan.micro)
            loader = Loader(make_data(job, job.data), job, lane, micro=micro)
            for batch in islice(loader, 1):
                yield from (micro for micro in batch.parts[0] if micro.samples)

    def evaluate(self, module: nn.Module, inputs: Inputs) -> None:
        job = replace(in_even_batches(self._job, FEW), workers=0)
        assert job.evaluate is not None
        with self.code_of("job.evaluate"):
            batch = next(evaluation_batches(make_data(job, job.evaluate), job, Lane(), micro=None))
        micro = batch.parts[0][0]
        with torch.no_grad(), evaluation_mode(module), compute_context(self._plan, HOST):
            with self.code_of("job.evaluate"):
                args, kwargs, on_host = inputs(micro.batch, HOST)
                with float64_named(micro.batch, module):
                    output = module(*args, **kwargs)
            with self.code_of("job.metrics" if job.metrics else "job.loss", on_host):
                found = measure(job, output, on_host, micro.samples)
                refuse_metrics(found, self._plan)
            if job.best:
                self._refuse_unknown(job.best, found)

    def _refuse_unknown(self, best: Best, found: Found) -> None:
        sums = EvaluationSums()
        sums.add(found, 0)
        if any(isinstance(given, Metric) and best.metric.startswith(f"{name}.") for name, given in found.items()):
            return  # of so few samples it may not give all that it gives
        ratios = [name for name in sums.ratios if name != "loss"]
        BestSoFar(best).refuse_unknown([*ratios, *sums.computed([sums.to_send()], trial=True)])

    def code_of(self, field: str, batch: Any = None) -> AbstractContextManager[None]:
        return told(field, batch) if self._final else nullcontext()


@contextmanager
def told(field: str, batch: Any = None) -> Generator[None]:
    """Report errors of the job's ``field``, given ``batch``, with their line in the user's code."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PhalanxError):
            raise
        raise SpecError([_problem(field, error, batch)]) from error


def _problem(field: str, error: Exception, batch: Any) -> Problem:
    text = next(iter(str(error).strip().splitlines()), "")
    own = users_frames(error)
    at = f", in {own[-1].filename} line {own[-1].lineno}: {own[-1].line}" if own else ""
    given = f"code that fails on the first samples: {type(error).__name__}: {text}{at}"
    fix = "that line mended" if own else 'the plan "single", which shows the whole traceback'
    if any(f".{kind.name}(" in at or f'"{kind.name}' in at for kind in all_kinds() if not kind.on_host):
        fix = "no device there: Phalanx moves model and batches to the device of each rank"
    if isinstance(error, KeyError) and isinstance(batch, Mapping):  # perhaps of another mapping: nothing is advised
        given += f"; the batch has {show_names([*map(str, batch)])}"
    return Problem(where=field, given=given, allowed="", fix=fix)


_NO_GRAPH = (
    "the loss depends on no parameter: nothing that it is computed from requires a gradient.\n"
    "    Usual causes: detach(), .item() or torch.no_grad() on the way to it.\n"
    '    try: loss=lambda output, batch: px.cross_entropy(output, batch["label"])'
)
