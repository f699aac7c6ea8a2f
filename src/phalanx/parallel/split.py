"""A model split over several ranks, with its replicas kept equal.

Techniques that split the model change a rank's parameters and work; the rest is the same for all of them: gradients are
added, once a step, over the ranks with the same slice and other samples or other tokens (``replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.comm import Mesh, found_by_first, local
from phalanx.config import Job, Plan
from phalanx.errors import RefusedError
from phalanx.parallel import activation_checkpointing, expert, torch_compile
from phalanx.parallel.context.regions import Entrance, added_late, entrances, open_for_hooks, share_out_tokens
from phalanx.parallel.deferred_init import fill, recipes
from phalanx.parallel.grad_reduce import add_up
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, TensorShard, each_micro_batch
from phalanx.parallel.local_shards import Axis, Placed
from phalanx.parallel.replica_group import Replicas, Rows, Sharded, Whole
from phalanx.parallel.split_facts import SplitParts
from phalanx.parallel.survey import Example
from phalanx.parallel.tensor import Places, Split, dry, find, show_added_later, show_slices, split_weights
from phalanx.parallel.tensor.find_pairs import Model
from phalanx.placement.limits import no_attention, no_layers_to_cut
from phalanx.trace.blocks import leave_cache_out, parts
from phalanx.units import show_names

if TYPE_CHECKING:
    from phalanx.parallel.stage_ownership import OwnedStages


class SplitLayout(Layout):
    """One rank's part of a split model."""

    def __init__(
        self, module: nn.Module, device: torch.device, job: Job, plan: Plan, mesh: Mesh, example: Example
    ) -> None:
        self._device, self._module = device, module
        known, again = recipes(module), parts(module)
        cut = _SplitModel(module, device, plan, mesh, example)
        if plan.zero < 3:
            fill(module, known, cut.slices, device=device)
            module.to(device)
        activation_checkpointing.apply(module, plan, again if cut.stages is None else cut.stages.units(again))
        torch_compile.apply(module, plan, None if cut.stages is None else cut.stages.units(again))
        if plan.zero == 3:
            values = lambda part: fill(module, known, cut.slices, within=part)  # noqa: E731
            self._replicas: Replicas = Sharded(module, device, mesh, cut.dealt, values)
        elif plan.zero:
            self._replicas = Rows(module, device, job, mesh, cut.dealt)
        else:
            self._replicas = Whole(module, job, mesh, cut.dealt)
        if plan.zero == 3:
            open_for_hooks(module, [*cut.entrances, *cut.dealt.modules])
        show_slices(cut.places)
        show_added_later(module, cut.own_tokens, cut.tensors)
        parameters = self._replicas.parameters
        self._late = [parameters[name] for name in cut.late if name in parameters]
        self._tp = mesh.group("tp")
        self._stages = cut.stages
        last = cut.stages is None or cut.stages.runner.is_last
        self.holdings = RankHoldings(
            module=module,
            parameters=parameters,
            remarks=cut.remarks,
            # Along cp every rank starts backward from the same loss, and their gradients are added.
            divisor=self._replicas.averaged / plan.cp,
            counts=last and mesh.at["tp"] == 0 and mesh.at["cp"] == 0,
            slices=cut.slices,
            stages=mesh.group("pp"),
            runner=cut.stages.runner if cut.stages else None,
        )

    def begin(self) -> None:
        super().begin()
        self._replicas.begin()

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        if self._stages is not None:
            self._stages.runner.run(parts[0], work)
        else:
            each_micro_batch(self._module, self._device, parts[0], work, around=self._replicas.around)

    def forward(self, args: Any, kwargs: Any) -> Any:
        if self._stages is not None:
            return self._stages.runner.forward(*args, **kwargs)
        return self._module(*args, **kwargs)

    def finish(self) -> None:
        self._replicas.finish()
        if self._stages is not None:
            self._stages.add_up_tied(self.parameters)
        if self._late and self._tp is not None:
            add_up([None if tensor.grad is None else local(tensor.grad) for tensor in self._late], self._tp)

    def stepped(self) -> None:
        self._replicas.stepped()


class _SplitModel:
    """A model with its weights and tokens shared out, in place."""

    def __init__(self, module: nn.Module, device: torch.device, plan: Plan, mesh: Mesh, example: Example) -> None:
        self.slices: dict[str, TensorShard] = {}  # what this rank holds of each split parameter, by name
        self.places: Places = []  # which modules read them
        self.tensors = Axis("tp", size=plan.tp, rank=mesh.at["tp"], group=mesh.group("tp"), tokens=plan.sequence)
        leave_cache_out(module)
        known = example.facts.parts if example.facts else None
        found = SplitParts.from_dict(found_by_first(lambda: (known or look(module, plan, example)).to_dict()))
        experts, cuts = found.experts, found.weights
        self.remarks: tuple[str, ...] = ()
        if found.whole:
            whole = show_names(found.whole)
            self.remarks = (f"tp={plan.tp} leaves on every rank what pairs up with no other weight: {whole}.",)
        self.entrances = [*found.over_cp, *found.over_tp]  # blocks that hidden states enter sliced along their tokens
        expert.by_rows(module, experts)
        self.stages: OwnedStages | None = None
        if plan.pp > 1:
            from phalanx.parallel.stage_ownership import OwnedStages

            self.stages = OwnedStages(module, device, plan, mesh, example, found.stages)
            here = {name for name, _ in module.named_parameters()}
            cuts = {name: how for name, how in cuts.items() if name in here}
            experts = [one for one in experts if one.whole_name(one.parameters[0]) in here]
        over = [self.tensors] if plan.sequence else []
        if plan.cp > 1:
            at, group = mesh.at["cp"], mesh.group("cp")
            over.append(Axis("cp", size=plan.cp, rank=at, group=group, sums=True, attention=plan.attention))
            share_out_tokens(module, found.over_cp, over[-1])
        share_out_tokens(module, found.over_tp, self.tensors)
        if cuts:
            placed = {name: (Placed(self.tensors, dim, cut),) for name, (dim, cut) in cuts.items()}
            self.slices, self.places = split_weights(module, placed)
        self.dealt = expert.deal_out(module, experts, plan, mesh, self.tensors)
        self.slices |= self.dealt.slices
        if self.stages is not None:
            self.stages.runner.share_out({axis.name: axis for axis in over})
            self.slices = self.stages.holdings(self.slices)
        # Parameters whose gradients are added up over tp at the end of a step.
        self.own_tokens = [name for name in found.late if name not in self.dealt.inside]
        self.late = [*self.own_tokens, *self.dealt.late]


def look(module: nn.Module, plan: Plan, example: Example) -> SplitParts:
    """Return the parts of ``module`` that ``plan`` shares out; its experts then work by rows. Not collective.

    Raises:
        RefusedError: if the plan asks for a split that the model does not have.
    """
    experts = expert.find(module, example, plan)
    expert.by_rows(module, experts)
    if plan.tp == plan.cp == 1 and not experts:
        return SplitParts(experts=[], weights={}, whole=[], over_cp={}, over_tp={}, late=[])
    with dry(module, example) as model:
        split = find(model, plan.tp, across=_across(module, plan)) if plan.tp > 1 else Split(cuts={}, whole=[])
        if plan.tp > 1 and not split.cuts:
            raise RefusedError([no_layers_to_cut(plan)])
        dealt = expert.rows_of(experts, plan)
        over_tp = _tokens(model, plan, "sequence") if plan.sequence else {}
        return SplitParts(
            experts=experts,
            weights=split.cuts,
            whole=[name for name in split.whole if name not in dealt],
            over_cp=_tokens(model, plan, "cp") if plan.cp > 1 else {},
            over_tp=over_tp,
            late=added_late(model, over_tp, split.cuts) if plan.sequence else [],
        )


def _across(module: nn.Module, plan: Plan) -> bool:
    """Return True if weights of different parts may be cut as a pair, together with everything between them.

    This holds for a model that declares itself a flat list of layers, without recompute or sharding around each.
    """
    flat = getattr(type(module), "single_layers", False)
    return flat and plan.pp == plan.cp == 1 and plan.recompute == "none" and not plan.sequence


def _tokens(model: Model, plan: Plan, key: str) -> dict[str, Entrance]:
    found = entrances(model, plan.tp if key == "sequence" else plan.cp)
    if found:
        return found
    raise RefusedError([no_attention(key, plan)])
