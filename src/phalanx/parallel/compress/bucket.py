"""Gradients that are averaged together, and what every way to average them does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that are averaged together.

    Attributes:
        names: of their parameters, in the order in which they lie in ``flat``.
        shapes: of each.
        flat: all of them, fp32: (count,).
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    flat: Tensor


class Average(ABC):
    """A way to average buckets over ranks."""

    @abstractmethod
    def __call__(self, bucket: Bucket) -> None:
        """Put the mean over the ranks into ``bucket.flat``, in place: the same bits on every rank. Collective."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Gradients are ``factor`` times as large from now on (a loss scale that changes)."""

    @abstractmethod
    def stored(self) -> list[Tensor]:
        """What it keeps in memory from step to step."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What it hands on from step to step, the same on every rank; to be saved, or filled in place. Collective."""
