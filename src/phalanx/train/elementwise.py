"""Tests whether an optimizer treats each element by itself, and the groups over which other optimizers add up.

Under ``tp`` and ``ep`` a rank steps its slice of a weight as if it were a whole one, which is right if each element is
treated by itself. Under ``fsdp`` it steps rows of a DTensor, whose operations may look over all ranks; some optimizers
are not written for that. Optimizers that cannot be tried are refused, too, because an error would not show.

A sharded parameter carries its ranks: it is a DTensor. A slice along ``tp`` or ``ep`` is a plain tensor, and an
optimizer is given tensors alone. So the step records here, when the optimizer is built, which parameters are slices;
LARS and LAMB look them up. Attributes would be copied or pickled along with a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.config import Job, Plan
from phalanx.errors import Problem
from phalanx.parallel import RankHoldings
from phalanx.train.torch_scheduler import MadeOptimizer

_STEPS = 3
_HALVES = 16 * 2.0**-8
"""Of a step: Muon's five iterations round three products each to bf16, and the result once more."""

_ON_ROWS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LARS", "LAMB")
"""Optimizers whose steps on DTensors the tests of this project hold beside those on whole parameters."""

_GOOD = "optimizers that treat each element by itself (SGD, Adam, AdamW), px.LARS and px.LAMB"

Values = Mapping[str, torch.Tensor]


def slice_problems(job: Job, plan: Plan, parameters: Values) -> list[Problem]:
    """Return the problems of the job's optimizer with slices of ``parameters``, which ``plan`` cuts; pure."""
    optimizer = _made(job, small(parameters))
    if getattr(optimizer, "adds_up_over_slices", False):
        return []
    if not (why := _not_elementwise(job, parameters)):
        return []
    return [_problem(job, plan, parameters, f"it {why}", f"under tp and ep, {_GOOD}")]


def elementwise(job: Job, parameters: Values) -> bool:
    """Return True if the job's optimizer treats parts of a parameter like the whole; False if unknown."""
    return not _not_elementwise(job, parameters)


def _not_elementwise(job: Job, parameters: Values) -> str:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start, grads = _drawn(parameters)
            whole = stepped(job, start, grads)
            for dim in range(2):
                halves = [stepped(job, _half(start, dim, at), [_half(one, dim, at) for one in grads]) for at in (0, 1)]
                for name, expected in whole.items():
                    pair = [half[name] for half in halves]
                    found = torch.cat(pair, dim) if expected.dim() > dim else pair[0]
                    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-7):
                        return "steps a whole parameter otherwise than its slices"
    except Exception as error:  # a factory or a step of any make
        return f"could not be tried on small parameters ({type(error).__name__}: {_line(error)})"
    return ""


def rows_problem(
    job: Job, plan: Plan, optimizer: torch.optim.Optimizer, parameters: Values, mesh: Any, *, alone: bool = False
) -> Problem | None:
    """Return the problem of the job's optimizer with rows over ``mesh``; all its ranks try, or one ``alone``.

    A lone trial shows only whether the optimizer fails; its values are not those of a mesh.
    """
    kind = type(optimizer)
    if kind.__name__ in _ON_ROWS and kind.__module__.startswith(("torch.optim.", "phalanx.")):
        return None
    from torch.distributed.tensor import Shard, distribute_tensor

    def rows(value: torch.Tensor) -> torch.Tensor:
        placed = [Shard(0)] * mesh.ndim if value.dim() else None
        return distribute_tensor(value.to(mesh.device_type), mesh, placed, src_data_rank=None)

    why, more = "", ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start, grads = _drawn(parameters)
        try:
            found = stepped(job, start, grads, rows)
            limit = _HALVES if half_within(job, parameters) else 1e-5
            whole = {} if alone else stepped(job, start, grads)
            if _apart(whole, {name: found[name].full_tensor().cpu() for name in whole}, start) > limit:  # pyrefly: ignore
                why = "steps rows on several ranks otherwise than a whole parameter"
        except Exception as error:  # a step of any make, on tensors that it may not have been written for
            why = f"fails on rows of DTensors, which is what ranks of fsdp hold ({type(error).__name__})"
            more = f": {_line(error)}" if _line(error) else ""
    if not why:
        return None
    allowed = f"under fsdp, {_GOOD}, and others that are written for DTensors"
    return _problem(job, plan, parameters, f"it {why}{more}", allowed)


def half_steps(job: Job, parameters: Values) -> str:
    """Return a note if the job's optimizer computes in half precision within its step, else ""."""
    if not (found := half_within(job, parameters)):
        return ""
    name = type(_made(job, small(parameters))).__name__
    return (
        f"{name} computes its step in {found}: the last bits of a gradient, which depend on the order of adding up, "
        "decide how values in between are rounded, by 1/256 each. Gradients agree, parameters within that only."
    )


def half_within(job: Job, parameters: Values) -> str:
    """Return the half precision used within the job's optimizer's step, as in Muon's iterations, or ""."""
    seen: set[torch.dtype] = set()
    try:
        with torch.random.fork_rng(devices=[]):
            start, grads = _drawn(parameters)
            with _Dtypes(seen):
                stepped(job, start, grads[:1])
    except Exception:  # a factory or a step of any make
        return ""
    return " and ".join(str(one).removeprefix("torch.") for one in (torch.bfloat16, torch.float16) if one in seen)


class _Dtypes(TorchFunctionMode):
    def __init__(self, seen: set[torch.dtype]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._seen |= {one.dtype for one in tree_leaves(found) if isinstance(one, torch.Tensor)}
        return found


def stepped(
    job: Job,
    start: Values,
    grads: list[dict[str, torch.Tensor]],
    dress: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return values after the job's optimizer has stepped these gradients; ``dress`` makes a parameter of each.

    Raises TypeError if the optimizer's state cannot be saved.
    """
    given = learning(start) if dress is None else {name: torch.nn.Parameter(dress(one)) for name, one in start.items()}
    with torch.enable_grad():
        optimizer = MadeOptimizer.of(job.optimizer(Parameters(given))).optimizer
        for group in optimizer.param_groups:
            if not isinstance(group.get("lr"), torch.Tensor) and not group.get("lr"):
                group["lr"] = 0.125  # warm-up may begin at zero
        for grad in grads:
            for name, parameter in given.items():
                parameter.grad = grad[name].clone() if dress is None else dress(grad[name])
            optimizer.step()
    kept = [one for state in optimizer.state.values() for one in state.values()]
    if any(part.is_partial() for one in kept for part in getattr(one, "placements", ())):
        raise TypeError("its state has sums over ranks that are not added up, which no checkpoint can hold")
    return {name: one.detach() for name, one in given.items()}


def _drawn(parameters: Values) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    start = small(parameters)
    return start, [{name: torch.randn_like(one) for name, one in start.items()} for _ in range(_STEPS)]


def _half(values: Values, dim: int, at: int) -> dict[str, torch.Tensor]:
    return {name: one.chunk(2, dim)[at] if one.dim() > dim else one for name, one in values.items()}


def _apart(expected: Values, found: Values, start: Values) -> float:
    """Return the largest difference of a parameter, relative to the length of its update."""
    away = 0.0
    for name, one in expected.items():
        if way := float((one - start[name]).norm()):
            away = max(away, float((found[name] - one).norm()) / way)
    return away


def _made(job: Job, values: Values) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):
            return MadeOptimizer.of(job.optimizer(Parameters(learning(values)))).optimizer
    except Exception:  # a factory of any make
        return None


def _problem(job: Job, plan: Plan, parameters: Values, why: str, allowed: str) -> Problem:
    optimizer = _made(job, small(parameters))
    name = "the job's optimizer" if optimizer is None else type(optimizer).__name__
    whole = replace(Plan(dp=plan.world_size), micro=plan.micro, precision=plan.precision, device=plan.device)
    return Problem(where="job.optimizer", given=f"{name} under {plan}: {why}", allowed=allowed, fix=str(whole))


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "").partition(". ")[0][:160]


class Parameters(list[torch.Tensor]):
    """The argument of a job's ``optimizer``: a list of parameters with their names (for parameter groups).

    ``whole`` are the names in the whole model, which may be more; ``None`` if unknown.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], whole: Iterable[str] | None = None) -> None:
        super().__init__(named.values())
        self._named = named
        self.whole = None if whole is None else tuple(whole)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, parameter) pairs, in order."""
        return iter(self._named.items())


def small(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return random values (4 × 6 × 2 × …) for parameters of these names and numbers of dimensions.

    If there are many, a few of each number of dimensions: an optimizer is tried on them, in milliseconds.
    """
    found: dict[str, torch.Tensor] = {}
    taken: dict[int, int] = {}
    for name, one in parameters.items():
        dims = one.dim()
        taken[dims] = taken.get(dims, 0) + 1
        if taken[dims] <= 32:
            found[name] = torch.randn([4, 6, *[2] * dims][:dims])
    return found


def learning(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return these values as parameters, each with memory of its own."""
    return {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}


SLICE_GROUPS = WeakTensorKeyDictionary()
"""The groups over which a parameter is cut, beside those of its mesh if it is a DTensor."""


def note_slices(held: RankHoldings) -> None:
    """Remember the groups over which the held parameters are cut by name, as long as they live."""
    for name, parameter in held.parameters.items():
        holding = held.slices.get(name)
        if holding is not None and holding.placed:
            SLICE_GROUPS[parameter] = tuple(one.axis.group for one in holding.placed if one.axis.group is not None)
