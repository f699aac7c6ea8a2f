"""A stage's own operations, recorded while the model's code runs and replayed from then on.

A stage computes its part of a model by running the model's own forward on stand-ins for other stages' values. For
arguments of the same form that code does the same each time: the stage's own work is a list of calls of units and a few
operations between them. Once two runs have made the same list, later runs only replay it, and the code of other stages
costs no time.

There is no list, and the model's code runs each time, if the code decides by values of tensors after the stage has
begun to compute, changes Python state, draws from Python's random streams, or puts units into contexts of its own (such
as a checkpoint). Before each replay, the Python state read by that code is compared (``PythonState``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from phalanx.parallel.pipeline.python_state import PythonState
from phalanx.parallel.pipeline.value_flow import autocast_devices


class Slot(int):
    """The index of a value in a replay."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or buffer, looked up at each use, because it may be another tensor then."""

    table: dict[str, Any]  # of the module that holds it
    name: str  # in that table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and self.table is other.table and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.table), self.name))


@dataclass(frozen=True, slots=True)
class ArgumentTree:
    """Nested arguments or results: their leaves, each a ``Slot``, an ``Attribute`` or a constant."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    def same(self, other: ArgumentTree) -> bool:
        return self.spec == other.spec and all(map(same, self.leaves, other.leaves))

    def slots(self) -> Iterator[Slot]:
        """Return the slots it needs."""
        return (leaf for leaf in self.leaves if type(leaf) is Slot)

    def filled(self, values: list[Any]) -> Any:
        return tree_unflatten([_value(leaf, values) for leaf in self.leaves], self.spec)


@dataclass(slots=True)
class ReplayedCall:
    """A call of a unit or of one of torch's functions.

    A result that was not a tensor is its guard: another result means that the model's code would take another path.
    """

    call: Callable[..., Any]
    given: ArgumentTree
    makes: tuple[Slot | None, ...]  # for each leaf of its result the slot of a new value
    guard: Any
    context: tuple[Any, ...]  # gradients and autocast
    early: bool  # whether it depends on the arguments only; those come first
    keeps: bool  # whether it is called though nothing needs what it gives
    frees: tuple[Slot, ...] = ()  # that nothing needs any more

    def same(self, other: ReplayedCall) -> bool:
        return (
            same(self.call, other.call)
            and self.given.same(other.given)
            and self.makes == other.makes
            and same(self.guard, other.guard)
            and self.context == other.context
        )


class GuardError(Exception):
    """A violated guard, before any result was used."""


@dataclass(slots=True)
class StageTape:
    """A stage's operations for arguments of one form."""

    operations: list[ReplayedCall]
    arrives: int  # before which operation the values of the stage before arrive; -1 for never
    expected: list[Tensor]  # fakes of those values
    arrivals: tuple[Slot, ...]  # theirs
    result: ArgumentTree
    given: int  # how many tensors the model is called with
    slots: int  # how many values there are
    context: tuple[Any, ...]  # around the stage
    state: PythonState  # Python values that the model's code reads

    def same(self, other: StageTape) -> bool:
        return (
            (self.arrives, self.arrivals, self.given, self.context)
            == (other.arrives, other.arrivals, other.given, other.context)
            and len(self.operations) == len(other.operations)
            and all(one.same(two) for one, two in zip(self.operations, other.operations, strict=True))
            and self.result.same(other.result)
        )

    def play(self, given: Sequence[Tensor], receive: Callable[[list[Tensor]], Sequence[Tensor]]) -> Any:
        """Replay all operations for these tensor arguments; ``receive`` returns the arrived values.

        Raises:
            GuardError: if the model's code would act differently; before any value arrives or a unit is called.
        """
        values: list[Any] = [None] * self.slots
        values[: self.given] = given
        for index, operation in enumerate(self.operations):
            if index == self.arrives:
                self._receive(values, receive)
            with _in_context(operation.context, self.context):
                args, kwargs = operation.given.filled(values)
                result = operation.call(*args, **kwargs)
            if operation.guard is not NO_GUARD:
                if not same(result, operation.guard):
                    raise GuardError
                continue
            leaves = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
            for slot, leaf in zip(operation.makes, leaves, strict=True):
                if slot is not None:
                    values[slot] = leaf
            del result, leaves, args, kwargs
            for slot in operation.frees:
                values[slot] = None
        if self.arrives == len(self.operations):
            self._receive(values, receive)
        return self.result.filled(values)

    def _receive(self, values: list[Any], receive: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
        for slot, value in zip(self.arrivals, receive(self.expected), strict=True):
            values[slot] = value

    def prune(self) -> None:
        """Drop operations needed by other stages only, and free each value after its last use."""
        needed, kept = set(self.result.slots()), []
        for index in reversed(range(len(self.operations))):
            one = self.operations[index]
            if (one.early or index < self.arrives) and not one.keeps and needed.isdisjoint(_made(one)):
                self.arrives -= index < self.arrives
                continue
            needed |= set(one.given.slots())
            kept.append(one)
        self.operations = kept[::-1]
        last = {slot: index for index, one in enumerate(self.operations) for slot in (*_made(one), *one.given.slots())}
        for index, one in enumerate(self.operations):
            one.frees = tuple(slot for slot, at in last.items() if at == index and slot not in set(self.result.slots()))


def _made(one: ReplayedCall) -> Iterator[Slot]:
    return (slot for slot in one.makes if slot is not None)


@contextmanager
def _in_context(wanted: tuple[Any, ...], ambient: tuple[Any, ...]) -> Iterator[None]:
    if wanted == ambient:
        yield
        return
    grad, types = wanted
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, now, before in zip(autocast_devices(), types, ambient[1], strict=True):
            if now != before:
                stack.enter_context(torch.autocast(kind, dtype=now or before, enabled=now is not None))
        yield


CONSTANTS = (bool, int, float, complex, str, type(None))
NO_GUARD = object()


def same(a: Any, b: Any) -> bool:
    """Return True if two callables, arguments or results are the same to a replay."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, partial):
        return same(a.func, b.func) and len(a.args) == len(b.args) and all(map(same, a.args, b.args))
    if isinstance(a, slice):
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return bool(a == b) if isinstance(a, (*_COMPARED, Slot, Attribute)) or callable(a) else False


_COMPARED = (*CONSTANTS, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type(Ellipsis))


def _value(leaf: Any, values: list[Any]) -> Any:
    if type(leaf) is Slot:
        return values[leaf]
    return leaf.table[leaf.name] if type(leaf) is Attribute else leaf
