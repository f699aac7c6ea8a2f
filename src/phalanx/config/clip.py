"""How gradients are clipped before the optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.config.fields import is_number
from phalanx.errors import Problem, SpecError

if TYPE_CHECKING:
    from phalanx.config.plan import Plan

Per = Literal["all", "group"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """What becomes of large gradients of the global batch, whatever plan they were computed under.

    Give ``norm`` or ``value``. A number alone as ``job.clip`` stands for ``Clip(norm=number)``.

    Attributes:
        norm: largest norm: gradients of a larger one are scaled down to it, as ``torch.nn.utils.clip_grad_norm_`` does.
        value: largest absolute value of each element, as ``torch.nn.utils.clip_grad_value_`` does.
        norm_type: of ``norm``: 2, or ``math.inf`` for the largest absolute value.
        per: of ``norm``: over ``all`` gradients, or over those of each parameter ``group`` by itself.
    """

    norm: float | None = None
    value: float | None = None
    norm_type: float = 2.0
    per: Per = "all"

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @classmethod
    def of(cls, given: float | Clip | None) -> Clip | None:
        """``given``, of which a number stands for the largest norm of all gradients."""
        return given if given is None or isinstance(given, Clip) else cls(norm=float(given))

    @property
    def by_whole_norm(self) -> bool:
        """Return True if one factor, of the L2 norm of all gradients, is all there is to it."""
        return self.norm is not None and self.norm_type == 2 and self.per == "all"


def _problems(clip: Clip) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(clip, name))
        found.append(Problem(where=f"clip.{name}", given=given, allowed=allowed, fix=f"px.Clip({fix})"))

    for name in ("norm", "value"):
        limit: Any = getattr(clip, name)
        if limit is not None and not (is_number(limit) and limit > 0):
            wrong(name, "a number above 0, or None", f"{name}=1.0")
    if (clip.norm is None) == (clip.value is None):
        given = f"norm={clip.norm}, value={clip.value}"
        found.append(Problem(where="clip", given=given, allowed="one of the two", fix="px.Clip(norm=1.0)"))
    if isinstance(clip.norm_type, bool) or clip.norm_type not in (2, math.inf):
        wrong("norm_type", "2, or math.inf", "norm=1.0, norm_type=math.inf")
    if clip.per not in get_args(Per):
        wrong("per", ", ".join(get_args(Per)), 'norm=1.0, per="group"')
    if not found and clip.norm is None:
        for name, default in (("norm_type", 2), ("per", "all")):
            if getattr(clip, name) != default:
                wrong(name, "only with norm: each value is clipped by itself", f"value={clip.value}")
    return found


def clip_problems(clip: Clip | None, plan: Plan) -> list[Problem]:
    """What keeps ``plan`` from it: servers, of which each has some rows of what a group is, do not add its norm up."""
    if not plan.server or clip is None or clip.value is not None or clip.by_whole_norm:
        return []
    allowed = "px.Clip(value=...) and px.Clip(norm=...) of all gradients under servers; the others under plans without"
    return [
        Problem(where="job.clip", given=f"{clip} under {plan}", allowed=allowed, fix=f"clip=px.Clip(norm={clip.norm})")
    ]
