"""Gradients as one vector over all ranks: scaling, the true global norm, clipping by norms and by values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
import torch.distributed as dist

from phalanx.comm import is_dtensor, local
from phalanx.config import Clip
from phalanx.parallel import RankHoldings, TensorShard


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each gradient; parameters without one are left out."""
    return [local(tensor.grad) for tensor in parameters if tensor.grad is not None]


def scale(grads: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by one factor, in place; the factor may be on another device."""
    if grads and not (isinstance(factor, float) and factor == 1.0):
        if isinstance(factor, torch.Tensor) and factor.device != grads[0].device:
            factor = factor.to(grads[0].device)  # with offload, gradients are on the host
        torch._foreach_mul_(grads, factor)


def add_up_rows(parameters: Iterable[torch.Tensor]) -> None:
    """Merge the rows of each sparse gradient, so that each row occurs once.

    Unmerged parts, of samples and ranks, would each round the value they are added to.
    """
    for tensor in parameters:
        if tensor.grad is not None and tensor.grad.is_sparse:
            tensor.grad = tensor.grad.coalesce()


@final
class Clipping:
    """The job's clipping of the gradients on a rank."""

    def __init__(self, clip: Clip | None, held: RankHoldings, optimizer: torch.optim.Optimizer) -> None:
        self._clip, self._held, self._optimizer = clip, held, optimizer
        self.by_whole_norm = clip is not None and clip.by_whole_norm

    def __call__(self, norm: torch.Tensor) -> None:
        """Clip in place; ``norm`` is that of all gradients if ``by_whole_norm``; otherwise collective."""
        how, held = self._clip, self._held
        if how is None:
            return
        grads = local_gradients(held.parameters.values())
        if how.value is not None:
            clip_values(grads, how.value)
        elif how.norm is not None and how.by_whole_norm:
            clip(grads, norm, how.norm)
        elif how.norm is not None:
            groups = self._optimizer.param_groups if how.per == "group" else [{"params": [*held.parameters.values()]}]
            norms = norms_of_groups(held, [group["params"] for group in groups], largest=how.norm_type != 2)
            for group, one in zip(groups, norms.unbind(), strict=True):
                clip(local_gradients(group["params"]), one, how.norm)


def norms_of_groups(held: RankHoldings, groups: Sequence[Sequence[torch.Tensor]], *, largest: bool) -> torch.Tensor:
    """Return norms over the gradients of each of ``groups`` on all ranks, which have equally many groups.

    L2 norms, or with ``largest`` the largest absolute values.
    """
    place = {id(tensor): index for index, group in enumerate(groups) for tensor in group}
    shared: dict[tuple[dist.ProcessGroup, ...], list[list[torch.Tensor]]] = {}
    device = next(iter(held.parameters.values()), next(held.module.parameters())).device
    for name, tensor in held.parameters.items():
        grad = tensor.grad
        if grad is None or (over := _groups(grad, held.slices.get(name))) is None:
            continue
        device = grad.device
        shared.setdefault(over, [[] for _ in groups])[place[id(tensor)]].append(local(grad))
    found = torch.zeros(len(groups), dtype=_wide(device), device=device)
    how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for over, each in shared.items():
        part = torch.stack(
            [_largest(one, device) if largest else _sum_of_squares(one, device, quick=False) for one in each]
        )
        for group in over:
            dist.all_reduce(part, how, group=group)
        found = torch.maximum(found, part) if largest else found + part
    if held.stages is not None:
        dist.all_reduce(found, how, group=held.stages)
    return found if largest else found.sqrt()


def _largest(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    each = [_elements(grad).abs().max().to(_wide(device)) for grad in grads if grad.numel()]
    return torch.stack(each).max() if each else torch.zeros((), dtype=_wide(device), device=device)


def clip_values(grads: list[torch.Tensor], limit: float) -> None:
    """Clip every element to the range from ``-limit`` to ``limit``; missing rows of a sparse gradient are 0."""
    found = [_elements(grad) for grad in grads]
    if found:
        torch._foreach_clamp_min_(found, -limit)
        torch._foreach_clamp_max_(found, limit)


def _elements(grad: torch.Tensor) -> torch.Tensor:
    return grad._values() if grad.is_sparse else grad  # scaling it made torch forget that they have been


def global_norm(held: RankHoldings, *, quick: bool = False, values: bool = False) -> torch.Tensor:
    """Return the L2 norm over all gradients of all ranks: a 0-dim tensor, the same on every rank.

    Parts held by one rank are summed over the ranks that share them. A part held by every rank counts once. It is
    finite only if all gradients are.

    Args:
        held: this rank's part.
        quick: on CPUs return not the norm, but a number that is finite only if all gradients are, in a tenth of the
            time: from norms in the gradients' own type. It is infinite if a square of finite numbers overflows.
        values: include the parameters: if one is not finite, neither is the norm.
    """
    if held.whole and not values:
        grads, sparse = list[torch.Tensor](), False
        for tensor in held.parameters.values():
            if (grad := tensor.grad) is not None:
                grads.append(grad)
                sparse = sparse or grad.is_sparse
        if grads and quick and grads[0].device.type == "cpu" and not sparse:
            return torch.stack(torch._foreach_norm(grads, 2)).sum()
        if grads:
            return _sum_of_squares(grads, grads[0].device, quick=quick).sqrt()
    shared: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    # A stage of frozen parameters alone steps none; its part is a zero where the others' parts are.
    device = next(iter(held.parameters.values()), next(held.module.parameters())).device
    for name, tensor in held.parameters.items():
        grad = tensor.grad
        if grad is None:
            continue
        device = grad.device
        groups = _groups(grad, held.slices.get(name))
        if groups is not None:
            shared.setdefault(groups, []).append(local(grad))
    square = torch.zeros((), dtype=_wide(device), device=device)
    if values:  # it goes the way of each sum, so that it comes to every rank without an exchange of its own
        here = [local(tensor.detach()) for tensor in held.parameters.values()]
        square = _sum_of_squares(here, device, quick=quick) * 0
    spoilt = square
    # Every rank has the same kinds of parameters in the same order, so that all talk in the same order.
    for groups, grads in shared.items():
        part = _sum_of_squares(grads, device, quick=quick) + spoilt
        for group in groups:
            dist.all_reduce(part, group=group)
        square = square + part
    if held.stages is not None:
        dist.all_reduce(square, group=held.stages)
    return square.sqrt()


def _groups(grad: torch.Tensor, holding: TensorShard | None) -> tuple[dist.ProcessGroup, ...] | None:
    found: list[dist.ProcessGroup] = []
    if is_dtensor(grad):
        sharded = (dim for dim, placement in enumerate(grad.placements) if placement.is_shard())
        found += [grad.device_mesh.get_group(dim) for dim in sharded]
    if holding is not None:
        if not holding.counts:
            return None
        found += [one.axis.group for one in holding.placed if one.axis.group is not None]
    return tuple(found)


def clip(grads: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale gradients whose global norm is above ``limit`` down to it (Pascanu et al. 2013)."""
    scale(grads, clip_factor(norm, limit))


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor of gradients with this global norm: at most 1."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def _sum_of_squares(grads: list[torch.Tensor], device: torch.device, *, quick: bool) -> torch.Tensor:
    # On CPUs torch adds fp32 squares one by one, which at 10 M elements is off by 3e-4 and by the way they are cut.
    wide = _wide(device)
    grads = [
        torch.view_as_real(grad) if grad.is_complex() else grad.coalesce().values() if grad.is_sparse else grad
        for grad in grads
        if grad.numel()
    ]
    if not grads:
        return torch.zeros((), dtype=wide, device=device)
    dtype = None if quick and device.type == "cpu" else wide
    norms = torch._foreach_norm(grads, 2, dtype=dtype)
    return torch.stack(norms).to(wide).square().sum()
