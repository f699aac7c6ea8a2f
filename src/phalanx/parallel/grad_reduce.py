"""Gradients added over ranks, many in one message, sparse ones by their rows; and the synchronisation of replicas.

Sparse gradients, as from an embedding with ``sparse=True``, have the used rows only. They are added up over replicas
and stages. They cannot be cut into rows over ranks, or sent to servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from phalanx.config import Plan
from phalanx.config.sync import BUCKET_BYTES
from phalanx.errors import Problem
from phalanx.units import show_names

_Item = TypeVar("_Item")


def add_up(gradients: Iterable[torch.Tensor | None], group: dist.ProcessGroup) -> None:
    """Sum each gradient over the ranks of ``group``, in place. Every rank must have the same ones."""
    waiting: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
    for bucket in buckets((grad for grad in gradients if grad is not None), lambda grad: grad):
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([grad.reshape(-1) for grad in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        waiting.append((work, flat, bucket))
    for work, flat, bucket in waiting:
        work.wait()
        pieces = flat.split([grad.numel() for grad in bucket])
        for grad, piece in zip(bucket, pieces, strict=True):
            if grad.data_ptr() != piece.data_ptr():
                grad.copy_(piece.view(grad.shape))


def buckets(items: Iterable[_Item], tensor_of: Callable[[_Item], torch.Tensor]) -> list[list[_Item]]:
    """Return ``items`` in runs with tensors of one type and about ``BUCKET_BYTES``; a larger one is alone."""
    runs: list[list[_Item]] = []
    size = 0
    for item in items:
        tensor = tensor_of(item)
        nbytes = tensor.numel() * tensor.element_size()
        if not runs or size + nbytes > BUCKET_BYTES or tensor.dtype != tensor_of(runs[-1][0]).dtype:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += nbytes
    return runs


def spread(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy the elements of ``flat`` into ``tensors``, one after the other."""
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def found_anywhere(
    here: Sequence[bool], parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> list[bool]:
    """Return for each of ``parameters`` True if ``here`` is true on any rank of ``group``. Collective."""
    if not parameters:
        return []
    ranks = torch.tensor(here, dtype=torch.float32, device=next(iter(parameters.values())).device)
    dist.all_reduce(ranks, group=group)
    return [count > 0 for count in ranks.tolist()]


def sparse(module: nn.Module) -> list[str]:
    """Return names of modules whose gradients are sparse."""
    return [name or "(the model itself)" for name, one in module.named_modules() if getattr(one, "sparse", False)]


def made_dense(module: nn.Module) -> list[str]:
    """Make the gradients of ``module`` dense, in place. Returns the former result of ``sparse``."""
    names = sparse(module)
    for one in module.modules():
        if getattr(one, "sparse", False):
            vars(one)["sparse"] = False
    return names


def sparse_problems(module: nn.Module, plan: Plan) -> list[Problem]:
    """Return the problems of ``plan`` with the sparse gradients of ``module``."""
    names = sparse(module) if plan.fsdp > 1 or plan.server else []
    if not names:
        return []
    if plan.server:
        whole = Plan(dp=plan.dp, precision=plan.precision, device=plan.device)
    else:
        whole = replace(plan, dp=plan.dp * plan.fsdp, fsdp=1, zero=0, offload="none")
    return [
        Problem(
            where="job.model",
            given=f"sparse gradients of {show_names(names)} under {plan}",
            allowed="dense ones, or plans that leave each parameter whole, such as dp and pp",
            fix=f"nn.Embedding(..., sparse=False), or {whole}",
        )
    ]


def cut_problems(module: nn.Module, plan: Plan) -> list[Problem]:
    """Return problems with parameters of ``module`` that ``plan`` cuts."""
    named = dict(module.named_parameters())
    hooked = [name for name, one in named.items() if one._backward_hooks or one._post_accumulate_grad_hooks]
    # A vector of complex numbers as pairs is gathered by DTensors where rows are not as many on each rank.
    uneven = {name: plan.zero == 3 or (one.dim() == 1 and one.shape[0] % plan.fsdp) for name, one in named.items()}
    pairs = [name for name, one in named.items() if one.is_complex() and plan.zero and uneven[name]]
    whole = (
        "hooks on the gradients of parameters, of which no rank has the whole",
        "hooks on parameters that are not cut",
    )
    real = (
        "complex parameters",
        "under fsdp real ones, and complex ones of which each rank has as many rows with zero=1, 2",
    )
    cut = (hooked if plan.zero == 3 or plan.tp > 1 else [], *whole), (pairs, *real)
    return [
        Problem(
            where="job.model",
            given=f"{what} under {plan}: {show_names(names)}",
            allowed=allowed,
            fix=f"dp={plan.world_size}",
        )
        for names, what, allowed in cut
        if names
    ]


class Sync(ABC):
    """The synchronisation of replicas: called in every step when gradients are ready, and after the optimizer step.

    Totals are the sum and the count of a loss: two numbers, or a tensor of both on CUDA.
    """

    per_replica = False  # whether the step's group is one replica of several, each of which counts for itself

    @abstractmethod
    def gradients_ready(self, step: int, totals: Any) -> Any:
        """Take gradients that are sums over the group's samples, and return the totals to divide by."""

    def named_ready(self, step: int, named: Any) -> Any:
        """Return the totals of losses by name, like ``gradients_ready``."""
        return named

    @abstractmethod
    def parameters_stepped(self, steps: int, totals: Any) -> None:
        """Handle the optimizer's step, the ``steps``-th; forward does not see the new values yet."""

    @abstractmethod
    def together(self) -> None:
        """Make replicas equal now, as at the end, so that all read the same values. Collective."""


class EveryStep(Sync):
    """Gradients summed over all replicas in every step, by the layouts."""

    def gradients_ready(self, step: int, totals: Any) -> Any:
        return totals

    def parameters_stepped(self, steps: int, totals: Any) -> None:
        pass

    def together(self) -> None:
        pass
