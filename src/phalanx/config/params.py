"""Values that a job declares by ``px.param`` and that its caller, or ``--set`` on the command line, may override."""

from __future__ import annotations

import difflib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from phalanx.errors import SpecError

Value = bool | int | float | str
T = TypeVar("T", bool, int, float, str)
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_ALLOWED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredParam:
    """A declared value: its value in this run, and its default."""

    name: str
    value: Value
    default: Value


@dataclass(kw_only=True, slots=True)
class ParamOverrides:
    """The overridden values while a job is built, and the values declared so far."""

    given: Mapping[str, Value]
    declared: dict[str, DeclaredParam] = field(default_factory=dict[str, DeclaredParam])
    texts: bool = False  # the values are texts of a command line

    def value(self, name: str, default: Value) -> Value:
        """Return the value of ``name`` in the type of its default."""
        return _typed(name, self.given[name], default, self.texts) if name in self.given else default

    def check(self) -> None:
        """Raise a ``SpecError`` if a name is overridden but not declared."""
        for name in self.given:
            if name not in self.declared:
                near = difflib.get_close_matches(name, self.declared, n=1, cutoff=0.4)
                allowed = f"one of {', '.join(sorted(self.declared))}" if self.declared else "nothing: it declares none"
                read = f'{name} = px.param("{name}", ...) in job() itself, before the functions that it gives'
                fix = near[0] if near else read
                raise SpecError.of(f"set {name}", "a name that the job does not declare", allowed, fix)


_active: ContextVar[ParamOverrides | None] = ContextVar("phalanx_params", default=None)


def param(name: str, default: T) -> T:
    """Return a value that the command line may override: ``lr = px.param("lr", 3e-4)``, then ``--set lr=1e-3``.

    Call it inside ``job()``, or at the top level of the job's file; not in a function of the job, such as its
    optimizer, which workers call later. An override has the type of the default.

    Raises:
        SpecError: if the name, the default or the override cannot be used, or the name was declared otherwise.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise SpecError.of("px.param", repr(name), "a Python name", 'px.param("lr", 3e-4)')
    if type(default) not in _ALLOWED:
        raise SpecError.of(f"px.param {name}", repr(default), "a default that is a bool, int, float or str", "3e-4")
    overrides = _active.get()
    if overrides is None:
        return default
    before = overrides.declared.get(name)
    if before and (type(before.default), before.default) != (type(default), default):
        given = f"defaults {before.default!r} and {default!r}"
        raise SpecError.of(f"px.param {name}", given, "one default for one name", f'px.param("{name}", {default!r})')
    value = overrides.value(name, default)
    overrides.declared[name] = DeclaredParam(name=name, value=value, default=default)
    return value  # pyrefly: ignore


@contextmanager
def params(**values: Value) -> Generator[None]:
    """Override values of a job while it is built: ``with px.params(lr=1e-3): mine = job()``.

    Raises:
        SpecError: at the end of the block, if one of the names was not declared.
    """
    with overriding(ParamOverrides(given=values)):
        yield


@contextmanager
def overriding(overrides: ParamOverrides) -> Generator[None]:
    """Use ``overrides`` for the block, and check at its end that each name was declared."""
    token = _active.set(overrides)
    try:
        yield
    finally:
        _active.reset(token)
    overrides.check()


def _typed(name: str, given: Value, default: Value, text: bool) -> Value:
    kind = type(default)
    try:
        if text and isinstance(given, str):
            return _TRUTHS[given.lower()] if kind is bool else kind(given)
        if type(given) is kind:
            return given
        if kind is float and type(given) is int:
            return float(given)
    except (ValueError, KeyError):
        pass
    raise SpecError.of(f"set {name}", repr(given), f"{_ALLOWED[kind]}, as its default {default!r}", f"{name}={default}")
