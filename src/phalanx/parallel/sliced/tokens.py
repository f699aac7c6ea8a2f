"""Attention of tokens that are dealt out over ranks (context parallelism): how keys and values meet all queries.

``gather``: every rank gathers all keys and values (Dubey et al. 2024, section 3.3.2). ``alltoall``: heads are swapped
for tokens, so that each rank has some heads of all tokens, and swapped back (DeepSpeed-Ulysses; Jacobs et al. 2023).
``ring``: keys and values travel from rank to rank, each adding to a running softmax (Liu et al. 2023); no rank ever
holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.sliced.axis import Axis, opened
from phalanx.parallel.sliced.cut import Cut


@dataclass(frozen=True, slots=True)
class How:
    """What attention is asked to do beside its three inputs."""

    mask: Any
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On plain tensors."""
        return F.scaled_dot_product_attention(
            q, k, v, self.mask, self.dropout, self.causal, scale=self.scale, enable_gqa=self.grouped
        )


def attend_over(axis: Axis, cut: Cut, q: Tensor, k: Tensor, v: Tensor, how: How, *, whole: bool) -> Tensor:
    """Attention of this rank's queries; keys and values are ``whole`` already, or cut as the queries are."""
    if not whole:
        k, v = (opened(tensor, tensor.dim() - 2, cut, axis) for tensor in (k, v))
    return _rows(axis, cut, q, k, v, how)


def _rows(axis: Axis, cut: Cut, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """This rank's rows of the whole attention."""
    mask = how.mask
    if how.causal:
        mine = positions(cut, axis.rank, q.device).unsqueeze(1) >= torch.arange(k.shape[-2], device=q.device)
        mask = mine if mask is None else mask & mine
    return How(mask, how.dropout, False, how.scale, how.grouped).run(q, k, v)


def positions(cut: Cut, rank: int, device: torch.device) -> Tensor:
    """Where in the whole sequence the tokens that ``rank`` holds stand, (tokens,)."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in cut.expanded()[rank]])
