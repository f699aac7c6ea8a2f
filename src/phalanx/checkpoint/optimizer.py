"""Optimizer state by parameter name, so that it loads under any plan.

Tensors of the state become checkpoint tensors named ``optimizer.<parameter>.<key>``. The rest is JSON: each group's
hyper-parameters with the names of its parameters, and each parameter's state with ``{"$tensor": name}`` in place of a
tensor.

State in a parameter's shape is split like the parameter. Ranks with different parameters (pipeline stages) each see a
part of every group; the saved groups are merged from all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx.checkpoint.all_ranks import distinct, on_all_ranks, some
from phalanx.checkpoint.folder import not_json
from phalanx.checkpoint.format import Manifest, StoredTensor
from phalanx.checkpoint.reading import read_state
from phalanx.checkpoint.sections import OPTIMIZER, name_in, names_of
from phalanx.checkpoint.store import load
from phalanx.checkpoint.tensor_part import PartTensor, TensorPart
from phalanx.comm.process_group import is_dtensor
from phalanx.errors import CheckpointError, DamagedError

# How a group is stepped, not what it learns: the restoring optimizer's own choice stands.
_OWN_CHOICE = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def optimizer_tensors(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], parts: Mapping[str, TensorPart] | None = None
) -> tuple[dict[str, Tensor | PartTensor], dict[str, Any]]:
    """Return the state of ``optimizer`` as flat tensors by name, and the rest as JSON.

    Every rank of the default process group must call it.

    Args:
        optimizer: holds tensors of ``parameters``, not necessarily all.
        parameters: name → the tensor stepped by the optimizer, plain or DTensor.
        parts: name → the part held in ``parameters``, for a slice or a copy.

    Returns:
        This rank's tensors to save beside the model's, and all ranks' JSON to save as ``state["optimizer"]``. A
        hyper-parameter tensor with one element (a capturable learning rate) becomes a number; callables are left out.

    Raises:
        CheckpointError: on all ranks; names hyper-parameters or states that are neither tensors nor JSON, tensors that
            are not in ``parameters``, or state of a slice that cannot be split differently.
    """
    tensors: dict[str, Tensor | PartTensor] = {}
    here = on_all_ranks(lambda: _described(optimizer, parameters, parts or {}, tensors))
    return tensors, _put_together(distinct(here))


def restore_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], path: Path, parts: Mapping[str, TensorPart] | None = None
) -> None:
    """Restore the state of ``optimizer`` saved in folder ``path`` under any plan.

    Expects ``state["optimizer"]`` and tensors as returned by ``optimizer_tensors``. Groups are matched by parameter
    names and get the saved hyper-parameters. Callables and ``foreach``, ``fused``, ``capturable`` and
    ``differentiable`` keep their values. State in a parameter's global shape is sharded like the parameter, and split
    as ``parts`` says. Every rank of the default process group must call it.

    Raises:
        CheckpointError: on all ranks; saved by another kind of optimizer, or with other groups. Then nothing is
            changed.
    """
    path, parts = Path(path), parts or {}
    targets: dict[str, Tensor | PartTensor] = {}
    states: dict[Tensor, Any] = {}
    names = on_all_ranks(lambda: _names(optimizer, parameters))
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    everywhere = frozenset[str]().union(*distinct(sorted(held)))

    def prepared() -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], bool]:
        saved, manifest = _section(path), Manifest.read(path)
        groups = _matched(optimizer, saved, names, everywhere)
        for group, _ in groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                values = saved["state"].get(name)
                if values is not None:
                    allocate = partial(_allocated, targets, manifest, parameter, group, parts.get(name))
                    states[parameter] = _filled(values, allocate)
        return groups, bool(names_of(OPTIMIZER, manifest.tensors))

    groups, some_saved = on_all_ranks(prepared)
    if some_saved:  # the same on every rank: those that need none take part
        load(path, targets)
    for group, options in groups:
        group.update(
            {key: _like(group.get(key), value) for key, value in options.items() if _is_saved(key, group.get(key))}
        )
    optimizer.state.clear()
    optimizer.state.update(states)


def _described(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    parts: Mapping[str, TensorPart],
    tensors: dict[str, Tensor | PartTensor],
) -> dict[str, Any]:
    names = _names(optimizer, parameters)
    states: dict[str, Any] = {}
    wrong: list[str] = []
    for parameter, values in optimizer.state.items():
        if id(parameter) not in names:
            raise CheckpointError(f"the optimizer keeps state for {type(parameter).__name__}, not for a parameter")
        name = names[id(parameter)]
        own: dict[str, Tensor] = {}
        states[name] = _plain(values, name_in(OPTIMIZER, name), own, tensors)
        tensors |= {key: _split_alike(key, value, parameter, parts.get(name)) for key, value in own.items()}
        wrong += [f"state of {name}: {kind} at {where}" for where, kind in not_json(states[name], "")]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _number(value) for key, value in group.items() if _is_saved(key, value)}
        wrong += [f"group {index}: {kind} at {where}" for where, kind in not_json(options, "")]
        groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], "options": options})
    if wrong:
        raise CheckpointError("neither tensors nor JSON in the optimizer, so they cannot be saved: " + "; ".join(wrong))
    return {"kind": type(optimizer).__name__, "groups": groups, "state": states}


def _put_together(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the sections of ranks that hold different parameters.

    If all ranks have the same groups in the same order, groups are matched by position, empty ones included.
    Otherwise groups are matched by equal hyper-parameters.
    """
    first, *others = sections
    if not others:
        return first
    here = [[json.dumps(group["options"], sort_keys=True) for group in section["groups"]] for section in sections]
    by_place = all(options == here[0] for options in here)
    groups: dict[Any, dict[str, Any]] = {}
    for section in sections:
        for place, group in enumerate(section["groups"]):
            key = place if by_place else json.dumps(group["options"], sort_keys=True)
            names = groups.setdefault(key, {"parameters": [], "options": group["options"]})["parameters"]
            names += [name for name in group["parameters"] if name not in names]
    state: dict[str, Any] = {}
    for section in sections:
        state = section["state"] | state
    grouped_by = "place" if by_place else "options"
    return {"kind": first["kind"], "groups": list(groups.values()), "grouped_by": grouped_by, "state": state}


def _split_alike(name: str, value: Tensor, parameter: Tensor, part: TensorPart | None) -> Tensor | PartTensor:
    if part is None:
        return value
    if value.shape == parameter.shape and not _is_step(name):
        return PartTensor(value, part)
    if part.ranges and value.numel() > 1:
        raise _unsplittable(name, value.shape, part)
    return value if part.counts else PartTensor(value, TensorPart(shape=tuple(value.shape), counts=False))


def _is_step(name: str) -> bool:
    return name.endswith(".step")


def _unsplittable(name: str, shape: Iterable[int], part: TensorPart) -> CheckpointError:
    return CheckpointError(
        f"{name} has the shape {list(shape)}, its parameter {list(part.shape)}, split over ranks: its part for each "
        "slice is unknown.\n"
        "    try: an optimizer whose state is of the parameters' shape, such as AdamW; or a plan without tp and ep"
    )


def _names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strangers := sum(id(parameter) not in names for parameter in held):
        raise CheckpointError(
            f"the optimizer holds {strangers} tensors that are none of the {len(parameters)} parameters given: "
            "was it made before the model was sharded or moved?"
        )
    return names


def _plain(value: Any, name: str, tensors: dict[str, Tensor], taken: Container[str]) -> Any:
    if isinstance(value, Tensor):
        if name in tensors or name in taken:
            raise CheckpointError(f"two tensors of the optimizer's state would both be called {name!r}")
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, dict):
        if reserved := [key for key in value if str(key).startswith("$")]:
            raise CheckpointError(f"{name} has the keys {some(map(str, reserved))}; a key cannot begin with $")
        return {key: _plain(item, f"{name}.{key}", tensors, taken) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{name}.{index}", tensors, taken) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    return value


def _filled(value: Any, allocate: Callable[[str], Tensor]) -> Any:
    if isinstance(value, dict):
        if "$tensor" in value:
            return allocate(value["$tensor"])
        if "$tuple" in value:
            return tuple(_filled(item, allocate) for item in value["$tuple"])
        return {key: _filled(item, allocate) for key, item in value.items()}
    return [_filled(item, allocate) for item in value] if isinstance(value, list) else value


def _allocated(
    targets: dict[str, Tensor | PartTensor],
    manifest: Manifest,
    parameter: Tensor,
    group: Mapping[str, Any],
    part: TensorPart | None,
    name: str,
) -> Tensor:
    if name not in manifest.tensors:
        what = f"its state names the tensor {name}, which it does not hold"
        raise DamagedError(f"the checkpoint is damaged: {what}", tensor=name)
    made = _empty(parameter, group, part, name, manifest.tensors[name])
    targets[name] = _split_alike(name, made, parameter, part)
    return made


def _empty(
    parameter: Tensor, group: Mapping[str, Any], part: TensorPart | None, name: str, stored: StoredTensor
) -> Tensor:
    whole = part.shape if part else tuple(parameter.shape)
    if _is_step(name):
        # Where torch's own load_state_dict puts it: on the device only if the step is computed there.
        device = parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        return torch.zeros(stored.shape, dtype=stored.dtype, device=device)
    if stored.shape == whole:
        return torch.zeros_like(parameter, dtype=stored.dtype, requires_grad=False)
    if part and part.ranges and prod(stored.shape) > 1:
        raise _unsplittable(name, stored.shape, part)
    values = torch.zeros(stored.shape, dtype=stored.dtype, device=parameter.device)
    if is_dtensor(parameter) and stored.shape:
        from torch.distributed.tensor import DTensor, Replicate

        # A factored moment has no shards that follow from the parameter's; whole on every rank is always right.
        mesh = parameter.device_mesh
        return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return values


def _section(path: Path) -> dict[str, Any]:
    saved = read_state(path).get(OPTIMIZER)
    if not isinstance(saved, dict) or not {"kind", "groups", "state"} <= saved.keys():
        raise CheckpointError(f"{path} holds no optimizer state")
    return saved


def _matched(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str], everywhere: frozenset[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each group with the options saved for its names; ``everywhere`` has the names stepped on any rank."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(f"the checkpoint was saved by the optimizer {saved['kind']}, this is {kind}")
    there = [(frozenset(group["parameters"]), group["options"]) for group in saved["groups"]]
    here = [frozenset(names[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups]
    known, then = frozenset(names.values()), frozenset[str]().union(*(members for members, _ in there))
    loosely = saved.get("grouped_by") in ("options", "place")  # of a pipeline's stages, put together

    def options_of(place: int, own: frozenset[str]) -> dict[str, Any] | None:
        if len(there) == len(here) and own == there[place][0] & known:
            return there[place][1]
        found = (options for members, options in there if own == members & known or (loosely and own <= members))
        return next(found, _of_equal_groups(own, there) if loosely else None)

    found = [options_of(place, own) for place, own in enumerate(here)]
    if everywhere != then or None in found:
        moved = [own for own, options in zip(here, found, strict=True) if options is None]
        problems = ["the optimizer groups its parameters otherwise:", *_regrouped(moved, everywhere, then)]
        raise CheckpointError("\n    ".join(problems))
    return [(group, options or {}) for group, options in zip(optimizer.param_groups, found, strict=True)]


def _of_equal_groups(own: frozenset[str], there: list[tuple[frozenset[str], dict[str, Any]]]) -> dict[str, Any] | None:
    found = [options for members, options in there if own & members]
    alike = found and all(options == found[0] for options in found)
    return found[0] if alike and own <= frozenset[str]().union(*(members for members, _ in there)) else None


def _regrouped(moved: list[frozenset[str]], now: frozenset[str], then: frozenset[str]) -> list[str]:
    said = {"missing from the checkpoint": now - then, "only in the checkpoint": then - now}
    return [f"{what} ({len(names)}): {some(names)}" for what, names in said.items() if names] or [
        f"a group of {len(group)} here, of no group there: {some(group)}" for group in moved
    ]


def _is_saved(key: str, value: Any) -> bool:
    return key not in _OWN_CHOICE and not callable(value)


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return type(value)(_number(item) for item in value) if type(value) in (list, tuple) else value


def _like(current: Any, saved: Any) -> Any:
    """Convert ``saved`` to the form of ``current``, because JSON has no tuples and no tensors."""
    if isinstance(current, Tensor):
        # In place: a compiled or captured step holds on to this tensor.
        return current.fill_(saved)
    if isinstance(current, tuple) and isinstance(saved, list):
        same = len(current) == len(saved)
        return tuple(_like(now, then) for now, then in zip(current, saved, strict=True)) if same else tuple(saved)
    return saved
