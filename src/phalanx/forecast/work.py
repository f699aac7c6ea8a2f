"""What a job asks for in each step, as far as forecasts need to know."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.forecast.lengths import Lengths
from phalanx.profile import Profile


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
