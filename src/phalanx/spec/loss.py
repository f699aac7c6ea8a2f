"""What a job's loss function gives back: a sum and the count it is to be divided by."""

from __future__ import annotations

from typing import Any, NamedTuple


class Loss(NamedTuple):
    """A loss as a sum and a count, so that any split of a batch adds up to the same number.

    A mean cannot be added up: the mean over 3 tokens and the mean over 5 are not the mean over 8. Sums and
    counts can: Phalanx adds both over micro-batches and ranks and divides once.

    Attributes:
        sum: scalar tensor, the loss summed over what is counted (tokens, samples, pixels). Backward runs on it.
        count: how many were summed: a number or a scalar tensor. May differ per micro-batch and may be 0.
    """

    sum: Any
    count: Any
