"""A rank's memory by part, measured in a run's first steps.

An allocator knows how much is allocated, not for which purpose, and on a CPU not even that. So memory is counted by its
holder: parameters, buffers, gradients and optimizer state by their storages, each once; activations by the tensors that
autograd saves for backward, from the save until backward releases them.

Only the memory of the computing device counts. On a CPU that is the host's, so that offloaded parts count there, and on
CUDA do not. Temporary memory within one operation does not count: workspaces, a collective's buffers, an optimizer's
temporary values. ``peak_bytes`` of the whole process includes it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from phalanx.comm import local
from phalanx.data import StepBatch
from phalanx.parallel.local_shards.tensor import is_sliced
from phalanx.trace.replaced import replaced
from phalanx.train.metrics import Metrics
from phalanx.train.step import Step, StepObserver

_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # pyrefly: ignore

_keeping: Any = getattr(checkpoint, "_CachingTorchDispatchMode", None)  # torch does not promise it

_MEASURED = 2  # steps: the first makes optimizer state and buckets, the second finds them there


@dataclass(kw_only=True, slots=True)
class Parts:
    """Bytes of one rank's memory, each part at its own peak.

    Attributes:
        parameters: values, or their shards; and the most gathered at one time.
        gradients: the peak: before a micro-batch, or before or after reduction; with the losses kept by compression.
        optimizer: its state, and the average of the weights, if the job has one.
        activations: the most saved for backward at one time, over all pending micro-batches.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0


class MeasuredStep:
    """A step that measures memory at its first calls, and then is the step itself.

    ``uncounted`` are the kinds of tensors that it could not measure.
    """

    def __init__(self, step: Step, kind: str) -> None:
        self._step, self._kind = step, kind
        self._left = _MEASURED
        self._parts = Parts()
        self.uncounted: set[str] = set()

    def __call__(self, batch: StepBatch) -> Metrics:
        """Take one step."""
        if not self._left:
            return self._step(batch)
        self._left -= 1
        step, saved = self._step, SavedActivationsMeter(self._kind, self._fixed(), self.uncounted)

        def around(context: AbstractContextManager[object]) -> AbstractContextManager[object]:
            self._see_gradients()  # those of the micro-batches before, which the last one's backward may scatter
            return saved.inside(context)

        step.watch = StepObserver(around=around, gradients=self._see_gradients)
        try:
            with saved.everywhere(step.layout.module, outside=not step.plan.compile):
                metrics = step(batch)
        except (MemoryError, RuntimeError):  # memory may have run out: by then this much was held
            with suppress(Exception):
                self._see_gradients()
                self._see_all(saved)
            raise
        finally:
            step.watch = None
        self._see_all(saved)
        if step.sharing is not None:
            step.sharing.saved(saved.peak, batch.here)
        return metrics

    def parts(self) -> Parts:
        """Return the measurements so far."""
        return self._parts if self._left < _MEASURED else self._see_fixed()

    def _see_all(self, saved: SavedActivationsMeter) -> None:
        parts = self._see_fixed()
        parts.parameters = max(parts.parameters, self._bytes(self._values()) + saved.gathered)
        parts.activations = max(parts.activations, saved.peak)

    def _see_fixed(self) -> Parts:
        parts, module, average = self._parts, self._step.layout.module, self._step.average
        values = list(self._values())
        parts.parameters = max(parts.parameters, self._bytes(values))
        parts.buffers = self._bytes(module.buffers(), but=values)
        kept = [*_tensors(self._step.optimizer.state), *_tensors(average.tensors if average else {})]
        parts.optimizer = max(parts.optimizer, self._bytes(kept, but=values))
        return parts

    def _see_gradients(self) -> None:
        sender = self._step.layout.holdings.sender
        there = [tensor.grad for tensor in self._values() if tensor.grad is not None]
        there += sender.stored() if sender else []
        self._parts.gradients = max(self._parts.gradients, self._bytes(there))

    def _values(self) -> Iterator[Tensor]:
        yield from self._step.layout.module.parameters()
        yield from self._step.layout.parameters.values()

    def _fixed(self) -> set[int]:
        return {memory._cdata for memory in self._storages((*self._values(), *self._step.layout.module.buffers()))}

    def _bytes(self, tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
        others = {memory._cdata for memory in self._storages(but)}
        found = {
            memory._cdata: memory.nbytes()
            for memory in self._storages(tensors)
            if memory.device.type == self._kind and memory._cdata not in others
        }
        return sum(found.values())

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            yield from _storages(tensor, self.uncounted)


class _SavedTensor:
    """A tensor saved by autograd that reports its release."""

    __slots__ = ("_freed", "_keys", "tensor")

    def __init__(self, tensor: Tensor, keys: list[int], freed: deque[int]) -> None:
        self.tensor, self._keys, self._freed = tensor, keys, freed

    def __del__(self) -> None:
        self._freed.extend(self._keys)


class SavedActivationsMeter:
    """A meter of the tensors that autograd saves for backward.

    Inside its block, in each thread that enters it, every saved tensor counts until it is released. Tensors saved
    inside other hooks, as in recomputed blocks, are kept by those hooks. They count as long as their memory exists.

    Attributes:
        peak: the most bytes saved at one time, without parameters and buffers.
        gathered: the most bytes of parameters beside the ``fixed`` ones: gathered from other ranks.
    """

    def __init__(self, kind: str, fixed: set[int], uncounted: set[str]) -> None:
        self.peak = self.gathered = 0
        self._kind, self._fixed, self._uncounted = kind, fixed, uncounted
        self._alive = 0
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()  # storages are freed in any thread, also while the lock is held
        self._sizes: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._watched: set[int] = set()
        self._ended: deque[int] = deque()
        self._whole: dict[int, torch.UntypedStorage] = {}
        self._hooks = threading.local()

    def __enter__(self) -> None:
        self._hooks.mine = _Hooks(self._pack, self._unpack)
        self._hooks.mine.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.mine.__exit__()

    @contextmanager
    def inside(self, context: AbstractContextManager[object]) -> Generator[None]:
        """Measure one thread's work, inside ``context``."""
        with context, self:
            yield

    @contextmanager
    def everywhere(self, module: nn.Module, *, outside: bool) -> Generator[None]:
        """Measure the whole step: parameters of ``module``, and with ``outside`` others' hooks."""
        with ExitStack() as stack:
            if outside:
                stack.enter_context(replaced(graph.saved_tensors_hooks, __enter__=self._entering()))
                stack.enter_context(replaced(graph, disable_saved_tensors_hooks=self._disabling()))
                if _keeping is not None:
                    stack.enter_context(replaced(_keeping, __exit__=self._keeping_ends(_keeping)))
                for part in module.modules():
                    if next(part.parameters(recurse=False), None) is not None:
                        stack.callback(part.register_forward_pre_hook(self._see_own).remove)
            yield

    def _pack(self, tensor: Tensor) -> Any:
        # The tensor itself, where it is an operation's output, would keep that for ever. One that is split over ranks
        # is none, and its copy must be on the same graph: what is recomputed from it starts there.
        kept = tensor if is_sliced(tensor) else tensor.detach()
        counted = self._counted(tensor)
        if not counted:
            return kept
        with self._lock:
            for memory in counted:
                self._hold(memory)
        return _SavedTensor(kept, [memory._cdata for memory in counted], self._freed)

    def _unpack(self, kept: Any) -> Tensor:
        tensor: Tensor = kept.tensor if isinstance(kept, _SavedTensor) else kept
        if self._whole and any(memory._cdata in self._whole for memory in _storages(tensor, self._uncounted)):
            self._see_whole()
        return tensor

    def _see(self, tensor: Tensor) -> None:
        counted = self._counted(tensor)
        if not counted:
            return
        with self._lock:
            self._settle()
            for memory in counted:
                if memory._cdata not in self._watched:
                    self._watched.add(memory._cdata)
                    self._hold(memory)
                    weakref.finalize(memory, self._ended.append, memory._cdata).atexit = False

    def _counted(self, tensor: Tensor) -> list[torch.UntypedStorage]:
        there = [
            memory
            for memory in _storages(tensor, self._uncounted)
            if memory._cdata not in self._fixed and memory.device.type == self._kind
        ]
        a_parameter = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        whole = [memory for memory in there if a_parameter or memory._cdata in self._whole]
        if whole:
            self._whole.update({memory._cdata: memory for memory in whole})
            self._see_whole()
            return []
        return there

    def _hold(self, memory: torch.UntypedStorage) -> None:
        self._settle()
        key = memory._cdata
        if key not in self._holders:
            self._holders[key], self._sizes[key] = 0, memory.nbytes()
            self._alive += self._sizes[key]
            self.peak = max(self.peak, self._alive)
        self._holders[key] += 1

    def _settle(self) -> None:
        """Count releases so far; memory addresses are reused, so this must come before new tensors."""
        while self._ended:
            key = self._ended.popleft()
            self._watched.discard(key)
            self._freed.append(key)
        while self._freed:
            key = self._freed.popleft()
            self._holders[key] -= 1
            if not self._holders[key]:
                self._alive -= self._sizes.pop(key)
                del self._holders[key]

    def _see_own(self, module: nn.Module, _: object) -> None:
        for tensor in module.parameters(recurse=False):
            self._counted(tensor)

    def _see_whole(self) -> None:
        self.gathered = max(self.gathered, sum(memory.nbytes() for memory in self._whole.values()))

    def _entering(self) -> Callable[[graph.saved_tensors_hooks], None]:
        enter, see = graph.saved_tensors_hooks.__enter__, self._see

        def entering(hooks: graph.saved_tensors_hooks) -> None:
            if not isinstance(hooks, _Hooks) and not isinstance(hooks.pack_hook, _WatchedHook):
                hooks.pack_hook = _WatchedHook(hooks.pack_hook, see)
            enter(hooks)

        return entering

    def _keeping_ends(self, keeping: Any) -> Callable[..., None]:
        """Count results that selective recompute keeps without hooks, even those unused by autograd."""
        leave = keeping.__exit__

        def leaving(mode: Any, *error: Any) -> None:
            leave(mode, *error)
            for kept in tree_leaves(list(mode.storage.values())):
                if isinstance(tensor := getattr(kept, "val", None), Tensor):
                    self._see(tensor)

        return leaving

    def _disabling(self) -> Callable[[str], AbstractContextManager[None]]:
        """Let torch.func run inside these hooks, which change no tensor; it refuses hooks otherwise."""
        disable = graph.disable_saved_tensors_hooks

        @contextmanager
        def disabling(message: str) -> Generator[None]:
            mine: _Hooks | None = getattr(self._hooks, "mine", None)
            top = _top_hooks(True)
            if mine is None or top is None or top[0] != mine.pack_hook:
                with disable(message):
                    yield
                return
            mine.__exit__()
            try:
                with disable(message):
                    yield
            finally:
                mine.__enter__()

        return disabling


class _Hooks(graph.saved_tensors_hooks):
    """The saved-tensor hooks of ``SavedActivationsMeter``."""


class _WatchedHook:
    """Another library's hook, with the meter reading its argument."""

    def __init__(self, hook: Callable[[Tensor], Any], see: Callable[[Tensor], None]) -> None:
        self._hook, self._see = hook, see

    def __call__(self, tensor: Tensor) -> Any:
        self._see(tensor)
        return self._hook(tensor)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, Sequence | Set) and not isinstance(state, str | bytes):
        for value in state:
            yield from _tensors(value)


def _storages(tensor: Tensor, uncounted: set[str]) -> list[torch.UntypedStorage]:
    try:
        if is_sliced(tensor):
            return [tensor._local.untyped_storage()]
        if tensor.layout == torch.sparse_coo:
            return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
        return [local(tensor).untyped_storage()]
    except Exception:  # measuring must not end the run
        uncounted.add(f"{type(tensor).__name__} ({str(tensor.layout).removeprefix('torch.')})")
        return []
