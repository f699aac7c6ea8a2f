"""Steps whose loss compares the samples of the whole global batch, so that micro-batches cannot be added up.

The rows of all outputs are gathered over micro-batches and ranks. Every rank computes the loss of all of them, and its
gradient with regard to its own rows: backward continues from there, and gradients of parameters add up over ranks as
usual. With one micro-batch a rank the loss lies between its forward and its backward. With several, all of them run
forward first, for their outputs alone; then each runs forward again, with the same random numbers, and backward from
the gradient of its output (GradCache; Gao et al. 2021, "Scaling deep contrastive learning batch size under memory
limited setup").
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.data import MicroBatch, StepBatch
from phalanx.device_kinds import widened
from phalanx.errors import LossError
from phalanx.parallel.buffer_sync import buffers_kept
from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.grad_accumulation import GradAccumulation
from phalanx.train.loss import LossReading
from phalanx.train.metrics import Totals
from phalanx.train.row_gather import leaves, rebuilt, with_whole_tensors
from phalanx.train.whole_batch import OutputPiece, WholeBatch

if TYPE_CHECKING:
    from phalanx.train.step import Step

Place = tuple[int, int]
"""Part and micro-batch of what this process holds of a step."""

_LOSS_STREAM = 1 << 40
"""Beside the micro-batches' numbers: what a loss over several of them draws at random is the same on every rank."""


class CoupledLoss(GradAccumulation):
    """One step's forwards, the one loss of all their outputs, and backwards from its gradient."""

    whole = True

    def __init__(self, owner: Step, batch: StepBatch) -> None:
        super().__init__(owner, batch)
        self._pieces: dict[Place, OutputPiece] = {}
        self._gradients: dict[Place, list[Tensor | None]] = {}
        self._outputs: dict[Place, list[Tensor]] = {}
        self._read_whole: LossReading | None = None
        self._value = torch.zeros(())
        # All ranks alike, for collectives keep one order: by uneven shares some have several where others have one.
        self._twice = max(map(len, batch.parts)) > 1 or bool(owner.plan.shares and owner.plan.micro)
        self._meeting = threading.Barrier(len(batch.parts))
        self._failed: BaseException | None = None

    def prepare(self) -> None:
        """Run all micro-batches forward, if a part has several, and find the gradients of their outputs.

        Buffers changed by these forwards are restored, so that only the forward before backward changes them.
        """
        if not self._twice:
            return
        modules = self._step.layout.modules
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(buffers_kept(module))
            for part, (module, micros) in enumerate(zip(modules, self._batch.parts, strict=True)):
                device = self._device_of(part)
                for index, micro in enumerate(micros):
                    # with a graph, which is dropped at once: without one, kernels may differ, and what they draw
                    self._keep((part, index), self.forward(module, device, micro), micro)
        self._solve()

    def forward(self, module: nn.Module, device: torch.device, micro: MicroBatch) -> Any:
        return with_whole_tensors(super().forward(module, device, micro))

    def run(self, module: nn.Module, device: torch.device, micro: MicroBatch, last: bool) -> None:
        try:
            super().run(module, device, micro, last)
        except threading.BrokenBarrierError:
            raise self._failed or RuntimeError("another thread ended its step") from None
        except BaseException as error:
            self._failed = self._failed or error
            self._meeting.abort()
            raise

    def loss(self, output: Any, device: torch.device, micro: MicroBatch, last: bool) -> Tensor:
        """Return the loss of the whole batch; its backward gives this micro-batch's output its own gradient."""
        place = self._places[id(micro)]
        if not self._twice:
            self._keep(place, output, micro)
            if self._meeting.wait() == 0:
                self._solve()
            self._meeting.wait()
        tensors = [one for _, one in leaves(output) if isinstance(one, Tensor)]
        if self._twice:
            self._check_same(place, tensors)
        assert self._read_whole is not None
        self._read[place] = replace(self._read_whole, samples=micro.samples)
        grads = self._gradients.pop(place)
        pairs = [(one, grad) for one, grad in zip(tensors, grads, strict=True) if grad is not None]
        return _FromGradients.apply(self._value.to(device), [grad for _, grad in pairs], *(one for one, _ in pairs))

    def totals(self) -> Totals:
        read = self._read_whole
        assert read is not None
        total = read.value.detach() * read.weight
        pairs = ((total, read.count), *read.named)
        if total.device.type == "cpu":
            return self._given([float(number) for pair in pairs for number in pair])
        numbers = [widened(torch.as_tensor(number, device=total.device)) for pair in pairs for number in pair]
        return self._given(torch.stack([number.reshape(()) for number in numbers]))

    def _keep(self, place: Place, output: Any, micro: MicroBatch) -> None:
        if self._twice:
            tensors = [one for _, one in leaves(output) if isinstance(one, Tensor)]
            self._outputs[place] = [one.detach().requires_grad_(one.requires_grad) for one in tensors]
            output = rebuilt(output, iter(self._outputs[place]))
        self._pieces[place] = OutputPiece(output=output, batch=micro.batch, samples=micro.samples)

    def _solve(self) -> None:
        step, places = self._step, sorted(self._pieces)
        pieces = [self._pieces.pop(place) for place in places]
        device = self._device_of(0)
        if len(pieces) == 1:
            ((micro,),) = self._batch.parts
            pieces = [replace(pieces[0], batch=self._on_device(micro, device))]
        if step.rows.splits(len(pieces)):
            reseed(device, stream(self._job.seed, step.progress.step, _LOSS_STREAM))
        with torch.enable_grad(), step.computing(device):
            whole = WholeBatch(pieces, step.rows, device, self._batch.samples)
            read = self._reading(self._job.loss(whole.output, whole.batch), whole.samples)
        value = read.value * self._factor_of_whole(read)
        for place, grads in zip(places, whole.gradients(value), strict=True):
            self._gradients[place] = grads
        self._value = value.detach()
        self._read_whole = replace(read, value=read.value.detach())

    def _device_of(self, part: int) -> torch.device:
        modules = self._step.layout.modules
        return self._step.rows.device if len(modules) == 1 else next(modules[part].parameters()).device

    def _factor_of_whole(self, read: LossReading) -> Any:
        if self._step.progress.loss_scale:
            self._divided_by = self._constant()
            return read.weight / self._divided_by
        self._exact = True
        if isinstance(read.count, Tensor):
            count = read.count.where(read.count != 0, 1).to(read.value.dtype)
            return read.weight * self._step.layout.divisor / count
        return read.weight * self._step.layout.divisor / (read.count or 1)

    def _check_same(self, place: Place, tensors: list[Tensor]) -> None:
        """Compare the loss on all ranks; on CUDA in the first step only, because it waits for the device."""
        before = self._outputs.pop(place)
        if tensors and tensors[0].device.type != "cpu" and self._step.last is not None:
            return
        for one, other in zip(before, tensors, strict=True):
            if not torch.allclose(one.double(), other.detach().double(), rtol=1e-3, atol=1e-5, equal_nan=True):
                raise LossError(_ANOTHER)


_ANOTHER = (
    'with loss_over="batch" and micro-batches every forward runs twice, and the second gave another output than the '
    "first.\n"
    "    Usual cause: random numbers that torch's own generator does not draw (numpy's, Python's), or a state that "
    "forward changes and that is no buffer.\n"
    "    try: torch's random numbers, a registered buffer; or a plan without micro"
)


class _FromGradients(torch.autograd.Function):
    """Autograd node with output ``value``, whose backward passes ``grads`` to ``outputs``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.grads
