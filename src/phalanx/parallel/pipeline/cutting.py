"""A model laid over the ranks of a pipeline: its units, the cuts between them, and the owners of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.parallel.mixed_precision import gathered_type
from phalanx.parallel.pipeline.program import Program, program
from phalanx.parallel.pipeline.stage import Stage, UnitOutlines, strip
from phalanx.parallel.survey import Example
from phalanx.placement.limits import few_parts, reads_uncalled
from phalanx.placement.schedules import holders
from phalanx.placement.stages import balanced
from phalanx.trace.blocks import blocks, can_be_called, parts


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCuts:
    """The places of a pipeline's cuts."""

    units: tuple[str, ...]  # names of the modules that it runs whole, in the order of their first calls
    starts: tuple[int, ...]  # of each stage, which call begins it


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPipeline:
    """A model cut into stages for a plan, the same on every rank."""

    plan: Plan
    program: Program  # what the model does
    regions: tuple[range, ...]  # of the program, for each stage
    rank_of: tuple[int, ...]  # for each stage the rank along pp that holds it
    stages_of: Mapping[str, tuple[int, ...]]  # name of a parameter → the stages that use it; several where it is tied

    @property
    def tied(self) -> dict[str, list[int]]:
        """Map name to stages for parameters used by several stages; their gradients must be added."""
        return {name: list(stages) for name, stages in self.stages_of.items() if len(stages) > 1}

    def ranks_of(self, name: str) -> list[int]:
        """Return the ranks along ``pp`` that hold a parameter, ascending."""
        return sorted({self.rank_of[stage] for stage in self.stages_of[name]})

    def owned(self, rank: int) -> list[str]:
        """Return names of the parameters on ``rank``, in the model's order."""
        return [name for name in self.stages_of if rank in self.ranks_of(name)]

    def names(self, stage: int) -> list[str]:
        """Return the units of a stage, in order."""
        return [self.program.calls[region].name for region in self.regions[stage]]

    @property
    def cuts(self) -> StageCuts:
        """Return the cuts, to be repeated in other processes."""
        return StageCuts(units=_units(self.program), starts=tuple(regions.start for regions in self.regions))

    def keep(self, rank: int, device: torch.device) -> list[Stage]:
        """Return this rank's stages, and strip the model of all other parameters. Call it once."""
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
    if plan.recompute != "none" and (reading := _reads_more(found, parts(module))):
        raise RefusedError([reads_uncalled(plan, reading)])
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
    whole = units(module, plan.pp * plan.stages)
    found = program(module, whole, example)
    while uncalled := found.uncalled(whole):  # the model calls what is inside them itself
        whole = take_apart(module, whole, uncalled)
        found = program(module, whole, example)
    return found, chosen(found, plan)


def _reads_more(found: Program, recomputed: Iterable[nn.Module]) -> str:
    inside = {child for part in recomputed for child in part.modules()}
    return next((call.name for call in found.calls if call.reads and call.unit in inside), "")


def _units(found: Program) -> tuple[str, ...]:
    return tuple(dict.fromkeys(call.name for call in found.calls))


def units(module: nn.Module, at_least: int) -> dict[nn.Module, str]:
    """Return the modules that run whole, with their names, in module order.

    They are the repeated blocks and the modules with parameters beside them. If those are fewer than ``at_least``, the
    largest are divided into their children.
    """
    found = _beside(module, set(blocks(module)))
    whole: set[nn.Module] = set()

    def size(unit: nn.Module) -> int:
        return sum(tensor.numel() for tensor in unit.parameters())

    while len(found) < at_least:
        largest = max((unit for unit in found if unit not in whole), key=size, default=None)
        if largest is None:
            break
        if len(_parts(largest)) < 2:
            whole.add(largest)
        else:
            _take_apart(found, largest)
    return _in_order(module, found)


def take_apart(module: nn.Module, units: Iterable[nn.Module], those: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return ``units`` with ``those`` replaced by their children."""
    found = list(units)
    for unit in those:
        _take_apart(found, unit)
    return _in_order(module, found)


def _in_order(module: nn.Module, found: list[nn.Module]) -> dict[nn.Module, str]:
    names = {child: name for name, child in module.named_modules()}
    order = {child: index for index, child in enumerate(names)}
    return {unit: names[unit] for unit in sorted(found, key=order.__getitem__)}


def _beside(module: nn.Module, among: set[nn.Module]) -> list[nn.Module]:
    if not among:
        return _parts(module)
    found: list[nn.Module] = []
    for child in module.children():
        inside = among.intersection(child.modules())
        if child in among:
            found.append(child)
        elif inside:
            found += _beside(child, inside)
        else:
            found += _parts(child, itself=True)
    return list(dict.fromkeys(found))


def _parts(module: nn.Module, *, itself: bool = False) -> list[nn.Module]:
    if next(module.parameters(), None) is None:
        return []
    if itself and can_be_called(module) and not isinstance(module, nn.Sequential):
        return [module]
    found: list[nn.Module] = []
    for child in module.children():
        found += _parts(child, itself=True)
    return list(dict.fromkeys(found))


def _take_apart(found: list[nn.Module], unit: nn.Module) -> None:
    at = found.index(unit)
    found[at : at + 1] = [part for part in _parts(unit) if part not in found]


def chosen(program: Program, plan: Plan) -> list[int]:
    """Return the first region of each stage of ``plan``, balanced.

    Raises:
        RefusedError: if the plan wants more stages than there can be.
    """
    stages = plan.pp * plan.stages
    allowed = [not program.trouble(cut) for cut in range(len(program.calls))]
    found = balanced(program.costs, stages, allowed)
    if found is None:
        most = sum(allowed[1:]) + 1
        because = next((program.trouble(cut) for cut in range(1, len(allowed)) if not allowed[cut]), "")
        raise RefusedError([few_parts(plan, most, [call.name for call in program.calls], because)])
    return found
