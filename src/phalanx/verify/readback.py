"""Reads a run's last checkpoint back: its tensors as they are, and what one device makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from phalanx.comm import Place, device_for, joined
from phalanx.config import Job, Plan
from phalanx.launch import launch
from phalanx.train.assembly import build
from phalanx.train.observer import AssemblyScene
from phalanx.train.state import restore

_LOADED = "loaded.safetensors"


def read_back(job: Job, path: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the checkpoint in folder ``path`` holds, and what one device that resumes from it begins with.

    Both are read at the same time. ``folder`` is for files.

    Raises:
        WorkerError: if the checkpoint cannot be loaded.
    """
    saved: dict[str, Tensor] = {}

    def meanwhile() -> None:
        if not saved:
            saved.update(saved_in(path))

    loaded = loaded_by_one_device(job, path, folder, meanwhile)
    meanwhile()
    return saved, loaded


def saved_in(path: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in folder ``path``, whole: ``model.<name>``, ``optimizer.<parameter>.<key>``."""
    from phalanx import checkpoint
    from phalanx.checkpoint.format import Manifest

    stored = Manifest.read(path).tensors
    found = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    checkpoint.load(path, found)
    return found


def loaded_by_one_device(
    job: Job, path: Path, folder: Path, watch: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """What one device that resumes from the checkpoint ``path`` begins with, named likewise; ``folder`` is for files.

    ``watch`` is called meanwhile.

    Raises:
        WorkerError: if it cannot be loaded.
    """

    def work(place: Place, report: Callable[[int], None]) -> Any:
        plan = Plan(device="cpu")
        with joined(place, device_for(place, "cpu")):
            assembly = build(job, plan, place)
            restore(path, job, assembly)
            scene = AssemblyScene(assembly)
            found = {f"model.{name}": tensor for name, tensor in {**scene.values(), **scene.buffers()}.items()}
            found |= {
                f"optimizer.{name}.{key}": tensor
                for name, state in scene.state().items()
                for key, tensor in state.items()
                if isinstance(tensor, Tensor)
            }
            found["progress.step"] = torch.tensor(float(assembly.step.progress.step))
            save_file({name: tensor.detach().clone() for name, tensor in found.items()}, folder / _LOADED)

    launch(work, 1, watch=watch)
    return load((folder / _LOADED).read_bytes())
