"""Gradients of gradients, as for a gradient penalty: refused if gathered parameters would be freed too early."""

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
    """Make autograd refuse to build a graph of gradients if ``plan`` cannot go back through it.

    ``torch.autograd.grad`` and ``backward`` both go through the replaced function. ``torch.func.grad`` is allowed: its
    gradients are forward operations to the outer graph.

    Raises:
        RefusedError: in the block.
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
    """Refuse ``torch.func.grad`` around the forward of a gathered ``module``.

    Raises:
        RefusedError: in such a call.
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
