"""A rank's stages of a pipeline: the parameters they leave here, and those shared with other stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from phalanx.comm import Mesh, local
from phalanx.config import Plan
from phalanx.parallel.grad_reduce import add_up
from phalanx.parallel.layout import TensorShard
from phalanx.parallel.pipeline import CutPipeline, PipelineRunner, StageCuts, UnitCall, cut
from phalanx.parallel.survey import Example
from phalanx.placement.collective_bytes import COPIES, EXPERT_COPIES
from phalanx.placement.schedules import in_halves


class OwnedStages:
    """The stages on this rank, run by ``runner``."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: Plan,
        mesh: Mesh,
        example: Example,
        known: StageCuts | None = None,
    ) -> None:
        """Cut the whole ``module``, and leave only this rank's parameters in it. Collective.

        ``known``: the cuts; searched for by default.
        """
        # Groups are made by all ranks together, and not every stage has what would ask for each of these.
        owners = (("tp",), ("cp",), ("ep",), ("ep", "tp"))
        for names in (*owners, ("fsdp", *COPIES), COPIES, ("fsdp", *EXPERT_COPIES), EXPERT_COPIES):
            mesh.group(*names)
        named = (*module.named_parameters(), *module.named_buffers())
        self._shapes = {name: tensor.shape for name, tensor in named}
        pipeline = cut(module, example, plan, known)
        rank = mesh.at["pp"]
        self._first = {name: pipeline.ranks_of(name)[0] == rank for name in pipeline.owned(rank)}
        together: dict[tuple[int, ...], list[str]] = {}
        for name in pipeline.tied:
            together.setdefault(tuple(pipeline.ranks_of(name)), []).append(name)
        self._tied = [(names, mesh.among("pp", ranks)) for ranks, names in together.items() if len(ranks) > 1]
        self._buffers = _elsewhere(module, pipeline, rank)
        halves = in_halves(plan.recompute, plan.zero, compiles=plan.compile, recomputes=pipeline.program.recomputes)
        self.runner = PipelineRunner(pipeline, mesh, device, halves=halves)

    def units(self, parts: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the units that run here among ``parts``."""
        inside = {child for part in parts for child in part.modules()}
        units = dict.fromkeys(call.unit for call in self._calls() if call.unit in inside)
        return [unit for unit in units if next(unit.parameters(), None) is not None]

    def _calls(self) -> list[UnitCall]:
        pipeline = self.runner.pipeline
        return [pipeline.program.calls[at] for stage in self.runner.stages_here for at in pipeline.regions[stage]]

    def holdings(self, slices: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        """Return ``slices`` with parameters of several stages, of which one copy counts."""
        found = dict(slices)
        for name in [name for name, first in self._first.items() if not first]:
            known = found.get(name)
            found[name] = TensorShard(
                shape=known.shape if known else self._shapes[name], placed=known.placed if known else (), counts=False
            )
        for name in self._buffers:
            found[name] = TensorShard(shape=self._shapes[name], counts=False)
        return found

    def add_up_tied(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add up the gradients of parameters used by several stages, over those stages."""
        for names, group in self._tied:
            if group is not None:
                grads = [parameters[name].grad for name in names if name in parameters]  # frozen ones have none
                add_up([None if grad is None else local(grad) for grad in grads], group)


def _elsewhere(module: nn.Module, pipeline: CutPipeline, rank: int) -> list[str]:
    keepers: dict[str, int] = {}
    for stage, keeper in enumerate(pipeline.rank_of):
        keepers |= {f"{name}.": keeper for name in pipeline.names(stage)}
    found: list[str] = []
    for name, _ in module.named_buffers():
        keeper = next((keeper for unit, keeper in keepers.items() if name.startswith(unit)), 0)
        if keeper != rank:
            found.append(name)
    return found
