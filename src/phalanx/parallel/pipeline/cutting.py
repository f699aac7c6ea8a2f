"""A model laid over the ranks of a pipeline: which stage is what, and where its parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from phalanx.config import Plan
from phalanx.parallel.example import Example
from phalanx.parallel.mixed_precision import gathered_type
from phalanx.parallel.pipeline.cuts import chosen, take_apart, units
from phalanx.parallel.pipeline.program import Program, program
from phalanx.parallel.pipeline.stage import Stage, UnitOutlines, strip
from phalanx.placement.schedules import holders


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCuts:
    """Where a pipeline is cut.

    Attributes:
        units: names of the modules that it runs whole, in the order of their first calls.
        starts: of each stage, which call begins it.
    """

    units: tuple[str, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPipeline:
    """A model cut into stages, the same on every rank.

    Attributes:
        plan: that it is cut for.
        program: what the model does.
        regions: of the program, for each stage.
        rank_of: for each stage the rank along ``pp`` that holds it.
        stages_of: name of a parameter → the stages that use it, ascending; several where it is tied.
    """

    plan: Plan
    program: Program
    regions: tuple[range, ...]
    rank_of: tuple[int, ...]
    stages_of: Mapping[str, tuple[int, ...]]

    @property
    def tied(self) -> dict[str, list[int]]:
        """Name → stages, for parameters that several stages use; their gradients are to be added over those."""
        return {name: list(stages) for name, stages in self.stages_of.items() if len(stages) > 1}

    def ranks_of(self, name: str) -> list[int]:
        """The ranks along ``pp`` that hold a parameter, ascending."""
        return sorted({self.rank_of[stage] for stage in self.stages_of[name]})

    def owned(self, rank: int) -> list[str]:
        """Names of the parameters that ``rank`` holds, in the model's order."""
        return [name for name in self.stages_of if rank in self.ranks_of(name)]

    def names(self, stage: int) -> list[str]:
        """The units that a stage runs, in order."""
        return [self.program.calls[region].name for region in self.regions[stage]]

    @property
    def cuts(self) -> StageCuts:
        """Where it is cut, for other processes to cut it there."""
        return StageCuts(units=_units(self.program), starts=tuple(regions.start for regions in self.regions))

    def keep(self, rank: int, device: torch.device) -> list[Stage]:
        """This rank's stages; of the model, only their parameters are left. To be called once."""
        mine = [stage for stage, holder in enumerate(self.rank_of) if holder == rank]
        forms = UnitOutlines(self.program)
        fakes = strip(self.program, set(self.owned(rank)), device, gathered_type(self.plan))
        if len(mine) > 1:
            own = {self.program.calls[region].unit: None for stage in mine for region in self.regions[stage]}
            forms.copied(own, fakes)
        return [Stage(self.program, stage, self.regions[stage], forms) for stage in mine]


def cut(module: nn.Module, example: Example, plan: Plan, known: StageCuts | None = None) -> CutPipeline:
    """Cut ``module``, which holds all its parameters, into the stages of ``plan``.

    Raises:
        RefusedError: if it cannot be cut so.
    """
    # Where to cut travels, the program does not: it is made of this process's modules and fakes.
    found = program(module, {module.get_submodule(name): name for name in known.units}, example) if known else None
    if found is not None and known is not None and _units(found) == known.units:
        starts = list(known.starts)
    else:
        found, starts = _looked_for(module, example, plan)
    regions = tuple(range(a, b) for a, b in pairwise([*starts, len(found.calls)]))
    stage_of = {region: stage for stage, its in enumerate(regions) for region in its}
    stages_of = {
        # What nothing uses stays with the first stage.
        name: tuple(sorted({stage_of[region] for region in its})) or (0,)
        for name, its in found.parameters.items()
    }
    return CutPipeline(
        plan=plan,
        program=found,
        regions=regions,
        rank_of=holders(plan.schedule, plan.pp, plan.pp * plan.stages),
        stages_of=stages_of,
    )


def _looked_for(module: nn.Module, example: Example, plan: Plan) -> tuple[Program, list[int]]:
    """What the model does, and which calls begin the stages."""
    whole = units(module, plan.pp * plan.stages, plan.split.split("/") if plan.split else ())
    found = program(module, whole, example)
    while uncalled := found.uncalled(whole):  # the model calls what is inside them itself
        whole = take_apart(module, whole, uncalled)
        found = program(module, whole, example)
    return found, chosen(found, plan)


def _units(found: Program) -> tuple[str, ...]:
    return tuple(dict.fromkeys(call.name for call in found.calls))
