"""Tells from its values whether a mask hides later positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def hides_later(mask: Tensor) -> bool:
    """Whether all above the diagonal is one value and the rest another; false of tensors without values."""
    if mask.is_meta or isinstance(mask, FakeTensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    size = mask.shape[-1]
    if size < 2 or mask.numel() > _LARGE:
        return False
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    values = mask.detach().to("cpu").reshape(-1, size, size)
    above, below = values[:, later], values[:, ~later]
    return bool((above == above[0, 0]).all() and (below == below[0, 0]).all() and above[0, 0] != below[0, 0])


_LARGE = 2**26
