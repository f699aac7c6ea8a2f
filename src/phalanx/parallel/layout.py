"""What every technique gives the training step: a model laid over this process's devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

Backward = Callable[[nn.Module, torch.device, Any, bool], None]
"""``backward(module, device, micro_batch, last)``: one forward and backward; ``last`` of this step on this part."""


class Layout(ABC):
    """A model as one technique lays it out: ``accumulate``, ``finish``, an optimizer step, ``stepped``."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model as the user wrote it, whose names checkpoints use; on this rank perhaps holding shards.

        To be called for a forward without gradients, on every rank the same number of times.
        """

    @property
    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """Name → the tensor the optimizer steps: a parameter, or this rank's shard of one as a DTensor."""

    @property
    @abstractmethod
    def divisor(self) -> int:
        """What gradients have been divided by after ``finish``: the ranks that were averaged over."""

    @abstractmethod
    def accumulate(self, parts: Sequence[Sequence[Any]], backward: Backward) -> None:
        """Run ``backward`` on every micro-batch of every part this process holds, reducing gradients on the way."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every tensor in ``parameters`` has the gradient of the whole global batch, over ``divisor``."""

    @abstractmethod
    def stepped(self) -> None:
        """The optimizer has stepped: bring the new values to wherever forward reads them, and drop the gradients."""


def each_micro_batch(
    module: nn.Module,
    device: torch.device,
    micros: Sequence[Any],
    backward: Backward,
    *,
    around: Callable[[bool], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> None:
    """Run ``backward`` on one part's micro-batches in turn, each inside ``around(last)``."""
    final = len(micros) - 1
    for index, micro in enumerate(micros):
        last = index == final
        with around(last):
            backward(module, device, micro, last)


def trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name → parameter that requires a gradient, each once, in module order."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
