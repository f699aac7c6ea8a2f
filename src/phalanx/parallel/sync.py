"""How replicas are kept together, at the two moments of a step at which ways to do it differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Sync(ABC):
    """Called by every step when gradients are ready, and when parameters have been stepped.

    Totals are the sum and the count of a loss: two numbers, or a tensor of both on CUDA.
    """

    @property
    @abstractmethod
    def alone(self) -> bool:
        """Whether the step's group is one replica of several, each of which counts for itself."""

    @abstractmethod
    def gradients_ready(self, step: int, totals: Any) -> Any:
        """Gradients are sums over the samples of the step's group. Returns what they are to be divided for: totals."""

    @abstractmethod
    def parameters_stepped(self, steps: int, totals: Any) -> None:
        """The optimizer has stepped, ``steps`` times so far; forward does not see the new values yet."""

    @abstractmethod
    def together(self) -> None:
        """Bring replicas wholly together now, as at the end: what is read is then the same on all. Collective."""


class Each(Sync):
    """Gradients are summed over all replicas in every step, which layouts do on the way."""

    @property
    def alone(self) -> bool:
        return False

    def gradients_ready(self, step: int, totals: Any) -> Any:
        return totals

    def parameters_stepped(self, steps: int, totals: Any) -> None:
        pass

    def together(self) -> None:
        pass
