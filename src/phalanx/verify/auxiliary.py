"""What a loss asks of the parameters that choose experts beside what the experts' work asks of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.data import StepBatch
from phalanx.parallel.expert.find import _as_experts, _count
from phalanx.train.step import Step


def auxiliary_gradients(step: Step, batch: StepBatch) -> dict[str, Tensor]:
    """Name → gradient of an auxiliary loss alone, of each matrix that chooses experts. None for other models.

    A backward of its own, on one device, in which nothing comes back through the weights that experts are called with.
    """
    routers = _routers(step.layout.module)
    if not routers:
        return {}
    hooks = [child.register_forward_pre_hook(_close, with_kwargs=True) for child in _experts(step.layout.module)]
    try:
        step.backward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = step.layout.parameters
    found = {name: parameters[name].grad for name in routers if name in parameters}
    for tensor in parameters.values():
        tensor.grad = None
    return {name: grad.detach().to("cpu", copy=True).contiguous() for name, grad in found.items() if grad is not None}


def _experts(module: nn.Module) -> dict[nn.Module, str]:
    return {child: name for name, child in module.named_modules() if _count(child) > 1}


def _routers(module: nn.Module) -> list[str]:
    """Matrices beside experts that have a row, or a column, for each."""
    found: dict[str, None] = {}
    for child, name in _experts(module).items():
        beside = name.rpartition(".")[0]
        for inner, tensor in module.get_submodule(beside).named_parameters(prefix=beside):
            if tensor.dim() == 2 and _count(child) in tensor.shape and not inner.startswith(f"{name}."):
                found[inner] = None
    return list(found)


def _close(_: nn.Module, args: Any, kwargs: Any) -> None:
    call = _as_experts(args, kwargs)
    if call is None:
        return
    weight = tree_leaves((args, kwargs))[call.leaves[2]]
    if weight.requires_grad:
        weight.register_hook(torch.zeros_like)
