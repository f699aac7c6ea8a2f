"""Findings about a job under a plan, made before any process of its run starts, and used by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from phalanx.config import Plan

if TYPE_CHECKING:  # loaded by plans that have some
    from phalanx.parallel.split_facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Findings about a job under a plan, made before any process of its run starts.

    Attributes:
        causes: a sentence for each difference from one device.
        facts: of its model, as JSON, for the processes that run it; ``None`` if not searched for. With facts, its
            optimizer has been tried, too.
        module: the model as the job makes it, in the process that traced it; ``None`` if tracing has changed it.
        size: elements of the model's parameters, if known.
        placement: each rank's part, as in ``placement.json`` of the run folder, if known.
        looked: whether a trial has ended that would have refused a loss that does not add up.
    """

    causes: tuple[str, ...] = ()
    facts: dict[str, Any] | None = None
    module: nn.Module | None = None
    size: int | None = None
    placement: dict[str, Any] | None = None
    looked: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON for other processes."""
        return {name: getattr(self, name) for name in ("causes", "facts", "size", "placement", "looked")}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Findings:
        """Build from the result of ``to_dict``, in another process."""
        known: dict[str, Any] = {name: told.get(name) for name in ("facts", "size", "placement")}
        return cls(causes=tuple(told.get("causes", ())), looked=bool(told.get("looked")), **known)


def known_facts(findings: Findings | None, module: nn.Module, plan: Plan) -> Facts | None:
    """Return the facts if they belong to ``module`` under ``plan``."""
    if not findings or not findings.facts:
        return None
    from phalanx.parallel.split_facts import Facts

    return Facts.known(findings.facts, module, plan)
