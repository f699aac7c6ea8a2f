"""What the process beside the workers answers: a plan's forecast on this machine, or which plan is best here."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.foresight.here import cluster_for
from phalanx.launch.aside import Say
from phalanx.spec import Job, Plan

_LIGHT = 0.05  # of the room: what a plan may hold without activations for its run to begin at once
_DELAY = 3.0  # seconds after which a run on CPUs is one that will take a while
_GPU = 4 * 2**30  # bytes that any CUDA device in use for training has
_STATE = 16.0  # bytes of a parameter, its gradient and Adam's state in fp32


def answer(job: Job, plan: Plan, threads: int | None, say: Say) -> None:
    """Tell ``light`` where the run may begin while this goes on, then the forecast or why there is none."""
    try:
        if _light(job, plan):
            say({"light": True})
            _wait_for_cores(plan)
        say(forecast_of(job, plan, threads))
    except Exception as error:  # a job of any make: a run never fails for want of a forecast
        say({"missing": one_line(error)})


def one_line(error: Exception) -> str:
    """What went wrong, in one line."""
    said = (error.problems[0].given if hasattr(error, "problems") else str(error)).strip()  # pyright: ignore
    text = said.splitlines()[0] if said else type(error).__name__
    return text if isinstance(error, PhalanxError) else f"{type(error).__name__}: {text}" if said else text


def _light(job: Job, plan: Plan) -> bool:
    """Whether what is there without activations is so little that only they could be too much."""
    from phalanx.hardware import memory_bytes
    from phalanx.parallel import device_kind
    from phalanx.train.work import size_of

    size = size_of(job)
    room = _GPU if device_kind(plan) == "cuda" else memory_bytes() // plan.devices
    return size is not None and size * _STATE < _LIGHT * room


def _wait_for_cores(plan: Plan) -> None:
    """Leave the cores to a run that may be over in a moment: torch's compiler, which tracing loads, takes seconds."""
    from phalanx.parallel import device_kind

    if device_kind(plan) == "cpu" and "torch._dynamo" not in sys.modules:
        time.sleep(_DELAY)


def forecast_here(job: Job, plan: Plan) -> dict[str, Any]:
    """``forecast_of`` for a run that is over: where there is none, why it is ``missing``."""
    try:
        return forecast_of(job, plan)
    except Exception as error:  # a job of any make
        return {"missing": one_line(error)}


def forecast_of(job: Job, plan: Plan, threads: int | None = None) -> dict[str, Any]:
    """The ``forecast`` of ``job`` under ``plan`` here, as JSON, and the plan to take ``instead`` where it does not fit.

    ``parts`` of the forecast are those of memory, each at its own peak; ``memory`` has them when all together are most.

    Raises:
        ProfileError: if the model's operations or shapes depend on values.
    """
    from phalanx.forecast import forecast, sweep
    from phalanx.planner import Question, shortfall
    from phalanx.planner.told import told
    from phalanx.train.work import steps_of, work_of

    work, cluster = work_of(job), cluster_for(plan, threads)
    found = forecast(work, plan, cluster)
    each = sweep(work, [plan], cluster).memory
    parts = {one.name: float(getattr(each, one.name)[0]) for one in fields(each)}
    answer: dict[str, Any] = {"forecast": {**told(found), "parts": parts}, "instead": ""}
    if not found.fits:
        question = Question(work=work, cluster=cluster, precision=plan.precision, steps=steps_of(job) or 0)
        missing = shortfall(question, plan)
        changes = missing.changes if missing else ()
        # a CPU's own memory is the host's: nothing is gained by moving there
        useful = [one for one in changes if one.plan.offload == "none" or cluster.groups[0].device.kind != "cpu"]
        answer["instead"] = next((one.words for one in useful if one.words.startswith("--plan")), "")
    return answer
