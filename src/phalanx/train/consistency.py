"""Checks that ranks agree before the first step: lengths of data, streams, initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from phalanx.comm import active, alike, from_every_rank
from phalanx.data import StepBatch
from phalanx.errors import DataError, RefusedError

Everyone = Callable[[Any], list[Any]]
"""Gives a value of each rank, in rank order. Collective."""


def same_length(length: int | None, where: str) -> None:
    """Refuse data with different lengths on ranks. Collective; ``where`` is the job's function, ``job.data``.

    Raises:
        DataError: with the length on each rank.
    """
    if alike(length):
        return
    lengths = enumerate(from_every_rank(length))
    if error := unlike_data({f"rank {rank}": {"length": one} for rank, one in lengths}, where):
        raise error


def same_data(told: Mapping[str, Any], everyone: Everyone = from_every_rank) -> None:
    """Refuse ``job.data`` whose facts on some rank differ from ``told``, this rank's. Collective.

    Raises:
        DataError: with the facts of each rank.
    """
    if _alike_everywhere(told, everyone):
        return
    if error := unlike_data({f"rank {rank}": one for rank, one in enumerate(everyone(told))}):
        raise error


def unlike_data(
    told: Mapping[str, Mapping[str, Any]], where: str = "job.data", shared: str = "Phalanx gives each its share"
) -> DataError | None:
    """Return the error for different data; ``None`` if they are equal.

    Args:
        told: by reader, such as ``rank 1``, the facts from a ``Loader``, or part of them.
        where: the job's function that makes them.
        shared: the way they are shared out, for the message.
    """
    facts = ("length", "order", "files")
    unlike = next((fact for fact in facts if len({one.get(fact) for one in told.values()}) > 1), None)
    if unlike is None:
        return None
    by = ", ".join(f"{who}: {one.get(unlike)}" for who, one in told.items())
    said = {
        "length": (
            f"{where} gives data of another length on each rank: {by}.",
            f"Every rank must see the same data; {shared}.",
            f"remove rank-dependent filtering or sharding from {where}",
        ),
        "order": (
            f"job.sampler gives another order of the first epoch on each rank (digests: {by}).",
            f"Every rank must know the whole order; {shared}.",
            "a sampler that draws from its seed and epoch alone: np.random.default_rng([seed, epoch])",
        ),
        "files": (
            f"{where} reads files that are others on each rank (digests: {by}).",
            f"Every rank must see the same data; {shared}.",
            "the same files, in the same order, on every host",
        ),
    }[unlike]
    return DataError("{}\n    {}\n    try: {}".format(*said))


def same_places(here: Mapping[str, int], whole: Mapping[str, int], everyone: Everyone = from_every_rank) -> None:
    """Refuse an optimizer whose groups on a pipeline's stage have another order than over the whole model.

    Collective; both arguments map name to the index of its group.

    Raises:
        RefusedError: with the first parameter that is in another group, on any rank.
    """
    off = next((name for name, place in here.items() if whole.get(name, place) != place), "")
    found = everyone([off, here.get(off, 0), whole.get(off, 0)])
    for rank, (name, place, other) in enumerate(found):
        if name:
            given = f"parameter groups in another order on a stage: {name} is in group {place} on rank {rank}, and in "
            given += f"group {other} of the whole model"
            allowed = "the same groups in the same order on every stage, where need be without parameters: a scheduler "
            allowed += "and px.Clip(per='group') know them by their place"
            raise RefusedError.of(
                "job.optimizer", given, allowed, 'px.groups(params, {"*.bias": {"weight_decay": 0.0}})'
            )


def same_groups(groups: int, everyone: Everyone = from_every_rank) -> None:
    """Refuse an optimizer with different numbers of groups on ranks, if groups are known by position. Collective.

    Raises:
        DataError: with the number on each rank. A scheduler keeps a rate for each group, and clipping takes a norm.
    """
    if _alike_everywhere(groups, everyone):
        return
    counts = everyone(groups)
    if len(set(counts)) > 1:
        by_rank = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise DataError(
            f"job.optimizer makes another number of parameter groups on each rank: {by_rank}.\n"
            "    A scheduler keeps a rate for each group, by its place, and px.Clip(per='group') takes a norm.\n"
            "    try: the same groups on every rank, where need be with no parameters in them"
        )


def same_stream(batch: StepBatch | None) -> None:
    """Refuse a stream at different places on ranks; ``None``: it has ended here. Collective.

    Raises:
        DataError: with the differences. Without it, ranks with more to read would wait for the others for ever.
    """
    mine = (batch.step, batch.epoch, batch.samples) if batch else ("ended", "ended", 0)
    if alike(mine):
        return
    differing = [
        f"{name} by rank: {', '.join(map(str, values))}"
        for name, values in zip(("step", "epoch", "samples"), zip(*from_every_rank(mine), strict=True), strict=True)
        if len(set(values)) > 1
    ]
    if differing:
        raise DataError(
            f"the stream has another length on each rank; {'; '.join(differing)}.\n"
            "    Every rank must see the same stream; Phalanx gives each its share.\n"
            "    try: remove rank-dependent sharding from job.data"
        )


def same_initial_values(module: nn.Module, everyone: Everyone = from_every_rank) -> None:
    """Refuse a model with different initial values on ranks. Collective; one small message in all.

    The sums of each parameter are compared, up to the rounding between machines; for a parameter without values, its
    recipe.

    Raises:
        DataError: naming the first parameter that differs.
    """
    if everyone is from_every_rank and not active():
        return
    here = [one for name, tensor in module.named_parameters() for one in _fingerprints(name, tensor)]
    if _alike_everywhere(here, everyone):  # so it is where processors are alike
        return
    first, *rest = everyone(here)
    for rank, others in enumerate(rest, start=1):
        different = next((one[0] for one, other in zip(first, others, strict=False) if not _alike(one, other)), None)
        if different is None and len(first) != len(others):
            different = max(first, others, key=len)[min(len(first), len(others))][0]  # pyrefly: ignore[bad-index]
        if different is not None:
            raise DataError(
                f"the model has other initial values on rank {rank} than on rank 0; the first parameter that differs: "
                f"{different}.\n"
                "    Usual cause: job.model draws from a source that Phalanx cannot seed (it seeds torch, numpy's "
                "global generator and random), or asks for the rank.\n"
                "    try: in job.model, numpy.random.default_rng(0) in place of numpy.random.default_rng()"
            )


def _alike_everywhere(value: Any, everyone: Everyone) -> bool:
    return everyone is from_every_rank and alike(value)


_Fingerprint = tuple[str, int, float, float]  # name, elements, sum, norm


def _fingerprints(name: str, tensor: torch.Tensor) -> list[_Fingerprint]:
    if tensor.is_meta:
        from phalanx.parallel.deferred_init import fingerprints

        return [(name, tensor.numel(), 0.0, 0.0), *((name, *one) for one in fingerprints(tensor))]
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return [(name, values.numel(), float(values.sum(dtype=torch.float64)), float(norm))]


def _alike(one: _Fingerprint, other: _Fingerprint) -> bool:
    if one[:2] != other[:2]:
        return False
    if math.isnan(one[2]) and math.isnan(other[2]):
        return True
    # Sums of independent draws differ by about the norm; those of equal draws on unlike processors by 1e-7 of it.
    return math.isclose(one[2], other[2], rel_tol=1e-9, abs_tol=1e-5 * one[3])
