"""One server's part of training: gradients of pieces come in, updates are made, values go out. No sockets.

Gradients are sums over the samples of a piece, over a constant. Those of a step are added up on arrival, unless they
may still be changed or left out when the step is applied; then they are kept apart until that moment.

Values being read are never overwritten: an update then goes into other memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from phalanx.parallel.parameter_server.shards import Flat, Form, form_of

_MOST_SPARE = 16  # pieces of memory kept for the next gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The way gradients and values are kept.

    Attributes:
        keeps_each_gradient: keep the pieces of a step apart, since some may not be applied.
        ahead: whether values are read while updates are made; each update then goes into other memory.
    """

    keeps_each_gradient: bool = False
    ahead: bool = False


@dataclass(slots=True)
class _OpenVersion:
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: set[int] = field(default_factory=set[int])
    total: Flat | None = None
    pieces: dict[int, Flat] = field(default_factory=dict[int, Flat])
    without: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The origin of a gradient."""

    step: int  # whose global batch it is of
    part: int  # which piece of that
    without: Sequence[int] = ()  # parameters that got none, by their place in the form


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The way a step's update is made from its gradient; equal on every server.

    Attributes:
        step: of the global batch.
        scale: factor of its gradient.
        largest: absolute value to which each element is clipped after scaling; 0 disables it.
        rate: factor on every learning rate.
        watched: keep the optimizer's input, as ``Shard.used``.
        left_out: count the update without making it.
    """

    step: int
    scale: float
    largest: float = 0.0
    rate: float = 1.0
    watched: bool = False
    left_out: bool = False


@final
class Shard:
    """Parameters, their optimizer, and pending gradients. Any thread may push and read; one updates."""

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        make: Callable[[Mapping[str, torch.Tensor]], torch.optim.Optimizer],
        rule: Rule,
    ) -> None:
        """Copy ``values``; ``make`` builds the optimizer over parameters of these names."""
        self.form: Form = form_of(values)
        self.version = self._floor = 0  # updates applied
        self._rule = rule
        self._live = self._next = Flat(self.form)
        for name, tensor in self._live.named.items():
            tensor.copy_(values[name].detach())
        self.parameters = {name: nn.Parameter(self._live.named[name]) for name in values}
        self.optimizer = make(self.parameters)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.used: dict[str, torch.Tensor] = {}  # what the optimizer was given last, where somebody looks on
        self._places = {name: place for place, name in enumerate(self.form)}
        self._open: dict[int, _OpenVersion] = {}
        self._done: set[int] = set()
        self._ready: tuple[int, Flat] | None = None
        self._readers: Counter[int] = Counter()
        self._spare: list[Flat] = []
        self._applying = False
        self._news = threading.Condition()

    def blank(self) -> Flat:
        """Return memory for a gradient, uninitialised."""
        with self._news:
            if self._spare:
                return self._spare.pop()
        return Flat(self.form)

    def give_back(self, flat: Flat) -> None:
        """Take back unused memory from ``blank``."""
        with self._news:
            self._keep(flat)

    def push(self, pushed: Pushed, gradient: Flat) -> bool:
        """Take ownership of ``gradient``, which came from ``blank``; return True if it is new.

        A piece that has arrived before, or belongs to an applied step, is dropped.
        """
        with self._news:
            over = pushed.step < self._floor or pushed.step in self._done
            known = None if over else self._open.setdefault(pushed.step, _OpenVersion())
        if known is None:
            self.give_back(gradient)
            return False
        with known.lock:
            if pushed.part in known.parts:
                self.give_back(gradient)
                return False
            known.parts.add(pushed.part)
            for place in pushed.without:
                known.without[place] = known.without.get(place, 0) + 1
            if self._rule.keeps_each_gradient:
                known.pieces[pushed.part] = gradient
            elif known.total is None:
                known.total = gradient
            else:
                known.total.add(gradient)
                self.give_back(gradient)
        return True

    def prepare(self, step: int, parts: Collection[int]) -> float:
        """Sum the gradient of ``step`` from these ``parts``, and return the sum of its squares."""
        known = self._open[step]
        with known.lock:
            assert known.parts >= set(parts), f"step {step}: {sorted(known.parts)} are in, {sorted(parts)} are needed"
            total = self._together(known, parts) if self._rule.keeps_each_gradient else known.total
        assert total is not None
        self._ready = step, total
        return total.square()

    def gradient(self) -> Mapping[str, torch.Tensor]:
        """Return the gradient prepared by ``prepare``, by name."""
        assert self._ready is not None
        return self._ready[1].named

    def apply(self, update: Update) -> None:
        """Apply ``update``, whose step is prepared."""
        assert self._ready is not None
        assert self._ready[0] == update.step
        total, self._ready = self._ready[1], None
        if update.left_out:
            self._make_way()
            self._publish(update.step, total)
            return
        total.scale(update.scale)
        if update.largest:
            total.clip(update.largest)
        known = self._open[update.step]
        unused = {place for place, times in known.without.items() if times == len(known.parts)}
        self._make_way()
        for name, parameter in self.parameters.items():
            parameter.grad = None if self._places[name] in unused else total.named[name]
        for group, own in zip(self.optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(own * update.rate)
            else:
                group["lr"] = own * update.rate
        grads = {name: parameter.grad for name, parameter in self.parameters.items() if update.watched}
        self.used = {name: grad.clone() for name, grad in grads.items() if grad is not None}
        self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        self._publish(update.step, total)

    @contextmanager
    def values(self) -> Iterator[tuple[int, Flat]]:
        """Yield the newest version and its values, which do not change inside the block."""
        with self._news:
            while self._applying:
                self._news.wait()
            version, live = self.version, self._live
            self._readers[id(live)] += 1
        try:
            yield version, live
        finally:
            with self._news:
                self._readers[id(live)] -= 1
                if not self._readers[id(live)]:
                    del self._readers[id(live)]
                    self._forget(live)

    def begin_at(self, version: int) -> None:
        """Count ``version`` updates as applied, before the first gradient arrives."""
        self.version = self._floor = version

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state."""
        state = (value for kept in self.optimizer.state.values() for value in kept.values())
        flats = len(self._spare) + sum(len(one.pieces) + (one.total is not None) for one in self._open.values())
        return {
            "parameters": self._live.nbytes,
            "gradients": self._live.nbytes * flats,
            "optimizer": sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
        }

    def _together(self, known: _OpenVersion, parts: Collection[int]) -> Flat:
        total: Flat | None = None
        for part in sorted(parts):
            gradient = known.pieces.pop(part)
            if total is None:
                total = gradient
            else:
                total.add(gradient)
                self.give_back(gradient)
        for gradient in known.pieces.values():
            self.give_back(gradient)
        known.pieces.clear()
        assert total is not None
        return total

    def _make_way(self) -> None:
        """Move the parameters to memory without readers."""
        with self._news:
            live = self._live
            in_place = not (self._rule.ahead or id(live) in self._readers)
            self._applying = in_place
        if not in_place:
            self._next = self.blank()
            self._next.copy(live)
            for name, parameter in self.parameters.items():
                parameter.data = self._next.named[name]

    def _publish(self, step: int, total: Flat) -> None:
        with self._news:
            before, self._live, self._applying = self._live, self._next, False
            del self._open[step]
            self._done.add(step)
            while self._floor in self._done:
                self._done.discard(self._floor)
                self._floor += 1
            self.version += 1
            self._keep(total)
            self._forget(before)
            self._news.notify_all()

    def _forget(self, flat: Flat) -> None:
        needed = (self._live, *self._spare)
        if id(flat) not in self._readers and not any(flat is one for one in needed):
            self._keep(flat)

    def _keep(self, flat: Flat) -> None:
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(flat)
