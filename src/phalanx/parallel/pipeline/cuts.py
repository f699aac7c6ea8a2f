"""Which modules a pipeline runs or leaves out whole, and where to cut between them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from phalanx.config import Plan
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.pipeline.program import Program
from phalanx.placement.limits import few_parts
from phalanx.placement.stages import balanced
from phalanx.trace.blocks import blocks, can_be_called


def units(module: nn.Module, at_least: int, beginning: Iterable[str] = ()) -> dict[nn.Module, str]:
    """The modules that are run whole, with their names; in module order.

    They are the repeated blocks and the modules with parameters beside them; where those are fewer than ``at_least``,
    the largest are taken apart. Modules named in ``beginning`` are units, or begin with one.
    """
    found = _beside(module, set(blocks(module)))
    names = {child: name for name, child in module.named_modules()}
    for name in beginning:
        for unit in list(found):
            if name.startswith(names[unit] + "."):
                _take_apart(found, unit, down_to=module.get_submodule(name))
    whole: set[nn.Module] = set()
    while len(found) < at_least:
        largest = max((unit for unit in found if unit not in whole), key=_size, default=None)
        if largest is None:
            break
        if len(_parts(largest)) < 2:
            whole.add(largest)
        else:
            _take_apart(found, largest)
    return _in_order(module, found)


def take_apart(module: nn.Module, units: Iterable[nn.Module], those: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """``units`` with what is inside ``those`` in place of them."""
    found = list(units)
    for unit in those:
        _take_apart(found, unit)
    return _in_order(module, found)


def _in_order(module: nn.Module, found: list[nn.Module]) -> dict[nn.Module, str]:
    names = {child: name for name, child in module.named_modules()}
    order = {child: index for index, child in enumerate(names)}
    return {unit: names[unit] for unit in sorted(found, key=order.__getitem__)}


def _beside(module: nn.Module, among: set[nn.Module]) -> list[nn.Module]:
    if not among:
        return _parts(module)
    found: list[nn.Module] = []
    for child in module.children():
        inside = among.intersection(child.modules())
        if child in among:
            found.append(child)
        elif inside:
            found += _beside(child, inside)
        else:
            found += _parts(child, itself=True)
    return _once(found)


def _parts(module: nn.Module, *, itself: bool = False) -> list[nn.Module]:
    """The children with parameters, through containers that have no forward of their own or only call one by one."""
    if next(module.parameters(), None) is None:
        return []
    if itself and can_be_called(module) and not isinstance(module, nn.Sequential):
        return [module]
    found: list[nn.Module] = []
    for child in module.children():
        found += _parts(child, itself=True)
    return _once(found)


def _take_apart(found: list[nn.Module], unit: nn.Module, down_to: nn.Module | None = None) -> None:
    at = found.index(unit)
    parts = [part for part in _parts(unit) if part not in found]
    found[at : at + 1] = parts
    if down_to is not None and down_to not in parts:
        for part in parts:
            if down_to in set(part.modules()):
                _take_apart(found, part, down_to)


def _size(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


def _once(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(modules))


def chosen(program: Program, plan: Plan) -> list[int]:
    """The first region of each stage of ``plan``: where it says, or balanced.

    Raises:
        RefusedError: if the plan names modules that cannot begin a stage, or wants more stages than there can be.
    """
    stages = plan.pp * plan.stages
    if plan.split:
        return [0, *_named(program, plan)]
    allowed = [not program.trouble(cut) for cut in range(len(program.calls))]
    found = balanced(program.costs, stages, allowed)
    if found is None:
        most = sum(allowed[1:]) + 1
        because = next((program.trouble(cut) for cut in range(1, len(allowed)) if not allowed[cut]), "")
        raise RefusedError([few_parts(plan, most, [call.name for call in program.calls], because)])
    return found


def _named(program: Program, plan: Plan) -> list[int]:
    names = plan.split.split("/")
    wanted = plan.pp * plan.stages - 1
    calls = [call.name for call in program.calls]
    known = {name for name, _ in program.module.named_modules() if name}
    found: list[int] = []
    for name in names:
        at = next((i for i, call in enumerate(calls) if call == name or call.startswith(name + ".")), None)
        if name not in known or at is None:
            near = difflib.get_close_matches(name, calls[1:], n=1, cutoff=0.0) or [calls[-1]]
            why = "no module of the model" if name not in known else "a module that forward does not call by itself"
            raise _refused(plan, f"{name!r}, {why}", "/".join(near[0] if one == name else one for one in names))
        if at == 0 or (found and at <= found[-1]):
            told = "the first part, where no stage before it would be left" if at == 0 else f"not after {names[0]!r}"
            raise _refused(plan, f"{name!r}, {told}", "/".join(calls[1 : wanted + 1]))
        if program.trouble(at):
            raise _refused(plan, f"{name!r}, before which there can be no cut: {program.trouble(at)}", "")
        found.append(at)
    if len(found) != wanted:
        raise _refused(plan, f"{len(found)} names for {wanted + 1} stages", "/".join(calls[1 : wanted + 1]))
    return found


def _refused(plan: Plan, given: str, fix: str) -> RefusedError:
    allowed = "the names of the modules that begin each stage but the first, in the order in which forward calls them"
    return RefusedError(
        [
            Problem(
                where="plan.split",
                given=f"split={plan.split}: {given}",
                allowed=f"{allowed}; {plan.pp * plan.stages - 1} of them for {plan.pp} ranks with {plan.stages} each",
                fix=f"split={fix}" if fix else "no split, for stages balanced by cost",
            )
        ]
    )
