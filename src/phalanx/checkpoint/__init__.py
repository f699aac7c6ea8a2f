"""Checkpoints that know tensors by full name and shard, so that any plan loads what any other saved."""

from phalanx.checkpoint.folder import latest
from phalanx.checkpoint.optimizer import optimizer_tensors, restore_optimizer
from phalanx.checkpoint.pieces import Part, Pieces
from phalanx.checkpoint.store import load, read_state, save
from phalanx.checkpoint.verify import verify

__all__ = ["Part", "Pieces", "latest", "load", "optimizer_tensors", "read_state", "restore_optimizer", "save", "verify"]
