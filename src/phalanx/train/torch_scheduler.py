"""A learning-rate scheduler of torch's that a job returns beside its optimizer: stepped, saved, restored with a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.checkpoint.folder import not_json
from phalanx.config import Job, Plan
from phalanx.config.phases import PhaseInputs
from phalanx.errors import CheckpointError, Problem, SpecError

_FIX = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
_PAIR = "a function that gives a torch.optim.Optimizer, or (optimizer, scheduler) with a scheduler of torch.optim's"


class MadeOptimizer(NamedTuple):
    """The result of a job's ``optimizer``: the optimizer, of any type, and an optional scheduler of torch's."""

    optimizer: Any
    scheduler: LRScheduler | None = None

    @classmethod
    def of(cls, given: Any) -> MadeOptimizer:
        """Read the function's result.

        Raises:
            SpecError: if it is a tuple or list of anything but an optimizer and a scheduler over it.
        """
        if not isinstance(given, tuple | list):
            return cls(given)
        kinds = ", ".join(type(one).__name__ for one in given)  # pyrefly: ignore
        if len(given) != 2 or not isinstance(given[1], LRScheduler):  # pyrefly: ignore
            raise SpecError([_wrong(f"a function that gives ({kinds})", _PAIR, _FIX)])
        optimizer, scheduler = given
        if scheduler.optimizer is not optimizer:
            what = f"a {type(scheduler).__name__} over another optimizer than the {type(optimizer).__name__} beside it"
            raise SpecError([_wrong(what, "a scheduler made over the very optimizer", "StepLR(optimizer, 30)")])
        return cls(optimizer, scheduler)


def without_plateau(optimizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the job's function ``optimizer`` without a scheduler that follows evaluations."""

    def made(params: Any) -> Any:
        found = MadeOptimizer.of(optimizer(params))
        return found.optimizer if found.scheduler is None or isinstance(found.scheduler, ReduceLROnPlateau) else found

    return made


def given_scheduler_problems(job: Job, plan: Plan, scheduler: LRScheduler, lr_scale: float) -> list[Problem]:
    """Return the problems of a scheduler that the job returns beside its optimizer."""
    name = type(scheduler).__name__
    instead = 'schedule=px.Schedule(decay="cosine", warmup_steps=100) of the job, and no scheduler'
    if job.lr_schedule != type(job.lr_schedule)():
        return [_wrong(f"{name} and {job.lr_schedule}", "one of the two: both set the learning rate", instead)]
    if lr_scale != 1.0:
        return [_wrong(f"{name} and a factor of {lr_scale:g} on every learning rate", "one of the two", instead)]
    if plan.server:
        allowed = "plans without servers, which step the optimizer slice by slice"
        return [_wrong(f"{name} under {plan}", allowed, instead)]
    if wrong := [f"{kind} at {where}" for where, kind in not_json(_encoded(scheduler.state_dict()), "")]:
        given = f"{name}, whose state cannot be saved: {'; '.join(wrong[:3])}"
        return [_wrong(given, "a scheduler whose state_dict() holds numbers, texts, lists and dicts", instead)]
    return _plateau_problems(job, scheduler) if isinstance(scheduler, ReduceLROnPlateau) else []


def _plateau_problems(job: Job, scheduler: ReduceLROnPlateau) -> list[Problem]:
    if isinstance(job.inputs, PhaseInputs) and not job.inputs.first:
        given = f"ReduceLROnPlateau of the phase {job.inputs.phase}, and evaluations are of the first phase"
        return [_wrong(given, "one of the first phase, or a scheduler that follows steps", "StepLR(optimizer, 30)")]
    if not job.evaluate_every:
        allowed = "only together with evaluate and evaluate_every: it is stepped by each evaluation"
        fix = "evaluate=lambda: dataset, evaluate_every=100"
        return [_wrong("ReduceLROnPlateau, and no evaluation before the end", allowed, fix)]
    best = job.best
    wanted = (best.metric, best.mode) if best else ("loss", "min")
    if scheduler.mode != wanted[1]:
        given = f"ReduceLROnPlateau(mode={scheduler.mode!r}), which would follow {wanted[0]}"
        allowed = f"mode={wanted[1]!r}: it follows the number of job.best, or the evaluation's loss without one"
        return [_wrong(given, allowed, f"ReduceLROnPlateau(optimizer, mode={wanted[1]!r})")]
    return []


def _wrong(given: str, allowed: str, fix: str) -> Problem:
    return Problem(where="job.optimizer", given=given, allowed=allowed, fix=fix)


@final
class TorchScheduler:
    """A scheduler stepped once an optimizer step, or once an evaluation if it follows those.

    Every rank has one, over its own optimizer: they all set the same rates.
    """

    def __init__(self, scheduler: LRScheduler, evaluate_every: int) -> None:
        self._scheduler, self._every = scheduler, evaluate_every
        self._evaluated = 0

    @property
    def follows_evaluations(self) -> bool:
        """Return True if it is stepped by evaluations, not by optimizer steps."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def stepped(self) -> None:
        """Count an optimizer step, also a skipped one."""
        if self.follows_evaluations:
            return
        with warnings.catch_warnings():
            # A first step that fp16 skips is a step of the schedule all the same.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
            self._scheduler.step()

    def awaits_evaluation(self, step: int) -> bool:
        """Return True if the evaluation after ``step`` steps is still to come."""
        return self.follows_evaluations and 0 < step != self._evaluated and step % self._every == 0

    def evaluated(self, step: int, value: float) -> None:
        """Take ``value`` of an evaluation after ``step`` steps. An extra one at the end does not count."""
        if self.awaits_evaluation(step):
            self._scheduler.step(value)  # pyrefly: ignore
            self._evaluated = step

    def state(self) -> dict[str, Any]:
        """Return the JSON for a checkpoint, without the values in the optimizer's groups."""
        kind, state = type(self._scheduler).__name__, _encoded(self._scheduler.state_dict())
        return {"kind": kind, "evaluated": self._evaluated, "state": state}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of ``state``, saved under any plan.

        Raises:
            CheckpointError: if it is of another kind of scheduler, or does not fit.
        """
        kind, there = type(self._scheduler).__name__, saved.get("kind")
        if there != kind:
            raise CheckpointError(
                f"the checkpoint was saved with the scheduler {there}, this is {kind}.\n"
                "    try: the job as it was, or a new run folder"
            )
        try:
            self._scheduler.load_state_dict(_decoded(saved["state"], self._scheduler.state_dict()))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of {kind} in the checkpoint does not fit this one: {error}") from error
        self._evaluated = int(saved["evaluated"])

    def keys(self) -> list[frozenset[str]]:
        """Return the keys of each parameter group that the scheduler sets, and a resume restores."""
        momentum = any(part.get("cycle_momentum") for part in _dicts(self._scheduler.state_dict()))
        return [_RATES | _MOMENTA if momentum else _RATES] * len(self._scheduler.optimizer.param_groups)


@final
class SchedulersOfPhases:
    """The schedulers of a job's phases as one, stepped, saved and restored with the run."""

    def __init__(self, schedulers: Mapping[str, Any], groups: Mapping[str, int]) -> None:
        """Take each phase's ``TorchScheduler`` or ``None``, in order, and its number of parameter groups."""
        self._schedulers, self._groups = schedulers, groups
        self._given: dict[str, TorchScheduler] = {name: one for name, one in schedulers.items() if one is not None}

    def stepped(self) -> None:
        """Count an optimizer step of the phases that had their turn."""
        for one in self._given.values():
            one.stepped()

    @property
    def follows_evaluations(self) -> bool:
        """Return True if one is stepped by evaluations."""
        return any(one.follows_evaluations for one in self._given.values())

    def awaits_evaluation(self, step: int) -> bool:
        """Return True if the evaluation after ``step`` steps is still to come."""
        return any(one.awaits_evaluation(step) for one in self._given.values())

    def evaluated(self, step: int, value: float) -> None:
        """Take ``value`` of an evaluation after ``step`` steps."""
        for one in self._given.values():
            one.evaluated(step, value)

    def state(self) -> dict[str, Any]:
        """Return the JSON for a checkpoint."""
        return {"kind": "phases", "phases": {name: one.state() for name, one in self._given.items()}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of ``state``, saved under any plan.

        Raises:
            CheckpointError: if other phases have schedulers there, or of another kind, or one does not fit.
        """
        there = saved.get("phases", {})
        if there.keys() != self._given.keys():
            raise CheckpointError(
                f"the checkpoint was saved with schedulers of the phases {', '.join(there) or 'none'}, these are of "
                f"{', '.join(self._given)}.\n    try: the job as it was, or a new run folder"
            )
        for name, one in self._given.items():
            one.restore(there[name])

    def keys(self) -> list[frozenset[str]]:
        """Return the keys of each parameter group of all phases that its scheduler sets; empty without one."""
        each = ((one, self._groups[name]) for name, one in self._schedulers.items())
        return [keys for one, groups in each for keys in (one.keys() if one else [frozenset[str]()] * groups)]


_RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "swa_lr"})
_MOMENTA = frozenset({"momentum", "betas", "max_momentum", "base_momentum"})


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _dicts(item)


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return _encoded(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return {"$items": [[key, _encoded(item)] for key, item in value.items()]}
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_encoded(item) for item in value]}
    return [_encoded(item) for item in value] if isinstance(value, list) else value


def _decoded(value: Any, current: Any) -> Any:
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    if isinstance(value, list):
        like = current if isinstance(current, list) and len(current) == len(value) else [None] * len(value)
        return [_decoded(item, now) for item, now in zip(value, like, strict=True)]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(_decoded(value["$tuple"], list(current) if isinstance(current, tuple) else None))
    there = current if isinstance(current, dict) else {}
    items = value["$items"] if "$items" in value else list(value.items())
    found = {key: _decoded(item, there.get(key)) for key, item in items}
    return type(current)(found) if isinstance(current, dict) else found
