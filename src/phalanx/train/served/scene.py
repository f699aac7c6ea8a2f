"""A run with servers as an observer of server 0 sees it: everything whole, gathered when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from phalanx.parallel import Holding
from phalanx.train.observer import Scene, State, groups_of
from phalanx.train.served.group import Group
from phalanx.train.served.keeper import Keeper, put_together


@final
class ServedScene(Scene):
    """What all servers hold. Workers, which are sent copies, are not seen."""

    def __init__(self, keeper: Keeper, group: Group, notes: list[str]) -> None:
        self._keeper, self._group, self._notes = keeper, group, notes
        self.scale = 1.0
        """What the sums that servers hold are to be multiplied by, to be gradients."""
        self.stepped_with = False
        """Whether gradients are those that optimizers were given, and no longer those brought together."""

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def replica(self) -> int:
        return 0

    @property
    def slices(self) -> Mapping[str, Holding]:
        return {}

    @property
    def modules(self) -> list[nn.Module]:
        return [self._keeper.layout.module]

    def values(self) -> Mapping[str, torch.Tensor]:
        module = self._keeper.layout.module
        frozen = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
        return {**frozen, **self._gathered("parameters")}

    def stepped(self) -> Mapping[str, torch.Tensor]:
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {**dict(self._keeper.layout.module.named_buffers()), **self._keeper.statistics.named}

    def gradients(self) -> Mapping[str, torch.Tensor]:
        if self.stepped_with:
            return self._gathered("used")
        return {name: tensor * self.scale for name, tensor in self._gathered("gradients").items()}

    def state(self) -> State:
        tensors, states = put_together(self._group.gather("everything"), self._keeper.layout.parameters)
        return {name: _filled(state, tensors) for name, state in states.items()}

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Those of server 0, with the parameters that it holds."""
        shard = self._keeper.shard
        return groups_of(shard.optimizer, shard.parameters)

    def from_every_process(self, value: Any) -> list[Any]:
        return [value]

    def _gathered(self, what: str) -> dict[str, torch.Tensor]:
        found, _ = put_together(self._group.gather(what), self._keeper.layout.parameters)
        return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def _filled(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A parameter's state with the tensors that its references name."""
    return {
        key: tensors[value["$tensor"]] if isinstance(value, dict) and "$tensor" in value else value
        for key, value in state.items()
    }
