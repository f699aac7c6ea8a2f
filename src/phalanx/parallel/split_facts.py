"""Findings of a traced model as plain facts, sent to the processes that run it, so that they need not trace it
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from torch import nn

from phalanx.config import Plan
from phalanx.config.sync import within
from phalanx.parallel.context.regions import Entrance
from phalanx.parallel.expert.find_experts import Experts
from phalanx.parallel.local_shards import Cut
from phalanx.parallel.pipeline import StageCuts


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitParts:
    """The parts of a model that can be shared out, by name, found in the whole model."""

    experts: list[Experts]  # modules that hold some
    weights: dict[str, tuple[int, Cut]]  # with the dimension that tp cuts
    whole: list[str]  # weights of two or more dimensions that tp leaves on every rank
    over_cp: dict[str, Entrance]  # blocks that hidden states enter sliced along their tokens
    over_tp: dict[str, Entrance]  # the same over tp, with sequence parallelism
    late: list[str]  # parameters whose gradients are then added up over tp at the end of a step
    stages: StageCuts | None = None  # of a pipeline, once they are found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SplitParts:
        """Build from the result of ``to_dict``, direct or through JSON."""

        def entrances(key: str) -> dict[str, Entrance]:
            return {name: Entrance(**one) for name, one in given[key].items()}

        stages = given["stages"]
        return cls(
            experts=[_experts(**one) for one in given["experts"]],
            weights={name: (dim, _cut(**cut)) for name, (dim, cut) in given["weights"].items()},
            whole=given["whole"],
            over_cp=entrances("over_cp"),
            over_tp=entrances("over_tp"),
            late=given["late"],
            stages=stages and StageCuts(units=tuple(stages["units"]), starts=tuple(stages["starts"])),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The findings of a traced model for a plan."""

    of: str  # the plan and the parameters that they hold for
    opened: tuple[str, ...] = ()  # names of the blocks that it takes apart itself
    parts: SplitParts | None = None  # what can be shared out; None if nothing is

    @classmethod
    def known(cls, found: Mapping[str, Any] | None, module: nn.Module, plan: Plan) -> Facts | None:
        """Return the facts in ``found``, from ``to_dict``, if they belong to ``module`` and ``plan``; else ``None``."""
        return cls.from_dict(found) if found and found["of"] == identity(module, plan) else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Facts:
        parts = given["parts"]
        known = None if parts is None else SplitParts.from_dict(parts)
        return cls(of=given["of"], opened=tuple(given["opened"]), parts=known)


def _experts(leaves: list[int], parameters: list[str], numbers: list[str], **rest: Any) -> Experts:
    first, second, third = leaves
    return Experts(leaves=(first, second, third), parameters=tuple(parameters), numbers=tuple(numbers), **rest)


def _cut(outer: int, units: int, inner: int, held: list[list[list[int]]]) -> Cut:
    return Cut(outer, units, inner, tuple(tuple((start, stop) for start, stop in ranges) for ranges in held))


def identity(module: nn.Module, plan: Plan) -> str:
    """Return a text that identifies ``module`` under ``plan``: the plan, and a hash of names and shapes."""
    named = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in module.named_parameters()]
    return f"{within(plan)} of {sha256(repr(named).encode()).hexdigest()}"
