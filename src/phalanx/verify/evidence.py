"""What two captures say about each other, and what gradients may be off by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from phalanx.comm import Mesh
from phalanx.config import Plan
from phalanx.verify import compare
from phalanx.verify.compare import Bound, Difference, FirstGradient, Tolerance
from phalanx.verify.fingerprints import Piece, Prints, cut_out, in_words
from phalanx.verify.record import FIRST, Copy, RunRecord


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What both runs gave.

    Attributes:
        plan: of the other run.
        one: one device.
        other: the plan.
        losses: relative difference of each step's loss.
        skipped: the first step whose update fp16's loss scale skipped on one side only; ``None`` where there is none.
        initial: differences of the parameters before the first step.
        gradients: differences of the first gradients.
        silent: names of those that are zero but for rounding.
        parameters: differences of the final parameters.
        batch_norm: names of modules that take statistics of their micro-batch.
        checks: everything that was compared, in the order in which a run computes it.
    """

    plan: Plan
    one: RunRecord
    other: RunRecord
    losses: list[float]
    skipped: int | None
    initial: list[Difference]
    gradients: list[Difference]
    silent: list[str]
    parameters: list[Difference]
    batch_norm: list[str]
    checks: list[Any] = field(default_factory=list[Any])

    def of(self, kind: str, step: int | None) -> list[Difference]:
        """Differences of the tensors of one kind, such as ``gradient``, in one step; ``None``: before or after all."""
        return [one for check in self.checks if (check.kind, check.step) == (kind, step) for one in check.differences]

    @cached_property
    def first_gradients(self) -> list[Prints]:
        """Each rank's prints of its gradients."""
        return self.other.prints("gradients")

    def peers(self, axis: str) -> Iterator[list[int]]:
        """Ranks that differ along one dimension of the mesh only, by groups."""
        for rank in range(self.plan.world_size if len(self.other.ranks) > 1 else 0):
            ranks = Mesh(self.plan, rank).peers(axis)
            if ranks[0] == rank:
                yield ranks

    @property
    def axes(self) -> list[str]:
        """Dimensions of the mesh that have more than one rank."""
        return [name for name, size in self.plan.mesh.items() if size > 1]


def holders(copies: Sequence[Mapping[str, Copy]], kind: str) -> dict[str, dict[Piece, list[int]]]:
    """Name → each part of the tensor that some rank holds → those ranks; of tensors of this kind."""
    found: dict[str, dict[Piece, list[int]]] = {}
    for rank, known in enumerate(copies):
        for key, copy in known.items():
            of, _, name = key.partition(".")
            if of == kind:
                found.setdefault(name, {}).setdefault(copy.piece, []).append(rank)
    return found


def ranks_in_words(ranks: list[int]) -> str:
    """Such as ``rank 1 holds`` or ``ranks 1, 3 hold``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def where(a: Tensor, b: Tensor, by_piece: dict[Piece, list[int]], plan: Plan) -> str:
    """Where most of the difference of two tensors is, if that is one of the parts that ranks hold, or one stage."""
    if a.shape != b.shape:
        return f"of shape {list(b.shape)}, not {list(a.shape)}"
    away = (a.double() - b.double()).square()
    total = float(away.sum())
    if len(by_piece) > 1:
        shares = {piece: float(cut_out(away, piece).sum()) for piece in by_piece}
        most = max(shares, key=lambda piece: shares[piece])
        if shares[most] > 0.9 * total and most:
            ranks = by_piece[most]
            return f"{in_words(most)}, which {ranks_in_words(ranks)} hold{'s' if len(ranks) == 1 else ''}"
        return ""
    stages = {plan.coordinate(rank)["pp"] for ranks in by_piece.values() for rank in ranks}
    return f"stage {stages.pop()}" if plan.pp > 1 and len(stages) == 1 else ""


def bound_of(one: RunRecord, step: int, tolerance: Tolerance, *, used: bool = False) -> Bound:
    """What gradients of ``step`` may be off by: reduced, or with ``used`` as the optimizer gets them."""
    magnitudes, total = one.magnitudes.get(step, {}), one.steps[step].norm if one.magnitudes else None
    if used and total:
        clipped = math.hypot(*(compare.norm(grad) for grad in one.used[step].values()))
        magnitudes = {name: size * clipped / total for name, size in magnitudes.items()}
        total = clipped
    return Bound(tolerance=tolerance, step=step, magnitudes=magnitudes, total=total)


def first_gradients(one: RunRecord, tolerance: Tolerance) -> dict[str, FirstGradient]:
    """The first gradient of each parameter that is not zero but for rounding.

    Adam makes a whole step of rounding: in each step before as far as in the first.
    """
    found: dict[str, FirstGradient] = {}
    after, before = one.values.get(FIRST, {}), dict[str, int]()
    for step, grads in sorted((one.reduced or one.used).items()):
        bound = bound_of(one, step, tolerance)
        total = bound.total or math.hypot(*(compare.norm(grad) for grad in grads.values()))
        for name, grad in grads.items():
            size = compare.norm(grad)
            small = bound.small(size, total)
            if name in found or not size:
                continue
            known = not small or name in bound.magnitudes
            error = bound.allowed(name, grad, small=small) / size if known else math.inf
            if error < 1:
                steps, there = before.get(name, 0), name in after
                rounded = steps * (after[name] - one.initial[name]).abs() if steps and there else None
                how = {"error": error, "stretch": error / tolerance.gradient_at(step)}
                found[name] = FirstGradient(values=grad, rounded=rounded, **how)
            else:
                before[name] = before.get(name, 0) + 1
    return found
