"""DiLoCo: the outer step over averaged differences (Douillard et al. 2023), and a model's parameters in fragments.

Source: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, algorithm 1, lines
11 to 14. With rate 1 and no momentum the copy becomes the average of the replicas: local SGD (Stich, "Local SGD
converges fast and communicates little", 2019, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from phalanx.comm import local
from phalanx.config import Plan
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.grad_reduce import spread
from phalanx.placement.stages import balanced
from phalanx.trace.blocks import blocks


class OuterOptimizer:
    """The copies that replicas began from, flat on the host in fp32, one a fragment, and the optimizer that steps them.

    The same on every replica: each steps its own, by the same gradient.
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


def fragment_problems(parameters: int, count: int) -> list[Problem]:
    """More fragments than a rank has parameters."""
    if count <= parameters:
        return []
    given, allowed = (
        f"fragments={count} for {parameters} parameters on a rank",
        "at most as many as a rank has parameters",
    )
    return [Problem(where="plan.fragments", given=given, allowed=allowed, fix=f"fragments={parameters}")]


def divide(sizes: Mapping[str, int], owners: Mapping[str, int], count: int) -> list[list[str]]:
    """Names in ``count`` groups of consecutive ones, such that the largest group is as small as it can be.

    Args:
        sizes: name → bytes, in the order in which groups are made.
        owners: name → number of the block it belongs to; what belongs to none is by itself. Where there are fewer
            blocks than groups, blocks are cut.
        count: of groups.

    Raises:
        RefusedError: if there are fewer names than groups.
    """
    units = [list(names) for _, names in groupby(sizes, key=lambda name: owners.get(name, name))]
    if len(units) < count:
        units = [[name] for name in sizes]
    if problems := fragment_problems(len(units), count):
        raise RefusedError(problems)
    first = balanced([sum(sizes[name] for name in unit) for unit in units], count, [True] * len(units)) or []
    return [[name for unit in units[a:b] for name in unit] for a, b in pairwise([*first, len(units)])]


def owners(module: nn.Module) -> dict[str, int]:
    """Name of each parameter inside a repeated block → the number of the block."""
    held = {id(tensor): index for index, block in enumerate(blocks(module)) for tensor in block.parameters()}
    return {name: held[id(tensor)] for name, tensor in module.named_parameters() if id(tensor) in held}


class Fragment:
    """Some of what an optimizer steps on this rank: read and written as one flat fp32 tensor on the host."""

    def __init__(self, parameters: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._parameters = {name: parameters[name] for name in names}

    def read(self) -> Tensor:
        """The values now, in a tensor of their own."""
        return flattened([local(tensor) for tensor in self._parameters.values()])

    def write(self, flat: Tensor) -> None:
        """Put values in place of those that are there."""
        spread([local(tensor) for tensor in self._parameters.values()], flat)

    def cut(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name with what ``flat`` holds for it, in a tensor like the parameter, fp32."""
        pieces = flat.split([local(tensor).numel() for tensor in self._parameters.values()])
        for (name, tensor), piece in zip(self._parameters.items(), pieces, strict=True):
            like = torch.zeros_like(tensor, dtype=torch.float32, requires_grad=False)
            local(like).copy_(piece.view(local(like).shape))
            yield name, like

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What ``cut`` took apart."""
        return flattened([local(tensors[name]) for name in self._parameters])


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All elements as one fp32 tensor on the host, which shares no memory with ``tensors``."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors))
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        piece.copy_(tensor.detach().reshape(-1))
    return flat
