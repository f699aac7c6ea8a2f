"""What a look at a job under a plan found before any process of its run started, and what of it a rank can use."""

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
    """What a look at a job under a plan found before any process of its run started.

    Attributes:
        causes: why it differs from one device, one sentence each.
        facts: of its model, as JSON, for the processes that run it; ``None`` where nothing was looked for. Where there
            are some, its optimizer has been tried, too.
        module: the model as the job makes it, in the process that looked; ``None`` where the look has changed it.
        size: elements of the model's parameters, where that process knows.
        placement: what each rank will hold, as ``placement.json`` of the run folder has it, if known.
        looked: whether a look has ended, and would have refused a loss that does not add up.
    """

    causes: tuple[str, ...] = ()
    facts: dict[str, Any] | None = None
    module: nn.Module | None = None
    size: int | None = None
    placement: dict[str, Any] | None = None
    looked: bool = False

    def to_dict(self) -> dict[str, Any]:
        """What other processes are told, as JSON."""
        return {name: getattr(self, name) for name in ("causes", "facts", "size", "placement", "looked")}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Findings:
        """What ``to_dict`` told, in another process."""
        known: dict[str, Any] = {name: told.get(name) for name in ("facts", "size", "placement")}
        return cls(causes=tuple(told.get("causes", ())), looked=bool(told.get("looked")), **known)


def known_facts(findings: Findings | None, module: nn.Module, plan: Plan) -> Facts | None:
    """The facts that are of ``module`` under ``plan``."""
    if not findings or not findings.facts:
        return None
    from phalanx.parallel.split_facts import Facts

    return Facts.known(findings.facts, module, plan)
