"""Operations on fake tensors, recorded, and executed later for the wanted tensors."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor: its memory, the memory's bytes, and its layout in it."""

    memory: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TapedOperation:
    """One operation."""

    func: Any
    args: tuple[Any, ...]  # with places for tensors that are not there
    kwargs: dict[str, Any]  # the same, without a generator
    state: Tensor | None  # of the random numbers before it, where it draws any
    generator: bool  # whether it draws from a generator of its own
    blind: bool  # whether it does not look at values
    overwrites: bool  # whether what it writes into is new whatever was there
    writes: tuple[int, ...]  # memory that it writes into
    made: tuple[TensorPlace | None, ...]  # of each leaf of its result that is in new memory

    @property
    def makes(self) -> set[int]:
        return {one.memory for one in self.made if one is not None}

    @property
    def reads(self) -> set[int]:
        """Return the memories whose values it needs."""
        if self.blind:
            return set()
        leaves = tree_leaves((self.args[1:] if self.overwrites else self.args, self.kwargs))
        return {leaf.memory for leaf in leaves if isinstance(leaf, TensorPlace)}


class OperationTape:
    """Operations in order. Memory is numbered; a later write into it belongs to that operation."""

    def __init__(self) -> None:
        self._steps: list[TapedOperation] = []
        self._writers: dict[int, list[int]] = {}
        self._numbers: dict[int, int] = {}
        self._memory: list[Any] = []  # kept, so that no two have one address

    def place(self, tensor: Tensor) -> TensorPlace:
        """Return the place of a fake."""
        memory = tensor.untyped_storage()
        number = self._numbers.setdefault(memory._cdata, len(self._memory))
        if number == len(self._memory):
            self._memory.append(memory)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return TensorPlace(number, memory.nbytes(), tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def knows(self, tensor: Tensor) -> bool:
        """Return True if a fake lies in memory made by a recorded operation."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return number in self._writers

    def add(self, step: TapedOperation) -> None:
        for memory in {*step.writes, *step.makes}:
            self._writers.setdefault(memory, []).append(len(self._steps))
        self._steps.append(step)

    def alive(self) -> list[int]:
        """Return the bytes of each memory still used by a fake."""
        return [one.nbytes() for one in self._memory if torch._C._storage_Use_Count(one._cdata) > 1]

    @property
    def given(self) -> int:
        """Return the bytes of tensors with values among the operations."""
        leaves = (leaf for step in self._steps for leaf in tree_leaves((step.args, step.kwargs)))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def close(self) -> None:
        """Release the memory table; no operations may follow."""
        self._numbers, self._memory = {}, []

    def replay(self, wanted: Sequence[TensorPlace], take: Callable[[int, Tensor], None]) -> None:
        """Execute the operations needed for these places; call ``take(index, tensor)`` once each is made.

        Tensors without common operations are made one after the other; values are freed as soon as possible.
        """
        parts = [self._leading_to(place) for place in wanted]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for members in _connected(parts):
                self._run(sorted(set().union(*(parts[one] for one in members))), members, parts, wanted, take)

    def value(self, place: TensorPlace) -> Tensor:
        found: list[Tensor] = []
        self.replay([place], lambda _, tensor: found.append(tensor))
        return found[0]

    def fingerprints(self, place: TensorPlace) -> Iterator[tuple[int, float, float]]:
        """Yield values to compare two ranks' recipes of a tensor, as (elements, sum, norm).

        The first covers the operations and random states, the others each number and each given tensor among them.
        """
        digest = hashlib.sha256()
        given: list[tuple[int, float, float]] = []
        for index in self._leading_to(place):
            step = self._steps[index]
            digest.update(str(step.func).encode())
            if step.state is not None:
                digest.update(step.state.numpy().tobytes())
            for leaf in tree_leaves((step.args, step.kwargs)):
                if isinstance(leaf, Tensor):
                    wide = leaf.double() if not leaf.is_complex() else torch.view_as_real(leaf).double()
                    given.append((leaf.numel(), float(wide.sum()), float(wide.norm())))
                elif isinstance(leaf, float):
                    given.append((1, leaf, abs(leaf)))
                else:
                    digest.update(repr(leaf).encode())
        yield 1, float(int.from_bytes(digest.digest()[:6], "big")), 0.0
        yield from given

    def _leading_to(self, place: TensorPlace) -> list[int]:
        found: set[int] = set()
        waiting = [(place.memory, len(self._steps))]
        seen = set(waiting)
        while waiting:
            memory, before = waiting.pop()
            writers = self._writers[memory]
            for index in reversed(writers[: bisect_left(writers, before)]):
                step = self._steps[index]
                begins = step.overwrites or memory in step.makes
                found.add(index)
                needs = {(one, index) for one in step.reads if one != memory or begins} - seen
                seen |= needs
                waiting += needs
                if begins:
                    break
        return sorted(found)

    def _run(
        self,
        steps: list[int],
        members: list[int],
        parts: list[list[int]],
        wanted: Sequence[TensorPlace],
        take: Callable[[int, Tensor], None],
    ) -> None:
        done: dict[int, list[int]] = {}
        for one in members:
            done.setdefault(parts[one][-1], []).append(one)
        last: dict[int, int] = {}
        for index in steps:
            step = self._steps[index]
            for memory in {*step.reads, *step.writes, *step.makes}:
                last[memory] = index
        for one in members:  # kept at least until it is taken
            last[wanted[one].memory] = max(last[wanted[one].memory], parts[one][-1])
        there: dict[int, torch.UntypedStorage] = {}
        for index in steps:
            _do(self._steps[index], there)
            for one in done.get(index, ()):
                take(one, _at(wanted[one], there))
            for memory in [memory for memory in there if last.get(memory, -1) <= index]:
                del there[memory]


def _connected(parts: Sequence[Sequence[int]]) -> list[list[int]]:
    group_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for index, part in sorted(enumerate(parts), key=lambda pair: pair[1][0]):
        met = {group_of[step] for step in part if step in group_of}
        members = [index, *(member for group in met for member in groups.pop(group))]
        groups[index] = sorted(members, key=lambda one: parts[one][-1])
        for member in members:
            group_of.update(dict.fromkeys(parts[member], index))
    return list(groups.values())


def _at(place: TensorPlace, there: dict[int, torch.UntypedStorage]) -> Tensor:
    if place.memory not in there:
        there[place.memory] = torch.UntypedStorage(place.size)
    tensor = torch.empty(0, dtype=place.dtype)
    return tensor.set_(there[place.memory], place.offset, place.shape, place.stride)


def _do(step: TapedOperation, there: dict[int, torch.UntypedStorage]) -> None:
    args, kwargs = tree_map(
        lambda leaf: _at(leaf, there) if isinstance(leaf, TensorPlace) else leaf, (step.args, step.kwargs)
    )
    if step.state is not None and step.generator:
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(step.state)
    elif step.state is not None:
        torch.set_rng_state(step.state)
    made = step.func(*args, **kwargs)
    for leaf, place in zip(tree_leaves(made), step.made, strict=True):
        if place is None:
            continue
        memory = leaf.untyped_storage()
        where = (tuple(leaf.shape), tuple(leaf.stride()), leaf.storage_offset(), leaf.dtype, memory.nbytes())
        if where == (place.shape, place.stride, place.offset, place.dtype, place.size):
            there[place.memory] = memory
        else:
            _at(place, there).copy_(leaf)
