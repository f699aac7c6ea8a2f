"""A survey of a model with an example, as a plan's ranks would see it, in this process before any other starts.

It calls the techniques' own functions: ``split.look`` for cuts, ``pipeline.cut`` for stages, ``expert.rows_of`` for
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.config import Plan
from phalanx.config.job import Cutting
from phalanx.placement.ownership import DimensionShare, StageSurvey, Survey, Tensor

if TYPE_CHECKING:  # loaded by plans that split a model
    from phalanx.parallel.pipeline import CutPipeline
    from phalanx.parallel.split_facts import Facts, SplitParts


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A model's call, and the use of its output."""

    args: tuple[Any, ...]  # of forward, of one or a few samples, on the host
    kwargs: dict[str, Any]
    batch: Any  # the second argument of the loss
    loss: Callable[[Any, Any], Any]  # from the output and the batch to the job's loss, of whatever form
    tensor_parallel: Mapping[str, Cutting] = field(default_factory=dict[str, Cutting])  # as the job wishes weights cut
    facts: Facts | None = None  # what another process has found of the model with it; None if to be looked for


def survey(module: nn.Module, plan: Plan, example: Example | None = None) -> tuple[Survey, SplitParts | None]:
    """Survey ``module``, which needs no values; a plan that splits the model needs an ``example``.

    Also returns the findings on a split model; those in the example's ``facts`` are used without another search.

    Raises:
        RefusedError: if the plan asks for a split that the model does not have.
    """
    parameters, buffers = _tensors(module.named_parameters()), _tensors(module.named_buffers())
    found = Survey(plan=plan, parameters=parameters, buffers=buffers)
    if plan.kind != "split":
        return found, None
    from phalanx.parallel.expert import by_rows
    from phalanx.parallel.split import look

    assert example is not None
    known = example.facts.parts if example.facts else None
    if known is not None:
        by_rows(module, known.experts)
    parts = known or look(module, plan, example)
    if plan.pp == 1:
        shares = _shares(parts, plan, {tensor.name for tensor in parameters})
        return replace(found, whole=tuple(parts.whole), shares=(shares,)), parts
    from phalanx.parallel.pipeline import cut

    pipeline = cut(module, example, plan, parts.stages)
    return replace(
        found,
        stages=tuple(_stages(pipeline, {tensor.name: tensor.elements for tensor in parameters})),
        tied={name: tuple(stages) for name, stages in pipeline.tied.items()},
        whole=tuple(parts.whole),
        shares=tuple(_shares(parts, plan, set(pipeline.owned(rank))) for rank in range(plan.pp)),
        recomputes=pipeline.program.recomputes,
    ), replace(parts, stages=pipeline.cuts)


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            itemsize=tensor.dtype.itemsize,
            learns=tensor.requires_grad,
        )
        for name, tensor in named
    )


def _shares(found: SplitParts, plan: Plan, here: set[str]) -> dict[str, DimensionShare]:
    from phalanx.parallel.expert import dealt_over, rows_of

    shares = {
        name: DimensionShare(axes=("tp",), dim=dim, ranges=cut.expanded())
        for name, (dim, cut) in found.weights.items()
        if name in here
    }
    experts = [one for one in found.experts if one.whole_name(one.parameters[0]) in here]
    over = tuple(axis for axis in dealt_over(experts, plan) if plan.mesh[axis] > 1)
    for name, cut in rows_of(experts, plan).items():
        shares[name] = DimensionShare(axes=over, dim=0, ranges=cut.expanded())
    return shares


def _stages(pipeline: CutPipeline, sizes: Mapping[str, int]) -> Iterator[StageSurvey]:
    for index, regions in enumerate(pipeline.regions):
        names = tuple(name for name, stages in pipeline.stages_of.items() if index in stages)
        yield StageSurvey(
            index=index,
            rank=pipeline.rank_of[index],
            units=tuple(dict.fromkeys(pipeline.names(index))),
            parameters=names,
            elements=sum(sizes[name] for name in names),
            cost=sum(pipeline.program.costs[region] for region in regions),
        )
