"""Copies of one tensor on several ranks: how many there are, and which are not the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from phalanx.verify import compare
from phalanx.verify.prints import Piece, in_words
from phalanx.verify.record import Copy, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Two ranks that hold other values of the same part of a tensor.

    Attributes:
        kind: of tensor: ``value``, ``stepped``, ``buffer``, ``state``, ``gradient``.
        name: of the tensor.
        ranks: the two.
        piece: the part.
        relative: norm of the difference over that of the first's values.
    """

    kind: str
    name: str
    ranks: tuple[int, int]
    piece: Piece
    relative: float

    @property
    def words(self) -> str:
        """Such as ``gain on ranks 0 and 1, by 3e-06``."""
        kinds = {"buffer": "the buffer ", "state": "the optimizer's ", "gradient": "the gradient of "}
        at = f" ({in_words(self.piece)})" if self.piece else ""
        first, other = self.ranks
        where = f"on rank {first}, as the optimizer has it," if first == other else f"on ranks {first} and {other}"
        return f"{kinds.get(self.kind, '')}{self.name}{at} {where} differ by {self.relative:.2g} (allowed 0)"


def copies_apart(record: Record, moment: str, everywhere: bool) -> tuple[int, list[Apart]]:
    """How many copies of what another rank holds as well there are at ``moment``, and those that differ.

    Without ``everywhere`` replicas that step by themselves are each a world of their own.
    """
    many, found = 0, list[Apart]()
    firsts: dict[tuple[int, str, Piece], tuple[int, Copy]] = {}
    for rank, told in enumerate(record.ranks):
        replica = 0 if everywhere else told.replica
        for key, copy in told.copies.get(moment, {}).items():
            first, known = firsts.setdefault((replica, key, copy.piece), (rank, copy))
            if first == rank:
                continue
            many += 1
            if known.digest != copy.digest:
                kind, _, name = key.partition(".")
                by = _by(known.values, copy.values)
                found.append(Apart(kind=kind, name=name, ranks=(first, rank), piece=copy.piece, relative=by))
    return many, found


def _by(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return float("nan")
    return compare.difference("", a, b, max(compare.norm(a), 1e-30), 0.0).relative
