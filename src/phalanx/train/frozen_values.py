"""Fingerprints of untrained parameters, for runs whose checkpoints hold trained values only.

A fingerprint adds up over the blocks of a tensor, modulo 2^64: it is the same under any cut of a plan. It sums every
element's bits times a weight of its place in the whole, so that one changed value, or two swapped values, give another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint import PartTensor, read_state
from phalanx.checkpoint.export import not_whole
from phalanx.checkpoint.sections import FROZEN, MODEL, name_in, names_of, put_in
from phalanx.checkpoint.tensor_part import blocks_of
from phalanx.config import Job
from phalanx.errors import CheckpointError, RunError
from phalanx.parallel import Layout
from phalanx.units import show_names

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD, _STEP = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D  # of the weights; any odd numbers that fill 64 bits would do
_PIECE = 1 << 22  # elements at a time, for their places take eight bytes each

Held = Mapping[str, Tensor | PartTensor]


def frozen_of(layout: Layout, tensors: Held) -> dict[str, Tensor | PartTensor]:
    """Return the untrained parameters among a model's ``tensors``, by their names in checkpoints."""
    names = {name_in(MODEL, name) for name, one in layout.module.named_parameters() if not one.requires_grad}
    trained = {name_in(MODEL, name) for name in layout.parameters}
    return {name: held for name, held in tensors.items() if name in names - trained}


@torch.no_grad()
def fingerprints_of(held: Held, everyone: Callable[[Any], list[Any]]) -> dict[str, str]:
    """Return the fingerprint of each tensor that the ranks have together, by name. Collective by ``everyone``."""
    here = {
        name: [
            [list(offsets), list(block.shape), _fingerprint_of(block.detach(), offsets, tuple(one.shape))]
            for offsets, block in blocks_of(one).items()
        ]
        for name, one in held.items()
    }
    blocks: dict[str, dict[str, int]] = {}
    for there in everyone(here):
        for name, found in there.items():
            blocks.setdefault(name, {}).update({f"{offsets} {sizes}": value for offsets, sizes, value in found})
    return {name: f"{sum(each.values()) % (1 << 64):016x}" for name, each in sorted(blocks.items())}


def refuse_other(saved: Mapping[str, str], now: Mapping[str, str], path: Path) -> None:
    """Refuse to resume from ``path`` with other frozen values than it was trained with.

    Raises:
        CheckpointError: with the names of those that differ, or are not frozen any more.
    """
    if other := [own for own, name in names_of(MODEL, saved).items() if now.get(name) != saved[name]]:
        raise CheckpointError(
            f"{path} holds what is trained alone, and of what is not, other values are here: {show_names(other)}. They "
            "come from job.model and job.initial, which a run with checkpoint='all' does not read when it resumes.\n"
            "    try: the base that the run began with, and checkpoint='trainable'"
        )


def refuse_moved(began: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to save without frozen values that have changed since the run began.

    Raises:
        RunError: with the names of the changed values, such as a teacher that follows its student.
    """
    if moved := [own for own, name in names_of(MODEL, began).items() if now.get(name) != began[name]]:
        raise RunError(
            f"values that no optimizer steps have changed since the run began: {show_names(moved)}. Checkpoints of "
            "what is trained alone would lose them.\n    try: checkpoint='all'"
        )


def completed(job: Job | None, path: Path, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` of the checkpoint ``path`` with missing frozen values from ``job``.

    Raises:
        SpecError: some are missing, and no job is known.
        CheckpointError: the job has others.
    """
    return values | left_out(job, path)


def left_out(job: Job | None, path: Path) -> dict[str, Tensor]:
    """Return the frozen values missing in the checkpoint ``path``, from ``job``, by their names in the model.

    Raises:
        SpecError: some are missing, and no job is known.
        CheckpointError: the job has others.
    """
    saved = read_state(path).get(FROZEN) or {}
    if not saved:
        return {}
    if job is None:
        raise not_whole(path)
    from phalanx.train.build_model import build_model

    with torch.random.fork_rng(devices=[]):
        own = build_model(job).state_dict(keep_vars=True)
    there = {name: own[name].detach() for name in names_of(MODEL, saved) if name in own}
    refuse_other(saved, fingerprints_of(put_in(MODEL, there), lambda here: [here]), path)
    return there


def _fingerprint_of(block: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    if not block.numel():
        return 0
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = prod(block.shape[1:])
    rows = max(1, _PIECE // max(inner, 1))
    total = 0
    for begin in range(0, block.shape[0] if shape else 1, rows):
        piece = (block[begin : begin + rows] if shape else block).contiguous()
        place = torch.zeros((), dtype=torch.int64, device=piece.device)
        for dim, length in enumerate(piece.shape):
            start = offsets[dim] + (begin if dim == 0 else 0)
            along = torch.arange(start, start + length, device=piece.device) * strides[dim]
            place = place.unsqueeze(-1) + along
        bits = piece.view(_BITS[piece.element_size()]) if piece.dtype != torch.bool else piece
        mixed = (place * _ODD + _STEP) ^ ((place * _STEP) >> 29)
        total += int(((bits.to(torch.int64) + 1) * mixed).sum())
    return total % (1 << 64)
