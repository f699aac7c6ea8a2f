"""How long a job's samples are: up to a hundred of them, spread over the data, in a second at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from phalanx.data import Loader
from phalanx.forecast import Lengths
from phalanx.forecast.work import lengths_of
from phalanx.trace import length_of

COUNT = 100
PATIENCE = 1.0  # seconds; reading one sample may take long


def look(loader: Loader, inputs: Callable[[Any], Any], *, seconds: float = PATIENCE) -> tuple[Lengths | None, Any]:
    """The lengths of samples, ``None`` where they are all alike, and two of the longest as one batch.

    Args:
        loader: of the job's data.
        inputs: what the model is called with, of a batch.
        seconds: after which no further sample is read.
    """
    end = time.monotonic() + seconds
    found: list[tuple[int, int]] = []
    for place, batch in loader.spread(COUNT):
        found.append((_length(inputs(batch)), place))
        if found[-1][0] <= 1 or time.monotonic() > end:  # images and the like have no tokens
            break
    found.sort()
    if len({length for length, _ in found}) < 2:
        return None, loader.example(2)
    both = _length(inputs(loader.together([found[0][1], found[-1][1]])))
    lengths = lengths_of([length for length, _ in found], padded=both == found[-1][0])
    return lengths, loader.together([place for _, place in found[-2:]])


def _length(given: Any) -> int:
    return length_of([leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)])
