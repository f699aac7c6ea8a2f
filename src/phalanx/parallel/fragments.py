"""A model's parameters in a few groups of consecutive blocks, and each group as one flat tensor on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, nn

from phalanx.comm import local
from phalanx.errors import Problem, RefusedError
from phalanx.trace.blocks import blocks


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
    if len(units) < count:
        raise RefusedError(
            [
                Problem(
                    where="plan.fragments",
                    given=f"fragments={count} for {len(units)} parameters on a rank",
                    allowed="at most as many as a rank has parameters",
                    fix=f"fragments={len(units)}",
                )
            ]
        )
    cuts = _cuts([sum(sizes[name] for name in unit) for unit in units], count)
    return [[name for unit in units[a:b] for name in unit] for a, b in pairwise(cuts)]


def owners(module: nn.Module) -> dict[str, int]:
    """Name of each parameter inside a repeated block → the number of the block."""
    held = {id(tensor): index for index, block in enumerate(blocks(module)) for tensor in block.parameters()}
    return {name: held[id(tensor)] for name, tensor in module.named_parameters() if id(tensor) in held}


def _cuts(costs: Sequence[int], count: int) -> list[int]:
    """Where each of ``count`` runs of ``costs`` begins, and the end, with the least largest sum."""
    sums = [0, *accumulate(costs)]
    # best[end] = (largest, where the last run begins), for runs made of the costs before ``end``
    rows: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for _ in range(count):
        before, row = rows[-1], dict[int, tuple[int, int]]()
        for end in range(len(rows), len(costs) + 1):
            row[end] = min((max(worst, sums[end] - sums[at]), at) for at, (worst, _) in before.items() if at < end)
        rows.append(row)
    cuts = [len(costs)]
    for row in reversed(rows[1:]):
        cuts.append(row[cuts[-1]][1])
    return cuts[::-1]


class Fragment:
    """Some of what an optimizer steps on this rank: read and written as one flat fp32 tensor on the host.

    Attributes:
        names: of the parameters, in order.
    """

    def __init__(self, parameters: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._parameters = {name: parameters[name] for name in names}

    def read(self) -> Tensor:
        """The values now, in a tensor of their own."""
        return flattened([local(tensor) for tensor in self._parameters.values()])

    def write(self, flat: Tensor) -> None:
        """Put values in place of those that are there."""
        spread([local(tensor) for tensor in self._parameters.values()], flat)

    def cut(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name with what ``flat`` holds for it, in a tensor like the parameter, fp32."""
        for (name, tensor), piece in zip(self._parameters.items(), self._pieces(flat), strict=True):
            like = torch.zeros_like(tensor, dtype=torch.float32, requires_grad=False)
            local(like).copy_(piece.view(local(like).shape))
            yield name, like

    def joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What ``cut`` took apart."""
        return flattened([local(tensors[name]) for name in self.names])

    def _pieces(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split([local(tensor).numel() for tensor in self._parameters.values()])


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All elements as one fp32 tensor on the host, which shares no memory with ``tensors``."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors))
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        piece.copy_(tensor.detach().reshape(-1))
    return flat


def spread(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Put the elements of ``flat``, on the host, into ``tensors``: what ``flattened`` put together."""
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(piece.view(tensor.shape))
