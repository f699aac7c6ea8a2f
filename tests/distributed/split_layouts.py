"""One model's parameters under plans that split them by name, cut by hand: uneven, fused, zigzag, along two axes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from checkpoint_ranks import placed, row_view
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from phalanx.comm import Mesh
from phalanx.config import Plan
from phalanx.parallel import Layout, MicroBatchWork, RankHoldings, TensorShard
from phalanx.parallel.local_shards import Axis, Cut, Placed
from phalanx.parallel.local_shards.axis import kept

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (7, 4),
    "norm": (6,),
    "qkv": (24, 6),
    "bias": (24,),
    "down": (6, 8),
    "deep": (5, 6, 2),
    "thin": (2, 3),
    "frozen": (8, 3),
}
STAGES = [("embed", "norm", "qkv", "bias", "frozen"), ("down", "deep", "thin", "embed")]
"""Which names each stage of a pipeline holds; ``embed`` is tied, and the first stage's counts."""

CUTS = {
    ("embed", "tp"): (0, lambda ranks: Cut.even(7, ranks)),
    ("qkv", "tp"): (0, lambda ranks: Cut.even(24, ranks, outer=3, inner=2)),
    ("bias", "tp"): (0, lambda ranks: Cut.even(24, ranks, outer=3, inner=2)),
    ("down", "tp"): (1, lambda ranks: Cut.even(8, ranks)),
    ("deep", "tp"): (1, lambda ranks: Cut.even(6, ranks)),
    ("deep", "ep"): (0, lambda ranks: Cut.even(5, ranks)),
    ("thin", "tp"): (0, lambda ranks: Cut.even(2, ranks)),  # over three ranks one holds nothing
    ("frozen", "tp"): (0, lambda ranks: Cut.zigzag(8, ranks)),
}


class Net(nn.Module):
    """Parameters of every kind, and a buffer; it computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(value(name, shape), requires_grad=name != "frozen"))
        self.register_buffer("count", torch.tensor(3))


class Cuttings(Layout):
    """A model held as a plan says; without work to do."""

    def __init__(self, held: RankHoldings) -> None:
        self.holdings = held

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None: ...

    def finish(self) -> None: ...

    def stepped(self) -> None: ...


def value(name: str, shape: Sequence[int]) -> Tensor:
    """Numbers that depend on nothing but the name."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def laid_out(text: str, rank: int = 0) -> Cuttings:
    """The model under the plan, on this rank."""
    plan, module = Plan.parse(text), Net()
    mesh = Mesh(plan, rank)
    stage = _kept(module, mesh.at["pp"]) if plan.pp > 1 else {}
    axes = {
        name: Axis(name, size=plan.mesh[name], rank=mesh.at[name], group=mesh.group(name))
        for name in ("tp", "ep")
        if plan.mesh[name] > 1
    }
    cuts: dict[str, tuple[Placed, ...]] = {}
    for (name, along), (dim, cut) in CUTS.items():
        if along in axes and name in dict(module.named_parameters()):
            cuts[name] = (*cuts.get(name, ()), Placed(axes[along], dim, cut(axes[along].size)))
    slices = {name: TensorShard(shape=torch.Size(SHAPES[name]), placed=ways) for name, ways in cuts.items()}
    for name, ways in cuts.items():
        whole = module.get_parameter(name)
        mine = nn.Parameter(kept(whole.detach(), ways).clone(), requires_grad=whole.requires_grad)
        module.register_parameter(name, mine)
    for name, counts in stage.items():
        holding = slices.get(name) or TensorShard(shape=torch.Size(SHAPES[name]))
        slices[name] = TensorShard(shape=holding.shape, placed=holding.placed, counts=counts)
    device = torch.device("cpu")
    if plan.zero == 3:
        fully_shard(module, mesh=mesh.sharding(device, ("dp",)))
    parameters: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if plan.zero == 1:
        over = mesh.sharding(device, ("dp",))
        parameters = {name: nn.Parameter(row_view(tensor, over)) for name, tensor in parameters.items()}
    return Cuttings(RankHoldings(module=module, parameters=parameters, slices=slices, stages=mesh.group("pp")))


def _kept(module: nn.Module, stage: int) -> dict[str, bool]:
    """Drop what other stages hold; which of the names that several hold counts here."""
    for name in SHAPES:
        if name not in STAGES[stage]:
            del module._parameters[name]
    return {"embed": stage == 0}


def own(whole: Tensor, name: str, like: Tensor, held: RankHoldings) -> Tensor:
    """What this rank has of ``whole``, which is a tensor of the shape of parameter ``name``."""
    holding = held.slices.get(name)
    return placed(kept(whole, holding.placed if holding else ()), like)
