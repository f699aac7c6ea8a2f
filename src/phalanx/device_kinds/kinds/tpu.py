"""TPUs of Google by TorchTPU, the package ``torch_tpu``. Written against its version 0.2; never run on a TPU.

torch loads the installed package by itself (an entry point of ``torch.backends``). If it finds TPUs, torch has the
device type ``tpu`` and the backend ``tpu_dist`` for collectives from then on. A process has one TPU, picked by
torchrun's variables: workers are started by torchrun, not forked. Streams and events exist in name only.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

from phalanx.device_kinds.torch_accelerator import Accelerator

if TYPE_CHECKING:
    import torch

    from phalanx.device_kinds.interface import DeviceMemory

_LISTING = """
import json, torch
found = [torch.tpu.get_device_properties(index) for index in range(torch.accelerator.device_count())]
print(json.dumps([[one.name, one.total_memory] for one in found]))
"""


@final
class _Tpu(Accelerator):
    name, label, torch_type, hardware = "tpu", "TPU", "tpu", ("tpu",)
    backend, precisions, listing = "tpu_dist", ("fp32", "bf16"), _LISTING
    pod_resource = "google.com/tpu"
    in_order = compiles = True
    automatic = forks = False  # a run says that it wants them, and how its workers start

    def missing(self) -> str:
        if find_spec("torch_tpu") is None:
            return "torch_tpu, by which torch uses TPUs, is not installed: pip install torch_tpu libtpu"
        return "" if self.is_built() else "torch_tpu finds no TPU on this machine"

    def count(self) -> int:
        import torch

        return torch.accelerator.device_count() if self.is_built() else 0

    def device(self, index: int) -> torch.device:
        return self.current()  # that of this process, whatever its place: it has no other

    def generator(self, device: torch.device) -> torch.Generator:
        return self.module()._get_generator(device)

    def before_workers(self, machines: int, workers: int) -> None:
        set_up: Any = import_module("torch.tpu.distributed").set_tpu_launch_env
        set_up(nnodes=machines, nproc_per_node=workers)

    def in_use(self) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says of itself that it is experimental
            return super().in_use()

    def memory(self) -> DeviceMemory | None:
        try:
            return super().memory()
        except RuntimeError:  # not every version of it counts memory
            return None


KIND = _Tpu()
