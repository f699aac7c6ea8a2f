"""Gradients as one vector over all ranks: scaling, the true global norm, clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from phalanx.comm import is_dtensor, local


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of each gradient; parameters without one are left out."""
    grads = (tensor.grad for tensor in parameters if tensor.grad is not None)
    return [local(grad) for grad in grads]


def scale(grads: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by one factor, in place; the factor may be on another device."""
    if grads and not (isinstance(factor, float) and factor == 1.0):
        if isinstance(factor, torch.Tensor) and factor.device != grads[0].device:
            factor = factor.to(grads[0].device)  # with offload, gradients are on the host
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def global_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients of all ranks: a 0-dim tensor, the same on every rank.

    Rows held by one rank only are summed over the ranks that share them out; what every rank holds counts once.
    """
    whole: list[torch.Tensor] = []
    sharded: list[torch.Tensor] = []
    groups: dict[dist.ProcessGroup, None] = {}
    for tensor in parameters:
        grad = tensor.grad
        if is_dtensor(grad):
            dims = [dim for dim, placement in enumerate(grad.placements) if placement.is_shard()]
            for dim in dims:
                groups[grad.device_mesh.get_group(dim)] = None
            (sharded if dims else whole).append(grad.to_local())
        elif grad is not None:
            whole.append(grad)
    device = (whole or sharded)[0].device if whole or sharded else torch.device("cpu")
    square = _sum_of_squares(sharded, device)
    for group in groups:
        dist.all_reduce(square, group=group)
    return (square + _sum_of_squares(whole, device)).sqrt()


def clip(grads: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale gradients whose global norm is above ``limit`` down to it (Pascanu et al. 2013)."""
    scale(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))


def _sum_of_squares(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    # On CPUs torch adds fp32 squares one by one, which at 10 M elements is off by 3e-4 and by the way they are cut.
    wide = torch.float64 if device.type == "cpu" else torch.float32
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch._foreach_norm(grads, 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum()
