"""Tracking, through a model's own code, of the values that depend on parameters.

Between units (the modules that run whole) a model does small work of its own.

A stage runs that code on stand-ins for other stages' values. A custom ``autograd.Function`` takes them directly, and
``torch.utils.checkpoint`` keeps them for backward, when stand-ins are no longer swapped. So the run handles both: a
function's arguments are swapped like an operation's, and the inside of a checkpoint is recomputed unit by unit, from
the values that the units are called with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.device_kinds import host
from phalanx.parallel.local_shards.axis import parameter_of
from phalanx.parallel.local_shards.tensor import METADATA, is_sliced, name_of
from phalanx.trace.fake_tensors import fake
from phalanx.trace.replaced import each_checkpoint, replaced

Recompute = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a call that does the same and computes its activations a second time in backward."""


@contextmanager
def told_to(run: Flow) -> Iterator[None]:
    """Notify ``run`` of autograd functions outside of units, and of checkpoints, in the block."""

    def applied(cls: Any, *args: Any) -> Any:
        call = partial(_applied, cls)
        if cls is checkpointing.CheckpointFunction:
            return _reentrant(run, call, *args)
        return call(*args) if run.inside else run.function(call, args)

    def checkpointed(generator: Any, function: Any, *args: Any, **kwargs: Any) -> Generator[None]:
        own = run.inside
        settings = dict(zip(_SETTINGS, args, strict=False))  # as ``checkpoint`` gives them, before the arguments
        with run.recomputing(_again(**settings)):
            if own:
                yield from generator(function, *args, **kwargs)
            else:
                yield

    with each_checkpoint(checkpointed), replaced(_SingleLevelFunction, apply=classmethod(applied)):
        yield


def _applied(cls: Any, *args: Any) -> Any:
    return super(_SingleLevelFunction, cls).apply(*args)  # pyrefly: ignore


_SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _again(**settings: Any) -> Recompute:
    return lambda call: partial(checkpointing.checkpoint, call, use_reentrant=False, **settings)


def _reentrant(run: Flow, call: Callable[..., Any], function: Any, preserve: bool, *args: Any) -> Any:
    with run.recomputing(_again(preserve_rng_state=preserve)):
        if run.inside:
            return call(function, preserve, *args)
        # Nothing that it computes gets a gradient then, its parameters' included.
        with nullcontext() if run.learns(args) else torch.no_grad():
            return function(*args)


class Key(NamedTuple):
    """A value, identified by its origin."""

    call: int  # of the unit that was called last, counting calls from 0; -1 before the first
    unit: bool  # whether it is that unit's output, not of the model's work after it
    index: int  # which leaf of the output; or which result

    @property
    def region(self) -> int:
        """Return the call whose stage computes it; work before the first call belongs to that call."""
        return max(self.call, 0)


class TensorMark:
    """The knowledge of a tensor during one run."""

    __slots__ = ("flow", "key", "region", "stand_in", "value")

    def __init__(self, flow: Flow, key: Key | None, region: int) -> None:
        # Which value it is, None for one that a unit keeps to itself; and where it came about.
        self.flow, self.key, self.region = flow, key, region
        self.stand_in: Tensor | None = None  # a fake of it, where the tensor itself is not one
        self.value: Tensor | None = None  # the real tensor, once it has arrived


class Flow(TorchFunctionMode):
    """One run of a model. Dry runs and stages override its methods."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.real = False  # whether values are computed here, not stood in for
        self.call = -1  # the last unit that was called
        self.inside = False  # whether it is running
        self.recomputes = False  # whether the model has recomputed activations by itself so far
        self.reentrant: list[bool] = []  # of each reentrant checkpoint whether what it was called with learns
        self._count = 0
        self._again: list[Recompute] = []
        self._unseen = False

    def used(self, leaves: list[Tensor]) -> None:
        """Handle a read of these values."""

    def within(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle an operation inside a unit."""
        return func(*args, **kwargs)

    def between(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle an operation outside units, with its actual arguments."""
        return func(*args, **kwargs)

    def came(self, mark: TensorMark, tensor: Tensor) -> None:
        """Handle a new value."""

    def entered(self) -> None:
        """Handle the call of another unit."""
        self.call += 1
        self._count = 0

    def mark_of(self, tensor: Tensor) -> TensorMark | None:
        """Return this run's mark of ``tensor``."""
        mark = getattr(tensor, _NAME, None)
        return mark if mark is not None and mark.flow is self else None

    def again(self, tensor: Tensor, mark: TensorMark) -> None:
        """Mark ``tensor`` as unchanged."""
        setattr(tensor, _NAME, mark)

    def depends(self, tensor: Tensor) -> bool:
        """Return True if it depends on parameters."""
        if self.mark_of(tensor) is not None:
            return True
        return parameter_of(tensor.local if is_sliced(tensor) else tensor) is not None

    def put(self, tensor: Tensor, key: Key | None) -> TensorMark:
        """Mark ``tensor`` as the value ``key``."""
        mark = TensorMark(self, key, key.region if key else max(self.call, 0))
        setattr(tensor, _NAME, mark)
        if key is not None:
            self.came(mark, tensor)
        return mark

    def as_fake(self, leaf: Any) -> Any:
        """Return a fake in place of a value that depends on parameters."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor) or not self.depends(leaf):
            return leaf
        mark = self.mark_of(leaf)
        if mark is None or mark.stand_in is None:
            made = fake(self.fakes, leaf)
            if leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                made = made.clone()  # not a leaf, which could not be written into
            if mark is not None:
                mark.stand_in = made
            return made
        return mark.stand_in

    def as_real(self, leaf: Any) -> Any:
        """Return the value in place of its fake."""
        if isinstance(leaf, Tensor):
            mark = self.mark_of(leaf)
            if mark is not None and mark.value is not None:
                return mark.value
        return leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in METADATA or self._unseen:
            return func(*args, **kwargs)
        if self.inside:
            return self.within(func, args, kwargs)
        return self._operation(func, name, args, kwargs)

    def function(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Handle an autograd function as one operation: its forward is not part of the model's work."""
        return call(*args) if self._unseen else self._operation(call, "apply", args, {}, unseen=True)

    @contextmanager
    def recomputing(self, how: Recompute) -> Generator[None]:
        """Wrap the units inside by ``recomputed``, for work that is repeated in backward."""
        self.recomputes = True
        self._again.append(how)
        try:
            yield
        finally:
            self._again.pop()

    def learns(self, args: tuple[Any, ...]) -> bool:
        """Return True if an argument of the next reentrant checkpoint requires a gradient."""
        self.reentrant.append(any(leaf.requires_grad for leaf in args if isinstance(leaf, Tensor)))
        return self.reentrant[-1]

    def recomputed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``call`` of a unit for the checkpoint around it."""
        return self._again[-1](call) if self._again else call

    def _operation(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, *, unseen: bool = False) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self.depends(leaf)]
        # What is drawn is drawn where this code belongs: other stages are at another place of the random stream.
        chance = not leaves and name in RANDOM
        if not leaves and not chance:
            return self._between(func, args, kwargs, unseen)
        self.used(leaves)
        swap = self.as_real if self.real else self.as_fake
        given, named = tree_map(swap, args), tree_map(swap, kwargs)
        if not self.real and leaves and writes(name) and not self.depends(args[0]):
            given = (fake(self.fakes, args[0]), *given[1:])  # what is written into it makes it depend on parameters
        result = self._between(func, given, named, unseen)
        own = not chance and all((mark := self.mark_of(leaf)) is not None and mark.key is None for leaf in leaves)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if writes(name) and args and isinstance(args[0], Tensor):
            made = [leaf for leaf in made if leaf is not given[0]]
            self.written(args[0], given[0], None if own else self._next())
        for leaf in made:
            self.put(leaf, None if own else self._next())
        return result

    def _between(self, func: Callable[..., Any], args: Any, kwargs: Any, unseen: bool) -> Any:
        self._unseen, before = unseen, self._unseen
        try:
            return self.between(func, args, kwargs)
        finally:
            self._unseen = before

    def written(self, held: Tensor, written: Tensor, key: Key | None) -> None:
        """Handle a change of ``written``; the model may hold its stand-in, or the tensor it stands in for."""
        mark = self.put(written, key)
        if held is written:
            return
        if self.real:
            replaced = TensorMark(self, mark.key, mark.region)
            replaced.value = written
            setattr(held, _NAME, replaced)
        else:
            setattr(held, _NAME, mark)
            mark.stand_in = written

    def _next(self) -> Key:
        self._count += 1
        return Key(self.call, False, self._count - 1)


_NAME = "_phalanx_mark"
RANDOM = frozenset(
    """
    bernoulli multinomial normal poisson rrelu gumbel_softmax dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_alpha_dropout feature_dropout native_dropout rand randn randint randperm rand_like randn_like randint_like
    bernoulli_ normal_ uniform_ exponential_ random_ cauchy_ geometric_ log_normal_
    """.split()
)
"""Names of torch's functions that draw random numbers."""


def writes(name: str) -> bool:
    """Return True if torch's function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_")


@cache
def autocast_devices() -> tuple[str, ...]:
    """Return the device types this process may compute on, each with its own autocast."""
    there = torch.accelerator.current_accelerator()
    return (host().torch_type, *((there.type,) if there else ()))


def autocast_types() -> tuple[torch.dtype | None, ...]:
    """Return the autocast type on each device type; ``None`` if it is off."""
    kinds = autocast_devices()
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and registered dataclasses."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
