"""GPUs of Intel, by torch's own ``torch.xpu`` and oneCCL. Written against their interface; never run on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

from phalanx.device_kinds.torch_accelerator import Accelerator

if TYPE_CHECKING:
    import torch


@final
class _Xpu(Accelerator):
    name, label, torch_type, hardware = "xpu", "XPU", "xpu", ("xpu",)
    backend = "xccl"
    streams = pinned = in_order = shared = compiles = True
    light_way = "torch.xpu.device_count()"
    heavy_ways = ".xpu(), .to('xpu'), torch.xpu.synchronize()"

    def event(self, *, timed: bool = False) -> torch.Event:
        import torch

        return cast(Any, torch.xpu.Event(enable_timing=timed))

    def queued_on(self, stream: torch.Stream) -> Any:
        import torch

        return torch.xpu.stream(cast(Any, stream))


KIND = _Xpu()
