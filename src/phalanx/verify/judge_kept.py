"""Compares what a run leaves behind: its evaluations and the last checkpoint; copies of one tensor on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.verify import compare
from phalanx.verify.compare import Difference, Tolerance
from phalanx.verify.fingerprints import Piece, in_words
from phalanx.verify.record import END, FIRST, START, Copy, RunRecord, Tensors

WORDS = {START: "before the first step", FIRST: "after the first update", END: "after the last step"}
"""Moments of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One kind of thing at one moment, compared.

    Attributes:
        kind: of thing: ``copies``, ``initial``, ``loss``, ``scale`` (of gradients), ``gradient``, ``used``,
            ``parameter``, ``buffer``, ``state``, ``exact`` (numbers that must be the same), ``evaluation``,
            ``checkpoint``, ``dropout`` (masks of a run with it).
        step: it belongs to; ``None`` for what is before or after all.
        many: how many were compared.
        largest: relative difference.
        allowed: of the one that came closest to what it is allowed, or went beyond it most.
        first: what is beyond that, in words; empty where nothing is.
        differences: of tensors.
        wrong: of numbers that must be the same all that are not, in words.
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
    """Two that hold other values of the same part of a tensor.

    Attributes:
        kind: of tensor: ``value``, ``stepped``, ``buffer``, ``state``, ``gradient``.
        name: of the tensor.
        who: hold it, such as ``ranks 0 and 1``.
        relative: norm of the difference over that of the first's values; not a number where only digests are known.
    """

    kind: str
    name: str
    who: str
    piece: Piece
    relative: float

    @property
    def words(self) -> str:
        """Such as ``gain on ranks 0 and 1 differ by 3e-06 (allowed 0)``."""
        kinds = {"buffer": "the buffer ", "state": "the optimizer's ", "gradient": "the gradient of "}
        at = f" ({in_words(self.piece)})" if self.piece else ""
        by = "" if math.isnan(self.relative) else f" by {self.relative:.2g}"
        return f"{kinds.get(self.kind, '')}{self.name}{at} on {self.who} differ{by} (allowed 0)"


def copies_apart(
    record: RunRecord, moment: str, everywhere: bool, *, values: bool = False
) -> tuple[int, list[CopiesDiffer]]:
    """How many copies of what another rank holds as well there are at ``moment``, and those that differ.

    Copies in one process count as well, and those that servers have sent to workers. Without ``everywhere`` replicas
    that step by themselves are each a world of their own, but for parameters where ``values`` of all are together.
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
                found.append(_apart(key, copy, f"ranks {first} and {rank}", _by(known.values, copy.values)))
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


def _by(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return math.nan
    return compare.difference("", a, b, max(compare.norm(a), 1e-30), 0.0).relative


def evaluations(one: RunRecord, other: RunRecord, tolerance: Tolerance) -> Iterator[Check]:
    """Every evaluation says the same: the loss within what a step's may differ, metrics within what parameters may."""
    for step, here in one.evaluations.items():
        there = other.evaluations.get(step, {})
        pairs = {"loss": (here["loss"], there.get("loss", math.nan))}
        pairs |= {
            name: (value, there.get("metrics", {}).get(name, math.nan)) for name, value in here["metrics"].items()
        }
        off = {name: compare.relative_difference(float(a), float(b)) for name, (a, b) in pairs.items()}
        # A loss is a mean over samples, here over fewer or more of them than in a step; a metric may be of any form.
        fewer = math.sqrt(max(1.0, (one.steps[0].samples or 0) / max(1, here["samples"])))
        within = {name: tolerance.loss * fewer if name == "loss" else tolerance.parameter for name in off}
        wrong = [
            f"{name} of the evaluation after step {step} is {pairs[name][1]}, not {pairs[name][0]}"
            for name, by in off.items()
            if not by <= within[name]
        ]
        if here["samples"] != there.get("samples"):
            wrong.append(f"samples of the evaluation are {there.get('samples')}, not {here['samples']}")
        worst = max(off, key=lambda name: off[name] / within[name])
        yield Check(
            kind="evaluation",
            when=f"after step {step}",
            many=len(pairs) + 1,
            largest=off[worst],
            allowed=within[worst],
            first=wrong[0] if wrong else "",
        )


def checkpoint(other: RunRecord) -> Iterator[Check]:
    """What is saved, and what one device makes of it, is all that was held, bit for bit."""
    kept = {f"model.{name}": tensor for name, tensor in other.values[END].items()}
    kept |= {f"optimizer.{name}": tensor for name, tensor in other.state.get(END, {}).items()}
    numbers = {f"optimizer.{name}": value for name, value in other.numbers.get(END, {}).items()}
    numbers["progress.step"] = float(len(other.steps))
    buffers = {f"model.{name}": tensor for name, tensor in other.buffers.get(END, {}).items()}
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
