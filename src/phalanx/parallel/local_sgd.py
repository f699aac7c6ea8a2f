"""Replicas that step independently and are averaged now and then: local SGD, post-local SGD, DiLoCo.

Every ``every`` steps the difference between the common starting copy and each replica is averaged, weighted by loss
counts, and the outer step (``outer``) moves the copy by it; replicas continue from the new copy. The copy lives in host
memory, in fp32, on every rank for its own part.

- ``after=N``: in the first N steps gradients are summed over the replicas as well, and divided by the count of the
  whole global batch: these are steps of one device (post-local SGD; Lin et al., "Don't use large mini-batches, use
  local SGD", 2020).
- Running statistics are averaged with the parameters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Counterparts, local
from phalanx.config import Plan
from phalanx.errors import DataError, LossError
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.compression import Feedback, Wire, averaged, codec
from phalanx.parallel.diloco import FlatParameters, OuterOptimizer, flattened
from phalanx.parallel.grad_reduce import Sync, spread
from phalanx.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaged:
    """One averaging."""

    step: int  # optimizer steps taken when it was read
    seconds: float  # that this rank waited for it
    bytes: int  # that this rank sent
    whole: int  # bytes that those would have been without a codec
    loss: float | None  # mean over all replicas since the last averaging; None if the count is 0


class LocalSgd(Sync):
    """This rank's part of one replica; ``across`` are its counterparts in the others."""

    per_replica = True

    def __init__(
        self, plan: Plan, layout: Layout, across: Counterparts, first_step: int, last_step: int | None
    ) -> None:
        """Take the run's parts; after ``last_step`` steps replicas are made equal, ``None`` if that is unknown."""
        held = layout.holdings
        self.across = across
        self._news: deque[Averaged] = deque(maxlen=1000)
        self._plan, self._layout, self._steps, self._last = plan, layout, first_step, last_step
        self._flat = FlatParameters(held.parameters)
        self._statistics = BufferSync(held.module)
        self._outer = OuterOptimizer(plan, self._flat.read())
        self._averaging = Averaging(across, plan.compress)
        self._totals: Any = (0.0, 0.0)  # sum and count of this replica's losses since the last averaging
        self._since = 0  # steps since then

    def gradients_ready(self, step: int, totals: Any) -> Any:
        if step >= self._plan.after:
            return totals
        parameters = list(self._layout.parameters.values())
        present = (tensor.grad is not None for tensor in parameters)
        numbers = torch.tensor([*map(float, totals), *present], dtype=torch.float64)
        self.across.sum(numbers)
        total, count, *holders = numbers.tolist()
        used = [tensor for tensor, replicas in zip(parameters, holders, strict=True) if replicas]
        for tensor in used:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        grads = [local(tensor.grad) for tensor in used if tensor.grad is not None]
        flat = flattened(grads)
        self.across.sum(flat)
        spread(grads, flat)
        return (total, count) if isinstance(totals, tuple) else totals.new_tensor((total, count))

    def named_ready(self, step: int, named: Any) -> Any:
        if step >= self._plan.after or not len(named):
            return named
        numbers = torch.tensor([float(one) for one in named], dtype=torch.float64)
        self.across.sum(numbers)
        return numbers.to(named.device) if isinstance(named, torch.Tensor) else numbers.tolist()

    @torch.no_grad()
    def parameters_stepped(self, steps: int, totals: Any) -> None:
        plan, self._steps = self._plan, steps
        done = steps - plan.after
        if done == 0:
            self._begin()
        if done > 0:
            self._totals = tuple(a + b for a, b in zip(self._totals, totals, strict=True))
            self._since += 1
            if done % plan.every == 0:
                self._average()
        if steps == self._last:
            self._come_together()

    @torch.no_grad()
    def together(self) -> None:
        """Average now; does nothing if the replicas are equal."""
        self._come_together()
        self._layout.stepped()

    @torch.no_grad()
    def restored(self, steps: int, momentum: Mapping[str, Tensor]) -> None:
        """Continue after ``steps`` steps from the present values, with the saved ``momentum``."""
        self._steps = steps
        self._begin()
        if momentum and self._plan.outer_momentum:
            self._outer.remember(self._flat.flat(momentum))

    @torch.no_grad()
    def momentum(self) -> dict[str, Tensor]:
        """Return the outer momentum of each parameter in a tensor like it, fp32; empty before the first step."""
        remembered = self._outer.momentum
        return {} if remembered is None else dict(self._flat.cut(remembered))

    @torch.no_grad()
    def room_for_momentum(self) -> dict[str, Tensor]:
        """Return zeros in the form of ``momentum``."""
        return dict(self._flat.cut(torch.zeros_like(self._flat.read())))

    def news(self) -> Iterator[Averaged]:
        """Yield averagings that were not reported yet."""
        while self._news:
            yield self._news.popleft()

    def from_every_rank(self, value: Any) -> list[Any]:
        """Return a small JSON-like value from each rank of the run, in rank order. Collective."""
        return self.across.from_every_rank(value)

    def mean(self, values: Tensor, weight: float = 1.0) -> Tensor:
        """Return the mean of ``values``, flat on the host, over the replicas. Overwrites ``values``. Collective."""
        return self._averaging.plain(values, weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean of the replicas' parameters in place for the block, and restore them afterwards.

        Collective.
        """
        own = self._flat.read()
        buffers = flattened(self._statistics.buffers)
        with torch.no_grad():
            spread(self._statistics.buffers, self._averaging.plain(buffers.clone(), 1.0))
            if self._since:
                self._flat.write(self._averaging.plain(own.clone(), float(self._totals[1])))
            self._layout.stepped()
        yield
        with torch.no_grad():
            self._flat.write(own)
            spread(self._statistics.buffers, buffers)
            self._layout.stepped()

    def _begin(self) -> None:
        self._outer.copy.copy_(self._flat.read())

    def _come_together(self) -> None:
        if self._steps <= self._plan.after:
            spread(self._statistics.buffers, self._averaging.plain(flattened(self._statistics.buffers), 1.0))
        if self._since:
            self._average(whole=True)

    def _average(self, *, whole: bool = False) -> None:
        began = time.perf_counter()
        values, beside = self._flat.read(), flattened(self._statistics.buffers)
        loss, count = map(float, self._totals)
        tally = AveragingWeights(weight=count, loss=loss, count=count, steps=self._steps)
        self._since, self._totals = 0, (0.0, 0.0)
        mean = self._averaging.mean(self._outer.copy - values, beside, tally, whole=whole)
        difference, beside = mean.split([values.numel(), mean.numel() - values.numel()])
        self._flat.write(self._outer.step(difference))
        spread(self._statistics.buffers, beside)
        told = {"bytes": tally.sent, "whole": tally.whole, "loss": tally.loss / tally.count if tally.count else None}
        self._news.append(Averaged(step=tally.steps, seconds=time.perf_counter() - began, **told))


@dataclass(kw_only=True, slots=True)
class AveragingWeights:
    """The counts that go with an averaging: one replica's before it, all replicas' after it."""

    weight: float  # counted by losses, samples or tokens, since the last averaging
    loss: float  # sum of the losses since then
    count: float  # their count
    steps: int  # optimizer steps taken: the same on every replica
    sent: int = 0  # bytes that this rank sent
    whole: int = 0  # bytes that those would have been without a codec


class Averaging:
    """Averages over this rank's counterparts; a codec's losses are added to the next averaging."""

    def __init__(self, across: Counterparts, compress: str) -> None:
        self._across = across
        self._codec = codec(compress)
        self._wire = Wire(across.group)
        self._feedback: Feedback | None = None

    def mean(self, values: Tensor, beside: Tensor, tally: AveragingWeights, *, whole: bool = False) -> Tensor:
        """Return the weighted mean of ``values``, compressed unless ``whole``, then that of ``beside``. Collective.

        Overwrites both. ``tally`` becomes that of all replicas. ``whole`` includes the losses kept so far.

        Raises:
            LossError: if all replicas counted 0.
            DataError: if replicas have not taken equally many steps.
        """
        weight = self._weigh(tally)
        tally.whole = tally.sent + self._across.sent(values.nbytes + beside.nbytes)
        across, feedback = self._across, self._feedback
        if whole and feedback is not None:
            values = feedback.whole(values.mul_(weight))
            self._feedback = None
        else:
            values.mul_(weight)
        beside.mul_(weight)
        if whole or self._codec is None:
            both = torch.cat((values, beside)) if beside.numel() else values
            across.sum(both)
            tally.sent += across.sent(both.nbytes)
            return both.div_(across.size)
        if feedback is None and self._codec.facts.feeds_back:
            feedback = self._feedback = Feedback(self._codec)
        before = self._wire.traffic.sent
        averaged(values, self._wire, self._codec, feedback)
        tally.sent += self._wire.traffic.sent - before
        if beside.numel():
            across.sum(beside)
            tally.sent += across.sent(beside.nbytes)
        return torch.cat((values, beside.div_(across.size)))

    def plain(self, values: Tensor, weight: float) -> Tensor:
        """Return the mean of ``values`` with this weight, uncompressed. Overwrites ``values``. Collective.

        If all weights are 0, all replicas count equally.
        """
        if not values.numel():
            return values
        across, total = self._across, torch.tensor(weight, dtype=torch.float64)
        across.sum(total)
        values.mul_(weight * across.size / total.item() if total else 1.0)
        across.sum(values)
        return values.div_(across.size)

    def _weigh(self, tally: AveragingWeights) -> float:
        across = self._across
        numbers = torch.tensor((tally.weight, tally.loss, tally.count, tally.steps), dtype=torch.float64)
        across.sum(numbers)
        tally.sent += across.sent(numbers.nbytes)
        weight, tally.loss, tally.count, steps = numbers.tolist()
        if steps != tally.steps * across.size:
            raise DataError(
                f"replicas came together after unlike numbers of steps: {tally.steps} on this one, "
                f"{steps / across.size:g} on the average.\n"
                "    Usual cause: a stream of another length on each rank.\n"
                "    try: remove rank-dependent sharding from job.data"
            )
        if not weight > 0:
            raise LossError(
                f"nothing was counted in the steps before step {tally.steps}, on any replica: "
                "the counts of their losses add up to 0.\n"
                "    try: leave samples whose labels are all ignored out of job.data, or a larger batch"
            )
        own, tally.weight = tally.weight * across.size / weight, weight
        return own
