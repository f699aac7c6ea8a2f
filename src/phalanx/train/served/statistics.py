"""Running statistics of normalisation layers, which servers keep beside the parameters.

A worker brings those of a step's first piece; they are the next step's. So they go on as those of rank 0 do where
replicas step together.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.parallel.server import Flat, form_of

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


@final
class Statistics:
    """The running means and variances in ``module``, and their form on the wire."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = {
            name: child
            for name, child in module.named_modules()
            if isinstance(child, _NormBase) and child.track_running_stats
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name → buffer. Looked up each time: moving a module puts others in their place."""
        return {
            f"{name}.{key}" if name else key: value
            for name, layer in self._layers.items()
            for key in _NAMES
            if isinstance(value := getattr(layer, key), torch.Tensor)
        }

    def take(self) -> Flat:
        """A copy of them on the host."""
        found = self.tensors
        flat = Flat(form_of(found))
        for name, tensor in flat.named.items():
            tensor.copy_(found[name])
        return flat

    def put(self, flat: Flat) -> None:
        """Set them to the values of ``flat``."""
        found = self.tensors
        with torch.no_grad():
            for name, tensor in flat.named.items():
                found[name].copy_(tensor)
