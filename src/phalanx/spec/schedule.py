"""Learning-rate schedules, counted in optimizer steps or samples, never in processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.errors import Problem, SpecError

Decay = Literal["constant", "linear", "cosine", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The factor on every learning rate at a given step.

    The factor rises from near 0 to 1 over the warm-up, then falls to ``floor`` by ``decay``.

    Attributes:
        decay: ``constant``, ``linear``, ``cosine``, or ``step`` (times ``gamma`` at each milestone).
        warmup_steps: optimizer steps of linear warm-up.
        warmup_samples: the same in samples; give one or the other.
        total_steps: optimizer steps until ``floor`` is reached; ``None``: the length of the run.
        floor: the last factor of ``linear`` and ``cosine``.
        milestones: optimizer steps at which ``step`` decays.
        gamma: the factor ``step`` multiplies by at each milestone.
    """

    decay: Decay = "constant"
    warmup_steps: int = 0
    warmup_samples: int = 0
    total_steps: int | None = None
    floor: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if self.decay not in get_args(Decay):
            problems.append(
                Problem(
                    where="schedule.decay",
                    given=repr(self.decay),
                    allowed=", ".join(get_args(Decay)),
                    fix='px.Schedule(decay="cosine")',
                )
            )
        for name in ("warmup_steps", "warmup_samples"):
            if getattr(self, name) < 0:
                problems.append(
                    Problem(
                        where=f"schedule.{name}",
                        given=str(getattr(self, name)),
                        allowed="0 or more",
                        fix=f"px.Schedule({name}=100)",
                    )
                )
        if self.warmup_steps and self.warmup_samples:
            problems.append(
                Problem(
                    where="schedule.warmup_samples",
                    given="warmup_steps and warmup_samples",
                    allowed="one of the two",
                    fix="px.Schedule(warmup_steps=100)",
                )
            )
        if self.total_steps is not None and self.total_steps < 1:
            problems.append(
                Problem(
                    where="schedule.total_steps",
                    given=str(self.total_steps),
                    allowed="1 or more, or None",
                    fix="px.Schedule(total_steps=1000)",
                )
            )
        if self.decay == "step" and not self.milestones:
            problems.append(
                Problem(
                    where="schedule.milestones",
                    given="none",
                    allowed="the steps at which to decay",
                    fix='px.Schedule(decay="step", milestones=(1000, 2000))',
                )
            )
        if problems:
            raise SpecError(problems)

    def factor(self, *, step: int, batch: int, total_steps: int) -> float:
        """The factor for optimizer step ``step`` (0 is the first) at ``batch`` samples a step.

        ``total_steps`` is the length of the run, used where the schedule states none of its own.
        """
        warmup = self.warmup_samples / batch if self.warmup_samples else self.warmup_steps
        if step < warmup:
            return min(1.0, (step + 1) / warmup)
        if self.decay == "step":
            return self.gamma ** sum(step >= milestone for milestone in self.milestones)
        if self.decay == "constant":
            return 1.0
        total = self.total_steps if self.total_steps is not None else total_steps
        progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
        shape = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * shape
