"""What keeps gradients from being sent in a smaller form: in the job, the model or the optimizer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from phalanx.config import Job, Plan
from phalanx.config.sync import Compression
from phalanx.errors import Problem
from phalanx.parallel.grad_reduce import sparse
from phalanx.units import show_names


def check(job: Job, plan: Plan) -> list[Problem]:
    """What of a job keeps ``plan.compress`` from serving it."""
    if not _gradients(plan) or job.unused != "allow" or not Compression.parse(plan.compress).facts.feeds_back:
        return []
    return [
        Problem(
            where="plan.compress",
            given=f'compress={plan.compress} with unused="allow"',
            allowed="fp16 or bf16 there: what others leave out of a gradient comes with the parameter's next one, and "
            "a step that does not use the parameter drops it",
            fix=str(replace(plan, compress="bf16")),
        )
    ]


def problems(module: nn.Module, plan: Plan) -> list[Problem]:
    """Which gradients of ``module`` cannot be sent as ``plan.compress`` says."""
    if not _gradients(plan):
        return []
    numbers = [name for name, one in module.named_parameters() if one.requires_grad and one.is_complex()]
    found = [f"sparse gradients of {show_names(names)}"] if (names := sparse(module)) else []
    found += [f"complex gradients of {show_names(numbers)}"] if numbers else []
    if not found:
        return []
    given = f"{' and '.join(found)} with compress={plan.compress}"
    allowed = "dense gradients of real numbers: they are sent by blocks and matrices of elements"
    return [Problem(where="plan.compress", given=given, allowed=allowed, fix=str(replace(plan, compress="none")))]


def optimizer_problems(optimizer: torch.optim.Optimizer, plan: Plan) -> list[Problem]:
    """Whether ``optimizer`` makes something else than a late gradient of one that comes late.

    So does, of ``topk``, one that takes an element of zero for one that has come to rest.
    """
    if not isinstance(optimizer, torch.optim.Rprop) or not plan.compress.startswith("topk"):
        return []
    given = f"{type(optimizer).__name__} with compress={plan.compress}"
    allowed = "not topk: Rprop steps by signs alone, and topk gives all but the largest elements none"
    return [Problem(where="job.optimizer", given=given, allowed=allowed, fix=str(replace(plan, compress="bf16")))]


def _gradients(plan: Plan) -> bool:
    """Whether gradients are what is compressed, in every step."""
    return plan.compress != "none" and plan.sync == "each" and not plan.server
