"""Optimizer state by parameter name, so that it loads under any data-parallel plan.

Tensors of the state become checkpoint tensors called ``optimizer.<parameter>.<key>``. Everything else is JSON: the
hyper-parameters of each group with the names of its parameters, and for each parameter its state with
``{"$tensor": name}`` where a tensor stood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from phalanx.checkpoint.jsontext import not_json
from phalanx.checkpoint.manifest import Manifest, StoredTensor
from phalanx.checkpoint.store import load, read_state
from phalanx.checkpoint.together import some, together
from phalanx.errors import CheckpointError

SECTION = "optimizer"
"""The key of ``state.json`` that holds what ``optimizer_tensors`` returns beside the tensors."""

# How a group is stepped, not what it learns: the restoring optimizer's own choice stands.
_OWN_CHOICE = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def optimizer_tensors(
    optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of ``optimizer`` as flat tensors by name, and as JSON what is not tensors.

    Args:
        optimizer: holds tensors of ``parameters``, not necessarily all.
        parameters: name → the tensor that the optimizer steps, plain or DTensor.

    Returns:
        Tensors to save beside the model's, and JSON to save as ``state["optimizer"]``. A hyper-parameter that is a
        tensor of one element (a capturable learning rate) is a number in it; callables are left out.

    Raises:
        CheckpointError: names the hyper-parameters or states that are neither tensors nor JSON, or says that the
            optimizer holds tensors that are not in ``parameters``.
    """
    names = _names(optimizer, parameters)
    tensors: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    wrong: list[str] = []
    for parameter, values in optimizer.state.items():
        if id(parameter) not in names:
            raise CheckpointError(f"the optimizer keeps state for {type(parameter).__name__}, not for a parameter")
        name = names[id(parameter)]
        states[name] = _plain(values, f"{SECTION}.{name}", tensors)
        wrong += [f"state of {name}: {kind} at {where}" for where, kind in not_json(states[name], "")]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _number(value) for key, value in group.items() if _is_saved(key, value)}
        wrong += [f"group {index}: {kind} at {where}" for where, kind in not_json(options, "")]
        groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], "options": options})
    if wrong:
        raise CheckpointError("neither tensors nor JSON in the optimizer, so they cannot be saved: " + "; ".join(wrong))
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "state": states}


def restore_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor], path: Path) -> None:
    """Bring ``optimizer`` to the state saved in folder ``path``, whatever the plan it was saved under.

    Expects ``state["optimizer"]`` and the tensors as ``optimizer_tensors`` gave them. Groups are matched by the names
    in them and get the saved hyper-parameters; callables, and how the step is computed (``foreach``, ``fused``,
    ``capturable``, ``differentiable``), stay as they are. State of a parameter's global shape is sharded like the
    parameter. Every rank of the default process group must call it.

    Raises:
        CheckpointError: on all ranks; saved by another kind of optimizer, or with other groups. Nothing is changed.
    """
    path = Path(path)
    targets: dict[str, Tensor] = {}
    states: dict[Tensor, Any] = {}

    def prepared() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        saved, manifest = _section(path), Manifest.read(path)
        names = _names(optimizer, parameters)
        groups = _matched(optimizer, saved, names)
        for group, _ in groups:
            for parameter in group["params"]:
                values = saved["state"].get(names[id(parameter)])
                if values is not None:
                    states[parameter] = _filled(values, _allocator(parameter, group, manifest, targets))
        return groups

    groups = together(prepared)
    if targets:
        load(path, targets)
    for group, options in groups:
        group.update({key: _like(group.get(key), value) for key, value in options.items() if _is_set(key, group)})
    optimizer.state.clear()
    optimizer.state.update(states)


def _names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in names for parameter in held)
    if strangers:
        raise CheckpointError(
            f"the optimizer holds {strangers} tensors that are none of the {len(parameters)} parameters given: "
            "was it made before the model was sharded or moved?"
        )
    return names


def _plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` with its tensors moved to ``tensors`` and a reference in their place."""
    if isinstance(value, Tensor):
        if name in tensors:
            raise CheckpointError(f"two tensors of the optimizer's state would both be called {name!r}")
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, dict):
        reserved = [key for key in value if str(key).startswith("$")]
        if reserved:
            raise CheckpointError(f"{name} has the keys {some(map(str, reserved))}; a key cannot begin with $")
        return {key: _plain(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    return value


def _filled(value: Any, allocate: Callable[[str], Tensor]) -> Any:
    """The inverse of ``_plain``, with a new tensor for each reference."""
    if isinstance(value, dict):
        if "$tensor" in value:
            return allocate(value["$tensor"])
        if "$tuple" in value:
            return tuple(_filled(item, allocate) for item in value["$tuple"])
        return {key: _filled(item, allocate) for key, item in value.items()}
    return [_filled(item, allocate) for item in value] if isinstance(value, list) else value


def _allocator(
    parameter: Tensor, group: Mapping[str, Any], manifest: Manifest, targets: dict[str, Tensor]
) -> Callable[[str], Tensor]:
    def allocate(name: str) -> Tensor:
        if name not in manifest.tensors:
            raise CheckpointError(
                f"the checkpoint is damaged: its state names the tensor {name}, which it does not hold"
            )
        targets[name] = _empty(parameter, group, name.rpartition(".")[2], manifest.tensors[name])
        return targets[name]

    return allocate


def _empty(parameter: Tensor, group: Mapping[str, Any], key: str, stored: StoredTensor) -> Tensor:
    if key == "step":
        # Where torch's own load_state_dict puts it: on the device only if the step is computed there.
        device = parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        return torch.zeros(stored.shape, dtype=stored.dtype, device=device)
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=stored.dtype, requires_grad=False)
    values = torch.zeros(stored.shape, dtype=stored.dtype, device=parameter.device)
    if isinstance(parameter, DTensor) and stored.shape:
        # A factored moment has no shards that follow from the parameter's; whole on every rank is always right.
        mesh = parameter.device_mesh
        return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return values


def _section(path: Path) -> dict[str, Any]:
    saved = read_state(path).get(SECTION)
    if not isinstance(saved, dict) or not {"kind", "groups", "state"} <= saved.keys():
        raise CheckpointError(f"{path} holds no optimizer state")
    return saved


def _matched(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(f"the checkpoint was saved by the optimizer {saved['kind']}, this is {kind}")
    there = {frozenset(group["parameters"]): group["options"] for group in saved["groups"]}
    here = [frozenset(names[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups]
    if set(here) != set(there):
        raise CheckpointError(
            "\n    ".join(["the optimizer groups its parameters otherwise:", *_regrouped(here, there)])
        )
    return [(group, there[members]) for group, members in zip(optimizer.param_groups, here, strict=True)]


def _regrouped(here: list[frozenset[str]], there: Mapping[frozenset[str], Any]) -> list[str]:
    now, then = frozenset().union(*here), frozenset().union(*there)
    moved = [f"a group of {len(group)} here, of no group there: {some(group)}" for group in here if group not in there]
    found = {"missing from the checkpoint": now - then, "only in the checkpoint": then - now}
    return [f"{said} ({len(names)}): {some(names)}" for said, names in found.items() if names] or moved


def _is_saved(key: str, value: Any) -> bool:
    return key not in _OWN_CHOICE and not callable(value)


def _is_set(key: str, group: Mapping[str, Any]) -> bool:
    return key not in _OWN_CHOICE and not callable(group.get(key))


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return type(value)(_number(item) for item in value) if type(value) in (list, tuple) else value


def _like(current: Any, saved: Any) -> Any:
    """``saved`` in the form of ``current``: JSON knows no tuples and no tensors."""
    if isinstance(current, Tensor):
        # In place: a compiled or captured step holds on to this tensor.
        return current.fill_(saved)
    if isinstance(current, tuple) and isinstance(saved, list):
        same = len(current) == len(saved)
        return tuple(_like(now, then) for now, then in zip(current, saved, strict=True)) if same else tuple(saved)
    return saved
