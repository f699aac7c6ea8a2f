"""What two captures say about each other, in the forms that causes are told by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from phalanx.comm import Mesh
from phalanx.spec import Plan
from phalanx.verify.compare import Difference
from phalanx.verify.prints import Piece, Prints, in_words, prints_from
from phalanx.verify.trace import Passed, trace_from_json


@dataclass(frozen=True)
class Captured:
    """What a run gave.

    Attributes:
        ranks: each worker's answer, in rank order.
        initial: the parameters before the first step, whole.
        gradients: of the first step.
        parameters: after the last step.
        auxiliary: of parameters that choose experts, the gradients that come to them by no expert.
    """

    ranks: list[dict[str, Any]]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    auxiliary: dict[str, Tensor]

    def prints(self, when: str) -> list[Prints]:
        """Each rank's: ``start``, ``gradients`` or ``end``."""
        return [prints_from(capture[when]) for capture in self.ranks]

    @cached_property
    def traces(self) -> list[dict[str, Passed]]:
        """Each rank's; empty where none was taken."""
        return [trace_from_json(capture["trace"]) for capture in self.ranks]


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
    """

    plan: Plan
    one: Captured
    other: Captured
    losses: list[float]
    skipped: int | None
    initial: list[Difference]
    gradients: list[Difference]
    silent: list[str]
    parameters: list[Difference]
    batch_norm: list[str]

    @cached_property
    def first_gradients(self) -> list[Prints]:
        """Each rank's prints of its gradients."""
        return self.other.prints("gradients")

    def peers(self, axis: str) -> Iterator[list[int]]:
        """Ranks that differ along one dimension of the mesh only, by groups."""
        for rank in range(self.plan.world_size):
            ranks = Mesh(self.plan, rank).peers(axis)
            if ranks[0] == rank:
                yield ranks

    @property
    def axes(self) -> list[str]:
        """Dimensions of the mesh that have more than one rank."""
        return [name for name, size in self.plan.mesh.items() if size > 1]


def holders(prints: list[Prints]) -> dict[str, dict[Piece, list[int]]]:
    """Name → each part of the tensor that some rank holds → those ranks."""
    found: dict[str, dict[Piece, list[int]]] = {}
    for rank, known in enumerate(prints):
        for name, (piece, _) in known.items():
            found.setdefault(name, {}).setdefault(piece, []).append(rank)
    return found


def ranks_in_words(ranks: list[int]) -> str:
    """Such as ``rank 1 holds`` or ``ranks 1, 3 hold``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def where(a: Tensor, b: Tensor, by_piece: dict[Piece, list[int]], plan: Plan) -> str:
    """Where most of the difference of two tensors is, if that is one of the parts that ranks hold, or one stage."""
    from phalanx.verify.prints import cut_out

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
