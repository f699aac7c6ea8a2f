"""What a rank's memory holds when it holds most, by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.forecast.habits import Habits
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.tables import Array
from phalanx.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Memory:
    """Bytes at the peak of the rank that needs most: shape (N,) each.

    Attributes:
        parameters: values, in the precision computed in and in that stepped.
        gradients: while they are summed.
        optimizer: its state.
        activations: saved for backward, of all micro-batches under way.
        working: temporaries beyond what is saved.
        communication: buffers of collectives, and parameters gathered.
        reserve: what the allocator holds beyond what is allocated.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    working: Array
    communication: Array
    reserve: Array

    @property
    def allocated(self) -> Array:
        """Bytes of tensors."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working + self.communication

    @property
    def reserved(self) -> Array:
        """Bytes the allocator holds."""
        return self.allocated + self.reserve


def memory(profile: Profile, layouts: Layouts, habits: Habits, precision: str, state: float) -> Memory:
    """The memory of every candidate; ``state`` is bytes of optimizer state a parameter."""
    zero = np.zeros_like(layouts.tp)
    return Memory(
        parameters=zero,
        gradients=zero,
        optimizer=zero,
        activations=zero,
        working=zero,
        communication=zero,
        reserve=zero,
    )
