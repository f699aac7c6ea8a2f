"""Checkpoints that know tensors by full name and shard, so that any plan loads what any other saved."""

from phalanx.checkpoint.background import BackgroundSaver, Saving
from phalanx.checkpoint.export import Exported, contents, export
from phalanx.checkpoint.folder import FoundCheckpoint, checkpoints, latest, prune
from phalanx.checkpoint.optimizer import optimizer_tensors, restore_optimizer
from phalanx.checkpoint.reading import read_state, verify
from phalanx.checkpoint.store import SaveRequest, load, resume_newest, save
from phalanx.checkpoint.survivor import save_as_survivor
from phalanx.checkpoint.tensor_part import PartTensor, TensorPart

__all__ = [
    "BackgroundSaver",
    "Exported",
    "FoundCheckpoint",
    "PartTensor",
    "SaveRequest",
    "Saving",
    "TensorPart",
    "checkpoints",
    "contents",
    "export",
    "latest",
    "load",
    "optimizer_tensors",
    "prune",
    "read_state",
    "restore_optimizer",
    "resume_newest",
    "save",
    "save_as_survivor",
    "verify",
]
