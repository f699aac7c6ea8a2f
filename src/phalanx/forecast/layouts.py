"""Plans as arrays: one entry a candidate, so that thousands are forecast at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.forecast.price import Shapes
from phalanx.forecast.tables import Array
from phalanx.spec import Plan

Whole = npt.NDArray[np.int64]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layouts:
    """N candidates of one precision: shape (N,) each.

    Attributes:
        dp: replicas of the (sharded) model.
        fsdp: ranks over which its state is sharded.
        tp: ranks that share each layer's weights.
        pp: ranks that hold a run of layers each.
        cp: ranks that share each sample's tokens.
        ep: ranks that share the experts, and hold different samples.
        zero: 0 to 3.
        stages: on each rank of ``pp``.
        schedule: index in ``SCHEDULES``.
        recompute: index in ``RECOMPUTES``.
        sequence: 1 where the stream is cut along the tokens with ``tp``.
        micro: samples in one forward of a rank.
        batch: samples in one step of all.
        length: tokens of a sample.
        offload: 0 none, 1 optimizer, 2 parameters.
    """

    dp: Array
    fsdp: Array
    tp: Array
    pp: Array
    cp: Array
    ep: Array
    zero: Array
    stages: Array
    schedule: Array
    recompute: Array
    sequence: Array
    micro: Array
    batch: Array
    length: Array
    offload: Array

    @property
    def replicas(self) -> Array:
        """Parts of the global batch."""
        return self.dp * self.fsdp * self.ep

    @property
    def devices(self) -> Array:
        """That each needs."""
        return self.replicas * self.tp * self.pp * self.cp

    @property
    def micros(self) -> Array:
        """Micro-batches of a rank in one step."""
        return np.ceil(self.batch / self.replicas / self.micro - 1e-9)

    @property
    def shapes(self) -> Shapes:
        """How one micro-batch is computed on a rank."""
        return Shapes(
            samples=self.micro,
            length=self.length,
            tp=self.tp,
            sequence=self.sequence,
            cp=self.cp,
            ep=self.ep,
            returned=self.returned,
        )

    @property
    def returned(self) -> Array:
        """1 where a CPU's freed memory goes back to the kernel: all that shards or splits the model; else 0."""
        return (self.fsdp * self.tp * self.pp * self.cp * self.ep > 1).astype(float)

    def take(self, rows: npt.NDArray[Any]) -> Layouts:
        """The candidates at ``rows``: indices, or a mask."""
        return Layouts(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    @classmethod
    def of(cls, plans: Sequence[Plan], batch: float, length: float) -> Layouts:
        """The layouts of ``plans`` for a global batch; without ``micro`` a rank takes its whole share at once."""

        def each(name: str) -> Array:
            return np.array([float(getattr(plan, name)) for plan in plans])

        replicas = np.array([float(plan.replicas) for plan in plans])
        micro = np.array([float(plan.micro or 0) for plan in plans])
        share = np.ceil(batch / replicas)
        return cls(
            dp=each("dp") * each("threads"),
            fsdp=each("fsdp"),
            tp=each("tp"),
            pp=each("pp"),
            cp=each("cp"),
            ep=each("ep"),
            zero=each("zero"),
            stages=each("stages"),
            schedule=np.array([float(SCHEDULES.index(plan.schedule)) for plan in plans]),
            recompute=np.array([float(RECOMPUTES.index(plan.recompute)) for plan in plans]),
            sequence=each("sequence"),
            micro=np.where(micro > 0, np.minimum(micro, share), share),
            batch=np.full(len(plans), float(batch)),
            length=np.full(len(plans), float(length)),
            offload=np.array([float(("none", "optimizer", "parameters").index(plan.offload)) for plan in plans]),
        )
