"""Which modules a pipeline runs or leaves out whole: its stages are runs of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

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
