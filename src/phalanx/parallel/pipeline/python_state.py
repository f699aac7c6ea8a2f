"""State that a model's own Python code may read beside its arguments: attributes, globals and closures, by value.

A stage that replays recorded operations does not run the code that made them. If state read by this code has changed
since, or if the code changes state itself, the recording is invalid.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, repeat
from operator import is_
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_LOOKED_INTO = (Tensor, type, FunctionType, ModuleType, CodeType)
_DEEPEST = 8
_MOST_ENTRIES = 5000
_MOST_ITEMS = 256
_LIVE = frozenset({"_parameters", "_buffers", "training", "forward"})
"""Attributes of modules that may change: looked up when they are used, or compared by who records."""


class PythonState:
    """Values of names in namespaces, as they were when they were added."""

    def __init__(self) -> None:
        self.trouble = ""  # why it cannot be compared
        self._names: list[tuple[Any, tuple[str, ...], tuple[Any, ...]]] = []
        self._collections: list[tuple[Any, int, tuple[Any, ...]]] = []
        self._count = 0
        self._sizes: list[tuple[Mapping[str, Any], int]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []

    def add_modules(self, outside: Iterable[nn.Module], inside: Iterable[nn.Module]) -> None:
        """Add attributes of the modules ``outside`` units, without parameters and buffers, except ``inside``."""
        self._seen |= {id(module) for module in inside}
        for module in outside:
            self._add(module, 0)

    def add_frame(self, frame: FrameType) -> None:
        """Add the state that a called Python function reads: globals by name, closure, its object."""
        code = frame.f_code
        outside = {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
        self._add_namespace(outside, frame.f_globals)
        held = frame.f_locals
        if code.co_name == "__init__" and id(held.get("self")) not in self._seen:  # made by this very code
            self._seen.add(id(held.get("self")))
            self._alive.append(held.get("self"))
        names = [*code.co_freevars, *(["self"] if "self" in code.co_varnames[: code.co_argcount] else [])]
        for name in names:
            self._add(held.get(name), 0)

    def unchanged(self) -> bool:
        """Return True if every name still has its value."""
        return (
            all(len(attributes) == count for attributes, count in self._sizes)
            and all(_same_values(map(held.get, names, _GONE), values) for held, names, values in self._names)
            and all(len(held) == count and _same_values(_items(held), was) for held, count, was in self._collections)
        )

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, (*_SCALARS, *_NOT_LOOKED_INTO)) or id(value) in self._seen:
            return
        if self._count > _MOST_ENTRIES or depth > _DEEPEST:
            self.trouble = self.trouble or "its code reads more Python objects than can be compared each time"
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, dict):
            self._add_collection(value, list(value.values()), depth)
        elif isinstance(value, list | set):
            self._add_collection(value, list(value), depth)
        elif isinstance(value, tuple | frozenset):
            for one in value:
                self._add(one, depth + 1)
        elif isinstance(value, nn.Module):
            self._add_object(value, {name: one for name, one in vars(value).items() if name not in _LIVE}, depth)
        elif not _of_library(type(value).__module__):
            self._add_object(value, getattr(value, "__dict__", {}), depth)

    def _add_object(self, value: Any, attributes: Mapping[str, Any], depth: int) -> None:
        own = getattr(value, "__dict__", {})
        self._sizes.append((own, len(own)))
        self._add_namespace(attributes, own, depth)
        for kind in type(value).__mro__:
            if not _of_library(kind.__module__):
                of_class = {name: one for name, one in vars(kind).items() if isinstance(one, (*_SCALARS, FunctionType))}
                self._add_namespace(of_class, vars(kind), depth)
                slots = _Slots(value)
                held = {
                    name: slots.get(name) for name, one in vars(kind).items() if isinstance(one, MemberDescriptorType)
                }
                self._add_namespace(held, slots, depth)

    def _add_collection(self, held: Any, values: Iterable[Any], depth: int) -> None:
        if len(held) > _MOST_ITEMS:
            self.trouble = f"its code reads a {type(held).__name__} of {len(held)} items"
            return
        self._collections.append((held, len(held), tuple(_items(held))))
        for one in values:
            self._add(one, depth + 1)

    def _add_namespace(self, names: Mapping[str, Any], namespace: Any, depth: int = 0) -> None:
        self._count += len(names)
        self._names.append((namespace, tuple(names), tuple(names.values())))
        for value in list(names.values()):
            self._add(value, depth + 1)


class _Slots:
    """The slots of an object, as a mapping."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._value, name, default)


_GONE = repeat(object())
_LIBRARY_NAMES = frozenset({"torch", "phalanx", "numpy", "keras", "optree", *sys.stdlib_module_names})


def _items(held: Any) -> Iterable[Any]:
    return chain(held, held.values()) if isinstance(held, dict) else held


def _same_values(now: Iterable[Any], before: Iterable[Any]) -> bool:
    # This runs for every micro-batch: nothing but identity is looked at until something is another object.
    now = tuple(now)
    return all(map(is_, now, before)) or all(
        a is b or (type(a) is type(b) and isinstance(b, _SCALARS) and a == b) for a, b in zip(now, before, strict=True)
    )


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARY_NAMES and not module.startswith("phalanx.demo")


@contextmanager
def calls_watched(called: Callable[[FrameType], None]) -> Iterator[None]:
    """Call ``called`` with the frame of each Python function on this thread, libraries excepted.

    The garbage collector is off meanwhile, because its callbacks are not the model's code.
    """
    before, collects = sys.getprofile(), gc.isenabled()
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in seen:
            if not _of_library(frame.f_globals.get("__name__", "")):
                called(frame)
            if not frame.f_code.co_freevars and "self" not in frame.f_code.co_varnames:
                seen.add(frame.f_code)

    gc.disable()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


@contextmanager
def calls_not_watched() -> Iterator[None]:
    """Suspend ``calls_watched`` for the block."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)


def chance() -> Any:
    """Return the states of Python's and NumPy's random streams, by which code may decide."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, bytes(np.asarray(keys)), tuple(rest)
