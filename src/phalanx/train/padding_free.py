"""The place of a sample in a batch: a row of its own, or, without padding, a part of one joined row.

A batch that joins its samples has no row for each, so trials on single samples collate each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from phalanx.config.losses import IGNORED
from phalanx.units import show_names


def joined_along(whole: Any, alone: Sequence[Any]) -> int | None:
    """Return the dimension along which ``whole`` is the joined length of its samples' tensors.

    ``None`` if there is none, or if ``whole`` has a row for each sample.
    """
    if not all(isinstance(one, Tensor) and one.dim() for one in (whole, *alone)):
        return None
    for dim in (1, 0):
        if any(one.dim() <= dim or _beside(one, dim) != _beside(whole, dim) for one in (whole, *alone)):
            continue
        sizes = [one.shape[dim] for one in alone]
        if sum(sizes) == whole.shape[dim] and (dim or max(sizes) > 1):
            return dim
    return None


def _beside(one: Tensor, dim: int) -> tuple[int, ...]:
    return (*one.shape[:dim], *one.shape[dim + 1 :])


def row_lengths(batch: Any, alone: Sequence[Any]) -> list[int]:
    """Return the tokens of each sample in a batch that joins them, by its first such tensor; else an empty list.

    ``alone`` are the batches of the single samples, in its order.
    """
    for whole, *each in _leaves(batch, alone):
        if len(each) > 1 and (dim := joined_along(whole, each)) is not None:
            return [one.shape[dim] for one in each]
    return []


def joined_dimensions(batch: Any, alone: Sequence[Any]) -> set[int]:
    """Return the dimensions along which tensors of a batch join its samples."""
    return {dim for whole, *each in _leaves(batch, alone) if (dim := joined_along(whole, each)) is not None}


def counted_tokens(batch: Any, alone: Sequence[Any]) -> list[float]:
    """Return the tokens of each sample in a batch that joins them, without those with label -100."""
    for whole, *each in _leaves(batch, alone):
        joined = joined_along(whole, each) is not None and not whole.is_floating_point()
        if joined and bool((whole == IGNORED).any()):
            return [float((one != IGNORED).sum()) for one in each]
    return [*map(float, row_lengths(batch, alone))]


def unlike_alone(batch: Any, alone: Sequence[Any]) -> str:
    """Return names of tensors whose samples differ from single ones, in words, or "".

    Integers may be larger by one constant in all of a sample: its index in the row, or its begin.
    """
    paths = [path for path, _ in tree_flatten_with_path(batch)[0]]
    names: list[str] = []
    for path, (whole, *each) in zip(paths, _leaves(batch, alone), strict=False):
        if (dim := joined_along(whole, each)) is None:
            continue
        parts = whole.split([one.shape[dim] for one in each], dim)
        if not all(_alike(part, one) for part, one in zip(parts, each, strict=True)):
            names.append(str(getattr(path[0], "key", getattr(path[0], "idx", "batch"))) if path else "batch")
    return show_names(names) if names else ""


def _alike(part: Tensor, alone: Tensor) -> bool:
    if part.is_floating_point() or part.is_complex():
        return torch.allclose(part, alone, equal_nan=True)
    if part.dtype == torch.bool or not part.numel():
        return torch.equal(part, alone)
    more = part - alone
    return bool((more == more.flatten()[0]).all())


def mixes(output: Any, alone: Sequence[Any]) -> bool:
    """Return True if the model's output for joined samples differs from that of each alone."""
    for whole, *each in _leaves(output, alone):
        if (dim := joined_along(whole, each)) is None or not whole.is_floating_point():
            continue
        if not torch.allclose(whole, torch.cat(each, dim), rtol=1e-3, atol=1e-4):
            return True
    return False


def _leaves(whole: Any, alone: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(zip(tree_leaves(whole), *map(tree_leaves, alone), strict=False))


MIXES_JOINED = (
    "the model mixes samples: job.collate joins those of a micro-batch in one row, and its output for one depends on "
    "the others there. Position ids that begin anew with each sample, cu_seqlens, or a mask (px.document_mask) keep "
    "them apart in models that read these."
)
