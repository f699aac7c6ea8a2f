"""Models that check themselves: annotations, field metadata and rules give each message its given, allowed and try."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from phalanx.device_kinds import kind_names
from phalanx.errors import Problem, SpecError

T = TypeVar("T")
M = TypeVar("M", bound="SelfChecked")
Check = Callable[[Any], bool]
Text = str | Callable[[Any], str]
_LONG = 80  # characters
_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
    NoneType: "None",
    Callable: "a function",
}
_BOUNDS = {
    "least": (-sys.float_info.max, "{} or more"),
    "above": (-math.inf, "above {}"),
    "most": (sys.float_info.max, "{} or less"),
    "below": (math.inf, "below {}"),
}


@dataclass(frozen=True, slots=True)
class Veto:
    """A condition under which a model is refused, and the words of its problem.

    Words are functions of the model, or templates of its fields: ``{dp}``; ``{dp2}`` is at least 2.

    Attributes:
        at: the field; a name with a dot is used as it is.
        broken: returns true for a model that is to be refused.
    """

    at: str
    broken: Callable[[Any], Any]
    given: Text
    allowed: Text
    fix: Text


class SelfChecked:
    """Base of the dataclasses that check their fields and rules when made.

    Metadata of a field: bounds (``least``, ``above``, ``most``, ``below``), ``of`` (the unit), ``allowed`` (words),
    ``example`` (the line to copy), ``accepts`` (a check in place of the annotation's), ``problems`` (all in one).
    """

    __slots__ = ()
    WHERE: ClassVar[str] = ""
    CALL: ClassVar[str] = "{}"  # the line to copy, around an example
    RULES: ClassVar[tuple[Veto, ...]] = ()

    def __init_subclass__(cls, **how: Any) -> None:
        for name, value in how.items():  # none for the second class that slots=True makes
            setattr(cls, name.upper(), value)

    def __post_init__(self) -> None:
        self.settle()
        problems = problems_of(self)
        if problems:
            raise SpecError(problems)

    def settle(self) -> None:
        """Fill in fields whose default depends on other fields."""

    def more_problems(self) -> Iterable[Problem]:
        """Return the problems that are no rules."""
        return ()

    @classmethod
    def line(cls, name: str, value: Any) -> str:
        """Return the line to copy that sets the field ``name``."""
        return f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"

    def given(self, name: str) -> str:
        """Return the words for the value of the field ``name``."""
        return shown(getattr(self, name))


def option(default: Any, example: Any = None, **meta: Any) -> Any:
    """Return a field with a default and metadata; ``example`` is the line to copy, or a function of the value."""
    return field(default=default, metadata={"example": example, **meta})


class UnreadableError(Exception):
    """A rule reads a field that has a problem of its own."""


class View:
    """A model as rules see it: its fields without those that have a problem, and as text."""

    def __init__(self, model: Any, bad: set[str]) -> None:
        self._model, self._bad = model, bad

    def __getattr__(self, name: str) -> Any:
        if name in self._bad or (self._bad and isinstance(getattr(type(self._model), name, None), property)):
            raise UnreadableError(name)
        return getattr(self._model, name)

    def __getitem__(self, name: str) -> Any:
        if name[-1] == "2":
            return max(2, getattr(self, name[:-1]))
        value = getattr(self, name)
        return show(value) if value is True or value is False or value == math.inf else value


def problems_of(model: SelfChecked) -> list[Problem]:
    """Return everything that is wrong in the fields of ``model``, then by its rules about the other fields."""
    cls, found = type(model), dict[str, list[Problem]]()
    for name, check in checks_of(cls).items():
        value = getattr(model, name)
        if not check.accepts(value):
            found[name] = check.problems(cls, value, model.given(name))
    problems, view = sum(found.values(), list[Problem]()), View(model, set(found))
    for rule in cls.RULES:
        try:
            if rule.broken(view if found else model):
                problems.append(_broken(rule, view, cls))
        except UnreadableError:
            continue
    return problems or [*model.more_problems()]


def _broken(rule: Veto, view: View, cls: type[SelfChecked]) -> Problem:
    given, allowed, fix = (
        words.format_map(view) if isinstance(words, str) else words(view)
        for words in (rule.given, rule.allowed, rule.fix)
    )
    if "." in rule.at:
        return Problem(where=rule.at, given=given, allowed=allowed, fix=fix)
    return Problem(where=f"{cls.WHERE}.{rule.at}".strip("."), given=given, allowed=allowed, fix=cls.CALL.format(fix))


def needs(key: str, other: str, why: str, default: Any) -> Veto:
    """Return the rule that a plan's ``key`` differs from ``default`` only together with the dimension ``other``."""
    least, beside = (1, " dp={dp2}") if other == "server" else (2, "")
    given, allowed = f"{key}={{{key}}} without {other}", f"only together with {other}={least} or more: {why}"
    fix = f"{other}={least}{beside} {key}={{{key}}}"
    return Veto(key, lambda p: getattr(p, key) != default and getattr(p, other) < least, given, allowed, fix)


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """The check of a field, and the words for it."""

    name: str
    hint: Any
    meta: Mapping[str, Any]
    required: bool
    accepts: Check

    @property
    def allowed(self) -> str:
        """The values that the field may have, in words."""
        allowed = self.meta.get("allowed") or _words(self.hint, self.meta)
        return allowed() if callable(allowed) else allowed

    def problems(self, cls: type[SelfChecked], value: Any, given: str) -> list[Problem]:
        """Return the problems of ``value``, which the field does not accept."""
        if "problems" in self.meta:
            return self.meta["problems"](value)
        fix = cls.CALL.format(self.example(cls, value))
        return [Problem(where=f"{cls.WHERE}.{self.name}", given=given, allowed=self.allowed, fix=fix)]

    def example(self, cls: type[SelfChecked], value: Any) -> str:
        """Return the example in the metadata, the word nearest to ``value``, or a value within the bounds."""
        example = self.meta.get("example")
        if example:
            return example(value) if callable(example) else example
        kind = (get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,))[0]
        if get_origin(kind) is Literal:
            return cls.line(self.name, nearest(str(value), get_args(kind)))
        least = self.meta.get("least", 1)
        return cls.line(self.name, {bool: True, int: max(2, least), float: max(1.0, least), str: self.name}.get(kind))


@cache
def checks_of(cls: type) -> dict[str, FieldCheck]:
    """Return the check of each field of a dataclass."""
    hints, found = get_type_hints(cls), dict[str, FieldCheck]()
    for one in fields(cls):  # pyrefly: ignore
        meta, hint = one.metadata, hints[one.name]
        accepts = meta.get("accepts") or _accepts(hint, meta)
        if "problems" in meta:
            accepts = partial(_has_none, meta["problems"])
        required = one.default is MISSING and one.default_factory is MISSING
        found[one.name] = FieldCheck(one.name, hint, meta, required, accepts)
    return found


def _has_none(problems: Callable[[Any], list[Problem]], value: Any) -> bool:
    return not problems(value)


def _accepts(hint: Any, meta: Mapping[str, Any]) -> Check:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda _: True
    if origin in (Union, UnionType):
        some = [_accepts(one, meta) for one in inner]
        return lambda value: any(accepts(value) for accepts in some)
    if origin is Literal:
        kinds = {type(word) for word in inner}
        return lambda value: type(value) in kinds and value in inner
    if origin is Callable:
        return callable
    if origin is Mapping:
        key, one = (_accepts(part, meta) for part in inner)
        return lambda value: hasattr(value, "items") and all(key(name) and one(item) for name, item in value.items())
    if origin in (tuple, Sequence):
        each = _accepts(inner[0], meta)
        return lambda value: isinstance(value, tuple | list) and all(map(each, value))
    if hint in (int, float):
        kind = is_number if hint is float else is_whole
        least, above, most, below = (meta.get(name, default) for name, (default, _) in _BOUNDS.items())
        return lambda value: kind(value) and least <= value <= most and above < value < below
    return lambda value: isinstance(value, hint)


def _words(hint: Any, meta: Mapping[str, Any]) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        *parts, last = (_words(one, meta) for one in inner if one is not NoneType)
        return f"{', '.join(parts)}, or {last}" if parts else last
    if origin is Literal:
        return ", ".join(map(str, inner))
    if hint not in (int, float):
        return _PLAIN.get(origin or hint, f"a px.{getattr(hint, '__name__', hint)}")
    bounds = [text.format(meta[name]) for name, (_, text) in _BOUNDS.items() if name in meta]
    return ", ".join([f"{_PLAIN[hint]} of {meta['of']}" if "of" in meta else _PLAIN[hint], *bounds])


def nearest(word: str, words: Iterable[str], cutoff: float = 0.0) -> str:
    """Return the one of ``words`` that is most like ``word``; the first if none is like it."""
    known = list(words)
    return (get_close_matches(word, known, n=1, cutoff=cutoff) or known)[0]


def show(value: object) -> str:
    """Return a value as the text of a plan has it."""
    if value == math.inf:
        return UNBOUNDED
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(given: Any) -> str:
    """Return ``given`` in one short line; a model or a list of samples is named by its type."""
    if hasattr(given, "named_parameters"):
        return f"a model, a {type(given).__name__}"
    whole = repr(given)
    return whole if len(whole) <= _LONG and "\n" not in whole else f"an object of type {type(given).__name__}"


def unknown_keys(names: Iterable[str], table: Iterable[str], where: str, fix: str) -> list[Problem]:
    """Return a problem for each key of ``table`` that is none of ``names``."""
    known, allowed = list(names), ", ".join(names)
    return [
        Problem(where=f"{where}.{key}", given=f"unknown key {key!r}", allowed=allowed, fix=fix)
        for key in table
        if key not in known
    ]


def from_table(cls: type[M], where: str, table: Any, fix: str, problems: list[Problem]) -> M | None:
    """Return an instance from the table of a file, or None with its problems added to ``problems``.

    ``read`` in the metadata of a field turns a text into its value; ``in_file=False`` keeps a field out of files.
    """
    checks = {name: check for name, check in checks_of(cls).items() if check.meta.get("in_file", True)}
    needed = [name for name, check in checks.items() if check.required]
    if not isinstance(table, Mapping):
        given = "nothing" if table is None else shown(table)
        problems.append(Problem(where=where, given=given, allowed=f"a table with {', '.join(needed)}", fix=fix))
        return None
    found = list[Problem]()
    for key, value in table.items():
        near = get_close_matches(str(key), checks, n=1)
        found += unknown_keys(checks, [key], where, checks[near[0]].example(cls, value) if near else fix)
    for name in (name for name in needed if name not in table):
        found.append(Problem(where=f"{where}.{name}", given="nothing", allowed=checks[name].allowed, fix=fix))
    values = dict[str, Any]()
    for name in (name for name in checks if name in table):
        before = len(found)
        path = name if where == cls.WHERE else f"{where}.{name}"
        value = _from_file(checks[name], path, table[name], fix, found)
        values |= {name: value} if len(found) == before else {}
    made, wrong = None, list[Problem]()
    for name, value in values.items():
        wrong += [] if checks[name].accepts(value) else checks[name].problems(cls, value, shown(value))
    if {*needed} <= {*values}:
        try:
            made, wrong = cls(**values), []
        except SpecError as error:
            wrong = list(error.problems)
    problems += found + [replace(one, where=one.where.replace(f"{cls.WHERE}.", f"{where}.", 1)) for one in wrong]
    return None if found else made


def _from_file(check: FieldCheck, path: str, value: Any, fix: str, found: list[Problem]) -> Any:
    """Return the value of a field as a file has it: a part is a table, several parts are a list of tables."""
    part = next((kind for kind in (check.hint, *get_args(check.hint)) if is_dataclass(kind)), None)
    if "read" in check.meta and isinstance(value, str):
        try:
            return check.meta["read"](value)
        except SpecError as error:
            found += error.problems
    elif part is not None and "read" not in check.meta:
        if get_origin(check.hint) is not tuple:
            return from_table(part, path, value, fix, found)
        if isinstance(value, list):
            return tuple(from_table(part, f"{path}[{place}]", row, fix, found) for place, row in enumerate(value))
    return value


def plan_problem(name: str, given: str, allowed: str, fix: str) -> Problem:
    """Return a problem of the key ``name`` of a plan."""
    return Problem(where=f"plan.{name}", given=given, allowed=allowed, fix=fix)


def is_whole(value: object, least: float = -math.inf) -> bool:
    """Return True if ``value`` is a whole number, ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Return True if ``value`` is a finite number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)


def steps_misfit(steps: list[Any], what: str) -> tuple[str, str] | None:
    """Return the given and the allowed words if ``steps`` are not increasing steps from 0."""
    if bad := [step for step in steps if not is_whole(step, 0)]:
        return f"step {bad[0]!r}", "optimizer steps: whole numbers, 0 or more"
    if min(steps) != 0:
        return f"a first step of {min(steps)}", f"{what} from step 0 on"
    if steps != sorted(steps):
        return f"steps {', '.join(map(str, steps))}", "steps that increase"
    return None


def held_in(step: int, since: Mapping[int, T]) -> T:
    """Return the value for ``step``, where each value of ``since`` holds from its key on."""
    return since[max(first for first in since if first <= step)]


UNBOUNDED = "unbounded"
"""Text of a staleness without limit, ``math.inf``."""

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
Device = str  # "auto", or the name of a device kind
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Attention = Literal["ring", "alltoall", "gather"]
Sync = Literal["each", "local", "diloco"]
Outer = Literal["none", "nesterov", "sgd"]

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Dimensions of the mesh, from the one with the farthest ranks to the one whose ranks are neighbours."""

DATA_AXES = ("dp", "fsdp", "ep")
"""Dimensions whose ranks hold different samples."""

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2}
"""Stages on each rank by schedule, the default of a plan."""

_WORDS = (Precision, Recompute, Offload, Schedule, Attention, Sync, Outer)
_NAMES = ("precision", "recompute", "offload", "schedule", "attention", "sync", "outer")
CHOICES = {name: get_args(words) for name, words in zip(_NAMES, _WORDS, strict=True)}
"""Words of the keys that take one of a few."""


def choices() -> dict[str, tuple[str, ...]]:
    """Return the words of each key of a plan that takes a word."""
    return {**CHOICES, "device": ("auto", *kind_names())}
