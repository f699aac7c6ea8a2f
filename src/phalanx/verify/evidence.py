"""Evidence from two records: copies, evaluations and checkpoints compared; the allowed difference of gradients.

``judge`` compares the rest with it, ``diagnose`` finds causes in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.sections import MODEL, OPTIMIZER, put_in
from phalanx.comm import Mesh
from phalanx.config import Plan
from phalanx.verify import compare
from phalanx.verify.compare import Bounds, Difference
from phalanx.verify.fingerprints import in_words
from phalanx.verify.record import AVERAGE, END, FIRST, START, Copy, RunRecord, Tensors
from phalanx.witness.reference_step import Piece, cut_out
from phalanx.witness.rounding import FLOOR


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The results of both runs: one device, and the other under ``plan``.

    Attributes:
        checks: all comparisons, in the order of a run's computation.
        silent: names of parameters whose first gradient is zero except for rounding.
        batch_norm: names of modules that take statistics of their micro-batch.
    """

    plan: Plan
    one: RunRecord
    other: RunRecord
    checks: list[Check]
    silent: list[str]
    batch_norm: list[str]

    def of(self, kind: str, step: int | None) -> list[Difference]:
        """Return the result of ``differences_of``."""
        return differences_of(self.checks, kind, step)

    @property
    def losses(self) -> list[float]:
        """Return the relative difference of each step's loss."""
        return compare.losses(self.one.losses, self.other.losses)

    @property
    def skipped(self) -> int | None:
        """Return the first step whose update fp16's loss scale skipped on one side only, or ``None``."""
        pairs = zip(self.one.steps, self.other.steps, strict=True)
        return next((step for step, (a, b) in enumerate(pairs) if a.skipped != b.skipped), None)

    @property
    def loss_differs(self) -> bool:
        """Return True if the first step's loss differs by more than rounding."""
        return any(check.first for check in self.checks if (check.kind, check.step) == ("loss", 0))

    @cached_property
    def rounding(self) -> float:
        """Return the typical relative difference by rounding in a gradient of the first step."""
        return statistics.median(one.allowed for one in self.gradients) if self.gradients else FLOOR["fp32"]

    @cached_property
    def initial(self) -> list[Difference]:
        """Return differences of the parameters before the first step."""
        return self.of("initial", None)

    @cached_property
    def gradients(self) -> list[Difference]:
        """Return differences of the first gradients that are more than rounding."""
        return [one for one in self.of("gradient", 0) if not one.rounding or one.beyond]

    def peers(self, axis: str) -> Iterator[list[int]]:
        """Yield groups of ranks that differ along one dimension of the mesh only."""
        for rank in range(self.plan.world_size if len(self.other.ranks) > 1 else 0):
            ranks = Mesh(self.plan, rank).peers(axis)
            if ranks[0] == rank:
                yield ranks

    @property
    def axes(self) -> list[str]:
        """Return the mesh dimensions with more than one rank."""
        return [name for name, size in self.plan.mesh.items() if size > 1]


def holders(copies: Sequence[Mapping[str, Copy]], kind: str) -> dict[str, dict[Piece, list[int]]]:
    """Map name to each part of the tensor held by a rank, with those ranks; for tensors of this kind."""
    found: dict[str, dict[Piece, list[int]]] = {}
    for rank, known in enumerate(copies):
        for key, copy in known.items():
            of, _, name = key.partition(".")
            if of == kind:
                found.setdefault(name, {}).setdefault(copy.piece, []).append(rank)
    return found


def ranks_in_words(ranks: list[int]) -> str:
    """Return a text such as ``rank 1`` or ``ranks 1, 3``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def where(a: Tensor, b: Tensor, by_piece: dict[Piece, list[int]], plan: Plan) -> str:
    """Return the place of most of the difference of two tensors, if it is a rank's part, or one stage."""
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


def differences_of(checks: Sequence[Check], kind: str, step: int | None) -> list[Difference]:
    """Return differences of tensors of one kind, such as ``gradient``, in one step; ``None``: outside steps."""
    return [one for check in checks if (check.kind, check.step) == (kind, step) for one in check.differences]


WORDS = {START: "before the first step", FIRST: "after the first update", END: "after the last step"}
WORDS |= {AVERAGE: "in the average"}
"""Moments of a run."""
KINDS = {
    "buffer": "the buffer ",
    "state": "the optimizer's ",
    "gradient": "the gradient of ",
    "used": "the gradient of ",
}
"""What stands before the names of tensors of a kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison of values at one moment.

    Attributes:
        kind: of value: ``copies``, ``initial``, ``loss``, ``scale`` (of gradients), ``gradient``, ``used``,
            ``parameter``, ``average`` (of weights), ``buffer``, ``state``, ``exact`` (numbers that must be the same),
            ``evaluation``, ``checkpoint``.
        many: number of compared values.
        largest: relative difference.
        allowed: of the value closest to its bound, or furthest beyond it.
        first: the first value beyond its bound, in words, or "".
        wrong: all unequal numbers that must be the same, in words.
    """

    kind: str
    when: str
    many: int
    step: int | None = None
    largest: float = 0.0
    allowed: float = 0.0
    first: str = ""
    differences: tuple[Difference, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiesDiffer:
    """Two ranks with different values for the same part of a tensor.

    Attributes:
        kind: of tensor: ``value``, ``stepped``, ``buffer``, ``state``, ``gradient``.
        who: the holders, such as ``ranks 0 and 1``.
        relative: norm of the difference over that of the first's values; NaN if only digests are known.
    """

    kind: str
    name: str
    who: str
    piece: Piece
    relative: float

    @property
    def words(self) -> str:
        """Return a text such as ``gain on ranks 0 and 1 differ by 3e-06 (allowed 0)``."""
        at = f" ({in_words(self.piece)})" if self.piece else ""
        by = "" if math.isnan(self.relative) else f" by {self.relative:.2g}"
        return f"{KINDS.get(self.kind, '')}{self.name}{at} on {self.who} differ{by} (allowed 0)"


def copies_apart(
    record: RunRecord, moment: str, everywhere: bool, *, values: bool = False
) -> tuple[int, list[CopiesDiffer]]:
    """Return the number of copies held by several ranks at ``moment``, and those that differ.

    Copies in one process count, too, and copies that servers have sent to workers. Without ``everywhere`` independent
    replicas are each a world of their own, except for parameters if ``values`` of all are equal.
    """
    many, found = 0, list[CopiesDiffer]()
    firsts: dict[tuple[int, str, Piece], tuple[int, Copy]] = {}
    for rank, told in enumerate(record.ranks):
        for key, copy in told.copies.get(moment, {}).items():
            replica = 0 if everywhere or (values and key.startswith("value.")) else told.replica
            many += len(copy.differs_by)
            beside = [thread for thread, by in enumerate(copy.differs_by, 1) if by]
            found += [_apart(key, copy, f"threads 0 and {thread}", copy.differs_by[thread - 1]) for thread in beside]
            first, known = firsts.setdefault((replica, key, copy.piece), (rank, copy))
            if first == rank:
                continue
            many += 1
            if known.digest != copy.digest:
                a, b, off = known.values, copy.values, math.nan
                if a is not None and b is not None:
                    off = compare.difference("", a, b, max(compare.norm(a), 1e-30), 0.0).relative
                found.append(_apart(key, copy, f"ranks {first} and {rank}", off))
    for worker, told in enumerate(record.workers):
        for key, copy in told.get(moment, {}).items():
            if (0, key, copy.piece) in firsts:
                many += 1
                if firsts[0, key, copy.piece][1].digest != copy.digest:
                    found.append(_apart(key, copy, f"worker {worker} and the servers", math.nan))
    return many, found


def _apart(key: str, copy: Copy, who: str, relative: float) -> CopiesDiffer:
    kind, _, name = key.partition(".")
    return CopiesDiffer(kind=kind, name=name, who=who, piece=copy.piece, relative=relative)


def evaluations(one: RunRecord, other: RunRecord, bounds: Bounds) -> Iterator[Check]:
    """Yield checks of every evaluation; a metric, which may be of any form, has a floor 16 times as high."""
    for step, here in one.evaluations.items():
        there = other.evaluations.get(step, {})
        pairs = {"loss": (here["loss"], there.get("loss", math.nan))}
        pairs |= {
            name: (value, there.get("metrics", {}).get(name, math.nan)) for name, value in here["metrics"].items()
        }
        off = {name: compare.relative_difference(float(a), float(b)) for name, (a, b) in pairs.items()}
        sizes = {name: max(abs(float(a)), 1e-30) for name, (a, _) in pairs.items()}
        within = {name: bounds.of_sum(f"evaluation|{step}|{name}", size) / size for name, size in sizes.items()}
        within |= {name: within[name] + 15 * FLOOR[bounds.precision] for name in off if name != "loss"}
        wrong = [
            f"{name} of the evaluation after step {step} is {pairs[name][1]}, not {pairs[name][0]}"
            for name, by in off.items()
            if not by <= within[name]
        ]
        if here["samples"] != there.get("samples"):
            wrong.append(f"samples of the evaluation are {there.get('samples')}, not {here['samples']}")
        worst = max(off, key=lambda name: off[name] / within[name])
        numbers: dict[str, Any] = {"many": len(pairs) + 1, "largest": off[worst], "allowed": within[worst]}
        yield Check(kind="evaluation", when=f"after step {step}", first=wrong[0] if wrong else "", **numbers)


def checkpoint(other: RunRecord) -> Iterator[Check]:
    """Yield checks that the saved and the resumed values equal the held ones, bit for bit."""
    kept = put_in(MODEL, other.values[END]) | put_in(OPTIMIZER, other.state.get(END, {}))
    numbers = put_in(OPTIMIZER, other.numbers.get(END, {}))
    numbers["progress.step"] = float(len(other.steps))
    buffers = put_in(MODEL, other.buffers.get(END, {}))
    for words, found, counted in (
        ("in the checkpoint", other.saved, False),
        ("once one device has loaded the checkpoint", other.loaded, True),
    ):
        if not found:
            continue
        # Some buffers are no part of a model's state; numbers may be held by a file of their own.
        held = kept | {name: tensor for name, tensor in buffers.items() if name in found}
        there = {name: torch.tensor(value) for name, value in numbers.items() if counted or name in found}
        unlike = [one for name, tensor in held.items() for one in _unlike(name, tensor, found)]
        unlike += [one for name, value in there.items() for one in _unlike(name, value, found)]
        first = f"{unlike[0].name} {words}, by {unlike[0].relative:.2g} (allowed 0)" if unlike else ""
        if unlike and unlike[0].name not in found:
            first = f"{unlike[0].name} is not there {words}"
        largest = max((one.relative for one in unlike), default=0.0)
        yield Check(kind="checkpoint", when=words, many=len(held) + len(there), largest=largest, first=first)


def _unlike(name: str, tensor: Tensor, found: Tensors) -> list[Difference]:
    if name not in found:
        return [compare.missing(name)]
    there = found[name] if tensor.dim() else found[name].reshape(()).to(tensor.dtype)
    return [one for one in compare.values({name: tensor}, {name: there}) if one.beyond]
