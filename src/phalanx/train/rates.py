"""The learning rate of each parameter group in each step: the job's schedule, or what sets it in its place."""

from __future__ import annotations

import math
from typing import Any

import torch

from phalanx.config import Job, Schedule
from phalanx.errors import Problem, RefusedError


class Rates:
    """Sets an optimizer's learning rates before each step.

    A rate is what the optimizer began with, times the schedule's factor and ``scale``. Where neither changes anything,
    what a hook of the optimizer or a loop of the user's own sets between steps stands.
    """

    def __init__(self, job: Job, optimizer: torch.optim.Optimizer, *, total_steps: int, scale: float) -> None:
        self._job, self._groups = job, optimizer.param_groups
        self._total_steps, self._scale = total_steps, scale
        self._base = [float(group["lr"]) for group in self._groups]
        self._set = list(self._base)

    def set(self, step: int) -> float:
        """Set the rates of ``step``; gives that of the first group.

        Raises:
            RefusedError: if something else has set one that the job's schedule sets, too.
        """
        job = self._job
        factor = self._scale * job.schedule.factor(step=step, batch=job.batch, total_steps=self._total_steps)
        for index, group in enumerate(self._groups):
            self._base[index] = self._base_of(index, group["lr"], step)
            rate = self._set[index] = self._base[index] * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a compiled or captured step reads this very tensor
            else:
                group["lr"] = rate
        return self._set[0]

    def _base_of(self, index: int, found: Any, step: int) -> float:
        if isinstance(found, torch.Tensor) and found.device.type != "cpu":
            return self._base[index]  # looking would wait for the device
        if math.isclose(float(found), self._set[index], rel_tol=1e-6):
            return self._base[index]
        if self._job.schedule == Schedule() and self._scale == 1.0:
            return float(found)
        raise RefusedError(
            [
                Problem(
                    where="job.optimizer",
                    given=f"a learning rate that something else set to {float(found):g} before step {step}, "
                    f"where the schedule had set {self._set[index]:g}",
                    allowed="one of the two: the job's schedule (and its factor), or what else sets the rate",
                    fix="schedule=px.Schedule()",
                )
            ]
        )
