"""Sparse gradients, as an embedding with ``sparse=True`` gives them: rows that a batch has used, and none of the rest.

They are added up over replicas and stages as they are. Nothing cuts them into rows over ranks, or sends them to
servers.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from phalanx.config import Plan
from phalanx.errors import Problem
from phalanx.units import show_names


def sparse(module: nn.Module) -> list[str]:
    """Names of modules whose gradients are sparse."""
    return [name or "(the model itself)" for name, one in module.named_modules() if getattr(one, "sparse", False)]


def made_dense(module: nn.Module) -> list[str]:
    """Have ``module`` give dense gradients in place of sparse ones, in place. Returns ``sparse`` as it was."""
    names = sparse(module)
    for one in module.modules():
        if getattr(one, "sparse", False):
            vars(one)["sparse"] = False
    return names


def sparse_problems(module: nn.Module, plan: Plan) -> list[Problem]:
    """What keeps ``plan`` from the sparse gradients of ``module``; empty where nothing does."""
    names = sparse(module) if plan.fsdp > 1 or plan.server else []
    if not names:
        return []
    if plan.server:
        whole = Plan(dp=plan.dp, precision=plan.precision, device=plan.device)
    else:
        whole = replace(plan, dp=plan.dp * plan.fsdp, fsdp=1, zero=0, offload="none")
    return [
        Problem(
            where="job.model",
            given=f"sparse gradients of {show_names(names)} under {plan}",
            allowed="dense ones, or plans that leave each parameter whole, such as dp and pp",
            fix=f"nn.Embedding(..., sparse=False), or {whole}",
        )
    ]
