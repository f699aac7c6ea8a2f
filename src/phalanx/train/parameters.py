"""The parameters that an optimizer is built over, and small ones of the same names to try it on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn


class Parameters(list[torch.Tensor]):
    """The parameters an optimizer is built over: a list, which also knows their names (for parameter groups)."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__(named.values())
        self._named = named

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, parameter) pairs, in order."""
        return iter(self._named.items())


_ROWS, _COLUMNS, _REST = 4, 6, 2
_KINDS = 32


def small(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random values (4 × 6 × 2 × …) for parameters of these names and numbers of dimensions.

    Of many, a few of each number of dimensions: an optimizer is tried on them, in milliseconds.
    """
    found: dict[str, torch.Tensor] = {}
    taken: dict[int, int] = {}
    for name, one in parameters.items():
        dims = one.dim()
        taken[dims] = taken.get(dims, 0) + 1
        if taken[dims] <= _KINDS:
            found[name] = torch.randn([_ROWS, _COLUMNS, *[_REST] * dims][:dims])
    return found


def learning(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These values as parameters, each with memory of its own."""
    return {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
