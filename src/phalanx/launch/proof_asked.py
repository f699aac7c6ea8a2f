"""What a worker that nobody forked asks before it trains: whether its plan is proven on the devices it has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from phalanx.comm import Place
from phalanx.config import Job, Plan, RunSpec
from phalanx.errors import Problem, RefusedError
from phalanx.hardware.proven import Ground, missing_proof, ships_proven
from phalanx.launch.rank_0 import decided_by_rank_0
from phalanx.parallel import device_kind, devices_here

Prove = Callable[[Job, RunSpec, Callable[[], None] | None], str]
"""What proves the plan of a run with a job, and looks on meanwhile; gives and raises what ``refuse_unproven`` does."""

_proofs = count()  # that these workers have asked for together


def require_proof(job: Job, run: RunSpec, place: Place, prove: Prove | None) -> str:
    """That the run goes on though its plan was never proven on such devices, in words; empty where it was. Collective.

    Raises:
        RefusedError: on every rank: it was not, and is not equal, or cannot be proven by rank 0.
    """
    number, here = next(_proofs), devices_here(run.plan, place)
    if ships_proven(device_kind(run.plan, here)):
        return ""
    alone = prove is not None and place.workers_here == place.world_size

    def ask() -> str:
        return prove(job, run, None) if alone and prove else refuse_unproven(run, here)

    return decided_by_rank_0(place, ask, f"proof/{number}")


def refuse_unproven(run: RunSpec, here: int) -> str:
    """Refuse the plan of ``run`` where nothing has proven it on the devices of this machine, ``here`` many of it.

    Returns:
        That the run goes on without a proof, in words; empty where there is one.

    Raises:
        RefusedError: nothing has, and the run does not say ``unproven``.
    """
    kind = device_kind(run.plan, here)
    ground = missing_proof(run.plan, kind)
    if ground is None:
        return ""
    if run.unproven:
        return unproven_note(ground)
    given = f"{run.plan} on {ground}, where {ground.techniques} was never proven"
    allowed = "what one proof on such a machine has shown; a smaller plan of the same techniques will do"
    raise RefusedError([Problem(where="plan", given=given, allowed=allowed, fix=fix_unproven(run.plan))])


def unproven_note(ground: Ground) -> str:
    """What a run says that goes on all the same."""
    return f"not proven: {ground.techniques} on {ground}, and the run was told to go on without a proof"


def own_loop_note(plan: Plan, kind: str, run: RunSpec | None) -> str:
    """What a loop of the user's own is told, which begins all the same; empty where ``plan`` is proven on the kind."""
    ground = missing_proof(plan, kind)
    if ground is None:
        return ""
    if run and run.unproven:
        return unproven_note(ground)
    return f"not proven: {ground.techniques} on {ground}; px.prove(job, plan) compares it with one device"


def fix_unproven(plan: Plan) -> str:
    """What to do about a plan that is not proven."""
    return f'phalanx prove JOB --plan "{plan}" shows all that was compared; unproven=True trains all the same'
