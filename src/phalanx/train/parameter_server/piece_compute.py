"""What a worker computes: the sum of a piece's gradients, or what an evaluation measures on a piece."""

from __future__ import annotations

from typing import Any, final

import torch

from phalanx.config import Job, Plan
from phalanx.data.loader import BatchPieces
from phalanx.parallel import without_gradient
from phalanx.parallel.layout import Layout
from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.evaluate import Sums, add_up, evaluation_mode, measure
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context


@final
class Computer:
    """Forward and backward over pieces."""

    def __init__(self, job: Job, plan: Plan, layout: Layout, device: torch.device, divisor: float) -> None:
        """``divisor`` is the constant that backward divides sums by."""
        self._job, self._plan, self._layout, self._device, self._divisor = job, plan, layout, device, divisor
        self._inputs = Inputs(job, layout.module)
        self._checked = False

    def gradients(self, pieces: BatchPieces, step: int, part: int) -> tuple[Sums, int]:
        """Leave in each parameter's ``grad`` the sum over a piece, over the divisor.

        Returns the sum and the count of its loss, and its samples.

        Raises:
            GradientError: if parameters get no gradient and the job does not allow it.
        """
        module, device = self._layout.module, self._device
        for tensor in self._layout.parameters.values():
            tensor.grad = None
        total = count = 0.0
        samples = 0
        for index, micro in enumerate(pieces.micros(step, part)):
            reseed(device, stream(self._job.seed, step, index, part))
            with compute_context(self._plan, device):
                args, kwargs, batch = self._inputs(micro.batch, device)
                output = module(*args, **kwargs)
                read = read_loss(self._job.loss(output, batch), micro.samples, step)
            (read.value * (read.weight / self._divisor)).backward()
            total += float(read.value.detach()) * read.weight
            count += float(read.count)
            samples += micro.samples
        if not self._checked and self._job.unused == "error":
            without = [name for name, tensor in self._layout.parameters.items() if tensor.grad is None]
            if without:
                raise without_gradient(without, f"in step {step}")
        self._checked = True
        return {"loss": (total, count)}, samples

    def measures(self, pieces: BatchPieces, step: int, part: int) -> tuple[Sums, int]:
        """Sum and count of the loss and of each metric over a piece of the evaluation data, and its samples."""
        module, device = self._layout.module, self._device
        found: Sums = {}
        samples = 0
        with torch.no_grad(), evaluation_mode(module):
            for micro in pieces.micros(step, part):
                with compute_context(self._plan, device):
                    args, kwargs, batch = self._inputs(micro.batch, device)
                    measured = measure(self._job, module(*args, **kwargs), batch, micro.samples)
                samples += micro.samples
                add_up(found, measured)
        return found, samples

    @property
    def memory(self) -> dict[str, Any]:
        """Bytes of what is held, as events tell it."""
        size = sum(tensor.nbytes for tensor in self._layout.parameters.values())
        buffers = sum(tensor.nbytes for tensor in self._layout.module.buffers())
        return {"parameters": size, "gradients": size, "optimizer": 0, "buffers": buffers, "activations": 0}
