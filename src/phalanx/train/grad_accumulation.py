"""Gradient accumulation: the forwards and backwards of all micro-batches of one step, summed as one batch's.

Backward runs on sums. Their divisor, the count over the whole global batch, is known before backward if the loss is a
mean over samples, and only after every rank's forward if it is a sum and a count; then backward divides by a constant
of about that size (a power of two, so that there is no rounding) and the gradients are corrected once.
"""

from __future__ import annotations

import math
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.config.losses import Losses
from phalanx.data import MicroBatch, StepBatch
from phalanx.device_kinds import kind_of, widened
from phalanx.parallel import MicroBatchWork
from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.column_types import refuse_float64
from phalanx.train.inputs import to_device
from phalanx.train.loss import LossReading, read_loss
from phalanx.train.metrics import Numbers, Totals
from phalanx.train.named_losses import NamedCounts

if TYPE_CHECKING:
    from phalanx.train.step import Step


class GradAccumulation(MicroBatchWork):
    """One step's forwards and backwards, with sums, counts and the divisor of backward.

    Attributes:
        counts: of losses by name; ``None`` if the job has a single one.
        named: sum and count of each of those over the global batch, one after the other; set by ``totals()``.
    """

    whole = False  # whether the loss is called once, with all of the global batch

    def __init__(self, owner: Step, batch: StepBatch) -> None:
        self._step, self._batch = owner, batch
        self._job = owner.job
        self._read: dict[tuple[int, int], LossReading] = {}
        self._at_hand: dict[int, tuple[MicroBatch, Any]] = {}
        self._divided_by = 0.0
        self._exact = False
        self._reduced: tuple[dist.Work, torch.Tensor] | None = None
        self._places = {
            id(micro): (part, index) for part, micros in enumerate(batch.parts) for index, micro in enumerate(micros)
        }
        self.named: Any = ()
        self.counts: NamedCounts | None = None
        if isinstance(self._job.loss, Losses):
            alone = owner.plan.replicas == 1 and not owner.sync.per_replica and len(batch.parts[0]) == 1
            whole = self.whole or alone
            self.counts = NamedCounts(self._job.loss, owner.progress.step, whole=whole)

    def prepare(self) -> None:
        """Count losses by name before the first forward. Collective."""
        if self.counts is not None:
            self.counts.count(self._batch, self._device(), counts=self._step.layout.holdings.counts)

    def run(self, module: nn.Module, device: torch.device, micro: MicroBatch, last: bool) -> None:
        try:
            self.loss(self.forward(module, device, micro), device, micro, last).backward()
        except RuntimeError as error:
            refuse_float64(error, micro.batch, module)
            raise

    def forward(self, module: nn.Module, device: torch.device, micro: MicroBatch) -> Any:
        step = self._step
        part, index = self._places[id(micro)]
        reseed(device, stream(self._job.seed, step.progress.step, index, step.first_part + part, *step.streams))
        step.layout.computes(part, micro.samples)
        with step.computing(device):
            args, kwargs, on_device = step.inputs(micro.batch, device)
            self._at_hand[threading.get_ident()] = micro, on_device
            return module(*args, **kwargs)

    def loss(self, output: Any, device: torch.device, micro: MicroBatch, last: bool) -> torch.Tensor:
        step = self._step
        with step.computing_loss(device):
            read = self._reading(self._job.loss(output, self._on_device(micro, device)), micro.samples)
        # kept to the end of the step: with its graph it would keep a half-done backward's activations, too
        kept = LossReading(read.value.detach(), read.weight, read.count, read.samples, read.mean, read.named)
        self._read[self._places[id(micro)]] = kept
        factor = self._factor(read)
        if last and step.joined and step.layout.holdings.stages is None:
            self._start_reducing(device)
        return read.value * factor if isinstance(factor, torch.Tensor) or factor != 1.0 else read.value

    def _reading(self, result: Any, samples: int) -> LossReading:
        if self.counts is not None:
            return self.counts.read(result, samples)
        return read_loss(result, samples, self._step.progress.step)

    def _on_device(self, micro: MicroBatch, device: torch.device) -> Any:
        known, batch = self._at_hand.get(threading.get_ident(), (None, None))
        return batch if known is micro else to_device(micro.batch, device)

    def totals(self) -> Totals:
        """Return sum and count over the global batch."""
        if self._reduced is None and self._step.joined:
            self._start_reducing(self._device())  # a rank of a pipeline that computes no losses
        if self._reduced is None:
            return self._given(self._local_numbers(self._device()))
        work, numbers = self._reduced
        work.wait()
        if not self._read and self._step.reads_means is None:
            self._step.reads_means = bool(numbers[-1])  # one look, in the first step: the form of a loss stays
        self._exact = self._exact or bool(self._step.reads_means)
        return self._given(numbers[:-1].tolist() if kind_of(numbers.device).on_host else numbers[:-1])

    def _given(self, numbers: list[float] | torch.Tensor) -> Totals:
        self.named = numbers[2:]
        return numbers[:2] if isinstance(numbers, torch.Tensor) else (numbers[0], numbers[1])

    def beside(self, totals: Totals) -> Numbers:
        """Return ``totals``, followed by sum and count of each loss by name."""
        if isinstance(totals, torch.Tensor):
            return torch.cat((totals, self.named)) if len(self.named) else totals
        return (*totals, *self.named)

    def correction(self, totals: Totals) -> torch.Tensor | float | None:
        """Return the factor that turns the gradients into those of sum / count; ``None`` if not needed."""
        if self._exact:
            return None
        factor = (self._divided_by or self._constant()) * self._step.layout.divisor
        if isinstance(totals, tuple):
            return factor / (totals[1] or math.nan)
        return (factor / totals[1].clamp(min=1e-30)).to(torch.float32)

    def _factor(self, read: LossReading) -> Any:
        """Return the factor of this micro-batch's value before backward; 0 for a filler that keeps ranks in step."""
        step, count, scaled = self._step, read.count, self._step.progress.loss_scale
        if read.mean and not step.sync.per_replica and not scaled:
            self._exact = True
            return read.samples * step.layout.divisor / self._batch.samples
        if step.whole_here and len(self._batch.parts[0]) == 1 and not scaled:
            self._exact = True
            if not isinstance(count, torch.Tensor):
                return 1.0 / (count or 1)
            return 1.0 / count.where(count != 0, 1).to(read.value.dtype)  # of a whole number, a quotient is fp32
        self._divided_by = self._constant()
        return read.weight / self._divided_by

    def _constant(self) -> float:
        scaling = self._step.progress.loss_scale
        if scaling:
            # The same scale on every sample under every plan: what overflows on one device overflows on many.
            return 1.0 / scaling.scale
        return self._step.constant_divisor(self._batch.samples)

    def _device(self) -> torch.device:
        read = next(iter(self._read.values()), None)
        return read.value.device if read else next(self._step.layout.module.parameters()).device

    def _local_numbers(self, device: torch.device) -> list[float] | torch.Tensor:
        reads = [self._read[place] for place in sorted(self._read)] if self._step.layout.holdings.counts else []
        length, kind = 2 + 2 * len(self._step.names), kind_of(device)
        if kind.on_host:
            sums = [0.0] * length
            for read in reads:
                for index, number in enumerate((float(read.value) * read.weight, read.count, *chain(*read.named))):
                    sums[index] += float(number)
            return sums
        numbers = torch.zeros(length, dtype=kind.widest(), device=device)
        for read in reads:
            for index, number in enumerate((widened(read.value) * read.weight, read.count, *chain(*read.named))):
                numbers[index] += number.to(device) if isinstance(number, torch.Tensor) else number
        return numbers

    def _start_reducing(self, device: torch.device) -> None:
        here = self._local_numbers(device)
        exact = float(self._exact)
        if isinstance(here, list):
            numbers = torch.tensor((*here, exact), dtype=torch.float64)
        else:
            numbers = torch.cat((here, here.new_full((1,), exact)))
        work = dist.all_reduce(numbers, async_op=True)
        assert work is not None
        self._reduced = (work, numbers)
