"""What attention is asked to do beside its three inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SdpaArgs:
    """The other arguments of torch's ``scaled_dot_product_attention``.

    Attributes:
        mask: of booleans, or added to the scores.
        dropout: share of the weights that are dropped.
        causal: whether a token attends to itself and earlier ones only.
        scale: of the scores; ``None`` for one over the root of the features.
        grouped: whether several heads of queries read one of keys.
    """

    mask: Any
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    def masked(self, mask: Any) -> SdpaArgs:
        """The same with another mask."""
        return replace(self, mask=mask)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On plain tensors."""
        return F.scaled_dot_product_attention(
            q, k, v, self.mask, self.dropout, self.causal, scale=self.scale, enable_gqa=self.grouped
        )
