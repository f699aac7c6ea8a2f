"""A model split over several ranks, and the replicas of it kept together.

Techniques that split the model change what a rank holds and computes; what is left to do for its parameters is the
same for all of them: gradients are added over the ranks that hold the same slice and have seen other samples or other
tokens, once a step. That is done here, whole (as ``replicate`` does it) or sharded over ``fsdp`` (as ``shard`` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm import Mesh
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.example import Example
from phalanx.parallel.holding import Holding
from phalanx.parallel.layout import Held, Layout, Work, each_micro_batch, trainable
from phalanx.parallel.sliced import Axis, Placed
from phalanx.parallel.sums import add_up
from phalanx.parallel.tensor import Places, find, show_slices, split_weights
from phalanx.spec import Plan

_COPIES = ("dp", "ep", "cp")


class Split(Layout):
    """One rank's part of a split model."""

    def __init__(self, module: nn.Module, device: torch.device, plan: Plan, mesh: Mesh, example: Example) -> None:
        self._device, self._mesh = device, mesh
        slices, places = split_by_tensor(module, plan, mesh, example)
        self._sharded = plan.zero == 3
        self._module = module
        if self._sharded:
            from phalanx.parallel.shard import apply

            apply(module, device, plan, mesh.sharding(device, "fsdp", _COPIES))
            module._get_fsdp_state()._lazy_init()  # pyright: ignore  # reads parameters as they are, before the next line
        else:
            module.to(device)
        show_slices(places)
        self._held = Held(
            module=module,
            parameters=trainable(module),
            divisor=self._divisor(),
            counts=mesh.at["tp"] == 0 and mesh.at["cp"] == 0,
            slices=slices,
        )
        self._copies = mesh.group("fsdp", *_COPIES)

    def _divisor(self) -> float:
        # Along cp every rank starts backward from the same loss, and their gradients are added.
        averaged = self._mesh.size("fsdp", *_COPIES) if self._sharded else 1
        return averaged / self._mesh.size("cp")

    @property
    def held(self) -> Held:
        return self._held

    def accumulate(self, parts: Sequence[Sequence[Any]], work: Work) -> None:
        each_micro_batch(self._module, self._device, parts[0], work)

    def finish(self) -> None:
        if self._copies is not None and not self._sharded:
            add_up([tensor.grad for tensor in self._held.parameters.values()], self._copies)

    def stepped(self) -> None:
        for tensor in self._held.parameters.values():
            tensor.grad = None


def split_by_tensor(module: nn.Module, plan: Plan, mesh: Mesh, example: Example) -> tuple[dict[str, Holding], Places]:
    """Share out each layer's weights over ``tp``, in place; what this rank holds then, by name and where.

    Raises:
        RefusedError: if nothing can be shared out.
    """
    if plan.tp == 1:
        return {}, []
    axis = Axis("tp", size=plan.tp, rank=mesh.at["tp"], group=mesh.group("tp"), tokens=plan.sequence)
    found = find(module, example, plan.tp)
    if not found.cuts:
        raise RefusedError(
            [
                Problem(
                    where="plan.tp",
                    given=f"tp={plan.tp} for a model in which no two layers can share out their weights",
                    allowed="models with linear layers that follow one another, such as transformers",
                    fix=f"fsdp={plan.tp}",
                )
            ]
        )
    cuts: Mapping[str, tuple[Placed, ...]] = {
        name: (Placed(axis, dim, cut),) for name, (dim, cut) in found.cuts.items()
    }
    return split_weights(module, cuts)
