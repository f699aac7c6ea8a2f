"""The one GPU of a Mac. Written against torch's ``torch.mps``; never run on one.

There is no backend for collectives of its tensors, so that a run has one device. Its floating point types end at fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from phalanx.device_kinds.interface import DeviceKind, DeviceMemory

if TYPE_CHECKING:
    import torch


@final
class _Mps(DeviceKind):
    name, label, torch_type, hardware = "mps", "MPS", "mps", ("mps",)
    backend, most = "gloo", 1
    compiles = True
    forks = False  # Metal does not work in a process that was forked
    listing = "import json, torch; print(json.dumps([['', torch.mps.recommended_max_memory()]]))"

    def count(self) -> int:
        import torch

        return torch.mps.device_count() if torch.backends.mps.is_available() else 0

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("mps", 0)

    def current(self) -> torch.device:
        return self.device(0)

    def generator(self, device: torch.device) -> torch.Generator:
        import torch

        return torch.mps._get_default_mps_generator()

    def synchronize(self) -> None:
        import torch

        torch.mps.synchronize()

    def memory(self) -> DeviceMemory:
        import torch

        held, most = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        now = torch.mps.current_allocated_memory()  # nothing keeps the peak
        return DeviceMemory(peak=held, allocated=now, reserved=held, free=most - held, total=most)

    def widest(self) -> torch.dtype:
        import torch

        return torch.float32


KIND = _Mps()
