"""The first run of a plan's techniques on a kind of device where nothing has proven them: it proves itself first.

The look costs a small table that ships (``hardware/proven.py``); where that has the kind and the version of torch, no
more happens. Else a few steps of the plan are compared with one device as ``phalanx prove`` does, here, before the
run begins; what was equal is stored, so that it is asked once a machine, version and set of techniques.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.config import Job, Plan, RunSpec
from phalanx.device_kinds import kind_named
from phalanx.errors import PhalanxError, Problem, RefusedError
from phalanx.hardware.proven import Ground, missing_proof, ships_proven, store
from phalanx.launch.proof_asked import fix_unproven, unproven_note
from phalanx.parallel import device_kind

if TYPE_CHECKING:
    from phalanx.verify import Proof

STEPS = 3
"""Optimizer steps of a first proof, at least: more where parameters have had no gradient by then."""

_log = logging.getLogger("phalanx")


def first_proof(job: Job, run: RunSpec, watch: Callable[[], None] | None) -> str:
    """Prove the plan of ``run`` on this machine's devices, where nothing has; ``watch``: as of ``prove``.

    Returns:
        That the run goes on without a proof, in words; empty where there is one.

    Raises:
        RefusedError: the plan is not equal to one device here, or no proof can be had.
    """
    plan, kind = run.plan, device_kind(run.plan)
    ground = missing_proof(plan, kind)
    if ground is None:
        return ""
    if run.unproven:
        return unproven_note(ground)
    if why := _why_none(plan, kind):
        raise RefusedError([_none_to_be_had(plan, ground, why)])
    what = f'{ground.techniques} was never proven on {ground}: {STEPS} steps of "{plan}" are compared with one device'
    _log.warning("%s first, once; a run that is told to go on unproven leaves that out", what)
    proof = _proof(job, plan, ground, watch)
    if not proof.equal:
        raise RefusedError([_differs(plan, ground, proof)])
    _keep(job, proof, ground)
    return ""


def _why_none(plan: Plan, kind: str) -> str:
    if not plan.exact:
        return f"no step of it is one device's: {plan.bound}"
    if not kind_named(kind).forks:
        return f"it forks workers, and on {kind_named(kind).label} devices each is a process of its own"
    return ""


def remember_proof(job: Job, proof: Proof) -> None:
    """Store that ``proof``, which was made on this machine, is equal, where what ships does not say so.

    One of fewer steps than a first proof has stands for none: moments and counts of steps come in with the second.
    """
    kind = device_kind(proof.plan)
    if proof.equal and proof.steps >= STEPS and not ships_proven(kind):
        _keep(job, proof, Ground.of(proof.plan, kind))


def _keep(job: Job, proof: Proof, ground: Ground) -> None:
    shown: dict[str, Any] = {"job": job.name, "plan": str(proof.plan), "steps": proof.steps, "largest": proof.largest}
    if trouble := store(ground, shown):
        _log.warning("the proof cannot be kept, and is asked for again next time: %s", trouble)


def _proof(job: Job, plan: Plan, ground: Ground, watch: Callable[[], None] | None) -> Proof:
    from phalanx.verify import prove

    try:
        return prove(job, plan, steps=STEPS, watch=watch)
    except PhalanxError as error:
        raise RefusedError([_none_to_be_had(plan, ground, str(error))]) from error


def _differs(plan: Plan, ground: Ground, proof: Proof) -> Problem:
    known = [note for note in proof.notes if not note.startswith("dropout")]
    cause = f"; likely cause: {proof.cause}" if proof.cause else ""
    cause += f"; known of this job on any device: {'; '.join(known)}" if known else ""
    return Problem(
        where="plan",
        given=f"{plan} on {ground}, where it is not equal to one device over {proof.steps} steps: {proof.first}{cause}",
        allowed="a plan that is equal to one device on that kind of device",
        fix=fix_unproven(plan),
    )


def _none_to_be_had(plan: Plan, ground: Ground, why: str) -> Problem:
    return Problem(
        where="plan",
        given=f"{plan} on {ground}, where {ground.techniques} was never proven, and no proof can be had: {why}",
        allowed="a proof on that kind of device, or to train without one",
        fix="unproven=True",
    )
