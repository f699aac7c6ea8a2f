"""Whether two run folders hold the same: final weights bit for bit, and the samples of every step.

Checkpoints are read here by their manifest and by safetensors alone, not by the code that wrote them.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from phalanx.config import Plan
from phalanx.config.run_files import CHECKPOINTS, LEDGER
from phalanx.data import audit_run, records
from phalanx.errors import CheckpointError, DataError
from phalanx.events import RunLog

ROUNDING = 1e-4
"""Relative difference, of the whole tensor, that sums in another order may make over a short run in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """How a plan's run repeats: ``bits``, ``rounding`` (sums come in another order), or ``samples`` alone."""

    by: str
    why: str

    @classmethod
    def of(cls, plan: Plan) -> Repeats:
        """What two undisturbed runs under ``plan`` have in common."""
        if plan.staleness or plan.backup:
            return cls(by="samples", why="gradients may be stale, so no two runs are equal")
        if plan.shares == "auto":
            return cls(by="rounding", why="shares follow what is measured")
        if plan.server:
            return cls(by="rounding", why="servers add gradients up as they come")
        return cls(by="bits", why="")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsCompared:
    """Final checkpoints, tensor by tensor: weights and optimizer state.

    Attributes:
        tensors: compared.
        differing: of those, how many are not equal bit for bit.
        largest: the largest relative difference of a tensor, by its L2 norm.
        first: the first that differs more than is allowed; empty where none does.
        allowed: the largest relative difference that is; a number that is not finite never is.
    """

    tensors: int
    differing: int
    largest: float
    first: str
    allowed: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_weights(one: Path, other: Path, repeats: Repeats) -> WeightsCompared:
    """The final checkpoints in two run folders.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    first, second = final_tensors(one), final_tensors(other)
    if first.keys() != second.keys():
        names = sorted(first.keys() ^ second.keys())
        return WeightsCompared(tensors=len(first), differing=len(names), largest=math.inf, first=names[0], allowed=0.0)
    allowed = {"bits": 0.0, "rounding": ROUNDING, "samples": sys.float_info.max}[repeats.by]
    differences = {name: _difference(first[name], second[name]) for name in sorted(first)}
    beyond = [name for name, difference in differences.items() if not difference <= allowed]
    return WeightsCompared(
        tensors=len(first),
        differing=sum(difference != 0 for difference in differences.values()),
        largest=max(differences.values(), default=0.0),
        first=beyond[0] if beyond else "",
        allowed=allowed,
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """0 where equal bit for bit, else the relative difference; infinite where a number is not finite."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)):
        return 0.0 if not one.is_floating_point() or bool(one.isfinite().all()) else math.inf
    ours, theirs = one.double(), other.double()
    apart = (ours - theirs).norm().item()
    if not math.isfinite(apart):
        return math.inf
    return max(apart / max(theirs.norm().item(), 1e-12), 1e-300)


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint of the highest step in a run folder, put together of its chunks, by name.

    Raises:
        CheckpointError: there is none, or chunks are missing or do not fill their tensor.
    """
    steps = sorted((folder / CHECKPOINTS).glob("step-*"), key=lambda path: (len(path.name), path.name))
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint")
    try:
        manifest = json.loads((steps[-1] / "manifest.json").read_text())
        return {name: _whole(steps[-1], name, entry) for name, entry in manifest["tensors"].items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{steps[-1]} cannot be read: {type(error).__name__}: {error}") from error


def _whole(checkpoint: Path, name: str, entry: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    whole = torch.zeros(entry["shape"], dtype=dtype)
    filled = torch.zeros(entry["shape"], dtype=torch.int32)
    for chunk in entry["chunks"]:
        with safe_open(checkpoint / chunk["file"], framework="pt") as file:
            part = file.get_tensor(chunk["key"])
        place = tuple(slice(at, at + size) for at, size in zip(chunk["offsets"], chunk["sizes"], strict=True))
        if part.dtype != dtype or list(part.shape) != list(chunk["sizes"]):
            raise CheckpointError(f"{checkpoint}: {name} is {part.dtype} of {list(part.shape)} in {chunk['file']}")
        whole[place] = part
        filled[place] += 1
    if not bool((filled == 1).all()):
        raise CheckpointError(f"{checkpoint}: the chunks of {name} do not fill it, each element once")
    return whole


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesCompared:
    """The ledgers of two runs.

    Attributes:
        steps: in the undisturbed run.
        lost: samples of a step there that the disturbed run did not see in that step.
        doubled: samples that it saw in a step beyond those.
        wrong: what is wrong in its ledger by itself, one sentence each.
    """

    steps: int
    lost: int
    doubled: int
    wrong: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_samples(one: Path, other: Path) -> SamplesCompared:
    """Which samples the run in folder ``other`` saw in each step, against those of the run in ``one``."""
    wanted = read_ledger(one / LEDGER)
    try:
        seen = read_ledger(other / LEDGER)
        start = next(event for event in RunLog(other).events if event["event"] == "start")
        wrong = tuple(audit_run(other / LEDGER, start))
    except (DataError, OSError) as error:
        return SamplesCompared(steps=len(wanted), lost=0, doubled=0, wrong=(str(error),))
    nothing = (0, np.empty(0, dtype=np.int64))
    lost = doubled = 0
    for step in wanted.keys() | seen.keys():
        (epoch, ids), (epoch_there, there) = wanted.get(step, nothing), seen.get(step, nothing)
        if step in seen and step in wanted and epoch != epoch_there:
            wrong += (f"step {step} is of epoch {epoch_there} in place of {epoch}",)
        lost += _beyond(ids, there)
        doubled += _beyond(there, ids)
    return SamplesCompared(steps=len(wanted), lost=lost, doubled=doubled, wrong=wrong)


def _beyond(ids: np.ndarray, others: np.ndarray) -> int:
    """How many of ``ids`` there are beyond those in ``others``, each counted as often as it stands there."""
    values, counts = np.unique(ids, return_counts=True)
    there = dict(zip(*np.unique(others, return_counts=True), strict=True))
    return sum(max(0, int(count) - int(there.get(value, 0))) for value, count in zip(values, counts, strict=True))


def read_ledger(folder: Path) -> dict[int, tuple[int, np.ndarray]]:
    """Return for each step in order, its epoch and the sorted ids (int64) of its global batch, over all ranks.

    Raises:
        DataError: if a file is no ledger.
    """
    return {
        step: (those[0].epoch, np.sort(np.concatenate([record.ids for record in those])).astype(np.int64))
        for step, those in records(folder).items()
    }
