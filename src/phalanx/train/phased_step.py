"""A step of several phases: for each in turn, forward, backward and update over the whole global batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from phalanx.config import Job, Plan
from phalanx.config.phases import Phase
from phalanx.data import StepBatch
from phalanx.parallel import Layout
from phalanx.train.accidents import Accidents
from phalanx.train.metrics import Metrics
from phalanx.train.step import Step, StepPlan
from phalanx.train.torch_scheduler import SchedulersOfPhases


class PhasedStep(Step):
    """One optimizer step of a job with phases, each of them a ``Step`` over the same batch.

    Attributes:
        phases: each with its own step.
    """

    def __init__(
        self, job: Job, plan: Plan, layout: Layout, phases: Sequence[tuple[Phase, Step]], course: StepPlan
    ) -> None:
        """Take the phases' steps; ``layout`` is that of all phases."""
        super().__init__(job, plan, layout, merged([(one.name, step.optimizer) for one, step in phases]), course)
        self.phases = list(phases)
        schedulers = {one.name: step.scheduler for one, step in phases}
        for _, step in phases:
            step.scheduler = None  # each is stepped with those of the other phases
            step.checks_late = False  # another phase's update may come before the check
        if any(schedulers.values()):
            groups = {one.name: len(step.optimizer.param_groups) for one, step in phases}
            self.scheduler = SchedulersOfPhases(schedulers, groups)

    def __call__(self, batch: StepBatch) -> Metrics:
        """Run forward, backward and update of each phase in turn, for one global batch.

        Raises:
            LossError: if a loss is not finite, or not of an allowed form, or if nothing was counted.
            GradientError: if a gradient is not finite, or parameters get none and the job does not allow it.
            RollBackError: if the run is to go back to a checkpoint instead.
        """
        number = self.progress.step
        found: dict[str, Metrics] = {}
        computed = updated = 0.0
        for phase, step in self.phases:
            if not phase.turn(number):
                continue
            step.progress.step, step.watch, step.observer = number, self.watch, self.observer
            if self.progress.divisor:
                step.progress.divisor = self.progress.divisor
            found[phase.name] = step(batch)
            self.progress.divisor = step.progress.divisor
            computed, updated = computed + step.seconds[0], updated + step.seconds[1]
        self.seconds = (computed, updated)
        first = found[self.phases[0][0].name]
        accident = next((one.accident for one in found.values() if one.accident), "")
        skipped = any(one.skipped for one in found.values())
        if self.scheduler is not None:
            self.scheduler.stepped()  # of all phases at the end, also of those that had no turn
        metrics = replace(first, skipped=skipped, accident=accident, phases=found, names=())
        self._finished(batch, metrics)
        return metrics

    def meets_accidents(self, made: Callable[[str], Accidents]) -> None:
        """Give each phase its own accidents, because their losses cannot be compared."""
        super().meets_accidents(made)
        for phase, step in self.phases:
            step.accidents = made(phase.name)

    def saved(self, steps: int) -> None:
        super().saved(steps)
        for _, step in self.phases:
            step.saved(steps)


def merged(optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> torch.optim.Optimizer:
    """Return one optimizer with the groups and the state of all, which are saved and restored as one.

    Its class has the phases' names and their optimizers' classes, so that a checkpoint of others does not match.
    """
    kind = ", ".join(f"{name}: {type(one).__name__}" for name, one in optimizers)
    return type(kind, (_Merged,), {})([one for _, one in optimizers])


class _Merged(torch.optim.Optimizer):
    """The groups and the shared state of several optimizers; each parameter belongs to one of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # torch's own __init__ would make groups anew
        self.defaults: dict[str, Any] = {}
        self.state = defaultdict(dict)
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        for one in optimizers:
            self.state.update(one.state)
            one.state = self.state
        self.__setstate__({})  # the hooks that state_dict() and load_state_dict() ask for

    def step(self, closure: Any = None) -> None:  # pyrefly: ignore
        """Raise NotImplementedError: the optimizers take steps themselves."""
        raise NotImplementedError("each phase steps its own optimizer")
