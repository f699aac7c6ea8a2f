"""Checkpoints that know tensors by full name and shard, so that any plan loads what any other saved."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.folder import latest, verify

if TYPE_CHECKING:
    from phalanx.checkpoint.dcp import PartTensor, TensorPart
    from phalanx.checkpoint.optimizer import optimizer_tensors, restore_optimizer
    from phalanx.checkpoint.store import load, read_state, save

__all__ = [
    "PartTensor",
    "TensorPart",
    "latest",
    "load",
    "optimizer_tensors",
    "read_state",
    "restore_optimizer",
    "save",
    "verify",
]

_WHERE = {
    **dict.fromkeys(("optimizer_tensors", "restore_optimizer"), "optimizer"),
    **dict.fromkeys(("PartTensor", "TensorPart"), "dcp"),
    **dict.fromkeys(("load", "read_state", "save"), "store"),
}


def __getattr__(name: str) -> Any:
    # Saving and loading load torch's checkpoint package, which takes as long as torch; asking for the newest does not.
    if name not in _WHERE:
        raise AttributeError(f"module 'phalanx.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"phalanx.checkpoint.{_WHERE[name]}"), name)
