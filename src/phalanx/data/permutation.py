"""A keyed permutation of 0..length-1 of which any part can be computed by itself.

A shuffled list of sample numbers costs memory and time in proportion to the data, and resuming in the middle costs
it again. A permutation that is a *function* costs neither: position → sample number, with a key.

It is a Feistel network over a rectangle (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section
5): a number below ``rows * columns`` is a pair (row, column); each round adds a keyed hash of one to the other, modulo
its range, which can be undone and so is a permutation of the rectangle. The rectangle is the tightest one around
``length``; a number that lands outside 0..length-1 is sent through again until it lands inside ("cycle walking",
section 4 there), which happens to at most one in about ``sqrt(length)``.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = 2**62  # rows and columns then stay below 2**32, which the scaling of a hash needs
_SMALL = 1024
_ROUNDS = 8
_ROUNDS_SMALL = 24  # a small rectangle mixes less a round


@dataclass(frozen=True, slots=True)
class _Words:
    """Unsigned words of one size and the hash made of them: multiply, fold, multiply, keep the high bits.

    Attributes:
        dtype: numpy's unsigned type.
        first: odd multiplier before folding.
        second: odd multiplier after it.
        fold: bits shifted by in folding.
        low: low bits thrown away.
        high: bits kept; a side of the rectangle is at most 2**(all bits - high).
    """

    dtype: Any
    first: Any
    second: Any
    fold: Any
    low: Any
    high: Any


# Multipliers of splitmix64's finaliser and of Wellons' lowbias32. 32-bit words are three times as fast.
_WORDS_64 = _Words(np.uint64, *map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 29, 32, 32)))
_WORDS_32 = _Words(np.uint32, *map(np.uint32, (0x7FEB352D, 0x846CA68B, 15, 12, 20)))
_LARGEST_32 = 2**24


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of 0..length-1, fixed by its keys. Make one with ``Permutation.keyed``.

    Attributes:
        length: how many numbers are permuted, 1 to 2**62.
        rows: first side of the rectangle.
        columns: second side; ``rows * columns >= length``.
        keys: one word a round.
        words: the arithmetic.
    """

    length: int
    rows: Any
    columns: Any
    keys: tuple[Any, ...]
    words: _Words

    @classmethod
    def keyed(cls, length: int, *key: int) -> Permutation:
        """The permutation of 0..length-1 that belongs to ``key``, the same on every machine.

        Raises:
            ValueError: if ``length`` is not within 1 and 2**62.
        """
        if not 1 <= length <= LARGEST:
            raise ValueError(f"a permutation needs a length from 1 to 2**62, not {length}")
        words = _WORDS_32 if length <= _LARGEST_32 else _WORDS_64
        rows = math.isqrt(length - 1) + 1
        columns = -(-length // rows)
        rounds = _ROUNDS_SMALL if length < _SMALL else _ROUNDS
        digest = hashlib.shake_256(repr(key).encode()).digest(8 * rounds)
        keys = np.frombuffer(digest, dtype="<u8").astype(words.dtype)
        return cls(length, words.dtype(rows), words.dtype(columns), tuple(keys), words)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The numbers at ``positions`` (one-dimensional, each within 0..length-1), as int64."""
        numbers = self._through(positions.astype(self.words.dtype))
        outside = numbers >= self.length
        while outside.any():
            numbers[outside] = self._through(numbers[outside])
            outside = numbers >= self.length
        return numbers.astype(np.int64)

    def _through(self, numbers: np.ndarray) -> np.ndarray:
        """Once through the network: a permutation of the whole rectangle."""
        row = numbers // self.columns
        column = numbers - row * self.columns
        for index in range(0, len(self.keys), 2):
            self._add_hash(row, column, self.keys[index], self.rows)
            self._add_hash(column, row, self.keys[index + 1], self.columns)
        return row * self.columns + column

    def _add_hash(self, side: np.ndarray, other: np.ndarray, key: Any, below: Any) -> None:
        """Adds a hash of ``other``, scaled to 0..below-1, to ``side``, modulo ``below``, in place."""
        words = self.words
        mixed = (other ^ key) * words.first
        mixed ^= mixed >> words.fold
        mixed *= words.second
        mixed >>= words.low
        mixed *= below
        mixed >>= words.high
        side += mixed
        # side is below twice the modulus, and where it is below the modulus the difference wraps to a huge number.
        np.minimum(side, side - below, out=side)
