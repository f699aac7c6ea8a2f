"""The hardware of machines: of this one as probed, of others from the catalog."""

from phalanx.hardware.catalog import device, entry, names
from phalanx.hardware.cluster_text import cluster
from phalanx.hardware.probe import (
    cores,
    keep_freed_memory,
    memory_bytes,
    peak_memory,
    return_freed_memory,
    this_machine,
)

__all__ = [
    "cluster",
    "cores",
    "device",
    "entry",
    "keep_freed_memory",
    "memory_bytes",
    "names",
    "peak_memory",
    "return_freed_memory",
    "this_machine",
]
