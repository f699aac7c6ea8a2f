"""Optimizer state in host memory: the optimizer steps copies of the parameters that live there.

After backward each gradient moves to the host, the optimizer steps on the CPU, and the new values move back to the
device. The device then holds 8 bytes a parameter (value and gradient) in place of AdamW's 16, at the price of two
copies over the bus a step (Ren et al. 2021, ZeRO-Offload). Works on whole parameters and on shards alike. On a CPU,
whose memory is the host's, it saves no memory.

``offload=parameters`` goes further and is part of ``fully_shard`` itself (``fsdp.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.comm import is_dtensor, local
from phalanx.parallel.layout import Layout, MicroBatchWork


class OptimizerOnHost(Layout):
    """Any layout, with the optimizer's tensors held on the host."""

    def __init__(self, inner: Layout) -> None:
        self._inner = inner
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._host: dict[str, torch.Tensor] = {
            name: nn.Parameter(self._to_host(tensor.detach())) for name, tensor in inner.parameters.items()
        }
        self.holdings = replace(inner.holdings, parameters=self._host)

    def begin(self) -> None:
        self._inner.begin()

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        self._inner.accumulate(parts, work)

    def finish(self) -> None:
        self._inner.finish()
        for name, tensor in self._inner.parameters.items():
            self._host[name].grad = None if tensor.grad is None else self._to_host(tensor.grad)
            tensor.grad = None

    def stepped(self) -> None:
        with torch.no_grad():
            for name, tensor in self._inner.parameters.items():
                local(tensor).copy_(local(self._host[name]), non_blocking=True)
                self._host[name].grad = None
        self._inner.stepped()

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(tensor):
            return tensor.to("cpu", copy=True)
        from torch.distributed.tensor import DTensor  # loaded already, or there would be none

        mesh = tensor.device_mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = mesh if mesh.device_type == "cpu" else DeviceMesh("cpu", mesh.mesh)
        host = tensor.to_local().to("cpu", copy=True)
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(
            host, self._meshes[mesh], tensor.placements, run_check=False, shape=shape, stride=stride
        )
