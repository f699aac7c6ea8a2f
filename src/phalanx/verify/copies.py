"""Copies of one tensor on several ranks: how many there are, and which are not the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from phalanx.verify import compare
from phalanx.verify.prints import Piece, in_words
from phalanx.verify.record import Copy, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Two that hold other values of the same part of a tensor.

    Attributes:
        kind: of tensor: ``value``, ``stepped``, ``buffer``, ``state``, ``gradient``.
        name: of the tensor.
        who: hold it, such as ``ranks 0 and 1``.
        piece: the part.
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


def copies_apart(record: Record, moment: str, everywhere: bool, *, values: bool = False) -> tuple[int, list[Apart]]:
    """How many copies of what another rank holds as well there are at ``moment``, and those that differ.

    Copies in one process count as well, and those that servers have sent to workers. Without ``everywhere`` replicas
    that step by themselves are each a world of their own, but for parameters where ``values`` of all are together.
    """
    many, found = 0, list[Apart]()
    firsts: dict[tuple[int, str, Piece], tuple[int, Copy]] = {}
    for rank, told in enumerate(record.ranks):
        for key, copy in told.copies.get(moment, {}).items():
            replica = 0 if everywhere or (values and key.startswith("value.")) else told.replica
            many += len(copy.beside)
            beside = [thread for thread, by in enumerate(copy.beside, 1) if by]
            found += [_apart(key, copy, f"threads 0 and {thread}", copy.beside[thread - 1]) for thread in beside]
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


def _apart(key: str, copy: Copy, who: str, relative: float) -> Apart:
    kind, _, name = key.partition(".")
    return Apart(kind=kind, name=name, who=who, piece=copy.piece, relative=relative)


def _by(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return math.nan
    return compare.difference("", a, b, max(compare.norm(a), 1e-30), 0.0).relative
