"""The proof: the same job on one device and under a plan, compared loss by loss and tensor by tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from phalanx.launch import launch
from phalanx.parallel import batch_statistics, dropouts
from phalanx.spec import Job, Plan
from phalanx.train.assembly import build_model, refuse
from phalanx.verify import compare
from phalanx.verify.capture import capture, initial_parameters
from phalanx.verify.compare import Difference, Tolerance
from phalanx.verify.diagnose import Evidence, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Whether a plan computes what one device computes, and by how much it differs.

    Attributes:
        equal: whether everything compared is within ``tolerance``.
        plan: the plan.
        steps: optimizer steps compared.
        tolerance: what rounding may make differ, by kind.
        losses: relative difference of each step's loss.
        gradients: of the first step, by parameter.
        parameters: after the last step, relative to how far each moved, by parameter.
        not_compared: parameters whose gradient is zero but for rounding. Adam divides a gradient by its own size and so
            makes a whole step out of rounding; such parameters are named, not compared.
        notes: what no plan can keep, said before the run; dropout is switched off for the comparison.
        first: the first tensor or loss that differs, in words; empty where equal.
        cause: its likely cause; empty where equal.
    """

    equal: bool
    plan: Plan
    steps: int
    tolerance: Tolerance
    losses: list[float]
    gradients: list[Difference]
    parameters: list[Difference]
    not_compared: list[str]
    notes: list[str]
    first: str
    cause: str

    @property
    def largest(self) -> dict[str, float]:
        """The largest relative difference of each kind."""
        return {
            "loss": max(self.losses, default=0.0),
            "gradient": max((one.relative for one in self.gradients), default=0.0),
            "parameter": max((one.relative for one in self.parameters), default=0.0),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {**asdict(self), "plan": str(self.plan), "largest": self.largest}


def prove(
    job: Job,
    plan: Plan,
    *,
    steps: int = 20,
    watch: Callable[[], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Proof:
    """Run ``steps`` steps of ``job`` on one device and under ``plan``, and compare.

    ``say`` is called with each note before anything runs, ``watch`` ten times a second while it does.

    Raises:
        RefusedError: if the plan cannot serve the job here.
        WorkerError: if one of the runs failed.
    """
    refuse(job, plan, plan.world_size)
    module = build_model(job)
    notes = _notes(module)
    for note in notes:
        if say:
            say(note)
    with tempfile.TemporaryDirectory(prefix="phalanx-proof-") as folder:
        reference = _run(job, Plan(precision=plan.precision, device=plan.device), steps, Path(folder, "one"), watch)
        other = _run(job, plan, steps, Path(folder, "plan"), watch)
    layers = sum(1 for child in module.modules() if next(child.parameters(recurse=False), None) is not None)
    tolerance = Tolerance.of(plan.precision, batch=job.batch, layers=layers, steps=steps)
    return _judge(job, plan, steps, tolerance, (reference, other), module, notes)


@dataclass(frozen=True, slots=True)
class _Captured:
    ranks: list[dict[str, Any]]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def _run(job: Job, plan: Plan, steps: int, folder: Path, watch: Callable[[], None] | None) -> _Captured:
    folder.mkdir()
    ranks = launch(capture(job, plan, steps, folder), plan.world_size, watch=watch)
    return _Captured(ranks, load_file(folder / "gradients.safetensors"), load_file(folder / "parameters.safetensors"))


def _judge(
    job: Job,
    plan: Plan,
    steps: int,
    tolerance: Tolerance,
    pair: tuple[_Captured, _Captured],
    module: torch.nn.Module,
    notes: list[str],
) -> Proof:
    reference, other = pair
    losses = compare.losses(reference.ranks[0]["losses"], other.ranks[0]["losses"])
    gradients, silent = compare.gradients(reference.gradients, other.gradients, tolerance.noise)
    parameters = compare.parameters(initial_parameters(job), reference.parameters, other.parameters, silent)
    evidence = Evidence(
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        ranks=other.ranks,
        batch_norm=batch_statistics(module),
    )
    first = _first(evidence, tolerance)
    return Proof(
        equal=not first,
        plan=plan,
        steps=steps,
        tolerance=tolerance,
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        not_compared=silent,
        notes=notes,
        first=first,
        cause=diagnose(evidence, tolerance, job, plan) if first else "",
    )


def _first(evidence: Evidence, tolerance: Tolerance) -> str:
    """The first thing beyond tolerance, in the order it was computed: loss, gradient, later losses, parameters."""
    if not evidence.losses[0] <= tolerance.loss:
        return f"the loss of step 0, by {evidence.losses[0]:.2g} (allowed {tolerance.loss:.2g})"
    for one in evidence.gradients:
        if not one.relative <= tolerance.gradient:
            return f"the gradient of {one.name} in step 0, by {one.relative:.2g} (allowed {tolerance.gradient:.2g})"
    for step, loss in enumerate(evidence.losses):
        if not loss <= tolerance.loss:
            return f"the loss of step {step}, by {loss:.2g} (allowed {tolerance.loss:.2g})"
    for one in evidence.parameters:
        if not one.relative <= tolerance.parameter:
            return (
                f"{one.name} after the last step, by {one.relative:.2g} of its way (allowed {tolerance.parameter:.2g})"
            )
    return ""


def _notes(module: torch.nn.Module) -> list[str]:
    found: list[str] = []
    if names := dropouts(module):
        found.append(f"dropout is switched off for the comparison ({len(names)} modules, {names[0]} the first)")
    if names := batch_statistics(module):
        found.append(f"BatchNorm takes statistics of each micro-batch and is not equal when one is split ({names[0]})")
    return found
