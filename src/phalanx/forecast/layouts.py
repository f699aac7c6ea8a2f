"""The input of forecasts: a job's work in each step, and plans as arrays, so that thousands are forecast at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from phalanx.config import Plan
from phalanx.config.fields import CHOICES, Schedule
from phalanx.forecast.operation_arrays import Array
from phalanx.placement.batch_split import pieces
from phalanx.placement.collective_bytes import MeshSizes
from phalanx.placement.limits import returns_freed_memory
from phalanx.placement.schedules import SCHEDULES as PIPELINE_SCHEDULES
from phalanx.placement.schedules import PipelineSchedule
from phalanx.trace import Profile

Texts = npt.NDArray[np.str_]
Whole = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
RECOMPUTES, ATTENTIONS = CHOICES["recompute"], CHOICES["attention"]
DILOCO, NESTEROV = CHOICES["sync"].index("diloco"), CHOICES["outer"].index("nesterov")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layouts:
    """N candidates of one precision: shape (N,) each. Other fields are as in ``Plan``."""

    dp: Array
    fsdp: Array
    tp: Array
    pp: Array
    cp: Array
    ep: Array
    zero: Array
    stages: Array
    # index in ``SCHEDULES``; likewise ``recompute``, ``attention``, ``offload``, ``sync`` and ``outer``
    schedule: Array
    recompute: Array
    attention: Array
    sequence: Array
    asked: Array  # most samples in one forward of a rank; 0 for its whole share
    batch: Array  # samples in one step of all
    samples: Array  # of them those of a rank, on the device that is looked at
    length: Array  # tokens of a sample
    offload: Array
    sync: Array
    every: Array
    outer: Array
    server: Array
    staleness: Array
    compiles: Array  # 1 if blocks are compiled
    shares: Texts  # texts of uneven shares, as plans have them
    compress: Texts  # texts of how gradients are sent, as plans have them

    def scheduled(self, pick: Callable[[PipelineSchedule], bool]) -> Mask:
        """Return True for each candidate whose schedule passes ``pick``: shape (N,)."""
        return np.isin(self.schedule, [at for at, name in enumerate(SCHEDULES) if pick(PIPELINE_SCHEDULES[name])])

    @property
    def replicas(self) -> Array:
        """Return the parts of the global batch."""
        return self.dp * self.fsdp * self.ep

    @property
    def devices(self) -> Array:
        return self.replicas * self.tp * self.pp * self.cp

    @property
    def inner(self) -> Array:
        """Return the devices of one replica, without pipeline stages."""
        return self.fsdp * self.ep * self.cp * self.tp

    @property
    def alike(self) -> Array:
        """Return the ranks of ``dp`` whose gradients are summed in every step."""
        return np.where((self.sync > 0) | (self.server > 0), 1.0, self.dp)

    @property
    def summed(self) -> Array:
        """Return the ranks, without those of ``fsdp``, whose gradients are summed in every step.

        Ranks of ``cp`` and ``ep`` hold the same and see other tokens; experts are on one rank of ``ep`` only.
        """
        return self.alike * self.cp * self.ep

    @property
    def micro(self) -> Array:
        """Return the samples in one forward of a rank."""
        share = np.ceil(self.samples - 1e-9)
        return np.where(self.asked > 0, np.minimum(self.asked, share), share)

    @property
    def micros(self) -> Array:
        """Return the micro-batches of a rank in one step."""
        return pieces(np.ceil(self.samples - 1e-9), self.micro)

    @property
    def mesh(self) -> MeshSizes:
        same = ("fsdp", "tp", "pp", "cp", "ep", "zero", "sequence", "micros")
        return MeshSizes(
            **{name: getattr(self, name) for name in same},
            dp=self.alike,
            attention={name: 1.0 * (self.attention == at) for at, name in enumerate(ATTENTIONS)},
            again=1.0 * (self.recompute != RECOMPUTES.index("none")),
        )

    @property
    def returned(self) -> Array:
        """Return 1 if a CPU's freed memory goes back to the kernel; else 0."""
        return returns_freed_memory(self.fsdp).astype(float)

    def take(self, rows: npt.NDArray[Any]) -> Layouts:
        return Layouts(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    def having(self, samples: Array) -> Layouts:
        """Return these layouts with other ``samples`` a rank."""
        return replace(self, samples=samples)

    @classmethod
    def of(cls, plans: Sequence[Plan], batch: float, length: float) -> Layouts:
        """Build the layouts of ``plans`` for a global batch; without ``micro`` a rank takes its whole share at once."""

        def each(name: str) -> Array:
            words = CHOICES.get(name)
            values = [getattr(plan, name) for plan in plans]
            return np.array([float(words.index(value) if words else value or 0) for value in values])

        given = set(cls.__slots__) - {"dp", "asked", "batch", "samples", "length", "compiles", "shares", "compress"}
        return cls(
            **{name: each(name) for name in given},
            dp=each("dp") * each("threads"),
            asked=each("micro"),
            batch=np.full(len(plans), float(batch)),
            samples=batch / np.array([float(plan.replicas) for plan in plans]),
            length=np.full(len(plans), float(length)),
            compiles=each("compile"),
            shares=np.array([plan.shares for plan in plans]),
            compress=np.array([plan.compress for plan in plans]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of a job in each step."""

    profile: Profile
    batch: int  # samples in one optimizer step of all devices
    smaller: tuple[int, ...] = ()  # of other steps, if the batch changes with the step
    length: int = 0  # tokens in a sample; 0 for that of the profile
    lengths: Lengths | None = None  # of sampled data, if they differ and ``length`` is 0
    state: float = 8.0  # bytes of optimizer state for each parameter
    norm: bool = False  # whether ranks tell each other the norm of the gradient
    optimizer: str = "adamw"  # in lower case, such as ``adamw``, with ``-fused`` for the fused kernel

    @property
    def unlike(self) -> Lengths | None:
        """Return the lengths to use: ``None`` if one length is stated."""
        return None if self.length else self.lengths

    @property
    def tokens(self) -> int:
        return self.length or (round(self.lengths.mean) if self.lengths else self.profile.length)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of some samples, spread over the data."""

    tokens: tuple[int, ...]  # of each sample that was looked at, the shortest first
    padded: bool = False  # whether samples of a batch are padded to the longest of them

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def note(self) -> str:
        """Return a note on the sampled lengths and their use, for the reader."""
        counts = "the longest of each micro-batch, which others are padded to, for time" * self.padded
        return (
            f"lengths of {len(self.tokens)} samples: {self.tokens[0]} to {self.longest}, mean {self.mean:.0f}; "
            f"longest for memory, {counts or 'mean for time'}"
        )

    def of_batch(self, samples: Array) -> Array:
        """Return tokens a sample in a micro-batch of this size, on average; with padding, those of the longest.

        The largest of k draws from n lengths is the i-th smallest with probability (i/n)^k - ((i - 1)/n)^k.
        """
        if not self.padded:
            return np.full_like(samples, self.mean)
        below = np.arange(len(self.tokens) + 1)[:, None] / len(self.tokens)
        chances = np.diff(below ** np.maximum(samples, 1.0)[None, :], axis=0)
        return np.asarray(self.tokens, dtype=float) @ chances


def for_time(lengths: Lengths | None, layouts: Layouts) -> Layouts:
    """Return ``layouts`` with the length for a step's time."""
    return replace(layouts, length=lengths.of_batch(layouts.micro)) if lengths else layouts


def for_memory(lengths: Lengths | None, layouts: Layouts) -> Layouts:
    """Return ``layouts`` with the length for memory."""
    return replace(layouts, length=np.full_like(layouts.length, float(lengths.longest))) if lengths else layouts


def lengths_of(seen: Sequence[int], *, padded: bool) -> Lengths | None:
    """Return the lengths of samples; ``None`` if all are alike."""
    return Lengths(tuple(sorted(seen)), padded) if len(set(seen)) > 1 else None
