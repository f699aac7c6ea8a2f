"""What fields may hold: checks of type that every class here shares, and the keys of a plan that take a word."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from phalanx.device_kinds import kind_names
from phalanx.errors import Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldKind:
    """What may stand in a field.

    Attributes:
        types: of its values. ``float`` takes whole numbers, too; neither takes ``True`` and ``False``.
        allowed: the same in words.
        fix: a line to copy that would work.
    """

    types: tuple[type, ...]
    allowed: str
    fix: str

    def holds(self, value: object) -> bool:
        if isinstance(value, bool):
            return bool in self.types
        return isinstance(value, self.types) or (isinstance(value, int) and float in self.types)


def misfits(where: str, values: Mapping[str, object], kinds: Mapping[str, FieldKind]) -> list[Problem]:
    """A problem for each entry of ``values`` that is not of its kind; ``where``: of what, such as ``run``."""
    return [
        Problem(where=f"{where}.{name}", given=repr(values[name]), allowed=kind.allowed, fix=kind.fix)
        for name, kind in kinds.items()
        if name in values and not kind.holds(values[name])
    ]


def choices() -> dict[str, tuple[str, ...]]:
    """The words that each key of ``WORDS`` may take now."""
    return {**CHOICES, "device": ("auto", *kind_names())}


def plan_problem(name: str, given: str, allowed: str, fix: str) -> Problem:
    """What is wrong with the key ``name`` of a plan."""
    return Problem(where=f"plan.{name}", given=given, allowed=allowed, fix=fix)


def is_whole(value: object, least: int) -> bool:
    """Return True if ``value`` is a whole number, ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Return True if ``value`` is a finite number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)


def steps_misfit(steps: list[Any], what: str) -> tuple[str, str] | None:
    """What was given in place of the steps from which on each ``what`` holds, and what is allowed."""
    if bad := [step for step in steps if not is_whole(step, 0)]:
        return f"step {bad[0]!r}", "optimizer steps: whole numbers, 0 or more"
    if min(steps) != 0:
        return f"a first step of {min(steps)}", f"{what} from step 0 on"
    if steps != sorted(steps):
        return f"steps {', '.join(map(str, steps))}", "steps that increase"
    return None


def held_in(step: int, since: Mapping[int, T]) -> T:
    """What holds in ``step``, of what each holds ``since`` a step of its own; one of them since step 0."""
    return since[max(first for first in since if first <= step)]


Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
Device = str  # "auto", or the name of a device kind
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Attention = Literal["ring", "alltoall", "gather"]
Sync = Literal["each", "local", "diloco"]
Outer = Literal["none", "nesterov", "sgd"]

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""The dimensions of the mesh, from the one whose ranks are farthest apart to the one whose ranks are neighbours."""

DATA_AXES = ("dp", "fsdp", "ep")
"""Those whose ranks hold different samples."""

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "schedule": get_args(Schedule),
    "attention": get_args(Attention),
    "sync": get_args(Sync),
    "outer": get_args(Outer),
}
"""Keys that take one of a few words; ``device`` is one more, whose words are the kinds of devices there are."""

WORDS = (*CHOICES, "device")
"""Keys that take a word."""

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2}
"""Stages on each rank that a schedule needs, and has where a plan does not say."""

TRUTHS = ("compile", "sequence")
"""Keys that are true or false."""

TEXTS = ("shares", "compress")
"""Keys that take a text of their own."""

NUMBERS = ("outer_lr", "outer_momentum")
"""Keys that take a number which need not be whole."""

UNBOUNDED = "unbounded"
"""How a plan's text says a staleness without end, ``math.inf``."""

SYNC_KEYS = (
    *("sync", "every", "after", "outer", "outer_lr", "outer_momentum"),
    *("server", "staleness", "backup", "compress", "shares"),
)
"""Keys of other ways to keep replicas together than summing whole gradients over even shares in every step."""
