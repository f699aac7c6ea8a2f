"""A kind of device for tests: called by a name of its own, it computes with the cores of the host."""

from __future__ import annotations

import torch

from phalanx.device_kinds import DeviceKind, host


class StandIn(DeviceKind):
    """Its tensors are the host's and go by gloo."""

    name, label, torch_type, hardware = "standin", "stand-in", "cpu", ("standin",)
    backend = "gloo"
    on_host = True

    def count(self) -> int:
        return host().count()

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def current(self) -> torch.device:
        return self.device(0)

    def generator(self, device: torch.device) -> torch.Generator:
        return host().generator(device)


KIND = StandIn()
