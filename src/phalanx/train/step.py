"""One optimizer step over one global batch: the same for every plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.comm import active, from_every_rank
from phalanx.config import Job, Plan
from phalanx.config.losses import names_of
from phalanx.data import StepBatch
from phalanx.device_kinds import kind_of
from phalanx.parallel import EveryStep, Layout, Sync, without_gradient
from phalanx.parallel.double_backward import no_double_backward
from phalanx.train.accidents import LOOK_AT_VALUES, Accidents
from phalanx.train.build_optimizer import skips_on_device, use_fused
from phalanx.train.coupled_loss import CoupledLoss
from phalanx.train.drift import DriftWatch
from phalanx.train.grad_accumulation import GradAccumulation
from phalanx.train.grad_clipping import Clipping, add_up_rows, global_norm, local_gradients, scale
from phalanx.train.inputs import Inputs
from phalanx.train.loss import check_count, compiled_losses
from phalanx.train.loss_scaling import UNCHANGED, LossScale, cast_weights_once, compute_context
from phalanx.train.lr_schedule import LearningRates
from phalanx.train.metrics import Metrics, Totals, towards_host
from phalanx.train.named_losses import NamedCounts
from phalanx.train.observer import Observer
from phalanx.train.row_gather import RowGather
from phalanx.train.torch_scheduler import SchedulersOfPhases, TorchScheduler
from phalanx.train.uneven_shares import Sharing
from phalanx.train.weight_average import WeightAverage


@dataclass(kw_only=True, slots=True)
class Progress:
    """Values carried from step to step, and saved in checkpoints: optimizer steps taken, samples trained on.

    ``divisor`` is the constant that backward divides sums by, 0 before the first step; ``loss_scale`` is for fp16.
    """

    step: int = 0
    samples: int = 0
    divisor: float = 0.0
    loss_scale: LossScale | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The steps of a run, and their learning rates.

    Attributes:
        total_steps: the step after the last, at which a schedule without its own end reaches its floor.
        lr_scale: factor on every learning rate.
        first_part: the first of the parts of each global batch that this process holds.
        scheduler: of torch's, that sets the rates in place of a schedule of the job.
        streams: distinguishes the random streams of steps with equal number: the phase.
    """

    first_step: int = 0
    total_steps: int = 1
    lr_scale: float = 1.0
    first_part: int = 0
    scheduler: TorchScheduler | None = None
    streams: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObserver:
    """An observer of a step.

    Attributes:
        around: returns a context around that of each micro-batch's forward and loss, in their thread.
        gradients: called after backward, and again after the reduction of its gradients.
    """

    around: Callable[[AbstractContextManager[object]], AbstractContextManager[object]]
    gradients: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computed:
    """Batch and numbers of a step before its loss and gradient norm are checked.

    Attributes:
        norm: of the gradients; it may be read once ``metrics.loss`` was.
        counts: of losses by name, if the job has some.
        before: optimizer steps and samples taken before this step.
    """

    batch: StepBatch
    metrics: Metrics
    norm: torch.Tensor | None
    counts: NamedCounts | None
    before: tuple[int, int]


class Step:
    """A callable that takes one optimizer step with a global batch and returns its ``Metrics``.

    Attributes:
        sync: the synchronisation of replicas; call ``sync.together()`` before a user's own loop reads parameters.
        accidents: the policy for losses and gradients that are not finite.
        watch: measures memory; may be ``None``.
        sharing: the ranks' uneven shares, which may follow their speed; ``None`` if they are even.
        drift: compares replicas now and then; may be ``None``.
        average: of the weights, if the job has one; ``average.applied()`` puts it into the model.
        scheduler: of torch's, that sets the learning rates, or those of all phases; ``None`` without one.
        last: of the last finished step; ``None`` before the first.
        seconds: of the host, in the last step, for forward and backward, and for the update.
        inputs, first_part, streams, joined, whole_here, reads_means, names: read by gradient accumulation.
        rows: gathers the global batch for a loss that compares its samples.
        checks_late: True if a step's numbers may be checked after its update is queued, because the device can skip it.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        course: StepPlan,
        sync: Sync | None = None,
        rows: RowGather | None = None,
    ) -> None:
        self.job, self.plan, self.layout, self.optimizer = job, plan, layout, optimizer
        self.sync = sync or EveryStep()
        self.progress = Progress(
            step=course.first_step, loss_scale=LossScale.for_batch(job.batch) if plan.precision == "fp16" else None
        )
        self.inputs = Inputs(job, layout.module)
        self.scheduler: TorchScheduler | SchedulersOfPhases | None = course.scheduler
        scheduled = course.scheduler is not None
        total, scale_of_run = course.total_steps, course.lr_scale
        self._rates = LearningRates(job, optimizer, total_steps=total, scale=scale_of_run, scheduled=scheduled)
        self.first_part, self.streams = course.first_part, course.streams
        self.joined = active()
        self.whole_here = not self.joined and plan.devices == 1 and not self.sync.per_replica
        self._clipping = Clipping(job.clipping, layout.holdings, optimizer)
        self._checked = False
        self.reads_means: bool | None = None
        device = next(layout.module.parameters()).device
        self.names = names_of(job.loss)
        self._widest = compute_context(plan, device) is UNCHANGED
        self._compiles_losses = plan.compile and kind_of(device).compiles  # else it needs the host's C++ compiler
        self.rows = rows or RowGather(device)
        self.accidents = Accidents()
        self.watch: StepObserver | None = None
        self.observer = Observer()
        self.sharing: Sharing | None = None
        self.drift: DriftWatch | None = None
        self._work: GradAccumulation | None = None
        self.average = WeightAverage(job.average, layout) if job.average else None
        self.checks_late = not self.sync.per_replica
        self._late: bool | None = None  # known from the first step on
        self._unchecked: _Computed | None = None
        self.last: Metrics | None = None
        self.seconds = (0.0, 0.0)

    def __call__(self, batch: StepBatch) -> Metrics:
        """Run forward, backward and update for one global batch.

        Raises:
            LossError: if the loss is not finite, or not of an allowed form, or if nothing was counted.
            GradientError: if a gradient is not finite, or parameters get none and the job does not allow it.
            RollBackError: if the run is to go back to a checkpoint instead.
        """
        began = time.perf_counter()
        if why := self.accidents.left_out.get(batch.step):
            return self._without_update(batch, (math.nan, 0.0), why)
        self.accidents.begins(self)
        totals = self.backward(batch)
        between = time.perf_counter()
        metrics = self.update(batch, totals)
        self.seconds = (between - began, time.perf_counter() - between)
        return metrics

    def backward(self, batch: StepBatch) -> Totals:
        """Run forward and backward: every parameter gets the gradient of the global batch, divided by its count.

        Gradients of other backwards in ``.grad`` are dropped. Returns the loss's sum and count over the global batch.
        """
        work = self._work = (GradAccumulation if self.job.loss_over == "samples" else CoupledLoss)(self, batch)
        self.layout.begin()
        work.prepare()
        with no_double_backward(self.plan), cast_weights_once(self.plan, micro_batches=len(batch.parts[0])):
            self.layout.accumulate(batch.parts, work)
        if self.watch is not None:
            self.watch.gradients()
        self.layout.finish()
        add_up_rows(self.layout.holdings.parameters.values())
        if self.watch is not None:
            self.watch.gradients()
        totals = work.totals()
        if not self._checked:
            self._checked = True
            without = [name for name, tensor in self.layout.holdings.parameters.items() if tensor.grad is None]
            if without and self.job.unused == "error":
                raise without_gradient(without, "in the first step")
        totals = self.sync.gradients_ready(self.progress.step, totals)
        work.named = self.sync.named_ready(self.progress.step, work.named)
        correction = work.correction(totals)
        if correction is not None:
            scale(local_gradients(self.layout.holdings.parameters.values()), correction)
        self.observer.gradients(batch, totals)
        return totals

    def update(self, batch: StepBatch, totals: Totals) -> Metrics:
        """Clip, step the optimizer at the schedule's rate, and copy the new values to the forward's parameters.

        The loss and the gradient norm must be finite. If the optimizer can skip an update on the device, the host
        checks them one step later, while the device computes (``settle``). Otherwise it waits for them here.
        """
        held, progress, scaling = self.layout.holdings, self.progress, self.progress.loss_scale
        lr = self._rates.set(progress.step)
        nothing = self._nothing_here(batch, totals)
        wanted = self._clipping.by_whole_norm or scaling is not None
        norm = global_norm(held, quick=not wanted, values=progress.step % LOOK_AT_VALUES == 0)
        work, self._work = self._work, None
        numbers, host_norm, ready = towards_host(work.beside(totals) if work else totals, norm)
        facts = self._facts(batch, lr)
        names = self.names if work else ()
        kept = host_norm if wanted else None
        metrics = Metrics(skipped=False, _totals=numbers, _norm=kept, _ready=ready, names=names, **facts)
        counts, before = work.counts if work else None, (progress.step, progress.samples)
        computed = _Computed(batch=batch, metrics=metrics, norm=host_norm, counts=counts, before=before)
        if self._late is not False and self._skips_on_device(totals, norm):
            self.settle()
            self._unchecked = computed
        elif not nothing and (why := self._reason_to_skip(computed, exact=wanted)):
            return self._without_update(batch, metrics.totals, why)
        overflow = scaling is not None and not math.isfinite(metrics.grad_norm or 0.0)
        if overflow:
            metrics = replace(metrics, skipped=True)
        if scaling:
            before_update = scaling.scale
            scaling.update(not overflow)
            if held.sender is not None:
                held.sender.scale(scaling.scale / before_update)
        if not overflow and not nothing:
            self._clipping(norm)
            self.observer.steps(batch)
            self.optimizer.step()
        self._stepped(batch, totals, metrics)
        return metrics

    def settle(self) -> None:
        """Check the loss and the gradient norm of the last step, if that is pending. Collective.

        Raises:
            LossError, GradientError: they are not finite. Parameters and optimizer are those before that step.
        """
        computed, self._unchecked = self._unchecked, None
        if computed is None:
            return
        progress, now = self.progress, (self.progress.step, self.progress.samples)
        progress.step, progress.samples = computed.before
        self._reason_to_skip(computed, exact=True)
        progress.step, progress.samples = now

    def _skips_on_device(self, totals: Totals, norm: torch.Tensor) -> bool:
        if self._late is None:
            use_fused(self.optimizer)
            self._late = self._every_rank_can_skip(totals, norm)
        if not self._late or not isinstance(totals, torch.Tensor):
            return False
        usable = torch.isfinite(totals[0] / totals[1]) & torch.isfinite(norm) & (totals[1] > 0)
        self.optimizer.found_inf = usable.logical_not().float()  # pyrefly: ignore
        return True

    def _every_rank_can_skip(self, totals: Totals, norm: torch.Tensor) -> bool:
        """Return True on all ranks or none: ranks that check at different times would deadlock. Collective."""
        if not self.checks_late or not isinstance(totals, torch.Tensor) or not kind_of(totals.device).streams:
            return False
        if self.progress.loss_scale or not self.accidents.only_stops:
            return False
        return all(from_every_rank(skips_on_device(self.optimizer) and norm.device == totals.device))

    def _reason_to_skip(self, computed: _Computed, *, exact: bool) -> str:
        """Return the reason to skip this update, or ""; ``exact``: the norm is finite if all gradients are."""
        metrics = computed.metrics
        total, count = metrics.totals
        loss = total / count if count else math.nan
        check_count(metrics.step, count)
        if computed.counts:
            computed.counts.check([count for _, count in metrics.sums.values()])
        scaling, norm = self.progress.loss_scale, 0.0 if computed.norm is None else float(computed.norm)
        if not exact and not math.isfinite(norm) and math.isfinite(loss):
            norm = float(global_norm(self.layout.holdings, values=True))
        overflows = scaling is not None and not scaling.exhausted
        found = self.accidents.judge(metrics.step, loss, norm, overflows=overflows)
        if found is None:
            self.accidents.passed()
            return ""
        return self.accidents.meet(found, self, computed.batch)

    def _without_update(self, batch: StepBatch, totals: tuple[float, float], why: str) -> Metrics:
        lr = self._rates.set(self.progress.step)
        metrics = Metrics(skipped=True, accident=why, _totals=totals, _norm=None, **self._facts(batch, lr))
        self._stepped(batch, (0.0, 0.0), metrics)
        return metrics

    def _facts(self, batch: StepBatch, lr: float) -> dict[str, Any]:
        return {"step": self.progress.step, "epoch": batch.epoch, "samples": batch.samples, "lr": lr}

    def _stepped(self, batch: StepBatch, totals: Totals, metrics: Metrics) -> None:
        self.sync.parameters_stepped(self.progress.step + 1, totals)
        self.layout.stepped()
        if self.scheduler is not None:
            self.scheduler.stepped()
        self._finished(batch, metrics)

    def _finished(self, batch: StepBatch, metrics: Metrics) -> None:
        self.progress.step += 1
        self.progress.samples += batch.samples
        if self.average is not None and not metrics.skipped:
            self.average.stepped(self.progress.step)
        self.last = metrics
        if self.drift is not None:
            self.drift.stepped(self.progress.step - 1)
        if self.sharing is not None:
            self.sharing.stepped(batch)

    def meets_accidents(self, made: Callable[[str], Accidents]) -> None:
        """Set the policy for accidents; ``made`` builds it for a phase, or for ``""`` without phases."""
        self.accidents = made("")

    def saved(self, steps: int) -> None:
        """Record a checkpoint after this many steps."""
        self.accidents.saved(steps)

    def constant_divisor(self, samples: int) -> float:
        """Return the power of two that backward divides sums by, the same on every rank and in every step."""
        if not self.progress.divisor:
            self.progress.divisor = 2.0 ** round(math.log2(max(1.0, samples / self.layout.divisor)))
        return self.progress.divisor

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of forward and loss: the plan's precision, observed by ``watch``."""
        context = UNCHANGED if self._widest else compute_context(self.plan, device)
        return context if self.watch is None else self.watch.around(context)

    def computing_loss(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of the loss: that of ``computing``, with compiled losses if the plan compiles."""
        context = self.computing(device)
        if not self._compiles_losses:
            return context
        together = ExitStack()
        for one in (context, compiled_losses()):
            together.enter_context(one)
        return together

    def _nothing_here(self, batch: StepBatch, totals: Totals) -> bool:
        """Return True if this independent replica's losses counted nothing: its share of a short batch is empty.

        On CUDA this uses the sample count of the rank, because reading a count waits for the device.
        """
        if not self.sync.per_replica:
            return False
        if isinstance(totals, torch.Tensor) and any(micro.samples for part in batch.parts for micro in part):
            return False
        return not float(totals[1])
