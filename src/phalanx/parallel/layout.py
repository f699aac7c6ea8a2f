"""The common interface of all techniques for the training step: a model laid over this process's devices.

One device is the reference for every other layout: each micro-batch runs forward and backward there, gradients add up
in ``.grad``, and the optimizer steps. Use it while the model fits one device and is fast enough there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from phalanx.parallel.compression import Sender
    from phalanx.parallel.global_batch_norm import BatchStatistics
    from phalanx.parallel.local_shards.axis import Placed
    from phalanx.parallel.pipeline import PipelineRunner


class MicroBatchWork(ABC):
    """A step's work on each micro-batch, in parts that a pipeline runs at different times and places."""

    @abstractmethod
    def forward(self, module: nn.Module, device: torch.device, micro: Any) -> Any:
        """Return the output of ``module`` on a micro-batch, with its own random stream."""

    @abstractmethod
    def loss(self, output: Any, device: torch.device, micro: Any, last: bool) -> torch.Tensor:
        """Return the loss for backward; ``last``: no more losses of this step come on this part."""

    def run(self, module: nn.Module, device: torch.device, micro: Any, last: bool) -> None:
        """Run forward and backward of one micro-batch."""
        self.loss(self.forward(module, device, micro), device, micro, last).backward()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """A rank's part of a whole tensor.

    If ranks that are not data parallel hold the same elements (a tensor tied across pipeline stages), one copy
    ``counts``: in norms, and in checkpoints.
    """

    shape: torch.Size  # of the whole
    placed: tuple[Placed, ...] = ()  # how it is cut, axis by axis; none if the whole is here
    counts: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHoldings:
    """One rank's part of a model.

    Attributes:
        module: the user's model, whose names checkpoints use; on this rank perhaps with slices. Its forward without
            gradients must run on every rank equally often.
        parameters: name → the tensor the optimizer steps: a parameter, or this rank's shard of one as a DTensor.
        divisor: by which complete gradients have been divided: the ranks that were averaged over.
        counts: whether this rank's losses count; among ranks with equal losses only the first's do.
        slices: this rank's part of tensors split by name (tensor, expert and pipeline parallelism); the others are
            whole, or DTensors.
        whole: True if every rank holds all of each parameter and its gradient, as plain tensors.
        stages: the ranks of a pipeline, which hold parameters of other names.
        runner: of this rank's pipeline stages.
        remarks: sentences on parts that could not be split and are on every rank.
        sender: of this rank's gradients, if they are compressed.
    """

    module: nn.Module
    parameters: Mapping[str, torch.Tensor]
    divisor: float = 1.0
    counts: bool = True
    slices: Mapping[str, TensorShard] = field(default_factory=dict[str, TensorShard])
    whole: bool = False
    stages: dist.ProcessGroup | None = None
    runner: PipelineRunner | None = None
    remarks: tuple[str, ...] = ()
    sender: Sender | None = None


class Layout(ABC):
    """A model as one technique lays it out: ``begin``, ``accumulate``, ``finish``, an optimizer step, ``stepped``."""

    holdings: RankHoldings
    statistics: BatchStatistics | None = None  # of the global batch, where layers take them and replicas are several
    _with_gradients: tuple[torch.Tensor, ...] = ()  # parameters of the module and of the optimizer, listed once

    def begin(self) -> None:
        """Begin a step: drop gradients left by other code, such as a second loss on this model's output."""
        if not self._with_gradients:
            held = self.holdings
            self._with_gradients = (*{*held.module.parameters(), *held.parameters.values()},)
        drop_gradients(self._with_gradients)

    def computes(self, part: int, samples: int) -> None:
        """Announce a micro-batch with so many samples on this part; 0: a filler of weight 0."""
        if self.statistics is not None:
            self.statistics.begins(part, samples)

    @abstractmethod
    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        """Run ``work`` on every micro-batch of every part in this process, reducing gradients meanwhile."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every parameter has the gradient of the whole global batch, over the divisor."""

    @abstractmethod
    def stepped(self) -> None:
        """Copy the values stepped by the optimizer to the forward's parameters, and drop the gradients."""

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's output without gradients; ``None`` on pipeline ranks without it. Collective."""
        return self.holdings.module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        return self.holdings.module

    @property
    def modules(self) -> list[nn.Module]:
        """Return every copy of the model in this process; the first is ``module``."""
        return [self.holdings.module]

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.holdings.parameters

    @property
    def divisor(self) -> float:
        return self.holdings.divisor


class SingleLayout(Layout):
    """The whole model on one device, without communication."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self.holdings = RankHoldings(module=module.to(device), parameters=trainable(module), whole=True)

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        each_micro_batch(self.holdings.module, self._device, parts[0], work)

    def finish(self) -> None:
        """Do nothing: gradients are complete."""

    def stepped(self) -> None:
        drop_gradients(self.parameters.values())


def each_micro_batch(
    module: nn.Module,
    device: torch.device,
    micros: Sequence[Any],
    work: MicroBatchWork,
    *,
    around: Callable[[bool], AbstractContextManager[object]] | None = None,
) -> None:
    """Run ``work`` on one part's micro-batches in turn, each inside ``around(last)``."""
    for index, micro in enumerate(micros):
        last = index == len(micros) - 1
        if around is None:
            work.run(module, device, micro, last)
            continue
        with around(last):
            work.run(module, device, micro, last)


def drop_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the gradients of these parameters."""
    for tensor in parameters:
        if tensor.grad is not None:
            tensor.grad = None


def trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    """Map name to parameter for each one that requires a gradient, once, in module order."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
