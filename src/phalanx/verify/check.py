"""One thing that was compared."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.verify.compare import Difference
from phalanx.verify.record import END, FIRST, START

WORDS = {START: "before the first step", FIRST: "after the first update", END: "after the last step"}
"""Moments of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One kind of thing at one moment, compared.

    Attributes:
        kind: of thing: ``copies``, ``initial``, ``loss``, ``scale`` (of gradients), ``gradient``, ``used``,
            ``parameter``, ``buffer``, ``state``, ``exact`` (numbers that must be the same), ``evaluation``,
            ``checkpoint``, ``dropout`` (masks of a run with it).
        when: in words.
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
