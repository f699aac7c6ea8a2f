"""The proof: the same job on one device and under a plan, compared loss by loss and tensor by tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from phalanx.launch import launch, make_ready
from phalanx.parallel import batch_statistics, dropouts
from phalanx.spec import Job, Plan
from phalanx.spec.plan import Device, Precision
from phalanx.train.assembly import refuse
from phalanx.verify import compare
from phalanx.verify.capture import capture, model_of, recurrent_dropouts
from phalanx.verify.compare import Difference, Tolerance
from phalanx.verify.diagnose import diagnose
from phalanx.verify.evidence import Captured, Evidence, holders, where
from phalanx.verify.prints import Piece
from phalanx.verify.served import capture_served

Watch = Callable[[], None] | None


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
        parameters: after the last step, relative to how far each moved, by parameter; elements whose gradient is zero
            but for rounding are left out, since Adam makes a whole step out of rounding.
        not_compared: parameters whose whole gradient is zero but for rounding.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OneDevice:
    """What a job computes on one device: the measure of any number of plans at one precision.

    Attributes:
        job: the job.
        steps: optimizer steps taken.
        precision: of the computation.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    job: Job
    steps: int
    precision: Precision
    device: Device
    _module: torch.nn.Module
    _captured: Captured

    @classmethod
    def run(
        cls, job: Job, steps: int, *, precision: Precision = "fp32", device: Device = "auto", watch: Watch = None
    ) -> OneDevice:
        """Run ``steps`` steps of ``job`` on one device; ``watch`` is called ten times a second meanwhile.

        Raises:
            WorkerError: if the run failed.
        """
        captured = _run(job, Plan(precision=precision, device=device), steps, watch)
        return cls(job=job, steps=steps, precision=precision, device=device, _module=model_of(job), _captured=captured)

    def prove(self, plan: Plan, *, watch: Watch = None) -> Proof:
        """Run the same steps under ``plan`` and compare.

        Raises:
            RefusedError: if the plan cannot serve the job here.
            WorkerError: if the run failed.
        """
        refuse(self.job, plan, plan.world_size)
        other = _run(self.job, plan, self.steps, watch)
        layers = sum(1 for child in self._module.modules() if next(child.parameters(recurse=False), None) is not None)
        tolerance = Tolerance.of(plan.precision, batch=self.job.batch, layers=layers, steps=self.steps)
        return _judge(self, other, plan, tolerance)


def prove(
    job: Job, plan: Plan, *, steps: int = 20, say: Callable[[str], None] | None = None, watch: Watch = None
) -> Proof:
    """Run ``steps`` steps of ``job`` on one device and under ``plan``, and compare.

    ``say`` is called with each note before anything runs, ``watch`` ten times a second while it does.

    Raises:
        RefusedError: if the plan cannot serve the job here.
        WorkerError: if one of the runs failed.
    """
    refuse(job, plan, plan.world_size)
    for note in _notes(model_of(job)):
        if say:
            say(note)
    one = OneDevice.run(job, steps, precision=plan.precision, device=plan.device, watch=watch)
    return one.prove(plan, watch=watch)


def _run(job: Job, plan: Plan, steps: int, watch: Watch) -> Captured:
    with tempfile.TemporaryDirectory(prefix="phalanx-proof-") as name:
        folder = Path(name)
        make_ready(plan)
        if plan.server:
            ranks = launch(capture_served(job, plan, steps, folder), plan.processes, watch=watch)[plan.world_size]
        else:
            ranks = launch(capture(job, plan, steps, folder), plan.world_size, watch=watch)
        initial, gradients, parameters, auxiliary = (
            _read(folder, part) for part in ("initial", "gradients", "parameters", "auxiliary")
        )
    return Captured(ranks=ranks, initial=initial, gradients=gradients, parameters=parameters, auxiliary=auxiliary)


def _read(folder: Path, what: str) -> dict[str, torch.Tensor]:
    """What all stages have written. Read whole, not mapped: the folder goes."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(f"{what}-*.safetensors")):
        found |= load(file.read_bytes())
    return found


def _judge(one: OneDevice, other: Captured, plan: Plan, tolerance: Tolerance) -> Proof:
    reference = one._captured
    losses = compare.losses(reference.ranks[0]["losses"], other.ranks[0]["losses"])
    gradients, silent = compare.gradients(reference.gradients, other.gradients, tolerance.noise)
    meant = {name: grad for name, grad in reference.gradients.items() if name not in silent}
    parameters = compare.parameters(reference.initial, reference.parameters, other.parameters, meant, tolerance.noise)
    initial = compare.gradients(reference.initial, other.initial, 0.0)[0]
    parts = holders(other.prints("start"))
    initial = _placed(initial, 0.0, (reference.initial, other.initial), parts, plan)
    gradients = _placed(gradients, tolerance.gradient, (reference.gradients, other.gradients), parts, plan)
    parameters = _placed(parameters, tolerance.parameter, (reference.parameters, other.parameters), parts, plan)
    pairs = zip(reference.ranks[0]["skipped"], other.ranks[0]["skipped"], strict=True)
    evidence = Evidence(
        plan=plan,
        one=reference,
        other=other,
        losses=losses,
        skipped=next((step for step, (a, b) in enumerate(pairs) if a != b), None),
        initial=initial,
        gradients=gradients,
        silent=silent,
        parameters=parameters,
        batch_norm=batch_statistics(one._module),
    )
    first = _first(evidence, tolerance)
    return Proof(
        equal=not first,
        plan=plan,
        steps=one.steps,
        tolerance=tolerance,
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        not_compared=silent,
        notes=_notes(one._module),
        first=first,
        cause=diagnose(evidence, tolerance, one.job, plan) if first else "",
    )


def _placed(
    found: list[Difference],
    allowed: float,
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    parts: dict[str, dict[Piece, list[int]]],
    plan: Plan,
) -> list[Difference]:
    """Those that differ by more than is allowed, with where in the tensor they do."""
    reference, other = pair
    return [
        replace(one, where=where(reference[one.name], other[one.name], parts.get(one.name, {}), plan))
        if one.relative > allowed and one.name in reference and one.name in other
        else one
        for one in found
    ]


def _first(evidence: Evidence, tolerance: Tolerance) -> str:
    """The first thing beyond tolerance, in the order it was computed: loss, gradient, later losses, parameters."""
    if not evidence.losses[0] <= tolerance.loss:
        return f"the loss of step 0, by {evidence.losses[0]:.2g} (allowed {tolerance.loss:.2g})"
    for one in evidence.gradients:
        if not one.relative <= tolerance.gradient:
            at = f" ({one.where})" if one.where else ""
            return f"the gradient of {one.name}{at} in step 0, by {one.relative:.2g} (allowed {tolerance.gradient:.2g})"
    for step, loss in enumerate(evidence.losses):
        if not loss <= tolerance.loss:
            return f"the loss of step {step}, by {loss:.2g} (allowed {tolerance.loss:.2g})"
    for one in evidence.parameters:
        if not one.relative <= tolerance.parameter:
            at = f" ({one.where})" if one.where else ""
            by = f"by {one.relative:.2g} of its way (allowed {tolerance.parameter:.2g})"
            return f"{one.name}{at} after the last step, {by}"
    return ""


def _notes(module: torch.nn.Module) -> list[str]:
    found: list[str] = []
    if names := list(dict.fromkeys([*dropouts(module), *recurrent_dropouts(module)])):
        found.append(f"dropout is switched off for the comparison ({len(names)} modules, {names[0]} the first)")
    if names := batch_statistics(module):
        found.append(f"BatchNorm takes statistics of each micro-batch and is not equal when one is split ({names[0]})")
    return found
