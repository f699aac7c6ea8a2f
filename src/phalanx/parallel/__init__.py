"""The techniques that split work over devices, one file each, put together by ``assemble``."""

from phalanx.parallel.assemble import assemble, check, device_kind
from phalanx.parallel.exactness import batch_statistics, dropouts, notes
from phalanx.parallel.layout import Held, Layout, Work
from phalanx.parallel.unused import without_gradient

__all__ = [
    "Held",
    "Layout",
    "Work",
    "assemble",
    "batch_statistics",
    "check",
    "device_kind",
    "dropouts",
    "notes",
    "without_gradient",
]
