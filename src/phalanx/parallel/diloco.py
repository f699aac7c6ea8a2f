"""DiLoCo: the outer step over averaged differences (Douillard et al. 2023), and a model's parameters as one tensor.

Source: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, algorithm 1, lines
11 to 14. With rate 1 and no momentum the copy becomes the average of the replicas: local SGD (Stich, "Local SGD
converges fast and communicates little", 2019, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.comm import local
from phalanx.config import Plan
from phalanx.parallel.grad_reduce import spread


class OuterOptimizer:
    """The replicas' common starting copy, flat on the host in fp32, and its optimizer.

    It is equal on every replica: each steps its own, by the same gradient.
    """

    def __init__(self, plan: Plan, copy: Tensor) -> None:
        self.copy = copy
        momentum = plan.outer_momentum
        self._optimizer = torch.optim.SGD(
            [copy], lr=plan.outer_lr, momentum=momentum, nesterov=plan.outer == "nesterov" and momentum > 0
        )

    def step(self, difference: Tensor) -> Tensor:
        """Step by the mean over replicas of (copy - replica), and return the new copy."""
        self.copy.grad = difference
        self._optimizer.step()
        self.copy.grad = None
        return self.copy

    @property
    def momentum(self) -> Tensor | None:
        """Return the momentum buffer; ``None`` before the first step and without momentum."""
        return self._optimizer.state[self.copy].get("momentum_buffer")

    def remember(self, momentum: Tensor) -> None:
        """Restore the ``momentum`` of another run."""
        self._optimizer.state[self.copy]["momentum_buffer"] = momentum


class FlatParameters:
    """The optimizer's parameters on this rank, read and written as one flat fp32 tensor on the host."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)

    def read(self) -> Tensor:
        """Return the present values in a new tensor."""
        return flattened([local(tensor) for tensor in self._parameters.values()])

    def write(self, flat: Tensor) -> None:
        """Replace the values."""
        spread([local(tensor) for tensor in self._parameters.values()], flat)

    def cut(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of ``flat``, in a tensor like the parameter, fp32."""
        pieces = flat.split([local(tensor).numel() for tensor in self._parameters.values()])
        for (name, tensor), piece in zip(self._parameters.items(), pieces, strict=True):
            like = torch.zeros_like(tensor, dtype=torch.float32, requires_grad=False)
            local(like).copy_(piece.view(local(like).shape))
            yield name, like

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Join the result of ``cut`` again."""
        return flattened([local(tensors[name]) for name in self._parameters])


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements as one fp32 tensor on the host, sharing no memory with ``tensors``."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors))
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        piece.copy_(tensor.detach().reshape(-1))
    return flat
