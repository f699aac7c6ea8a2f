"""The common code of all accelerators: torch.accelerator, and torch's module for each kind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from phalanx.device_kinds.interface import DeviceKind, DeviceMemory

if TYPE_CHECKING:
    import torch


class Accelerator(DeviceKind):
    """A kind with its own torch module (``torch.NAME``), served by ``torch.accelerator``."""

    automatic = True
    listing = """
import json, torch
count = torch.accelerator.device_count()
print(json.dumps([["", torch.accelerator.get_memory_info(index)[1]] for index in range(count)]))
"""

    def count(self) -> int:
        return self.module().device_count() if self.is_built() else 0

    def is_built(self) -> bool:
        """Return True if the installed torch is built for this kind. Does not begin to use a device."""
        import torch

        there = torch.accelerator.current_accelerator()
        return there is not None and there.type == self.torch_type

    def module(self) -> Any:
        """Return torch's own module, such as ``torch.NAME``."""
        import torch

        return torch.get_device_module(self.torch_type)

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device(self.torch_type, index)

    def current(self) -> torch.device:
        import torch

        return torch.device(self.torch_type, torch.accelerator.current_device_index())

    def use(self, device: torch.device) -> None:
        import torch

        torch.accelerator.set_device_index(device)

    def generator(self, device: torch.device) -> torch.Generator:
        return self.module().default_generators[device.index or 0]

    def in_use(self) -> bool:
        return self.is_built() and bool(self.module().is_initialized())

    def spoilt(self) -> bool:
        return self.is_built() and bool(self.module()._is_in_bad_fork())

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize()

    def event(self, *, timed: bool = False) -> torch.Event:
        import torch

        return torch.Event(self.torch_type, enable_timing=timed)

    def stream(self, device: torch.device) -> torch.Stream:
        import torch

        return torch.Stream(device)

    def queued_on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def current_stream(self, device: torch.device) -> torch.Stream:
        import torch

        return torch.accelerator.current_stream(device)

    def memory(self) -> DeviceMemory | None:
        import torch

        free, total = torch.accelerator.get_memory_info()
        return DeviceMemory(
            peak=torch.accelerator.max_memory_allocated(),
            allocated=torch.accelerator.memory_allocated(),
            reserved=torch.accelerator.memory_reserved(),
            free=free,
            total=total,
        )
