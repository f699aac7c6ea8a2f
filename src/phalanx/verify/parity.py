"""The proof: the same job on one device and under a plan, compared loss by loss and tensor by tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.config import Job, Plan
from phalanx.errors import RefusedError, SpecError, WorkerError
from phalanx.launch.side_process import LookAhead, look_ahead
from phalanx.launch.torch_warmup import make_ready
from phalanx.train.assembly import refuse
from phalanx.train.findings import Findings
from phalanx.verify import compare
from phalanx.verify.capture import Watch, capture, proven, resumed, traced
from phalanx.verify.compare import Bounds, Difference
from phalanx.verify.diagnose import diagnose
from phalanx.verify.evidence import Check, Evidence, differences_of
from phalanx.verify.judge import Pair, judged, judged_after_resume
from phalanx.verify.module_trace import traceable
from phalanx.verify.record import END, RunRecord
from phalanx.verify.references import ModelFacts, ReferenceRun, facts_of
from phalanx.witness.own_loop import OwnLoop
from phalanx.witness.plain_loop import why_not
from phalanx.witness.rounding import LAST_PLACE


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Proof:
    """The result of comparing a plan with one device: equal or not, and the differences.

    Attributes:
        equal: whether rounding explains every difference.
        steps: optimizer steps compared.
        losses: relative difference of each step's loss.
        gradients: of the first step, by parameter, before clipping.
        parameters: after the last step, relative to their movement, by parameter; elements whose gradient is zero
            except for rounding are left out, since Adam makes a whole step out of rounding.
        not_compared: parameters whose whole gradient is zero except for rounding.
        notes: differences that no plan can avoid, said before the run; dropout is switched off for the comparison.
        first: the first tensor or loss that differs, in words; empty if equal.
        cause: its likely cause; empty if equal.
        checks: all comparisons, in the order of a run's computation.
        never: parameters without a nonzero gradient in any step.
        reference: the reference of the comparison, in words.
        asked: steps that were asked for; more are taken until every parameter has had a gradient, or ``most_steps``.
        late: the parameter whose first gradient came last, and its step, if more steps than asked were taken for it.
    """

    equal: bool
    plan: Plan
    steps: int
    losses: list[float]
    gradients: list[Difference]
    parameters: list[Difference]
    not_compared: list[str]
    notes: list[str]
    first: str
    cause: str
    checks: list[Check] = field(default_factory=list[Check])
    never: list[str] = field(default_factory=list[str])
    reference: str = ""
    asked: int = 0
    late: tuple[str, int] | None = None

    @property
    def copies(self) -> int:
        """Return the number of tensors compared with another rank's copy."""
        return sum(check.many for check in self.checks if check.kind == "copies")

    @property
    def largest(self) -> dict[str, float]:
        return {
            "loss": max(self.losses, default=0.0),
            "gradient": max((one.relative for one in self.gradients), default=0.0),
            "parameter": max((one.relative for one in self.parameters), default=0.0),
        }

    def __repr__(self) -> str:
        """Return the answer in a few lines; ``to_dict()`` has every tensor."""
        plan, steps = f'"{self.plan}"', f"{self.steps} step{'s' if self.steps > 1 else ''}"
        if not self.equal:
            cause = f"\nlikely cause: {self.cause}" if self.cause else ""
            return f"{plan} is not equal to one device over {steps}\nfirst: {self.first}{cause}"
        largest = ", ".join(f"{kind} {value:.1e}" for kind, value in self.largest.items())
        return f"{plan} is equal to one device over {steps}; largest relative differences: {largest}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": str(self.plan), "largest": self.largest, "copies": self.copies}


@dataclass(frozen=True, kw_only=True, slots=True)
class OneDevice:
    """The result of a job on one device: the measure of any number of plans at one precision.

    Attributes:
        steps: optimizer steps asked for; the reference continues until each parameter has had a gradient, or to
            ``most_steps``.
        reference: its origin, in words: a plain PyTorch loop, a user's own loop, or Phalanx.
    """

    job: Job
    steps: int
    how: ReferenceRun
    reference: str
    _facts: ModelFacts
    _record: RunRecord

    @classmethod
    def run(
        cls, job: Job, steps: int, how: ReferenceRun | None = None, watch: Watch = None, facts: ModelFacts | None = None
    ) -> OneDevice:
        """Run ``job`` on one device; ``watch`` is called ten times a second meanwhile.

        It uses the plain loop of the job; Phalanx if there is none; a user's own loop if ``how`` has one.

        Raises:
            WorkerError: if the run failed.
        """
        how, asked = how or ReferenceRun(), (steps, most_steps(steps))
        with _folder() as name:
            if how.against is not None:
                loop = getattr(how.against.function, "__name__", "")
                reference = f"your own {loop}()" if loop.isidentifier() else "your own loop"
                record = how.record(job, asked, Path(name), watch)
            elif reason := why_not(replace(job, steps=steps, epochs=None)):
                reference = f"Phalanx on one device ({reason})"
                record = _by_phalanx(job, how, asked, watch)
            else:
                reference = "a plain PyTorch loop"
                try:
                    record = how.record(job, asked, Path(name), watch)
                except WorkerError:  # Phalanx's own errors say what to do
                    _by_phalanx(job, how, (steps,), watch)
                    raise
        return cls(job=job, steps=steps, how=how, reference=reference, _facts=facts or facts_of(job), _record=record)

    def prove(
        self, plan: Plan, *, findings: Findings | None = None, watch: Watch = None, resume: bool | None = False
    ) -> Proof:
        """Run the same steps under ``plan`` and compare; ``findings`` of a trace are sent to the workers.

        ``resume`` also resumes the run from its middle, and compares its end with the run without a stop; ``None`` does
        so only for small models.

        Raises:
            RefusedError: if the plan cannot serve the job here.
            WorkerError: if the run failed.
        """
        refuse(self.job, plan, plan.world_size)
        taken = len(self._record.steps)
        bounds = Bounds(precision=plan.precision, noise=self._record.noise)
        later, at, notes = list[Check](), taken // 2, [*self._facts.notes]
        cheap = taken * sum(one.numel() for one in self._record.values[END].values()) <= _CHEAP
        wanted = not _why_not_resumed(plan, taken) and (cheap if resume is None else resume)
        with _folder() as name:
            given = proven(self.job, self.steps, taken)
            every = at if wanted else 0
            other = capture(given, plan, Path(name), watch, findings=findings, checkpoint_every=every)
            pair = Pair(one=self._record, other=other, plan=plan, bounds=bounds)
            checks = judged(pair)
            if wanted and not (plan.exact and any(check.first for check in checks)):
                try:
                    again = resumed(given, plan, Path(name), at, watch)
                    later = judged_after_resume(Pair(one=other, other=again, plan=plan, bounds=bounds), at)
                except SpecError as error:  # of a job that trains, and cannot be resumed
                    if resume:
                        raise
                    notes.append(f"the run was not resumed: {error.problems[0].given}")
        # A plan that is not exact differs from one device anyhow, but not from its own run without a stop.
        every_check = [*checks, *later] if plan.exact else [*later, *checks]
        first = next((check.first for check in every_check if check.first), "")
        cause = ""
        if first and any(check.first == first for check in later):
            cause = (
                "the same run without a stop has this right: the checkpoint lacks it, or the resume puts it elsewhere."
            )
        elif first:
            evidence = self.evidence(pair, checks, watch)
            cause = diagnose(evidence, self.job, plan, lambda: list(look_ahead(self.job, plan).causes))
        return Proof(
            equal=not first,
            plan=plan,
            steps=taken,
            losses=compare.losses(self._record.losses, other.losses),
            gradients=differences_of(checks, "gradient", 0),
            parameters=differences_of(checks, "parameter", None),
            not_compared=pair.silent,
            notes=notes,
            first=first,
            cause=cause,
            checks=every_check,
            never=pair.one.never,
            reference=self.reference,
            asked=self.steps,
            late=pair.one.last_gradient if taken > self.steps else None,
        )

    def evidence(self, pair: Pair, checks: list[Check], watch: Watch = None) -> Evidence:
        """Return the evidence for a diagnosis; the first step is repeated with traces on both sides."""
        one, other, plan = pair.one, pair.other, pair.plan
        if traceable(plan) and not self.job.phases:
            with _folder() as name:
                one = traced(one, self.job, self.how.plan, Path(name), watch)
            with _folder() as name:
                other = traced(other, self.job, plan, Path(name), watch)
        batch_norm = self._facts.batch_statistics
        return Evidence(plan=plan, one=one, other=other, checks=checks, silent=pair.silent, batch_norm=batch_norm)


def prove(
    job: Job,
    plan: Plan,
    *,
    steps: int = 20,
    against: Callable[..., Any] | None = None,
    say: Callable[[str], None] | None = None,
    watch: Watch = None,
    resume: bool | None = None,
) -> Proof:
    """Run ``steps`` steps of ``job`` on one device and under ``plan``, and compare.

    One device is the plain PyTorch loop of the job, or ``against``, a user's own loop (see
    ``phalanx.witness.own_loop``). Dropout is off for both. ``say`` is called with each note before the runs, ``watch``
    ten times a second during them.

    Raises:
        RefusedError: if the plan cannot serve the job here.
        WorkerError: if one of the runs failed.
    """
    refuse(job, plan, plan.world_size)
    if resume and (reason := _why_not_resumed(plan, steps)):
        raise RefusedError.of(
            "resume", f"resume=True, where {reason}", "other plans, and 2 steps or more", "resume=None"
        )
    if plan.precision not in LAST_PLACE:
        raise RefusedError.of("plan.precision", plan.precision, ", ".join(LAST_PLACE), "precision=bf16")
    with LookAhead(job, plan) as look:
        make_ready(plan)
        found = look.findings()
    causes = found.causes
    facts = facts_of(job)
    for note in (*facts.notes, *causes):
        if say:
            say(note)
    own = None if against is None else OwnLoop(against)
    how = ReferenceRun(precision=plan.precision, device=plan.device, against=own)
    proof = OneDevice.run(job, steps, how, watch, facts).prove(plan, findings=found, watch=watch, resume=resume)
    return replace(proof, notes=[*proof.notes, *causes])


def _why_not_resumed(plan: Plan, steps: int) -> str:
    if plan.compress != "none":
        return f"compress={plan.compress} works by buckets, which a resume makes anew"
    if plan.server and not plan.exact:
        return "no two runs with stale servers are equal"
    return "one step has no middle" if steps < 2 else ""


_CHEAP = 10**8
"""Parameters times steps up to which half of the run is run once more unasked."""


def most_steps(steps: int) -> int:
    """Return the most steps of a proof of ``steps``, if parameters still have had no gradient."""
    return steps + max(steps, _AT_LEAST)


_AT_LEAST = 4  # more steps, for branches behind branches that start at zero


def _by_phalanx(job: Job, how: ReferenceRun, tries: Sequence[int], watch: Watch) -> RunRecord:
    for taken in tries:
        with _folder() as name:
            record = capture(proven(job, tries[0], taken), how.plan, Path(name), watch)
        if not record.never:
            break
    return record  # pyrefly: ignore[unbound-name]


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="phalanx-proof-")
