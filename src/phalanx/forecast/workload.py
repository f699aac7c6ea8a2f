"""What a job asks for in each step, as far as forecasts need to know; samples of unlike lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.forecast.layouts import Layouts
from phalanx.forecast.operation_arrays import Array
from phalanx.trace import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a job asks for in each step.

    Attributes:
        profile: of its model.
        batch: samples in one optimizer step of all devices.
        length: tokens in a sample; 0 for that of the profile.
        lengths: of samples that were looked at, where they differ and ``length`` is 0.
        state: bytes of optimizer state for each parameter.
        modules: names of the model's, where they are known; empty where not.
        optimizer: in lower case, such as ``adamw``, with ``-fused`` where one kernel steps a tensor.
    """

    profile: Profile
    batch: int
    length: int = 0
    lengths: Lengths | None = None
    state: float = 8.0
    modules: frozenset[str] = frozenset()
    optimizer: str = "adamw"

    @property
    def unlike(self) -> Lengths | None:
        """The lengths that count: none where one is stated."""
        return None if self.length else self.lengths

    @property
    def tokens(self) -> int:
        """In one sample."""
        return self.length or (round(self.lengths.mean) if self.lengths else self.profile.length)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of some samples, spread over the data.

    Attributes:
        tokens: of each sample that was looked at, the shortest first.
        padded: whether samples of a batch are padded to the longest of them.
    """

    tokens: tuple[int, ...]
    padded: bool = False

    @property
    def longest(self) -> int:
        """Of all."""
        return self.tokens[-1]

    @property
    def mean(self) -> float:
        """Of all."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def note(self) -> str:
        """What was seen and how it counts, for the reader."""
        counts = "the longest of each micro-batch, which others are padded to, for time" * self.padded
        return (
            f"lengths of {len(self.tokens)} samples: {self.tokens[0]} to {self.longest}, mean {self.mean:.0f}; "
            f"longest for memory, {counts or 'mean for time'}"
        )

    def of_batch(self, samples: Array) -> Array:
        """Tokens of each sample in a micro-batch of so many, on average: where they are padded, of the longest.

        The largest of k draws from n lengths is the i-th smallest with probability (i/n)^k - ((i - 1)/n)^k.
        """
        if not self.padded:
            return np.full_like(samples, self.mean)
        below = np.arange(len(self.tokens) + 1)[:, None] / len(self.tokens)
        chances = np.diff(below ** np.maximum(samples, 1.0)[None, :], axis=0)
        return np.asarray(self.tokens, dtype=float) @ chances


def for_time(lengths: Lengths | None, layouts: Layouts) -> Layouts:
    """``layouts`` with the length that a step's time is of."""
    return replace(layouts, length=lengths.of_batch(layouts.micro)) if lengths else layouts


def for_memory(lengths: Lengths | None, layouts: Layouts) -> Layouts:
    """``layouts`` with the length that memory has to suffice for."""
    return replace(layouts, length=np.full_like(layouts.length, float(lengths.longest))) if lengths else layouts


def lengths_of(seen: Sequence[int], *, padded: bool) -> Lengths | None:
    """The lengths of samples; ``None`` where all are alike."""
    return Lengths(tuple(sorted(seen)), padded) if len(set(seen)) > 1 else None
