"""From a batch to the arguments of the model, on its device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.config import Job
from phalanx.config.phases import PhaseInputs
from phalanx.errors import LossError, Problem, RefusedError


class Inputs:
    """A function that returns ``(args, kwargs, batch on the device)``, by the job's ``inputs`` or ``forward``'s
    names.
    """

    def __init__(self, job: Job, module: nn.Module) -> None:
        self._given = job.inputs.given if isinstance(job.inputs, PhaseInputs) else job.inputs
        self._names, self._takes_all = _forward_names(module)
        self._beside: dict[str, Any] = {}
        self._first = True
        if isinstance(job.inputs, PhaseInputs) and "phase" in self._names:
            self._beside = {"phase": job.inputs.phase}
            self._names.remove("phase")

    def __call__(self, batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        args, kwargs, on_device = self._of_batch(to_device(batch, device))
        return args, {**kwargs, **self._beside}, on_device

    def _of_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        if self._given is not None:
            given, first, self._first = self._given(batch), self._first, False
            if first and any(type(leaf).__name__ == "FakeTensor" for leaf in tree_leaves(given)):
                raise RefusedError([_ELSEWHERE])
            return (*_as_arguments(given), batch)
        if isinstance(batch, Mapping):
            if self._takes_all:
                return (), dict(batch), batch
            chosen = {name: batch[name] for name in self._names if name in batch}
            if not chosen:
                names, keys = ", ".join(self._names) or "nothing", ", ".join(map(str, batch))
                fix = 'px.Job(..., inputs=lambda batch: batch["..."])'
                raise LossError(f"forward takes {names}; the batch has {keys}.\n    try: {fix}")
            return (), chosen, batch
        if isinstance(batch, tuple | list) and batch:
            return (batch[0],), {}, batch
        return (batch,), {}, batch


_ELSEWHERE = Problem(
    where="job.inputs",
    given="a function that calls a model that a pipeline has cut: the parameters of other stages are on other ranks",
    allowed="under pp, inputs that call no other model that is built under pp, too",
    fix="dp or fsdp in place of pp",
)


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``; structures and tensors already there are kept."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if device.type == "cpu":
        return value  # loaders give host tensors
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    return value


def _as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple):
        return value, {}
    return (value,), {}


def _forward_names(module: nn.Module) -> tuple[list[str], bool]:
    names, others = list[str](), True
    while others:
        forward: Callable[..., Any] = type(module).forward
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names += [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        others, inner = any(one.kind is one.VAR_KEYWORD for one in parameters), [*module.children()]
        if not names or len(inner) != 1:
            break
        module = inner[0]
    return names, not names and others
