"""A recorder of every operation of a run on fake tensors, of the lifetime of memory, and of recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.trace.replaced import each_checkpoint, replaced


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor as used by an operation."""

    memory: int  # number of the storage it lies in; views share it
    shape: tuple[int, ...]  # its shape
    floating: bool  # whether it holds numbers that gradients can have

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage."""

    bytes: int  # of all of it
    itemsize: int  # of the tensor that it was made as
    floating: bool  # whether that tensor was of floating point


@dataclass(slots=True)
class RecordedOperation:
    """One operation of the run."""

    name: str  # as the framework calls it
    inputs: tuple[TensorUse, ...]  # read by it, each once
    outputs: tuple[TensorUse, ...]  # made or written by it
    given: tuple[Any, ...] = ()  # the arguments, tensors in them as ``TensorUse``
    segment: int = 0  # which stretch between blocks it belongs to
    backward: bool = False  # whether it ran in the backward
    causal: bool = False  # of attention, whether later positions are hidden
    again: bool = False  # whether it is of a forward that is computed a second time


@dataclass(slots=True)
class RecordedRun:
    """The record of a run."""

    steps: list[RecordedOperation] = field(default_factory=list[RecordedOperation])  # operations in order
    memories: dict[int, Storage] = field(default_factory=dict[int, Storage])  # number → storage
    # numbers of what autograd kept for the backward, in order, each once, with the segment
    saved: dict[int, int] = field(default_factory=dict[int, int])
    # number when it came to be or minus it when it was freed, segment, whether in the backward; in order
    changes: list[tuple[int, int, bool]] = field(default_factory=list["tuple[int, int, bool]"])
    recomputes: bool = False  # whether there was a checkpoint of the model's own


class OperationRecorder(TorchDispatchMode):
    """A recorder of the operations inside it. Memory is numbered from 1, in order of first sight.

    Attributes:
        tape: the record.
        segment: the present stretch between blocks.
        backward: whether the backward has begun.
        again: whether a checkpoint of the model is computing its forward a second time.
        checkpoints: of the model, that are open in the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = RecordedRun()
        self.segment = 0
        self.backward = False
        self.again = False
        self.checkpoints = 0
        self._numbers: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._paused = 0
        self._causal: set[int] = set()
        self._counting: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch would load its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._paused or func.namespace == "prim":
            return made
        self._follow_positions(func, args, kwargs, made)
        if _is_free(func):
            return made
        inputs, outputs = self.tensors_in((args, kwargs)), self.tensors_in(made)
        if not outputs:
            return made
        name = func._schema.name.partition("::")[2]
        if name in _NORMS:
            self._keep_fp32(made[1:3])
        if name not in _EMPTY and not _same_memory(func, inputs, outputs):
            given = tuple(self._as_seen(one) for one in args)
            self.add(name, inputs, outputs, given=given)
        return made

    def add(self, name: str, inputs: Any, outputs: Any, *, given: tuple[Any, ...] = (), causal: bool = False) -> None:
        """Record an operation; inputs and outputs are tensors or results of ``seen``."""
        if self._paused:
            return
        self.tape.steps.append(
            RecordedOperation(
                name=name,
                inputs=inputs if isinstance(inputs, tuple) else self.tensors_in(inputs),
                outputs=outputs if isinstance(outputs, tuple) else self.tensors_in(outputs),
                given=given,
                segment=self.segment,
                backward=self.backward,
                causal=causal,
                again=self.again,
            )
        )

    def tensors_in(self, value: Any) -> tuple[TensorUse, ...]:
        found: dict[tuple[int, tuple[int, ...]], TensorUse] = {}
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                one = self.see(leaf)
                found.setdefault((one.memory, one.shape), one)
        return tuple(found.values())

    def see(self, tensor: Tensor) -> TensorUse:
        return TensorUse(self.number(tensor), tuple(tensor.shape), tensor.is_floating_point())

    def number(self, tensor: Tensor) -> int:
        """Return the number of the memory of ``tensor``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            number = len(self.tape.memories) + 1
            self._numbers[key] = number
            self.tape.memories[number] = Storage(storage.nbytes(), tensor.itemsize, tensor.is_floating_point())
            self.tape.changes.append((number, self.segment, self.backward))
            self._watches[key] = weakref.ref(storage, lambda _: self._freed(key, number))
        return self._numbers[key]

    def begin_backward(self) -> None:
        self.backward = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Record the tensors that autograd keeps for the backward."""

        def pack(tensor: Tensor) -> Tensor:
            if not self._paused:
                self.tape.saved.setdefault(self.number(tensor), self.segment)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Record that these tensors are kept for the backward."""
        if not self._paused and not self.backward:
            for tensor in tensors:
                self.tape.saved.setdefault(self.number(tensor), self.segment)

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Mark the block as the forward of a checkpoint."""
        self.checkpoints += 1
        self.tape.recomputes = True
        try:
            yield
        finally:
            self.checkpoints -= 1

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark the block as a repeated forward of a checkpoint."""
        before, self.again = self.again, True
        try:
            yield
        finally:
            self.again = before

    def is_causal(self, mask: Tensor) -> bool:
        """Return True if a mask was made by comparing positions, in a way that hides later ones."""
        return self.number(mask) in self._causal

    def mark_causal(self, mask: Tensor) -> None:
        self._causal.add(self.number(mask))

    def _keep_fp32(self, statistics: Iterable[Tensor]) -> None:
        """Keep the mean and scale of a norm in fp32, as accelerators do for any type; CPUs do not."""
        for one in statistics:
            if one.is_floating_point() and one.itemsize < _FP32:
                self.tape.memories[self.number(one)] = Storage(one.numel() * _FP32, _FP32, True)

    def _freed(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self._watches.pop(key, None)
        self.tape.changes.append((-number, self.segment, self.backward))

    def _follow_positions(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        if not isinstance(made, Tensor) or self.backward:
            return
        name = func._schema.name.partition("::")[2]
        if name == "arange":
            self._counting.add(self.number(made))
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        numbers = {self.number(leaf) for leaf in given}
        if name in ("triu", "tril") or (numbers & self._causal and made.dim() >= 2):
            self._causal.add(self.number(made))
        elif numbers and numbers <= self._counting and not made.is_floating_point():
            compared = name in ("le", "ge", "lt", "gt") and len(given) == 2 and made.dim() >= 2
            (self._causal if compared else self._counting).add(self.number(made))

    def _as_seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.see(value)
        return [self._as_seen(one) for one in value] if isinstance(value, list | tuple) else value


_FP32 = 4  # bytes
_NORMS = {
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}
_EMPTY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "_local_scalar_dense",
}
_VIEWS = {"_unsafe_view", "_reshape_alias", "detach", "detach_", "lift_fresh", "view_as_real", "view_as_complex"}


def _is_free(func: Any) -> bool:
    if func._schema.name.partition("::")[2] in _VIEWS:
        return True
    infos = [one.alias_info for one in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _same_memory(func: Any, inputs: Iterable[TensorUse], outputs: Iterable[TensorUse]) -> bool:
    if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
        return False
    return {one.memory for one in outputs} <= {one.memory for one in inputs}


@contextmanager
def recomputation_seen(recorder: OperationRecorder) -> Iterator[None]:
    """Let ``recorder`` see the inside of checkpoints, their kept tensors, and their repeated forward.

    A reentrant checkpoint runs like the other kind, which ``torch.autograd.grad`` can follow: it keeps and computes the
    same, and its results need no gradient unless an argument does.
    """

    def checkpointed(
        generator: Any, function: Callable[..., Any], preserve: bool, *rest: Any, **kwargs: Any
    ) -> Generator[None]:
        recorder.keep(leaf for leaf in tree_leaves((rest, kwargs)) if isinstance(leaf, Tensor))
        # Which numbers are drawn changes no cost.
        with recorder.checkpoint():
            yield from generator(partial(_again, recorder, function), False, *rest, **kwargs)

    with each_checkpoint(checkpointed), replaced(checkpointing, CheckpointFunction=_Reentrant):
        yield


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` in a checkpoint of its own."""
    return partial(checkpointing.checkpoint, function, use_reentrant=False)


def _again(recorder: OperationRecorder, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with recorder.recomputing():
        return function(*args, **kwargs)


class _Reentrant:
    """Replacement for torch's ``CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(leaf.requires_grad for leaf in args if isinstance(leaf, Tensor)):
            with torch.no_grad():
                return function(*args)
        with checkpointing.set_checkpoint_early_stop(False):
            return checkpointing.checkpoint(function, *args, use_reentrant=False)


def hides_later(mask: Tensor) -> bool:
    """Return True if all above the diagonal is one value and the rest another; False without values."""
    if mask.is_meta or isinstance(mask, FakeTensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    size = mask.shape[-1]
    if size < 2 or mask.numel() > _LARGE:
        return False
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    values = mask.detach().to("cpu").reshape(-1, size, size)
    above, below = values[:, later], values[:, ~later]
    return bool((above == above[0, 0]).all() and (below == below[0, 0]).all() and above[0, 0] != below[0, 0])


_LARGE = 2**26
