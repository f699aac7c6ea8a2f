"""Replicas that step by themselves, brought wholly together for a checkpoint, and what it keeps of their outer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm import local
from phalanx.parallel import Apart
from phalanx.parallel.fragments import flattened, spread
from phalanx.train.assembly import Assembly
from phalanx.train.precision import LossScale

if TYPE_CHECKING:
    from phalanx.checkpoint import Part, Pieces

OUTER_SECTION = "outer"
"""The key of ``state.json`` that says whether an outer momentum was saved, and what its tensors' names begin with."""


def come_together(assembly: Assembly) -> None:
    """Make replicas equal: parameters averaged as when their time has come, optimizer state and loss scale as well.

    Nothing where replicas do not step by themselves. Collective.
    """
    apart = assembly.apart
    if apart is None:
        return
    apart.together()
    with torch.no_grad():
        _average_state(assembly, apart)
    progress = assembly.step.progress
    if progress.loss_scale:
        progress.loss_scale = LossScale(**apart.across.from_counterparts(asdict(progress.loss_scale))[0])


def outer_tensors(assembly: Assembly, parts: Mapping[str, Part]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outer momentum by name, to save beside the model; and what to save as ``state["outer"]``."""
    momentum = assembly.apart.momentum() if assembly.apart else {}
    return _named(momentum, parts), {"momentum": bool(momentum)}


def restore_outer(assembly: Assembly, path: Path, state: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Let replicas step by themselves from what was restored, with the outer momentum if any was saved. Collective."""
    if assembly.apart is None:
        return
    from phalanx import checkpoint

    found: dict[str, torch.Tensor] = {}
    if (state.get(OUTER_SECTION) or {}).get("momentum"):
        found = assembly.apart.room_for_momentum()
        checkpoint.load(path, _named(found, parts))
    assembly.apart.restored(state["step"], found)


def _named(momentum: Mapping[str, torch.Tensor], parts: Mapping[str, Part]) -> dict[str, torch.Tensor | Pieces]:
    from phalanx.checkpoint import Pieces

    return {
        f"{OUTER_SECTION}.{name}": Pieces(tensor, parts[name]) if name in parts else tensor
        for name, tensor in momentum.items()
    }


def _average_state(assembly: Assembly, apart: Apart) -> None:
    """The mean of what the replicas' optimizers keep; counts of steps become the largest."""
    states = _same_states(assembly, apart)
    numbers = [
        (key, value)
        for state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    steps = [value for key, value in numbers if key == "step"]
    most = [max(each) for each in zip(*apart.across.from_counterparts([float(one) for one in steps]), strict=True)]
    for one, largest in zip(steps, most, strict=True):
        one.fill_(largest)
    values = [local(value) for key, value in numbers if key != "step"]
    spread(values, apart.mean(flattened(values)))


def _same_states(assembly: Assembly, apart: Apart) -> list[dict[str, Any]]:
    """What the optimizer keeps of each parameter that any replica keeps something of, in order.

    A parameter that one replica has not used yet has no state there: it gets zeros.
    """
    parameters, known = assembly.layout.parameters, assembly.optimizer.state
    here = {name: _forms(known[tensor]) for name, tensor in parameters.items() if known.get(tensor)}
    anywhere: dict[str, dict[str, Any]] = {}
    for there in apart.across.from_counterparts(here):
        anywhere = there | anywhere
    for name in anywhere.keys() - here.keys():
        tensor = parameters[name]
        for key, form in anywhere[name].items():
            alike = form == list(local(tensor).shape)
            known[tensor][key] = torch.zeros_like(tensor, requires_grad=False) if alike else torch.zeros(form)
    return [known[parameters[name]] for name in parameters if name in anywhere]


def _forms(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Shape of each tensor of an optimizer's state."""
    return {key: list(local(value).shape) for key, value in state.items() if isinstance(value, torch.Tensor)}
