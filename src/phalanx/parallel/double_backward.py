"""Gradients of gradients, as of a gradient penalty: not where gathered parameters are gone before they are read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from phalanx.config import Plan
from phalanx.config.fields import plan_problem
from phalanx.errors import RefusedError
from phalanx.trace.replaced import replaced


def no_double_backward(plan: Plan) -> AbstractContextManager[object]:
    """Within, ``torch.autograd.grad`` refuses to make a graph of gradients, where ``plan`` cannot go back through it.

    Raises:
        RefusedError: there.
    """
    if plan.zero != 3:
        return nullcontext()
    plain = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("create_graph") or (len(args) > 4 and args[4]):
            raise RefusedError([_DOUBLE])
        return plain(*args, **kwargs)

    return replaced(torch.autograd, grad=grad)


_DOUBLE = plan_problem(
    "zero",
    "zero=3 for a loss with gradients of gradients (create_graph=True): fully_shard drops gathered parameters after a "
    "block's backward, before the second one reads them",
    "single, threads, dp, and fsdp with zero=1 or zero=2",
    "fsdp=2 zero=2",
)
