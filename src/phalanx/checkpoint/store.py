"""Saving and loading: whole or not at all, on every rank or on none, under any plan whatever the plan that saved."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor, Placement

from phalanx.checkpoint.all_ranks import distinct, grouped, on_all_ranks, readable, some
from phalanx.checkpoint.dcp import PartLoadPlanner, PartTensor, ShardReader, ShardWriter, Writing
from phalanx.checkpoint.folder import begin, name_of, prune, publish, temporary, to_json
from phalanx.checkpoint.format import (
    DTYPES,
    MANIFEST,
    STATE,
    Manifest,
    StoredFile,
    StoredTensor,
    dtype_name,
    write_file,
)
from phalanx.errors import CheckpointError

Tensors = Mapping[str, Tensor | PartTensor]


def save(folder: Path, *, step: int, tensors: Tensors, state: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint of optimizer step ``step`` and return its path, ``folder/step-00000100``.

    Every rank of the default process group must call it; without a group this process saves alone. It is written
    under a temporary name, synced to disk and renamed once all ranks are done, so what has the final name is whole.
    Then all but the ``keep`` newest up to this step are deleted: for a moment there are ``keep`` + 1 on the disk.

    Args:
        folder: ``checkpoints`` of the run; on storage that all ranks share. Made if missing.
        step: optimizer steps done.
        tensors: by full name. A DTensor is written in the shards it has, and ``PartTensor`` as the part they are; a
            plain tensor is the same on all ranks that have it and is written by one of them. Ranks may have other
            names.
        state: JSON; rank 0's is written.
        keep: checkpoints to keep, at least 1.

    Raises:
        CheckpointError: on all ranks, if it cannot be written on any. The previous checkpoint stands.
    """
    folder = Path(folder)
    text = on_all_ranks(lambda: _checked(step, tensors, state, keep))
    names = _anywhere(tensors)

    def complete(stored: dict[str, StoredTensor], files: dict[str, StoredFile]) -> None:
        if unsaved := names - stored.keys():
            why = "held as copies only, each to be saved by a rank that does not have it"
            raise CheckpointError(f"{why}: {some(unsaved)}")
        path = temporary(folder, step)
        files = files | {STATE: write_file(path / STATE, [text])}
        manifest = Manifest(step=step, tensors=stored, files=files)
        if misfits := manifest.misfits(path):
            raise CheckpointError(f"{'; '.join(misfits)}: {folder} is not on storage that all ranks share")
        write_file(path / MANIFEST, [json.dumps(manifest.to_json()).encode()])
        publish(folder, step)

    writer = ShardWriter(temporary(folder, step), begin=lambda: begin(folder, step), complete=complete)
    try:
        with _dcp_alone():
            dcp_save(dict(tensors), storage_writer=writer, planner=Writing())
    except CheckpointException as error:
        if _is_first():
            shutil.rmtree(temporary(folder, step), ignore_errors=True)
        _pass_on_interrupt(error)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}; those before it stand\n{readable(error)}"
        ) from None
    if _is_first():
        prune(folder, step, keep)
    return folder / name_of(step)


def load(path: Path, tensors: Tensors) -> None:
    """Fill ``tensors`` in place from the checkpoint in folder ``path``, whatever the shards it was saved in.

    Every rank of the default process group must call it; without a group this process loads alone. Nothing is
    changed unless every name, global shape and dtype agrees. A tensor that is in the checkpoint only is a mistake if
    ``tensors`` holds others with the same prefix (the part of the name before the first dot): model and optimizer can
    be loaded by one call or by two, or one of them alone. Ranks may ask for other names; a tensor that any asks for is
    not a mistake.

    Raises:
        CheckpointError: on all ranks; names all missing and extra tensors and those of another shape or dtype, or
            says which files are missing or cut short.
    """
    path = Path(path)
    names = _anywhere(tensors)
    manifest = on_all_ranks(lambda: _fitting(path, tensors, names))
    targets = {name: held if isinstance(held, PartTensor) else held.detach() for name, held in tensors.items()}
    try:
        with _dcp_alone():
            dcp_load(targets, storage_reader=ShardReader(path, manifest), planner=PartLoadPlanner())
    except CheckpointException as error:
        _pass_on_interrupt(error)
        raise CheckpointError(f"{path} could not be read\n{readable(error)}") from None


def read_state(path: Path) -> dict[str, Any]:
    """The ``state`` that was saved with the checkpoint in folder ``path``; tuples come back as lists.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    file = Path(path) / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {STATE}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is damaged: it holds no JSON object")
    return state


def _anywhere(tensors: Tensors) -> set[str]:
    return set().union(*distinct(sorted(tensors)))


def _checked(step: int, tensors: Tensors, state: Mapping[str, Any], keep: int) -> bytes:
    if step < 0 or keep < 1:
        raise CheckpointError(f"given step={step}, keep={keep}; allowed: step of at least 0, keep of at least 1")

    def placements(tensor: Tensor) -> Sequence[Placement]:
        return tensor.placements if isinstance(tensor, DTensor) else ()

    for said, wrong in {
        "not tensors, so they would have to be pickled; put them in state": lambda t: not isinstance(t, Tensor),
        "on the meta device, so they have no values": lambda t: t.device.type == "meta",
        "DTensors that wait for a reduction (Partial)": lambda t: any(p.is_partial() for p in placements(t)),
        f"of a dtype that a checkpoint cannot hold ({', '.join(DTYPES)})": lambda t: dtype_name(t.dtype) not in DTYPES,
        "not dense": lambda t: t.layout != torch.strided,
    }.items():
        if names := [name for name, held in tensors.items() if wrong(_local(held))]:
            raise CheckpointError(f"{said}: {some(names)}")
    return to_json(state, "the state of a checkpoint")


def _fitting(path: Path, tensors: Tensors, names: set[str]) -> Manifest:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    manifest = Manifest.read(path)
    if misfits := manifest.misfits(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: {'; '.join(misfits)}")
    if meta := [name for name, held in tensors.items() if _local(held).device.type == "meta"]:
        raise CheckpointError(f"on the meta device, so there is nothing to load into: {some(meta)}")
    if different := _different(tensors, names, manifest.tensors):
        raise CheckpointError("\n    ".join([f"{path} does not fit: checkpoint of another model?", *different]))
    return manifest


def _different(tensors: Tensors, names: set[str], stored: Mapping[str, StoredTensor]) -> list[str]:
    """What ``tensors`` of this rank and ``names`` of all ranks have otherwise than the checkpoint."""
    prefixes = {_prefix(name) for name in names}
    missing = [name for name in names if name not in stored]
    extra = [name for name in stored if name not in names and _prefix(name) in prefixes]
    other = [
        f"{name} {_kind(tensor)} here, {_kind(stored[name])} there"
        for name, tensor in tensors.items()
        if name in stored and _kind(tensor) != _kind(stored[name])
    ]
    found = {"missing from the checkpoint": missing, "only in the checkpoint": extra, "other shape or dtype": other}
    return [f"{said} ({len(names)}): {some(names)}" for said, names in found.items() if names]


def _local(held: Tensor | PartTensor) -> Tensor:
    return held.local if isinstance(held, PartTensor) else held


def _kind(tensor: Tensor | PartTensor | StoredTensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _prefix(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""


def _is_first() -> bool:
    return not grouped() or dist.get_rank() == 0


def _pass_on_interrupt(error: CheckpointException) -> None:
    own, _ = error.failures.get(dist.get_rank() if grouped() else 0, (None, None))
    if own is not None and not isinstance(own, Exception):
        raise own from None


@contextmanager
def _dcp_alone() -> Iterator[None]:
    # DCP warns where there is no process group; here that is one of the two normal cases.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
