"""Detection of a model's experts by their calls and results, not by names or classes.

Experts that can be distributed are one module with the weights of all as tensors whose first dimension counts them (as
in transformers since version 5), called with hidden states (..., H), the experts chosen for each (..., K) and their
weights (..., K), and its result adds up over the K. This is verified: a few rows through all experts must give the same
as through some experts at a time.
"""
# A run of its own, on numbers: that experts can be dealt out shows in what they compute, not in their operations.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.parallel.local_shards import Cut
from phalanx.parallel.survey import Example
from phalanx.parallel.tensor.find_pairs import dry
from phalanx.parallel.tensor.trial import fixed
from phalanx.placement.limits import few_experts, no_experts
from phalanx.trace.blocks import blocks
from phalanx.units import show_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A module that holds experts, and the form of its calls."""

    name: str
    count: int
    leaves: tuple[int, int, int]  # which of its arguments are hidden states, chosen experts and their weights
    parameters: tuple[str, ...]  # names, within the module, of tensors with a row an expert
    numbers: tuple[str, ...] = ()  # attributes that say how many experts there are

    def whole_name(self, parameter: str) -> str:
        """Return the name in the model for a parameter of the module."""
        return f"{self.name}.{parameter}" if self.name else parameter


def find(module: nn.Module, example: Example, plan: Plan) -> list[Experts]:
    """Return the experts of ``module``, if any.

    Raises:
        RefusedError: if the plan has ``ep`` and no experts can be distributed over it.
    """
    seen = called_as_experts(module, example)
    found, unlike = [], []
    known: dict[Any, Experts | None] = {}
    for name, child in module.named_modules():
        if child not in seen:
            continue
        key = (type(child), seen[child].leaves, [tuple(tensor.shape) for tensor in child.parameters()].__str__())
        if key not in known:
            known[key] = _tried(child, seen[child], plan.ep * plan.tp)
        experts = known[key]
        if experts is None:
            unlike.append(name)
        else:
            found.append(replace(experts, name=name))
    if plan.ep > 1:
        _refuse(module, plan, found, unlike)
    return found


def whole_call(experts: Experts, args: Any, kwargs: Any) -> tuple[list[Tensor], Callable[..., tuple[Any, Any]]]:
    """Return hidden states, chosen experts and weights of a call, and a function that replaces them."""
    leaves, structure = tree_flatten((args, kwargs))

    def with_others(*others: Tensor) -> tuple[Any, Any]:
        changed = list(leaves)
        for index, other in zip(experts.leaves, others, strict=True):
            changed[index] = other
        return tree_unflatten(changed, structure)

    return [leaves[index] for index in experts.leaves], with_others


def or_alike(run: Callable[[], Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the experts' result; on fake tensors that cannot follow their code, a tensor of the same form."""
    try:
        return run()
    except Exception:  # a look at who was chosen, or a grouped product, whose fake is that of another device
        if not isinstance(hidden, FakeTensor):
            raise
        return hidden * weight.sum(-1, keepdim=True)


@contextmanager
def counting(module: nn.Module, experts: Experts, here: int) -> Iterator[None]:
    """Make the module's own code read ``here`` as its number of experts."""
    before = {name: module.__dict__[name] for name in experts.numbers}
    module.__dict__.update(dict.fromkeys(experts.numbers, here))
    try:
        yield
    finally:
        module.__dict__.update(before)


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """The form of a call of experts."""

    leaves: tuple[int, int, int]  # which of the arguments are hidden states, chosen experts and their weights
    shapes: tuple[torch.Size, torch.Size]  # of the first two
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    call: tuple[Any, Any]  # the arguments without these leaves


def called_as_experts(module: nn.Module, example: Example) -> dict[nn.Module, ExpertsCall]:
    """Return modules with weights for many experts that are called like experts."""
    candidates = [child for child in module.modules() if expert_count(child) > 1]
    if not candidates:
        return {}
    seen: dict[nn.Module, ExpertsCall] = {}

    def watched(child: nn.Module) -> Callable[..., Any]:
        forward = child.forward

        def watching(*args: Any, **kwargs: Any) -> Any:
            call = experts_call(args, kwargs)
            if call is None:
                return forward(*args, **kwargs)
            seen.setdefault(child, call)
            leaves, _ = tree_flatten((args, kwargs))
            hidden, _, weight = (leaves[index] for index in call.leaves)
            return or_alike(lambda: forward(*args, **kwargs), hidden, weight)

        return watching

    with fixed({child: watched(child) for child in candidates}), dry(module, example):
        pass
    return seen


def expert_count(module: nn.Module) -> int:
    """Return the number of experts in the module's own three-dimensional weights; 0 if these disagree."""
    counts = {tensor.shape[0] for tensor in module._parameters.values() if tensor is not None and tensor.dim() == 3}
    return counts.pop() if len(counts) == 1 else 0


def experts_call(args: Any, kwargs: Any) -> ExpertsCall | None:
    """Return the form of a call with hidden states, chosen experts and their weights, or ``None``."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    whole = [i for i, one in tensors.items() if one.dtype in (torch.int64, torch.int32) and one.dim() >= 2]
    if len(tensors) != 3 or len(whole) != 1:
        return None
    chosen = tensors[whole[0]]
    first, second = (index for index in tensors if index != whole[0])
    if tensors[second].shape != chosen.shape:
        first, second = second, first
    hidden, weight = tensors[first], tensors[second]
    if weight.shape != chosen.shape or hidden.shape[:-1] != chosen.shape[:-1]:
        return None
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        return None
    blank = tree_unflatten([None if i in tensors else leaf for i, leaf in enumerate(leaves)], structure)
    dtypes = hidden.dtype, chosen.dtype, weight.dtype
    return ExpertsCall((first, whole[0], second), (hidden.shape, chosen.shape), dtypes, blank)


def _tried(module: nn.Module, seen: ExpertsCall, ranks: int) -> Experts | None:
    count = expert_count(module)
    tables = [name for name, one in module._parameters.items() if one is not None and one.shape[:1] == (count,)]
    surely = [name for name in tables if module._parameters[name].dim() > 1]  # pyrefly: ignore
    numbers = [name for name, value in vars(module).items() if type(value) is int and value == count]
    perhaps = [*numbers, *(name for name in tables if name not in surely)]
    whole = Experts(name="", count=count, leaves=seen.leaves, parameters=tuple(tables), numbers=())
    # All, then those that leave out some.
    for chosen in (names for size in range(len(perhaps), -1, -1) for names in combinations(perhaps, size)):
        experts = replace(
            whole,
            parameters=tuple(name for name in tables if name in surely or name in chosen),
            numbers=tuple(name for name in numbers if name in chosen),
        )
        if _adds_up(module, experts, seen, ranks):
            return experts
    return None


def _adds_up(module: nn.Module, experts: Experts, seen: ExpertsCall, ranks: int) -> bool:
    hidden_shape, chosen_shape = seen.shapes
    lead, each = (1,) * (len(chosen_shape) - 2), chosen_shape[-1]
    few = min(experts.count, 2 * each)
    random = torch.Generator().manual_seed(0)
    device = next((one.device for one in module.parameters() if not one.is_meta), torch.device("cpu"))
    hidden = torch.randn(*lead, 2, hidden_shape[-1], generator=random).to(device, seen.dtypes[0])
    weight = torch.rand(*lead, 2, each, generator=random).to(device, seen.dtypes[2])
    ends = torch.tensor([list(range(each)), list(range(few - each, few))])
    chosen = ends.view(*lead, 2, each).to(device, seen.dtypes[1])
    try:
        with torch.no_grad(), _with_values(module, experts, few, random), counting(module, experts, few):
            whole = _run(module, experts, seen, (hidden, chosen, weight))
            parts = torch.zeros_like(whole)
            for (held,) in Cut.even(few, min(ranks, few)).expanded():
                for slot in range(each):
                    mine = (chosen[..., slot] >= held[0]) & (chosen[..., slot] < held[1])
                    if mine.any():
                        index, factor = chosen[..., slot][mine] - held[0], weight[..., slot][mine]
                        given = (hidden[mine].view(*lead, -1, hidden.shape[-1]), index.view(*lead, -1, 1))
                        with _some(module, experts, held):
                            made = _run(module, experts, seen, (*given, factor.view(*lead, -1, 1)))
                            parts[mine] += made.flatten(0, -2)
    except Exception:  # what the module cannot do with fewer experts, or one a row
        return False
    rtol = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 0.1
    return torch.allclose(whole, parts, rtol=rtol, atol=float(whole.abs().max()) * 1e-4, equal_nan=True)


@contextmanager
def _with_values(module: nn.Module, experts: Experts, few: int, random: torch.Generator) -> Iterator[None]:
    children = list(module.modules())
    kept = [(child, dict(child._parameters), child.training) for child in children]
    try:
        for child in children:
            child.training = False
            table: dict[str, Any] = child._parameters
            for name, tensor in table.items():
                if tensor is None:
                    continue
                shape = (few, *tensor.shape[1:]) if child is module and name in experts.parameters else tensor.shape
                if tensor.is_meta:
                    value = torch.randn(shape, generator=random).to(tensor.dtype) * tensor.shape[-1] ** -0.5
                else:
                    value = tensor.detach()[: shape[0]] if tensor.dim() else tensor.detach()
                table[name] = nn.Parameter(value, requires_grad=False)
        yield
    finally:
        for child, table, training in kept:
            child._parameters.update(table)
            child.training = training


def _run(module: nn.Module, experts: Experts, seen: ExpertsCall, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    _, with_others = whole_call(experts, *seen.call)
    args, kwargs = with_others(*tensors)
    return module.forward(*args, **kwargs)


@contextmanager
def _some(module: nn.Module, experts: Experts, held: tuple[int, int]) -> Iterator[None]:
    table: dict[str, Any] = module._parameters
    before = {name: table[name] for name in experts.parameters}
    for name, tensor in before.items():
        table[name] = nn.Parameter(tensor.detach()[slice(*held)], requires_grad=False)
    try:
        with counting(module, experts, held[1] - held[0]):
            yield
    finally:
        table.update(before)


def _refuse(module: nn.Module, plan: Plan, found: list[Experts], unlike: list[str]) -> None:
    fewest = min((experts.count for experts in found), default=0)
    if fewest >= plan.ep:
        return
    if found:
        raise RefusedError([few_experts(plan, fewest)])
    if unlike:
        what = f"experts that do not simply add up, one by one: {show_names(unlike)}"
    elif lists := _lists(module):
        what = f"experts that are modules of their own, called one by one: {show_names(lists)}"
    elif others := [name for name, child in module.named_modules() if expert_count(child) > 1 and _own(child)]:
        what = f"modules that are called in another way: {show_names(others)}"
    else:
        what = "a model without experts"
    raise RefusedError([no_experts(plan, what)])


def _lists(module: nn.Module) -> list[str]:
    names = {child: name for name, child in module.named_modules()}
    inside = [child for block in blocks(module) or [module] for child in block.modules()]
    lists = [child for child in inside if isinstance(child, nn.ModuleList) and len(child) > 1]
    return [names[one] for one in lists if len({_shapes(member) for member in one}) == 1]


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())


def _own(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.")
