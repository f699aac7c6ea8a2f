"""What a look at a model found, as plain facts, which travel to the processes that run it: these do not look again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from torch import nn

from phalanx.comm import within
from phalanx.config import Plan
from phalanx.parallel.context.regions import Entrance
from phalanx.parallel.expert.find_experts import Experts
from phalanx.parallel.local_shards import Cut
from phalanx.parallel.pipeline import StageCuts


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitParts:
    """What can be shared out of a model, looked for in the whole of it, before any is taken out.

    Attributes:
        experts: modules that hold some.
        weights: name → the dimension that ``tp`` cuts, and how.
        over_cp: blocks that hidden states enter sliced along their tokens over ``cp``.
        over_tp: the same over ``tp``, with sequence parallelism.
        whole: names of weights of two or more dimensions that ``tp`` leaves on every rank.
        late: names of parameters whose gradients are then added up over ``tp`` at the end of a step.
        stages: of a pipeline, where nobody has still to look for them.
    """

    experts: list[Experts]
    weights: dict[str, tuple[int, Cut]]
    whole: list[str]
    over_cp: dict[str, Entrance]
    over_tp: dict[str, Entrance]
    late: list[str]
    stages: StageCuts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a look at a model found for a plan.

    Attributes:
        of: the plan and the parameters that they hold for.
        opened: names of the blocks that it takes apart itself.
        parts: what can be shared out; ``None`` where nothing is.
    """

    of: str
    opened: tuple[str, ...] = ()
    parts: SplitParts | None = None

    @classmethod
    def known(cls, found: Mapping[str, Any] | None, module: nn.Module, plan: Plan) -> Facts | None:
        """What ``found``, from ``to_dict``, says of ``module`` under ``plan``; ``None`` where it is of others."""
        return cls.from_dict(found) if found and found["of"] == identity(module, plan) else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Facts:
        """What ``to_dict`` gave, from JSON."""
        parts = given["parts"]
        return cls(
            of=given["of"],
            opened=tuple(given["opened"]),
            parts=None if parts is None else _parts(parts),
        )


def _parts(given: Mapping[str, Any]) -> SplitParts:
    def entrances(key: str) -> dict[str, Entrance]:
        return {name: Entrance(**one) for name, one in given[key].items()}

    stages = given["stages"]
    return SplitParts(
        experts=[_experts(**one) for one in given["experts"]],
        weights={name: (dim, _cut(**cut)) for name, (dim, cut) in given["weights"].items()},
        whole=given["whole"],
        over_cp=entrances("over_cp"),
        over_tp=entrances("over_tp"),
        late=given["late"],
        stages=stages and StageCuts(units=tuple(stages["units"]), starts=tuple(stages["starts"])),
    )


def _experts(leaves: list[int], parameters: list[str], numbers: list[str], **rest: Any) -> Experts:
    first, second, third = leaves
    return Experts(leaves=(first, second, third), parameters=tuple(parameters), numbers=tuple(numbers), **rest)


def _cut(outer: int, units: int, inner: int, held: list[list[list[int]]]) -> Cut:
    return Cut(outer, units, inner, tuple(tuple((start, stop) for start, stop in ranges) for ranges in held))


def identity(module: nn.Module, plan: Plan) -> str:
    """What facts of ``module`` under ``plan`` are told apart from others by: the plan, and names and shapes."""
    named = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in module.named_parameters()]
    return f"{within(plan)} of {sha256(repr(named).encode()).hexdigest()}"
