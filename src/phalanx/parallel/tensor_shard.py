"""Which part of a whole tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from phalanx.parallel.local_shards.axis import Placed


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """One rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        placed: how it is cut, axis by axis; none where the whole is here.
        counts: whether this rank's copy is the one that counts in norms and is saved, where ranks that are not data
            parallel hold the same elements (a tensor tied across pipeline stages).
    """

    shape: torch.Size
    placed: tuple[Placed, ...] = ()
    counts: bool = True
