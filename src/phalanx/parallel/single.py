"""One device: what every other layout is measured against.

The model moves to its device, each micro-batch runs forward and backward there, gradients add up in ``.grad``, and the
optimizer steps. Nothing is communicated. Use it while the model fits one device and is fast enough there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, each_micro_batch, trainable


class SingleLayout(Layout):
    """The whole model on one device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module.to(device)
        self._device = device
        self._held = RankHoldings(module=self._module, parameters=trainable(module))

    @property
    def holdings(self) -> RankHoldings:
        return self._held

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        each_micro_batch(self._module, self._device, parts[0], work)

    def finish(self) -> None:
        pass

    def stepped(self) -> None:
        for tensor in self._held.parameters.values():
            tensor.grad = None
