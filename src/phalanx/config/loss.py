"""What a job's loss gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

IGNORED = -100
"""The label that does not count, as torch and transformers have it."""


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
