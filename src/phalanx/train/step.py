"""One optimizer step over one global batch: the same for every plan.

Backward runs on sums. What they are divided by, the count over the whole global batch, is known before backward where
the loss is a mean over samples, and only after every rank's forward where it is a sum and a count; then backward
divides by a constant of about that size (a power of two, so that nothing is rounded) and the gradients are corrected
once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm import active
from phalanx.config import Job, Plan
from phalanx.data import MicroBatch, StepBatch
from phalanx.parallel import EveryStep, Layout, MicroBatchWork, Sync, without_gradient
from phalanx.parallel.rng_streams import reseed
from phalanx.train.grad_clipping import add_up_rows, clip, global_norm, local_gradients, scale
from phalanx.train.inputs import Inputs, to_device
from phalanx.train.loss_form import Reading, check_totals, read_loss
from phalanx.train.loss_scaling import LossScale, compute_context
from phalanx.train.lr_schedule import Rates
from phalanx.train.metrics import Metrics, Totals, towards_host
from phalanx.train.observer import Observer
from phalanx.train.rng import stream
from phalanx.train.uneven_shares import Sharing


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a step carries to the next, and a checkpoint keeps.

    Attributes:
        step: optimizer steps taken.
        samples: samples trained on.
        divisor: the constant backward divides sums by; 0 before the first step.
        loss_scale: for fp16.
    """

    step: int = 0
    samples: int = 0
    divisor: float = 0.0
    loss_scale: LossScale | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Which steps a run takes, and at what learning rates.

    Attributes:
        first_step: the step to begin with.
        total_steps: the step after the last, where a schedule that states none of its own reaches its floor.
        lr_scale: factor on every learning rate.
        first_part: the first of the parts of each global batch that this process holds.
    """

    first_step: int = 0
    total_steps: int = 1
    lr_scale: float = 1.0
    first_part: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObserver:
    """Looks on while a step is taken.

    Attributes:
        around: gives what forward and loss of each micro-batch run inside, given what they would; in their thread.
        gradients: called when backward has run, and again when its gradients have been reduced.
    """

    around: Callable[[AbstractContextManager[object]], AbstractContextManager[object]]
    gradients: Callable[[], None]


class Step:
    """Calling it with a global batch takes one optimizer step and gives its ``Metrics``.

    Attributes:
        sync: how replicas are kept together; before a loop of one's own reads parameters, ``sync.together()``.
        watch: who measures memory; ``None`` for nobody.
        observer: who looks on.
        sharing: the ranks' uneven shares, which may follow their speed; ``None`` where they are even.
        seconds: that the host took, in the last step, for forward and backward, and for the update.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        course: StepPlan,
        sync: Sync | None = None,
    ) -> None:
        self.job, self.plan, self.layout, self.optimizer = job, plan, layout, optimizer
        self.sync = sync or EveryStep()
        self.progress = Progress(
            step=course.first_step, loss_scale=LossScale.for_batch(job.batch) if plan.precision == "fp16" else None
        )
        self._inputs = Inputs(job, layout.module)
        self._rates = Rates(job, optimizer, total_steps=course.total_steps, scale=course.lr_scale)
        self._first_part = course.first_part
        self._whole_here = not active() and plan.devices == 1 and not self.sync.alone
        self._checked = False
        self._reads_means: bool | None = None
        self._unchecked: Metrics | None = None
        self.watch: StepObserver | None = None
        self.observer = Observer()
        self.sharing: Sharing | None = None
        self.seconds = (0.0, 0.0)

    def __call__(self, batch: StepBatch) -> Metrics:
        """Forward, backward and update for one global batch.

        Raises:
            LossError: if the loss is not finite, or not of an allowed form, or if nothing was counted. What a number
                shows is raised one step late on CUDA, and for the last step by ``settle``.
            GradientError: if parameters get no gradient and the job does not allow it.
        """
        began = time.perf_counter()
        totals = self.backward(batch)
        between = time.perf_counter()
        metrics = self.update(batch, totals)
        self.seconds = (between - began, time.perf_counter() - between)
        return metrics

    def backward(self, batch: StepBatch) -> Totals:
        """Forward and backward: afterwards every parameter has the gradient of the global batch, divided by its count.

        It is of this batch alone: what lay in ``.grad`` before is dropped. Returns the loss's sum and count over the
        global batch.
        """
        work = _Work(self, batch)
        self.layout.begin()
        self.layout.accumulate(batch.parts, work)
        if self.watch is not None:
            self.watch.gradients()
        self.layout.finish()
        add_up_rows(self.layout.parameters.values())
        if self.watch is not None:
            self.watch.gradients()
        totals = work.totals()
        if not self._checked:
            self._check_gradients()
        totals = self.sync.gradients_ready(self.progress.step, totals)
        correction = work.correction(totals)
        if correction is not None:
            scale(local_gradients(self.layout.parameters.values()), correction)
        self.observer.gradients(batch, totals)
        return totals

    def update(self, batch: StepBatch, totals: Totals) -> Metrics:
        """Clip, step the optimizer at the schedule's rate, bring the new values to where forward reads them."""
        held = self.layout.held
        parameters = held.parameters.values()
        lr = self._rates.set(self.progress.step)
        scaling = self.progress.loss_scale
        norm = global_norm(held) if self.job.clip is not None or scaling else None
        progress = self.progress
        numbers, host_norm, ready = towards_host(totals, norm)
        metrics = Metrics(
            step=progress.step,
            epoch=batch.epoch,
            samples=batch.samples,
            lr=lr,
            skipped=scaling is not None and norm is not None and not math.isfinite(float(norm)),
            _totals=numbers,
            _norm=host_norm,
            _ready=ready,
        )
        # On CUDA one step later: looking at once would wait for the device while nothing is queued on it.
        if metrics.late:
            metrics_to_check, self._unchecked = self._unchecked, metrics
        else:
            metrics_to_check = metrics
        nothing = self._nothing_here(batch, totals)
        if metrics_to_check is not None and not nothing:
            self._check_totals(metrics_to_check)
        if scaling:
            before = scaling.scale
            scaling.update(not metrics.skipped)
            if held.sender is not None:
                held.sender.scale(scaling.scale / before)
        if not metrics.skipped and not nothing:
            if self.job.clip is not None and norm is not None:
                clip(local_gradients(parameters), norm, self.job.clip)
            self.observer.steps(batch)
            self.optimizer.step()
        self.sync.parameters_stepped(progress.step + 1, totals)
        self.layout.stepped()
        progress.step += 1
        progress.samples += batch.samples
        if self.sharing is not None:
            self.sharing.stepped(batch)
        return metrics

    def settle(self) -> None:
        """Check the last step's loss where that is still to be done; waits for it.

        Raises:
            LossError: if it is not finite, or nothing was counted.
        """
        last, self._unchecked = self._unchecked, None
        if last is not None:
            self._check_totals(last)

    def constant_divisor(self, samples: int) -> float:
        """The power of two that backward divides sums by, the same on every rank and in every step."""
        if not self.progress.divisor:
            self.progress.divisor = 2.0 ** round(math.log2(max(1.0, samples / self.layout.divisor)))
        return self.progress.divisor

    def _compute(self, device: torch.device) -> AbstractContextManager[object]:
        context = compute_context(self.plan, device)
        return context if self.watch is None else self.watch.around(context)

    def _nothing_here(self, batch: StepBatch, totals: Totals) -> bool:
        """Whether the losses of a replica that steps by itself counted nothing: it has no share of a short last batch.

        On CUDA it is found out where this rank has no samples; counting waits for the device.
        """
        if not self.sync.alone:
            return False
        if isinstance(totals, torch.Tensor) and any(micro.samples for part in batch.parts for micro in part):
            return False
        return not float(totals[1])

    def _check_totals(self, metrics: Metrics) -> None:
        scaling = self.progress.loss_scale
        check_totals(metrics.step, *metrics.totals, overflows=scaling is not None and not scaling.exhausted)

    def _check_gradients(self) -> None:
        self._checked = True
        without = [name for name, tensor in self.layout.parameters.items() if tensor.grad is None]
        if without and self.job.unused == "error":
            raise without_gradient(without, "in the first step")


class _Work(MicroBatchWork):
    """The forwards and backwards of one step: adds up sums and counts, and decides what backward divides by."""

    def __init__(self, owner: Step, batch: StepBatch) -> None:
        self._step, self._batch = owner, batch
        self._job = owner.job
        self._read: dict[tuple[int, int], Reading] = {}
        self._at_hand: dict[int, tuple[MicroBatch, Any]] = {}
        self._divided_by = 0.0
        self._exact = False
        self._reduced: tuple[dist.Work, torch.Tensor] | None = None
        self._places = {
            id(micro): (part, index) for part, micros in enumerate(batch.parts) for index, micro in enumerate(micros)
        }

    def forward(self, module: nn.Module, device: torch.device, micro: MicroBatch) -> Any:
        step = self._step
        part, index = self._places[id(micro)]
        reseed(device, stream(self._job.seed, step.progress.step, index, step._first_part + part))
        with step._compute(device):
            args, kwargs, on_device = step._inputs(micro.batch, device)
            self._at_hand[threading.get_ident()] = micro, on_device
            return module(*args, **kwargs)

    def loss(self, output: Any, device: torch.device, micro: MicroBatch, last: bool) -> torch.Tensor:
        step = self._step
        with step._compute(device):
            result = self._job.loss(output, self._on_device(micro, device))
            read = read_loss(result, micro.samples, step.progress.step)
        # kept to the end of the step: with its graph it would keep a half-done backward's activations, too
        self._read[self._places[id(micro)]] = replace(read, value=read.value.detach())
        factor = self._factor(read)
        if last and active() and step.layout.held.stages is None:
            self._start_reducing(device)
        return read.value * factor if isinstance(factor, torch.Tensor) or factor != 1.0 else read.value

    def _on_device(self, micro: MicroBatch, device: torch.device) -> Any:
        """The batch that this thread's last forward has moved there, or another that is moved now."""
        known, batch = self._at_hand.get(threading.get_ident(), (None, None))
        return batch if known is micro else to_device(micro.batch, device)

    def totals(self) -> Totals:
        """Sum and count over the global batch."""
        if self._reduced is None and active():
            self._start_reducing(self._device())  # a rank of a pipeline that computes no losses
        if self._reduced is None:
            return self._local_totals(self._device())
        work, numbers = self._reduced
        work.wait()
        if not self._read and self._step._reads_means is None:
            self._step._reads_means = bool(numbers[2])  # one look, in the first step: the form of a loss stays
        self._exact = self._exact or bool(self._step._reads_means)
        if numbers.device.type != "cpu":
            return numbers[:2]
        total, count, _ = numbers.tolist()
        return total, count

    def correction(self, totals: Totals) -> torch.Tensor | float | None:
        """The one factor that makes the gradients those of sum / count; ``None`` where backward divided by it."""
        if self._exact:
            return None
        factor = (self._divided_by or self._constant()) * self._step.layout.divisor
        if isinstance(totals, tuple):
            return factor / (totals[1] or math.nan)
        return (factor / totals[1].clamp(min=1e-30)).to(torch.float32)

    def _factor(self, read: Reading) -> Any:
        """What to multiply this micro-batch's value by before backward; 0 for a filler, there to keep ranks in step."""
        step = self._step
        if step.progress.loss_scale:
            self._divided_by = self._constant()
            return read.weight / self._divided_by
        if read.mean and not step.sync.alone:
            self._exact = True
            return read.samples * step.layout.divisor / self._batch.samples
        if step._whole_here and len(self._batch.parts[0]) == 1:
            self._exact = True
            return 1.0 / (
                read.count.where(read.count != 0, 1) if isinstance(read.count, torch.Tensor) else read.count or 1
            )
        self._divided_by = self._constant()
        return read.weight / self._divided_by

    def _constant(self) -> float:
        """What backward divides sums by, the same on every rank."""
        scaling = self._step.progress.loss_scale
        if scaling:
            # The same scale on every sample under every plan: what overflows on one device overflows on many.
            return 1.0 / scaling.scale
        return self._step.constant_divisor(self._batch.samples)

    def _device(self) -> torch.device:
        read = next(iter(self._read.values()), None)
        return read.value.device if read else next(self._step.layout.module.parameters()).device

    def _local_totals(self, device: torch.device) -> Totals:
        reads = [self._read[place] for place in sorted(self._read)] if self._step.layout.held.counts else []
        if device.type == "cpu":
            total = sum(read.value.item() * read.weight for read in reads)
            return total, sum(float(read.count) for read in reads)  # not in the counts' own type, perhaps bf16
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for read in reads:
            totals[0] += read.value.detach().to(device) * read.weight
            totals[1] += read.count.to(device) if isinstance(read.count, torch.Tensor) else read.count
        return totals

    def _start_reducing(self, device: torch.device) -> None:
        here = self._local_totals(device)
        exact = float(self._exact)
        if isinstance(here, tuple):
            numbers = torch.tensor((*here, exact), dtype=torch.float64)
        else:
            numbers = torch.cat((here, here.new_full((1,), exact)))
        work = dist.all_reduce(numbers, async_op=True)
        assert work is not None
        self._reduced = (work, numbers)
