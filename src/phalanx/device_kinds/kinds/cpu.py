"""The cores of a host, each process with its share of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from phalanx.device_kinds.interface import AttentionKernels, DeviceKind

if TYPE_CHECKING:
    import torch


@final
class _Cpu(DeviceKind):
    name, label, torch_type, hardware = "cpu", "CPU", "cpu", ("cpu",)
    backend, interfaces = "gloo", ("GLOO_SOCKET_IFNAME",)
    fitted = automatic = on_host = shared = True
    lost_peer = "gloo.*(timed out|timeout)"

    def count(self) -> int:
        import os

        return os.cpu_count() or 1

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def current(self) -> torch.device:
        return self.device(0)

    def generator(self, device: torch.device) -> torch.Generator:
        import torch

        return torch.default_generator

    def attention(self) -> AttentionKernels:
        return AttentionKernels(flash=self.attention_switches()[0])

    def attention_switches(self) -> tuple[bool, ...]:
        import torch

        switches = torch.backends.cuda  # that is where torch keeps those of all devices
        return switches.flash_sdp_enabled(), switches.math_sdp_enabled(), switches.mem_efficient_sdp_enabled()


KIND = _Cpu()
