"""Gradients of gradients, as of a gradient penalty: not where gathered parameters are gone before they are read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from phalanx.config import Plan
from phalanx.config.fields import plan_problem
from phalanx.errors import RefusedError
from phalanx.trace.replaced import replaced

_ALLOWED = nullcontext()


def no_double_backward(plan: Plan) -> AbstractContextManager[object]:
    """Within, autograd refuses to make a graph of gradients, where ``plan`` cannot go back through it.

    However it is asked for, by ``torch.autograd.grad`` under any name or by ``backward``: all go through one function.
    In ``torch.func.grad`` it may: its gradients are operations of the forward to the graph that backward takes.

    Raises:
        RefusedError: there.
    """
    if plan.zero != 3:
        return _ALLOWED
    plain: Any = torch.autograd._engine_run_backward  # pyrefly: ignore

    def run_backward(outputs: Any, gradients: Any, keep: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        if create_graph and not _differentiates():
            raise RefusedError([_DOUBLE])
        return plain(outputs, gradients, keep, create_graph, *args, **kwargs)

    return replaced(torch.autograd, _engine_run_backward=run_backward)


def refuse_differentiated(module: nn.Module, *_: Any) -> None:
    """Before the forward of a ``module`` that is gathered for it: refuse ``torch.func.grad`` around it.

    Raises:
        RefusedError: there.
    """
    if not torch.compiler.is_compiling() and _differentiates():
        raise RefusedError([_DIFFERENTIATED])


def _differentiates() -> bool:
    functorch: Any = vars(torch._C)["_functorch"]
    return any(one.key() == functorch.TransformType.Grad for one in functorch.get_interpreter_stack() or ())


_DOUBLE = plan_problem(
    "zero",
    "zero=3 for a loss with gradients of gradients (create_graph=True): fully_shard drops gathered parameters after a "
    "block's backward, before the second one reads them",
    "single, threads, dp, and fsdp with zero=1 or zero=2",
    "fsdp=2 zero=2",
)
_DIFFERENTIATED = plan_problem(
    "zero",
    "zero=3 for a model whose blocks run in torch.func.grad: fully_shard drops gathered parameters after a block's "
    "forward, before the gradient reads them",
    "single, threads, dp, and fsdp with zero=1 or zero=2",
    "fsdp=2 zero=2",
)
