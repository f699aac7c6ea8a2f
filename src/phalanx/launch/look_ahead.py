"""What a job under a plan is refused for, and what it does not keep, found in a process beside this one.

Looking builds the model and runs it on a few samples. A forked process does that, so that this one stays as it was: its
random numbers, modules that the job shares with it, and CUDA, which workers are forked without.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.config import Job, Plan
from phalanx.errors import DataError, GradientError, LossError, Problem, RefusedError, SpecError
from phalanx.launch.side_process import Aside, Say
from phalanx.launch.torch_warmup import leave_compiler_out
from phalanx.train.rehearsal import ahead

_FOUND = (LossError, GradientError, DataError)
"""What stops a run in its first step, and can be known before."""

_PATIENCE = 60.0
"""Seconds that a run waits for the look; a model that takes longer to build is looked at by its workers."""


def look_ahead(job: Job, plan: Plan) -> list[str]:
    """What ``job`` differs by from one device under ``plan``, with its causes.

    Empty where it cannot be looked at, and with servers, who refuse what they cannot do by themselves.

    Raises:
        RefusedError: if the model, the optimizer or the data are such that the plan cannot serve the job.
        SpecError: if the job's functions fail, or give something else than they must.
        LossError: if the loss is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    if plan.server:  # pieces of other sizes: what their sums differ by is for the proof to say
        return []
    with Aside(lambda say: _tell(job, plan, say)) as aside:
        told = aside.next(_PATIENCE) or {}
    if problems := told.get("problems"):
        kind = RefusedError if told["kind"] == RefusedError.__name__ else SpecError
        raise kind(Problem(**one) for one in problems)
    if "message" in told:
        raise next(kind for kind in _FOUND if kind.__name__ == told["kind"])(told["message"])
    return told.get("causes", [])


def _tell(job: Job, plan: Plan, say: Say) -> None:
    leave_compiler_out()
    told: dict[str, Any] = {}
    try:
        told["causes"] = ahead(job, plan)
    except SpecError as error:
        told = {"kind": type(error).__name__, "problems": [asdict(one) for one in error.problems]}
    except _FOUND as error:
        told = {"kind": type(error).__name__, "message": str(error)}
    except Exception:  # the job's own error, which a worker shows with its traceback
        told = {}
    say(told)
