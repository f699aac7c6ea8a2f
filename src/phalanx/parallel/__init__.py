"""The techniques that split work over devices, one file each, combined by ``assemble``."""

from phalanx.parallel.advice import advice, batch_statistics, dropouts, notes, without_gradient
from phalanx.parallel.assemble import assemble, assemble_phases, check, device_kind, devices_here
from phalanx.parallel.grad_reduce import EveryStep, Sync
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, TensorShard
from phalanx.parallel.local_sgd import LocalSgd
from phalanx.parallel.survey import Example

__all__ = [
    "EveryStep",
    "Example",
    "Layout",
    "LocalSgd",
    "MicroBatchWork",
    "RankHoldings",
    "Sync",
    "TensorShard",
    "advice",
    "assemble",
    "assemble_phases",
    "batch_statistics",
    "check",
    "device_kind",
    "devices_here",
    "dropouts",
    "notes",
    "without_gradient",
]
