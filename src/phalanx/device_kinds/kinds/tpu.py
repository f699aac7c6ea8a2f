"""TPUs of Google by TorchTPU, the package ``torch_tpu``. Written against its version 0.2; never run on a TPU.

torch loads it with itself where it is installed (an entry point), and has ``torch.tpu`` and the backend ``tpu_dist``
from then on. A process has one TPU, which its local rank picks; streams and events are there in name only.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, final

from phalanx.device_kinds.accelerator import Accelerator

if TYPE_CHECKING:
    import torch

_INSTALL = "pip install torch_tpu, on a machine with TPUs; torch then loads it by itself"


@final
class _Tpu(Accelerator):
    name, label, torch_type, hardware = "tpu", "TPU", "tpu", ("tpu",)
    backend = "tpu_dist"
    in_order = compiles = True

    def missing(self) -> str:
        if find_spec("torch_tpu") is None:
            return f"torch_tpu is not installed here: {_INSTALL}"
        return "" if self.is_built() else "torch has not loaded torch_tpu: leave TORCH_DEVICE_BACKEND_AUTOLOAD alone"

    def count(self) -> int:
        import torch

        return torch.accelerator.device_count() if self.is_built() else 0

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("tpu", torch.accelerator.current_device_index())


KIND = _Tpu()
