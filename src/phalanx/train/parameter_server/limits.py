"""What keeps servers from serving a job, found before any process starts where that can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.config import Job, Plan
from phalanx.errors import Problem
from phalanx.parallel.grad_reduce import sparse_problems
from phalanx.parallel.parameter_server import starved
from phalanx.train.elementwise import elementwise


def refusals(job: Job, plan: Plan) -> list[Problem]:
    """Everything in ``job`` and ``plan`` that servers cannot do."""
    found = _precision(plan)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = job.model()
        parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    except Exception:  # some models need values; then the servers themselves find out
        return found
    found += sparse_problems(module, plan)
    if plan.server > 1:
        found += starved(parameters, plan, cut=elementwise(job, parameters))
    return found


def _precision(plan: Plan) -> list[Problem]:
    if plan.precision != "fp16":
        return []
    given = f"precision=fp16 with server={plan.server}"
    allowed = "fp32 or bf16: which loss scale overflows is known only when gradients of other scales are on their way"
    return [Problem(where="plan.precision", given=given, allowed=allowed, fix=str(replace(plan, precision="bf16")))]
