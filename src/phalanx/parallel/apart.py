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

from phalanx.comm import Across, local
from phalanx.config import Plan
from phalanx.parallel.averaging import Averaging, Tally
from phalanx.parallel.compress import lane
from phalanx.parallel.fragments import Fragment, divide, flattened, owners, spread
from phalanx.parallel.layout import Held, Layout
from phalanx.parallel.outer import Outer
from phalanx.parallel.statistics import RunningStatistics
from phalanx.parallel.sync import Sync

_LATE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaged:
    """One averaging.

    Attributes:
        step: optimizer steps taken when it was read.
        fragment: which was averaged.
        seconds: that this rank waited for it.
        bytes: that this rank sent.
        whole: bytes that those would have been without a codec.
        loss: mean over all replicas since the last averaging; ``None`` where nothing was counted since.
    """

    step: int
    fragment: int
    seconds: float
    bytes: int
    whole: int
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A fragment on its way: this replica's values when it was read, and the mean to come."""

    fragment: int
    values: Tensor
    tally: Tally
    mean: Future[Tensor]
    seconds: float


class Apart(Sync):
    """One replica of several, as far as this rank holds it.

    Attributes:
        across: this rank's counterparts in the other replicas.
    """

    def __init__(self, plan: Plan, layout: Layout, across: Across, first_step: int, last_step: int | None) -> None:
        """``last_step``: steps taken at the end, when replicas are brought together; ``None`` where nobody knows."""
        held = layout.held
        self.across = across
        self._news: deque[Averaged] = deque(maxlen=1000)
        self._plan, self._layout, self._steps, self._last = plan, layout, first_step, last_step
        groups = divide(_sizes(held), owners(held.module), plan.fragments)
        self._fragments = [Fragment(held.parameters, names) for names in groups]
        self._statistics = RunningStatistics(held.module)
        self._outer = Outer(plan, [fragment.read() for fragment in self._fragments])
        self._averaging = Averaging(across, plan.compress)
        self._lane = lane(torch.device("cpu"))
        self._sent: _Sent | None = None
        self._totals: Any = (0.0, 0.0)  # sum and count of this replica's losses
        self._told: Any = self._totals  # when an averaging was begun last
        self._read: list[Any] = [self._totals] * plan.fragments  # when each fragment was read last
        self._since = [0] * plan.fragments  # steps since then

    @property
    def alone(self) -> bool:
        return True

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

    @torch.no_grad()
    def parameters_stepped(self, steps: int, totals: Any) -> None:
        plan, self._steps = self._plan, steps
        done = steps - plan.after
        if done == 0:
            self._begin()
        if done > 0:
            self._totals = tuple(a + b for a, b in zip(self._totals, totals, strict=True))
            self._since = [count + 1 for count in self._since]
            late = max(1, min(_LATE, plan.every // plan.fragments))
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
                self._outer.remember(index, fragment.joined(momentum))

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

    def told(self) -> Iterator[Averaged]:
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
        tally = Tally(weight=weight, loss=loss, count=count, steps=self._steps)
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
        """What this replica's losses counted since a fragment was read last."""
        return float(self._totals[1] - self._read[index][1])


def _sizes(held: Held) -> dict[str, int]:
    """Bytes of each whole parameter, the same on every rank that holds a part of it."""
    shapes = {
        name: held.slices[name].shape if name in held.slices else one.shape for name, one in held.parameters.items()
    }
    return {name: prod(shape) * held.parameters[name].element_size() for name, shape in shapes.items()}
