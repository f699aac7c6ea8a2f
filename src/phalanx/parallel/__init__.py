"""The techniques that split work over devices, one file each, put together by ``assemble``."""

from phalanx.parallel.advice import advice, micro_batches
from phalanx.parallel.apart import Apart
from phalanx.parallel.assemble import assemble, check, device_kind
from phalanx.parallel.exactness import batch_statistics, dropouts, notes
from phalanx.parallel.example import Example
from phalanx.parallel.holding import Holding
from phalanx.parallel.layout import Held, Layout, Work
from phalanx.parallel.sync import Each, Sync
from phalanx.parallel.unused import without_gradient

__all__ = [
    "Apart",
    "Each",
    "Example",
    "Held",
    "Holding",
    "Layout",
    "Sync",
    "Work",
    "advice",
    "assemble",
    "batch_statistics",
    "check",
    "device_kind",
    "dropouts",
    "micro_batches",
    "notes",
    "without_gradient",
]
