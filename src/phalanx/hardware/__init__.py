"""What machines have."""

from phalanx.hardware.allocator import return_freed_memory
from phalanx.hardware.probe import cores, cuda_devices, memory_bytes, peak_memory, this_machine

__all__ = ["cores", "cuda_devices", "memory_bytes", "peak_memory", "return_freed_memory", "this_machine"]
