"""Checkpoints stored by tensor name and shard, so that any plan loads a checkpoint of any other plan."""

from phalanx.checkpoint.background import BackgroundSaver, Saving
from phalanx.checkpoint.best import BestSoFar, best_step
from phalanx.checkpoint.export import Exported, ExportForm, contents, export, model_tensors
from phalanx.checkpoint.folder import FoundCheckpoint, checkpoints, latest, prune
from phalanx.checkpoint.optimizer import optimizer_tensors, restore_optimizer
from phalanx.checkpoint.reading import read_state, verify
from phalanx.checkpoint.store import SaveRequest, load, resume_newest, save
from phalanx.checkpoint.tensor_part import PartTensor, TensorPart

__all__ = [
    "BackgroundSaver",
    "BestSoFar",
    "ExportForm",
    "Exported",
    "FoundCheckpoint",
    "PartTensor",
    "SaveRequest",
    "Saving",
    "TensorPart",
    "best_step",
    "checkpoints",
    "contents",
    "export",
    "latest",
    "load",
    "model_tensors",
    "optimizer_tensors",
    "prune",
    "read_state",
    "restore_optimizer",
    "resume_newest",
    "save",
    "verify",
]
