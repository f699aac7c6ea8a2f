"""What the masks that a run has drawn say of its dropout: shares, scale, who draws the same and who must not.

Bounds follow from arithmetic: a share of n elements dropped at rate p is off by more than Bernstein's bound once in 10⁹
(Boucheron, Lugosi, Massart 2013, corollary 2.11), and two masks drawn for themselves agree in so many first elements
once in 10¹².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.verify.evidence import Check
from phalanx.verify.mask_recording import Draw

_CHANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Drawn:
    """A mask, and the process that drew it."""

    rank: int
    draw: Draw

    @property
    def call(self) -> tuple[Any, ...]:
        """What all processes that share its samples draw the same for."""
        draw = self.draw
        return draw.step, draw.ids, draw.layer[1], draw.part

    def __str__(self) -> str:
        return f"{self.draw.layer[0] or 'the model itself'} on rank {self.rank} in step {self.draw.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskStatistics:
    """What was measured of dropout in a run.

    Attributes:
        words: in one sentence.
        check: how many masks, the largest deviation of a share, and what is wrong with them.
        cause: of that, in words; empty where nothing is.
    """

    words: str
    check: Check
    cause: str = ""

    @classmethod
    def none(cls, words: str) -> MaskStatistics:
        """Nothing was measured, for a reason."""
        return cls(words=words, check=Check(kind="dropout", when="", many=0))


def statistics_of(answers: Sequence[dict[str, Any]], steps: int) -> MaskStatistics:
    """Of what each process told of the masks that it drew in so many ``steps``."""
    drawn = [
        Drawn(rank, Draw(**{**one, "layer": tuple(one["layer"])}))  # pyrefly: ignore[bad-argument-type]
        for rank, answer in enumerate(answers)
        for one in answer["draws"]
    ]
    first = [one for one in drawn if not one.draw.again]
    again = [one for one in drawn if one.draw.again]
    alone, copies = _alone(first)
    off, allowed, shares = _shares(alone)
    judges: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
        lambda: _not_applied(first),
        lambda: iter(shares),
        lambda: _copies_apart(first),
        lambda: _again_otherwise(first, again),
        lambda: _the_same(alone),
    )
    wrong, cause = next((found for judge in judges for found in judge()), ("", ""))
    elements = sum(one.draw.elements for one in alone)
    dropped = sum(one.draw.dropped for one in alone)
    layers = len({one.draw.layer[0] for one in first})
    words = (
        f"dropout drew {len(first)} masks in {layers} {'layers' if layers > 1 else 'layer'} in {steps} further steps: "
        f"{dropped / max(elements, 1):.2%} of {elements:,} elements, a layer's share at most {off:.2%} off its rate "
        f"(allowed {allowed:.2%}); no two alike of {sum(bool(one.draw.start) for one in alone)} that must not be; "
        f"{copies} copies on ranks that share samples the same; {len(again)} drawn again for backward the same"
    )
    if wrong:
        words = f"dropout drew {len(first)} masks in {steps} further steps, of which something is wrong"
    when = f"in {steps} further steps"
    check = Check(kind="dropout", when=when, many=len(drawn), first=wrong, largest=off, allowed=allowed)
    return MaskStatistics(words=words, check=check, cause=cause)


def _alone(first: Sequence[Drawn]) -> tuple[list[Drawn], int]:
    """One of each that is drawn the same on several ranks, and how many others there are."""
    real = [one for one in first if one.draw.ids]
    known: dict[tuple[Any, ...], Drawn] = {}
    for one in real:
        known.setdefault(one.call, one)
    return list(known.values()), len(real) - len(known)


def _shares(alone: Sequence[Drawn]) -> tuple[float, float, list[tuple[str, str]]]:
    """The largest deviation of a layer's share, measured by what it is allowed, that allowance, and what is wrong."""
    sums: dict[tuple[str, float], list[int]] = {}
    for one in alone:
        entry = sums.setdefault((one.draw.layer[0], one.draw.rate), [0, 0])
        entry[0], entry[1] = entry[0] + one.draw.dropped, entry[1] + one.draw.elements
    worst, wrong = (0.0, 0.0), list[tuple[str, str]]()
    for (name, rate), (dropped, elements) in sums.items():
        if not elements:
            continue
        off, allowed = abs(dropped / elements - rate), bound(rate, elements) / elements
        if off > allowed:
            share = f"{name or 'the model itself'} dropped {dropped / elements:.2%} of {elements:,} elements"
            wrong.append((f"{share}, not {rate:.2%} (allowed ± {allowed:.2%})", _RATE))
        if not worst[1] or off / allowed > worst[0] / worst[1]:
            worst = off, allowed
    return *worst, wrong


def bound(rate: float, elements: int) -> float:
    """How far the number of dropped ones is from ``rate * elements`` once in 10⁹, at most."""
    level = math.log(2 / _CHANCE)
    return level / 3 + math.sqrt(level**2 / 9 + 2 * level * elements * rate * (1 - rate))


def _not_applied(first: Sequence[Drawn]) -> Iterator[tuple[str, str]]:
    for one in first:
        if not one.draw.digest:
            yield f"{one} drew no mask, at rate {one.draw.rate:g}", _NONE
        if not one.draw.scaled:
            yield f"{one} does not give its input times the mask, with a scale of 1 / (1 - {one.draw.rate:g})", _SCALE


def _copies_apart(first: Sequence[Drawn]) -> Iterator[tuple[str, str]]:
    known: dict[tuple[Any, ...], Drawn] = {}
    for one in first:
        other = known.setdefault(one.call, one) if one.draw.ids else one
        if other.draw.digest != one.draw.digest:
            whose = f"rank {other.rank}, of a tensor that both hold of the same samples"
            yield f"{one} drops other elements than {whose}", _APART


def _again_otherwise(first: Sequence[Drawn], again: Sequence[Drawn]) -> Iterator[tuple[str, str]]:
    known = {(one.rank, one.draw.step, one.draw.digest) for one in first}
    for one in again:
        if one.draw.start and (one.rank, one.draw.step, one.draw.digest) not in known:
            yield f"{one} drew another mask in backward than in forward", _AGAIN


def _the_same(alone: Sequence[Drawn]) -> Iterator[tuple[str, str]]:
    known: dict[tuple[float, str], Drawn] = {}
    for one in alone:
        if one.draw.start and (other := known.setdefault((one.draw.rate, one.draw.start), one)) is not one:
            yield f"{one} drops the same elements as {other}", _why_the_same(one, other)


def _why_the_same(one: Drawn, other: Drawn) -> str:
    if one.draw.step != other.draw.step:
        return "masks are frozen: the random stream does not move on from step to step."
    if one.draw.layer[1] != other.draw.layer[1]:
        return "several layers begin at the same place of one random stream."
    if one.rank != other.rank:
        return "ranks with unlike samples draw from the same random stream: its seed must have the rank's part in it."
    if one.draw.ids != other.draw.ids:
        return "micro-batches draw from the same random stream: its seed must have the micro-batch in it."
    return "slices of one tensor draw from the same random stream: its seed must have the place of the slice in it."


_RATE = "the rate that the model asks for does not reach what drops, or what drops is not random."
_NONE = "the rate that the model asks for does not reach what drops."
_SCALE = "what is kept is not scaled so that its mean stays, or something else becomes of it."
_APART = (
    "ranks that share samples draw from unlike random streams, or at unlike places of them, on what each of them holds "
    "whole; their results then differ."
)
_AGAIN = "recompute does not set the random stream back: the gradient is that of other masks than the loss."
