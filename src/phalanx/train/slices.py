"""Over which ranks an optimizer has to add up what it sums over a parameter of which this rank holds a slice.

A sharded parameter says so itself: it is a DTensor. A slice along ``tp`` or ``ep`` is a plain tensor, and what an
optimizer is given are tensors alone. So the step notes here, when the optimizer is built, which parameters are slices;
LARS and LAMB look them up. Not as attributes: those would go along where a parameter is copied or pickled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.parallel import Held

_GROUPS = WeakTensorKeyDictionary()


def note_slices(held: Held) -> None:
    """Remember, for as long as they live, over which groups the parameters held are cut by name."""
    for name, parameter in held.parameters.items():
        holding = held.slices.get(name)
        if holding is not None and holding.placed:
            _GROUPS[parameter] = tuple(one.axis.group for one in holding.placed if one.axis.group is not None)


def groups_of_slices(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which ``parameter`` is cut, beside those of its mesh if it is a DTensor."""
    found: tuple[dist.ProcessGroup, ...] | None = _GROUPS.get(parameter)
    return found or ()
