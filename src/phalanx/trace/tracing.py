"""The way from a model to its profile. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.config.model_costs import Profile

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """A model, how it is called, and its loss. Only the forms of tensors are read; they may be on the meta device."""

    module: nn.Module  # the model; may be on the meta device
    args: tuple[Any, ...] = ()  # positional arguments of its forward, of one or more samples (dimension 0)
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # named arguments
    batch: Any = None  # what the loss is called with beside the output
    # from the output and the batch to a scalar tensor, or to something whose ``sum`` is one
    loss: Callable[[Any, Any], Any]
    length: int = 0  # tokens in one sample; 0 to find it from the inputs
    # whether the model makes its tensors on torch's default device and never asks where one is: tensors of the meta
    # device then do in place of fakes, and torch's compiler, which takes a second to load, is not needed
    meta: bool = False
    values: bool = False  # whether to compute with the values that there are, for a model whose shapes depend on them

    def profile(self) -> Profile:
        return trace(self)


def trace(described: ModelCall) -> Profile:
    """The costs of a model, found by running it on fake tensors at three sizes; nothing is computed.

    Floating parameters and inputs of fp32 are taken as bf16 where the model allows, so that what the model itself
    makes fp32 is told apart: it has ``itemsize`` 4, while 0 stands for the precision computed in.

    Raises:
        ProfileError: if the model does not run on fake tensors; it names the line of the model.
    """
    from phalanx.trace.laws import measured_at_sizes

    return measured_at_sizes(described)


def length_of(tensors: list[Any]) -> int:
    """Tokens of a sample in a model's inputs: dimension 1 of whole numbers, or of vectors in a row; else 1."""
    found = [one.shape[1] for one in tensors if one.dim() == 2 and not one.is_floating_point()]
    found += [one.shape[1] for one in tensors if one.dim() == 3 and one.is_floating_point()]
    return found[0] if found else 1
