"""Building a model without ever holding all of it: its making is recorded, and each rank repeats only its part.

While the job's function runs, large tensors are fakes, and every operation on them goes on a tape with the random state
before it (as torchdistx's deferred initialisation does). Random numbers are still drawn, into memory that is dropped at
once, so that small tensors, which are real, get the values of one device. A parameter's value results from repeating
its operations from those states: bit for bit as on one device, one parameter at a time, in any order.
"""
# Not a run of the model: what is recorded is how its parameters are made.

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.hardware import return_freed_memory
from phalanx.parallel.expert.find_experts import called_as_experts
from phalanx.parallel.layout import TensorShard
from phalanx.parallel.local_shards.axis import kept
from phalanx.parallel.operation_tape import OperationTape, TapedOperation, TensorPlace
from phalanx.parallel.survey import Example
from phalanx.parallel.tensor.find_pairs import dry
from phalanx.trace.fake_tensors import fake, quiet

LARGE = 4096
"""Elements from which a tensor is not made at once."""

_LOOKS, _PAUSE = 10, 0.02  # looks for what is held, and seconds between them


class UnrecordedError(Exception):
    """A model whose making cannot be repeated piece by piece."""


class Recipe:
    """The making of a parameter; kept on its stand-in, which is on the meta device."""

    def __init__(self, tape: OperationTape, place: TensorPlace) -> None:
        self.tape, self.place = tape, place


class StoredValue:
    """A parameter's value in a file; kept like a ``Recipe``. ``mark`` is its fingerprint."""

    def __init__(self, read: Callable[[], Tensor], mark: tuple[int, float, float]) -> None:
        self.read, self.mark = read, mark


def store(tensor: Tensor, value: StoredValue) -> None:
    """Give ``tensor``, a parameter on the meta device, ``value`` in place of its recorded making."""
    vars(tensor)[_RECIPE] = value


def recorded(make: Callable[[], Any]) -> Any:
    """Return the result of ``make``, large parameters on the meta device with a recipe each; buffers have values.

    Raises:
        UnrecordedError: if its making cannot be recorded.
    """
    return_freed_memory()
    recorder = _InitRecorder()
    try:
        with quiet(), _Objects(), recorder:
            module = make()
    except UnrecordedError:
        raise
    except Exception as error:  # what fakes cannot follow; if it is the model's own, building it whole shows that
        raise UnrecordedError(in_one_line(error)) from None
    if isinstance(module, nn.Module):
        recorder.settle(module)
    return module


def recipes(module: nn.Module) -> dict[str, Recipe | StoredValue]:
    """Map name to recipe for each parameter that has one."""
    return {
        name: tensor.__dict__[_RECIPE]
        for name, tensor in module.named_parameters(remove_duplicate=False)
        if _RECIPE in vars(tensor)
    }


def fingerprints(tensor: Tensor) -> Iterator[tuple[int, float, float]]:
    """Yield values to compare two ranks' recipes of a parameter: elements, and sums as of values."""
    recipe = vars(tensor).get(_RECIPE)
    if isinstance(recipe, StoredValue):
        return iter([recipe.mark])
    return recipe.tape.fingerprints(recipe.place) if recipe else iter(())


def loaded(module: nn.Module) -> int:
    """Return the bytes of large values that the making read, for example from a file, instead of drawing them."""
    here = [one for one in module.parameters() if not one.is_meta and one.numel() >= LARGE]
    tapes = {id(one.tape): one.tape for one in recipes(module).values() if isinstance(one, Recipe)}
    return sum(one.nbytes for one in here) + sum(tape.given for tape in tapes.values())


def fill(
    module: nn.Module,
    known: Mapping[str, Recipe | StoredValue],
    slices: Mapping[str, TensorShard] | None = None,
    *,
    within: nn.Module | None = None,
    device: torch.device | None = None,
) -> None:
    """Compute the values of the parameters of ``module`` on the meta device, one after the other, in place.

    Args:
        module: holds them.
        known: the recipes of the whole model, by name.
        slices: by name, this rank's part of parameters it holds in part.
        within: fill only this part of ``module``.
        device: each value is moved there once it is made; by default it stays on the host.
    """
    chosen = {id(tensor) for tensor in (within or module).parameters() if tensor.is_meta}
    left = [(name, tensor) for name, tensor in module.named_parameters() if id(tensor) in chosen and name in known]
    if not left:
        return
    made: dict[int, Any] = {}

    def take(index: int, whole: Tensor) -> None:
        name, before = left[index]
        local = kept(whole, slices[name].placed) if slices and name in slices else whole
        assert local.shape == before.shape, f"{name}: {tuple(local.shape)} in place of {tuple(before.shape)}"
        partly = local.numel() * local.itemsize < local.untyped_storage().nbytes()
        local = (local.clone() if partly else local).to(device, before.dtype)
        value = nn.Parameter(local, requires_grad=before.requires_grad)
        vars(value).update({key: one for key, one in vars(before).items() if key != _RECIPE})
        made[id(before)] = value

    drawn: list[tuple[int, Recipe]] = []
    for index, (name, _) in enumerate(left):
        recipe = known[name]
        if isinstance(recipe, StoredValue):
            take(index, recipe.read())
        else:
            drawn.append((index, recipe))
    if drawn:  # all of one tape: a model is recorded once
        places = [recipe.place for _, recipe in drawn]
        drawn[0][1].tape.replay(places, lambda at, whole: take(drawn[at][0], whole))
    _exchange(module, made)


def followed(module: nn.Module, example: Example) -> str:
    """Return the reason why the model cannot be traced before it has values, or ""."""
    try:
        if not called_as_experts(module, example):
            with dry(module, example):
                pass
        return ""
    except Exception as error:  # whatever the model raises on fake tensors
        return in_one_line(error)


def in_one_line(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


_RECIPE = "_recipe"
_FILLS = {"zero_", "fill_", "copy_"}
_DRAWS = {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"}
_FORBIDDEN = {"set_", "resize_", "resize_as_", "resize"}


class _Objects(TorchFunctionMode):
    """Copies of fake tensors made by recordable operations; torch would make them by reading memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            tensor, memo = args
            if id(tensor) not in memo:
                copied = tensor.detach().clone()
                if isinstance(tensor, nn.Parameter):
                    copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


class _InitRecorder(TorchDispatchMode):
    """A recorder that turns large tensors into fakes and keeps a tape of the operations on them."""

    def __init__(self) -> None:
        super().__init__()
        self._tape = OperationTape()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, FakeTensor) for leaf in given):
            return self._on_fakes(func, args, kwargs)
        if (not given or _is_like(func)) and all(leaf.device.type == "cpu" for leaf in given):
            made = self._faked(func, args, kwargs)
            if isinstance(made, Tensor) and made.numel() >= LARGE and made.device.type == "cpu":
                return self._noted(func, args, kwargs, made, [])
        return func(*args, **kwargs)

    def settle(self, module: nn.Module) -> None:
        parameters = {id(one): one for one in module.parameters() if isinstance(one, FakeTensor)}
        others = {id(one): one for one in _held(module) if isinstance(one, FakeTensor) and id(one) not in parameters}
        places = {key: self._tape.place(one) for key, one in (parameters | others).items()}
        if len({place.memory for place in places.values()}) < len(places):
            raise UnrecordedError("two of its tensors share memory")
        made: dict[int, Any] = {}
        of_fakes = {*vars(FakeTensor(self._fakes, torch.empty(0, device="meta"), torch.device("cpu"))), "_is_param"}
        for key, tensor in parameters.items():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made[key] = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            vars(made[key]).update({name: value for name, value in vars(tensor).items() if name not in of_fakes})
            made[key].__dict__[_RECIPE] = Recipe(self._tape, places[key])
        keys = list(others)

        def take(index: int, whole: Tensor) -> None:
            made[keys[index]] = whole.requires_grad_(others[keys[index]].requires_grad)

        self._tape.replay([places[key] for key in keys], take)
        _exchange(module, made)
        parameters, others, tensor = {}, {}, None
        if left := self._left():
            raise UnrecordedError(f"it keeps {left[0]} bytes elsewhere than in parameters and buffers")
        self._tape.close()

    def _left(self) -> list[int]:
        """Return the bytes of each fake still held, after frames held by other threads are released."""
        left = self._tape.alive()
        for _ in range(_LOOKS):
            if not left:
                break
            gc.collect()
            if left := self._tape.alive():
                time.sleep(_PAUSE)
        return left

    def _on_fakes(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        written = _written(func, args, kwargs)
        if name in _FORBIDDEN or any(not isinstance(one, FakeTensor) for one in written):
            raise UnrecordedError(f"{name} of a tensor that is not there yet")
        try:
            made = self._faked(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not written:
                return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
            made = written[0]
        return self._noted(func, args, kwargs, made, written)

    def _noted(self, func: Any, args: Any, kwargs: Any, made: Any, written: list[Tensor]) -> Any:
        new = [leaf for leaf in tree_leaves(made) if isinstance(leaf, FakeTensor)]
        for leaf in new:
            if leaf.is_conj() or leaf.is_neg() or leaf.layout != torch.strided:
                raise UnrecordedError(f"{_name(func)} gives a tensor that is not one run of numbers")
        fresh = {id(leaf) for leaf in new if not self._tape.knows(leaf)}
        if not fresh and not written:
            return made  # a view
        over = len(written) == 1 and written[0] is args[0] and _name(func) in _FILLS | _DRAWS and _covers(written[0])
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            if any(leaf.device.type != "cpu" for leaf in new):
                raise UnrecordedError(f"{_name(func)} draws on a device")
            state = (kwargs.get("generator") or torch.default_generator).get_state()
            swap = _scratch if _name(func) in _DRAWS or _is_like(func) else self._value
            func(*tree_map(swap, args), **tree_map(swap, kwargs))
        self._tape.add(
            TapedOperation(
                func=func,
                args=tree_map(self._kept, args),
                kwargs={key: tree_map(self._kept, value) for key, value in kwargs.items() if key != "generator"},
                generator=kwargs.get("generator") is not None,
                state=state,
                overwrites=over,
                blind=_is_like(func),
                writes=tuple(self._tape.place(one).memory for one in written),
                made=tuple(self._tape.place(leaf) if id(leaf) in fresh else None for leaf in tree_leaves(made)),
            )
        )
        return made

    def _faked(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._fakes:
            made = func(*tree_map(self._as_fake, args), **tree_map(self._as_fake, kwargs))
        # Tensors that are known there cannot be exchanged, as Module.to does with parameters.
        self._fakes.fake_tensor_converter.tensor_memo.clear()
        return made

    def _as_fake(self, leaf: Any) -> Any:
        return fake(self._fakes, leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) else leaf

    def _value(self, leaf: Any) -> Any:
        return self._tape.value(self._tape.place(leaf)) if isinstance(leaf, FakeTensor) else leaf

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self._tape.place(leaf)
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf  # it may be written into later


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _is_like(func: Any) -> bool:
    return _name(func).startswith("new_") or _name(func).endswith("_like")


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return found


def _covers(tensor: Tensor) -> bool:
    if tensor.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
        return False
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def _scratch(leaf: Any) -> Any:
    fake_leaf = isinstance(leaf, FakeTensor)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if fake_leaf else leaf


def _containers(module: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    for child in module.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor | tuple):
                yield vars(child), name, value
            elif isinstance(value, dict):
                yield from ((value, key, one) for key, one in list(value.items()))
            elif isinstance(value, list):
                yield from ((value, index, one) for index, one in enumerate(value))


def _held(module: nn.Module) -> Iterator[Tensor]:
    for _, _, value in _containers(module):
        yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Tensor))


def _exchange(module: nn.Module, made: Mapping[int, Any]) -> None:
    for container, key, value in _containers(module):
        if isinstance(value, tuple) and any(id(one) in made for one in value):
            container[key] = tuple(made.get(id(one), one) for one in value)
        elif id(value) in made:
            container[key] = made[id(value)]
