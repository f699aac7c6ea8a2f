"""GPUs of NVIDIA, and of AMD with torch built for ROCm, which uses the same name."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

from phalanx.device_kinds.interface import AttentionKernels, DeviceMemory
from phalanx.device_kinds.torch_accelerator import Accelerator

if TYPE_CHECKING:
    import torch


_LISTING = """
import json, torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[one.name, one.total_memory] for one in found]))
"""


@final
class _Cuda(Accelerator):
    name, label, torch_type, hardware = "cuda", "CUDA", "cuda", ("cuda", "rocm")
    backend, interfaces = "nccl", ("NCCL_SOCKET_IFNAME",)
    fitted = streams = pinned = in_order = shared = compiles = True
    lost_peer = "nccl.*(abort|remote|system error|timeout|unhandled)"
    visible, pod_resource = "CUDA_VISIBLE_DEVICES", "nvidia.com/gpu"
    versions: ClassVar[Mapping[str, str]] = {"cuda": "CUDA of torch", "nccl": "NCCL"}
    listing = _LISTING
    driver_tool, driver_reset = "nvidia-smi", "nvidia-smi -r -i {index}"
    light_way = "torch.cuda.device_count() in place of torch.cuda.is_available()"
    heavy_ways = ".cuda(), .to('cuda'), torch.cuda.synchronize()"

    def count(self) -> int:
        """Count devices through NVML, because a process that has initialised CUDA cannot fork workers."""
        import torch

        return torch.cuda.device_count()

    def driver(self) -> tuple[int, str, str]:
        text, error = _printed("--query-gpu=driver_version", "--format=csv,noheader")
        return len(text.split()), text.partition("\n")[0].strip(), error.strip().rpartition("\n")[2]

    def topology(self) -> str:
        return _printed("topo", "-m")[0]

    def current(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def use(self, device: torch.device) -> None:
        import torch

        torch.cuda.set_device(device)

    def in_use(self) -> bool:
        import torch

        return torch.cuda.is_initialized()

    def spoilt(self) -> bool:
        import torch

        return torch.cuda._is_in_bad_fork()

    def asks_lightly(self) -> Mapping[str, str]:
        # torch.cuda.is_available() then asks the driver's library for management, and initialises nothing
        return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def event(self, *, timed: bool = False) -> torch.Event:
        import torch

        return torch.cuda.Event(enable_timing=timed)

    def stream(self, device: torch.device) -> torch.Stream:
        import torch

        return torch.cuda.Stream(device)

    def queued_on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(cast(Any, stream))

    def current_stream(self, device: torch.device) -> torch.Stream:
        import torch

        return torch.cuda.current_stream(device)

    def memory(self) -> DeviceMemory:
        import torch

        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(
            peak=torch.cuda.max_memory_allocated(),
            allocated=torch.cuda.memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            free=free,
            total=total,
        )

    def attention(self) -> AttentionKernels:
        import torch

        switches = torch.backends.cuda
        return AttentionKernels(
            flash=switches.is_flash_attention_available() and switches.flash_sdp_enabled(),
            efficient=switches.mem_efficient_sdp_enabled(),
            features=8,
            most_features=256,
        )


def _printed(*words: str) -> tuple[str, str]:
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return "", "" if isinstance(error, FileNotFoundError) else str(error)
    return ("", (done.stdout + done.stderr).strip() or "nvidia-smi failed") if done.returncode else (done.stdout, "")


KIND = _Cuda()
