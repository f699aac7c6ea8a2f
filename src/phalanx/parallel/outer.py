"""The outer step: what replicas have learnt by themselves, averaged, is the gradient of the copy they began from.

Source: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, algorithm 1, lines
11 to 14. With rate 1 and no momentum the copy becomes the average of the replicas: local SGD (Stich, "Local SGD
converges fast and communicates little", 2019, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.config import Plan


class Outer:
    """The copies that replicas began from, flat on the host in fp32, one a fragment, and the optimizer that steps them.

    The same on every replica: each steps its own, by the same gradient.

    Attributes:
        copies: by fragment.
    """

    def __init__(self, plan: Plan, copies: Sequence[Tensor]) -> None:
        self.copies = list(copies)
        momentum = plan.outer_momentum
        self._optimizer = torch.optim.SGD(
            self.copies, lr=plan.outer_lr, momentum=momentum, nesterov=plan.outer == "nesterov" and momentum > 0
        )

    def step(self, fragment: int, difference: Tensor) -> Tensor:
        """Step by the mean over replicas of the copy less what each has come to; gives the new copy."""
        copy = self.copies[fragment]
        copy.grad = difference
        self._optimizer.step()
        copy.grad = None
        return copy

    def momentum(self, fragment: int) -> Tensor | None:
        """What it remembers of the steps before; ``None`` before the first, and where it remembers nothing."""
        return self._optimizer.state[self.copies[fragment]].get("momentum_buffer")

    def remember(self, fragment: int, momentum: Tensor) -> None:
        """Go on with the ``momentum`` of another run."""
        self._optimizer.state[self.copies[fragment]]["momentum_buffer"] = momentum
