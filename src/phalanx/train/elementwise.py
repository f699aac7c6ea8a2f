"""Whether an optimizer may step a slice of a parameter as if it were a whole one: it treats each element by itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.errors import Problem, RefusedError
from phalanx.parallel import Held
from phalanx.spec import Plan


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, held: Held, plan: Plan) -> None:
    """Raise if this rank holds slices that are plain tensors and ``optimizer`` looks at more than single elements.

    Raises:
        RefusedError: if so.
    """
    if not any(holding.placed for name, holding in held.slices.items() if name in held.parameters):
        return
    if getattr(optimizer, "adds_up_over_slices", False) or elementwise(optimizer):
        return
    ranks = plan.tp * plan.ep
    raise RefusedError(
        [
            Problem(
                where="job.optimizer",
                given=f"{type(optimizer).__name__} under {plan}: it steps a whole parameter otherwise than its slices",
                allowed="under tp and ep, optimizers that treat each element by itself (SGD, Adam, AdamW), "
                "px.LARS and px.LAMB",
                fix=f"fsdp={ranks}",
            )
        ]
    )


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one like ``optimizer`` makes of a small matrix what it makes of its parts; true where none can be made.

    Tried, because no optimizer says so of itself.
    """
    kind = type(optimizer)
    taken = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
    if "lr" in settings:
        settings["lr"] = 0.125  # a schedule may have set it to zero
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            start, *grads = torch.randn(4, 8, 6).unbind()
            whole = _stepped(kind, settings, start, grads)
            for dim in range(2):
                parts = [_stepped(kind, settings, *pair) for pair in _halves(start, grads, dim)]
                if not torch.allclose(torch.cat(parts, dim), whole, rtol=1e-5, atol=1e-7):
                    return False
    except Exception:  # a constructor or step of another form: nothing is known
        return True
    return True


def _stepped(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], start: torch.Tensor, grads: Sequence[torch.Tensor]
) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    one = kind([parameter], **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        one.step()
    return parameter.detach()


def _halves(
    start: torch.Tensor, grads: Sequence[torch.Tensor], dim: int
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    return [(start.chunk(2, dim)[half], [grad.chunk(2, dim)[half] for grad in grads]) for half in range(2)]
