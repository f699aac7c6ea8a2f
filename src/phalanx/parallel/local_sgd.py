"""Replicas that step by themselves and come together now and then: local SGD, post-local SGD, DiLoCo, fragments.

Every ``every`` steps the difference between the copy that replicas began from and what each has come to is averaged
over them, weighted by what their losses counted, and the outer step (``outer``) moves the copy by it; replicas go on
from there. The copy lives in host memory, in fp32, on every rank for what it holds.

- ``after=N``: in the first N steps gradients are summed over the replicas as well, and divided by the count of the
  whole global batch: these are steps of one device (post-local SGD; Lin et al., "Don't use large mini-batches, use
  local SGD", 2020).
- ``fragments=F``: the model's blocks in F groups that come together in turn, ``every`` / F steps apart, each while the
  next steps compute (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025). A fragment read after
  one step is merged 5 steps later, or when the next one's turn comes if that is sooner; then each replica goes on from
  the new copy plus what it has learnt meanwhile: copy + (now - read).
- With one fragment replicas wait for it, and are equal afterwards.
- Running statistics are averaged with the first fragment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from phalanx.comm import Counterparts, local
from phalanx.config import Plan
from phalanx.config.sync import FRAGMENT_STEPS
from phalanx.errors import DataError, LossError
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.compression import Feedback, Wire, averaged, codec, lane
from phalanx.parallel.diloco import Fragment, OuterOptimizer, divide, flattened, owners
from phalanx.parallel.grad_reduce import Sync, spread
from phalanx.parallel.layout import Layout, RankHoldings


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaged:
    """One averaging."""

    step: int  # optimizer steps taken when it was read
    fragment: int
    seconds: float  # that this rank waited for it
    bytes: int  # that this rank sent
    whole: int  # bytes that those would have been without a codec
    loss: float | None  # mean over all replicas since the last averaging; None where nothing was counted since


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A fragment on its way."""

    fragment: int
    values: Tensor  # this replica's, when it was read
    tally: AveragingWeights
    mean: Future[Tensor]  # to come
    seconds: float


class LocalSgd(Sync):
    """One replica of several, as far as this rank holds it; ``across`` are its counterparts in the others."""

    per_replica = True

    def __init__(
        self, plan: Plan, layout: Layout, across: Counterparts, first_step: int, last_step: int | None
    ) -> None:
        """``last_step``: steps taken at the end, when replicas are brought together; ``None`` where nobody knows."""
        held = layout.holdings
        self.across = across
        self._news: deque[Averaged] = deque(maxlen=1000)
        self._plan, self._layout, self._steps, self._last = plan, layout, first_step, last_step
        groups = divide(_sizes(held), owners(held.module), plan.fragments)
        self._fragments = [Fragment(held.parameters, names) for names in groups]
        self._statistics = BufferSync(held.module)
        self._outer = OuterOptimizer(plan, [fragment.read() for fragment in self._fragments])
        self._averaging = Averaging(across, plan.compress)
        self._lane = lane(torch.device("cpu"))
        self._sent: _Sent | None = None
        self._totals: Any = (0.0, 0.0)  # sum and count of this replica's losses
        self._told: Any = self._totals  # when an averaging was begun last
        self._read: list[Any] = [self._totals] * plan.fragments  # when each fragment was read last
        self._since = [0] * plan.fragments  # steps since then

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
            self._since = [count + 1 for count in self._since]
            late = max(1, min(FRAGMENT_STEPS, plan.every // plan.fragments))
            if self._sent and steps >= self._sent.tally.steps + late:
                self._merge(self._sent)
            for index in range(plan.fragments):
                if (done - index * plan.every // plan.fragments) % plan.every == 0:
                    self._sent = self._send(index)
            if self._sent and plan.fragments == 1:
                self._merge(self._sent)
        if steps == self._last:
            self._come_together()

    @torch.no_grad()
    def together(self) -> None:
        """As when their time has come; nothing where they are together."""
        self._come_together()
        self._layout.stepped()

    @torch.no_grad()
    def restored(self, steps: int, momentum: Mapping[str, Tensor]) -> None:
        """Go on from ``steps`` steps, from the values that are there now, with what ``momentum`` gave then."""
        self._steps = steps
        self._begin()
        if momentum and self._plan.outer_momentum:
            for index, fragment in enumerate(self._fragments):
                self._outer.remember(index, fragment.flat(momentum))

    @torch.no_grad()
    def momentum(self) -> dict[str, Tensor]:
        """What the outer optimizer remembers of each parameter, in a tensor like it, fp32; empty before it stepped."""
        found: dict[str, Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            if (remembered := self._outer.momentum(index)) is not None:
                found.update(fragment.cut(remembered))
        return found

    @torch.no_grad()
    def room_for_momentum(self) -> dict[str, Tensor]:
        """Zeros in the place of what ``momentum`` gives."""
        return {name: tensor for one in self._fragments for name, tensor in one.cut(torch.zeros_like(one.read()))}

    def news(self) -> Iterator[Averaged]:
        """The averagings that nobody has been told of yet."""
        while self._news:
            yield self._news.popleft()

    def from_every_rank(self, value: Any) -> list[Any]:
        """One small JSON-like value from each rank of the run, in rank order, after what is on its way. Collective."""
        if self._sent:
            self._sent.mean.wait()  # every rank must enter the group's collectives in the same order
        return self.across.from_every_rank(value)

    def mean(self, values: Tensor, weight: float = 1.0) -> Tensor:
        """The mean over the replicas of ``values``, flat on the host, which is used up. Collective."""
        return self._averaging.plain(values, weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, forward reads the mean of the replicas' parameters as they are; afterwards all is as it was.

        Collective.
        """
        own = [fragment.read() for fragment in self._fragments]
        buffers = flattened(self._statistics.buffers)
        with torch.no_grad():
            if self._sent:
                self._sent.mean.wait()  # every rank must enter the group's collectives in the same order
            spread(self._statistics.buffers, self._averaging.plain(buffers.clone(), 1.0))
            for index, fragment in enumerate(self._fragments):
                if self._since[index]:
                    fragment.write(self._averaging.plain(own[index].clone(), self._counted_since(index)))
            self._layout.stepped()
        yield
        with torch.no_grad():
            for fragment, values in zip(self._fragments, own, strict=True):
                fragment.write(values)
            spread(self._statistics.buffers, buffers)
            self._layout.stepped()

    def _begin(self) -> None:
        """Replicas are equal now, and step by themselves from here."""
        for copy, fragment in zip(self._outer.copies, self._fragments, strict=True):
            copy.copy_(fragment.read())

    def _come_together(self) -> None:
        if self._sent:
            self._merge(self._sent)
        if self._steps <= self._plan.after:
            spread(self._statistics.buffers, self._averaging.plain(flattened(self._statistics.buffers), 1.0))
        for index, steps in enumerate(self._since):
            if steps:
                self._merge(self._send(index, whole=True))

    def _send(self, index: int, *, whole: bool = False) -> _Sent:
        """Read a fragment, and start to average it; as it is, without a codec, if ``whole``."""
        began = time.perf_counter()
        values = self._fragments[index].read()
        beside = flattened(self._statistics.buffers if index == 0 else ())
        loss, count = (float(a - b) for a, b in zip(self._totals, self._told, strict=True))
        weight = self._counted_since(index)
        tally = AveragingWeights(weight=weight, loss=loss, count=count, steps=self._steps)
        self._since[index], self._read[index], self._told = 0, self._totals, self._totals
        difference = self._outer.copies[index] - values
        mean = self._lane.start(lambda: self._averaging.mean(index, difference, beside, tally, whole=whole))
        seconds = time.perf_counter() - began
        return _Sent(fragment=index, values=values, tally=tally, mean=mean, seconds=seconds)

    def _merge(self, sent: _Sent) -> None:
        """Wait for the mean, take the outer step, and go on from the new copy with what was learnt meanwhile."""
        began, index = time.perf_counter(), sent.fragment
        fragment, tally, mean = self._fragments[index], sent.tally, sent.mean.wait()
        difference, beside = mean.split([sent.values.numel(), mean.numel() - sent.values.numel()])
        copy = self._outer.step(index, difference)
        meanwhile = self._since[index] > 0
        fragment.write(copy + (fragment.read() - sent.values) if meanwhile else copy)
        if index == 0:
            spread(self._statistics.buffers, beside)
        self._sent = None
        loss = tally.loss / tally.count if tally.count else None
        seconds = sent.seconds + time.perf_counter() - began
        told = {"step": tally.steps, "bytes": tally.sent, "whole": tally.whole, "loss": loss}
        self._news.append(Averaged(fragment=index, seconds=seconds, **told))

    def _counted_since(self, index: int) -> float:
        return float(self._totals[1] - self._read[index][1])


def _sizes(held: RankHoldings) -> dict[str, int]:
    """Bytes of each whole parameter, the same on every rank that holds a part of it."""
    parameters, slices = held.parameters, held.slices
    return {name: prod(slices.get(name, one).shape) * one.element_size() for name, one in parameters.items()}


@dataclass(kw_only=True, slots=True)
class AveragingWeights:
    """What goes with an averaging, by replica; afterwards over all of them."""

    weight: float  # what losses counted, samples or tokens, since this was averaged last
    loss: float  # sum of the losses since the last averaging of anything
    count: float  # what they counted
    steps: int  # optimizer steps taken: the same on every replica
    sent: int = 0  # bytes that this rank sent
    whole: int = 0  # bytes that those would have been without a codec


class Averaging:
    """Over the counterparts of this rank; what a codec leaves out comes with the same fragment's next averaging."""

    def __init__(self, across: Counterparts, compress: str) -> None:
        self._across = across
        self._codec = codec(compress)
        self._wire = Wire(across.group)
        self._feedback: dict[int, Feedback] = {}

    def mean(
        self, fragment: int, values: Tensor, beside: Tensor, tally: AveragingWeights, *, whole: bool = False
    ) -> Tensor:
        """The weighted mean of ``values`` through the codec, or ``whole``, followed by that of ``beside``. Collective.

        Both are used up. ``tally`` becomes that of all replicas. What is sent ``whole`` has with it what was left out.

        Raises:
            LossError: if no replica counted anything.
            DataError: if replicas have not taken equally many steps.
        """
        weight = self._weigh(tally)
        tally.whole = tally.sent + self._across.sent(values.nbytes + beside.nbytes)
        across, feedback = self._across, self._feedback.get(fragment)
        if whole and feedback is not None:
            values = feedback.whole(values.mul_(weight))
            del self._feedback[fragment]
        else:
            values.mul_(weight)
        beside.mul_(weight)
        if whole or self._codec is None:
            both = torch.cat((values, beside)) if beside.numel() else values
            across.sum(both)
            tally.sent += across.sent(both.nbytes)
            return both.div_(across.size)
        if feedback is None and self._codec.facts.feeds_back:
            feedback = self._feedback[fragment] = Feedback(self._codec)
        before = self._wire.traffic.sent
        averaged(values, self._wire, self._codec, feedback)
        tally.sent += self._wire.traffic.sent - before
        if beside.numel():
            across.sum(beside)
            tally.sent += across.sent(beside.nbytes)
        return torch.cat((values, beside.div_(across.size)))

    def plain(self, values: Tensor, weight: float) -> Tensor:
        """The mean of ``values`` by these weights, as they are; ``values`` is used up. Collective.

        Where all weights are 0, all are the same.
        """
        if not values.numel():
            return values
        across, total = self._across, torch.tensor(weight, dtype=torch.float64)
        across.sum(total)
        values.mul_(weight * across.size / total.item() if total else 1.0)
        across.sum(values)
        return values.div_(across.size)

    def _weigh(self, tally: AveragingWeights) -> float:
        """This replica's weight: 1 is the mean one. Adds the tallies up."""
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
