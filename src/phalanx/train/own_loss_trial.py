"""A trial on a few samples: a model's own loss must add up by its count.

``px.model_loss`` multiplies the model's mean by a count. A wrong count, or a term that is no mean over the counted
items, such as a router's loss added by the model, gives another result for each way to split a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.config import Job
from phalanx.config.losses import IGNORED, ModelLoss
from phalanx.data import Loader
from phalanx.data.step_batch import rows_of
from phalanx.errors import Problem
from phalanx.train.evaluate import evaluation_mode
from phalanx.train.few_samples import HOST, PARTS
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.own_loss import COUNT
from phalanx.train.padding_free import row_lengths

_SAME, _SAME_HALF = 2e-5, 2e-2
"""Relative difference up to which losses of a whole and of its parts are the same: in fp32, and in less."""


def miscounted(job: Job, module: nn.Module, loader: Loader) -> list[Problem]:
    """Return a problem if the first samples' own losses do not add up by their counts. Draws random numbers."""
    if not isinstance(job.loss, ModelLoss):
        return []
    if loader.length is not None and loader.length < 2:
        return []
    tries = _tries(loader, PARTS if loader.length is None else min(PARTS, loader.length))
    with torch.no_grad(), evaluation_mode(module):
        given = ""
        for batch, alone in tries:
            try:
                given = _of_parts(job, module, batch, alone)
            except Exception:  # labels of -100 are not every model's; others, the job's own run shows
                continue
            if given:
                break
    if not given:
        return []
    allowed = "a mean over what is counted and nothing else; a loss that a model adds to it (of a router, say) is none"
    return [Problem(where="job.loss", given=given, allowed=allowed, fix=COUNT)]


def _tries(loader: Loader, size: int) -> list[tuple[Any, list[Any]]]:
    looked_at = list(loader.spread(size))
    batch, alone = loader.collate([place for place, _ in looked_at]), [one for _, one in looked_at]
    if row_lengths(batch, alone):
        return [(batch, alone)]
    batch = loader.example(size)
    uneven = _unevenly_labelled(batch, size)
    batches = [one for one in (uneven, batch) if one is not None]
    return [(one, [rows_of(one, [row], size) for row in range(size)]) for one in batches]


def _unevenly_labelled(batch: Any, samples: int) -> Any:
    """Remove labels unevenly over the samples, so that a wrong count shows; ``None`` without labels.

    The second sample loses its first label, which causal language models do not count.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return None
    labels = labels.clone()
    for row in range(1, samples):
        labels[row, : 1 + (row - 1) * (labels.shape[1] - 1) // samples] = IGNORED
    return {**batch, "labels": labels}


def _of_parts(job: Job, module: nn.Module, batch: Any, alone: Sequence[Any]) -> str:
    inputs, samples = Inputs(job, module), len(alone)

    def total(batch: Any, samples: int) -> tuple[float, float]:
        args, kwargs, part = inputs(batch, HOST)
        torch.manual_seed(0)
        read = read_loss(job.loss(module(*args, **kwargs), part), samples, "a look at a few samples")
        return float(read.value), float(read.count)

    whole, count = total(batch, samples)
    parts = [total(one, 1) for one in alone]
    lost = [row for row, (value, number) in enumerate(parts) if number and not math.isfinite(value)]
    if lost and math.isfinite(whole):
        row = lost[0]
        return f"px.model_loss(): sample {row} alone has no finite loss, and its count is {parts[row][1]:g}"
    parts = [(value, number) for value, number in parts if number]
    added, counted = sum(one for one, _ in parts), sum(one for _, one in parts)
    half = any(one.dtype.itemsize < 4 for one in module.parameters() if one.is_floating_point())
    same = _SAME_HALF if half else _SAME
    close = math.isclose(whole, added, rel_tol=same, abs_tol=1e-6) and math.isclose(count, counted, rel_tol=_SAME)
    if close or not all(map(math.isfinite, (whole, added))):
        return ""
    one, other = whole / (count or 1), added / (counted or 1)
    return f"px.model_loss(): {samples} samples' loss is {one:.6g} in one batch, and {other:.6g} added up by counts"
