"""Random streams for data: what a sample draws depends on the job's seed, the epoch and the sample, and nothing else.

Augmentations draw from Python's ``random``, numpy's legacy global generator and torch's CPU generator. All three are
seeded before each sample (or, for datasets that fetch many at once, before each micro-batch; for streams, before each
global batch). So a sample is augmented in the same way on any number of ranks and worker processes, and after a
resume. A generator that a dataset makes for itself is its own affair.

Nothing is restored afterwards: saving and restoring the three states costs more than seeding them, and training
seeds the streams it uses by itself before each micro-batch.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class EpochSeeds:
    """The seeds of all samples in one epoch.

    Attributes:
        base: 64 bits that stand for (seed, epoch).
    """

    epoch: int
    base: int

    @classmethod
    def of(cls, seed: int, epoch: int) -> EpochSeeds:
        """The seeds of ``epoch`` in a job with ``seed``."""
        digest = hashlib.blake2b(repr((seed, epoch)).encode(), digest_size=8, person=b"phalanx.sample").digest()
        return cls(epoch, int.from_bytes(digest, "little"))

    def seed(self, sample: int) -> int:
        """The 64-bit seed of ``sample`` (splitmix64)."""
        mixed = (self.base + (sample + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def plant(self, sample: int) -> None:
        """Seeds Python's, numpy's and torch's CPU stream for ``sample``; about 10 µs."""
        seed = self.seed(sample)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
