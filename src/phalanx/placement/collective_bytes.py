"""The exchanges of ranks in an optimizer step: their kind, ranks, bytes and number.

Written once, for numbers and for arrays with one entry for each plan: forecasts price these exchanges, and a test
counts that these run and no others. They are those of even shares: for experts, as if tokens were routed evenly, which
is not counted; for rows, as if ranks divided them; for gradients of one group, as if they were one bucket. Not listed
are running statistics, which rank 0 sends to all, BatchNorm's exchanges for statistics of the global batch, the
question which parameters had a gradient, and gathers of sliced outputs under ``tp`` or ``cp`` for a loss over the whole
batch. Plans with independent replicas, compression or servers send other messages, which they count as they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from phalanx.config import Plan
from phalanx.config.model_costs import ModelPart, Share, SizeLaw, Weights
from phalanx.config.plan import AXES
from phalanx.placement.batch_split import micro_batches

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "ring"]
"""``ring``: each rank passes on what came to it until every rank has had all: ranks - 1 messages of an equal share."""

Number = Any
"""A number, or an array with one for each plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One exchange with a rank's participation."""

    why: str
    kind: Kind
    over: tuple[str, ...]  # dimensions of the mesh along which its ranks stand
    # bytes of the whole: what an all-reduce adds up, an all-gather or a ring ends with on every rank, a reduce-scatter
    # begins with, an all-to-all hands in, a message holds
    size: Number
    times: Number = 1  # how often; 0 if a plan has none
    ends: bool = False  # whether only the first and the last of these ranks take part


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    """The properties of a plan that determine exchanges; see ``Plan``."""

    dp: Number = 1  # replicas whose gradients are added up in every step
    fsdp: Number = 1
    tp: Number = 1
    pp: Number = 1
    cp: Number = 1
    ep: Number = 1
    zero: Number = 0
    sequence: Number = 0  # 1 if tokens are cut over ``tp`` between blocks
    attention: Mapping[str, Number]  # for each way to attend over ``cp``, 1 if it is taken
    again: Number = 0  # 1 if the backward computes something of blocks again, and so repeats what they exchange
    micros: Number = 1  # micro-batches of a rank in a step
    twice: Number = 0  # 1 if each micro-batch runs forward twice, for a loss over the whole batch

    def ranks(self, over: Sequence[str]) -> Number:
        """Return the ranks in one group of an exchange."""
        return prod(getattr(self, axis) for axis in over)

    def divided(self, share: Share, most: Number) -> Number:
        """Return the ranks of ``tp`` that divide an ``inner`` share; see ``Weights.most``."""
        return 1 + (self.tp - 1) * (self.tp <= most) if share == "inner" else 1

    @classmethod
    def of(cls, plan: Plan, batch: int) -> MeshSizes:
        """Build from ``plan`` for a global batch."""
        return cls(
            **{axis: getattr(plan, axis) for axis in AXES},
            zero=plan.zero,
            sequence=int(plan.sequence),
            attention={plan.attention: 1},
            again=int(plan.recompute != "none"),
            micros=micro_batches(plan, batch),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Bytes of one element."""

    products: Number = 4  # of what matrix products give, and attention reads
    stream: Number = 4  # of hidden states between blocks, and of their gradients
    gathered: Number = 4  # of a sharded parameter when it is gathered to compute with
    weights: Number = 4  # of a parameter that was stepped in shards and is gathered then
    sent: Number = 4  # of a gradient


_CLASSES = 4  # bytes of a number in the loss, whatever the model computes in


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPass:
    """One micro-batch in one part of a model, on one rank."""

    part: ModelPart
    entry: SizeLaw  # hidden states: of this part, or of the blocks where it makes them from tokens
    last: bool  # whether the loss is computed in it
    samples: Number  # in the micro-batch
    length: Number  # tokens of each, before ``cp`` cuts them

    @classmethod
    def of(cls, parts: Sequence[ModelPart], part: ModelPart, samples: Number, length: Number) -> PartPass:
        """Build for one of a model's ``parts``."""
        entry = hidden_states(parts) if part.role == "before" else part.entry
        return cls(part=part, entry=entry, last=part is parts[-1], samples=samples, length=length)

    @property
    def stream(self) -> Number:
        """Return the elements of the hidden states of all tokens."""
        return self.entry.at(self.samples, self.length)


def hidden_states(parts: Sequence[ModelPart]) -> SizeLaw:
    """Return the size of the values between blocks, and between stages of a pipeline."""
    return next((one for one in parts if one.role == "block"), parts[-1]).entry


Pass = Literal["forward", "again", "backward"]
"""``again``: the forward of a block once more, in its backward, up to what it saved last, without its result."""


def inside(micro: PartPass, mesh: MeshSizes, widths: Widths, way: Pass) -> list[Exchange]:
    """Return the exchanges of ranks that share a part, in one pass of one micro-batch through it."""
    return [*tensor(micro, mesh, widths, way), *context(micro, mesh, widths, way), *experts(micro, mesh, widths)]


def tensor(micro: PartPass, mesh: MeshSizes, widths: Widths, way: Pass) -> list[Exchange]:
    """Return the exchanges over ``tp``.

    Results of row-parallel products are added up, and so are the gradients at the inputs of column-parallel ones
    (Shoeybi et al. 2019, section 3). With tokens cut, a gather and a scatter replace each sum (Korthikanti et al. 2022,
    section 4.2.2). An embedding's rows are looked up on their own ranks and added up. For cut classes the loss adds up
    three numbers a token: their largest, the sum of their exponentials, the target's own.
    """
    part, some, backward = micro.part, 1 * (mesh.tp > 1), way == "backward"
    here = micro.stream / mesh.cp
    rows = [one for one in part.forward if one.share == "row" and one.kind in _PRODUCTS]
    joins = sum(1 * (mesh.tp <= one.most) for one in rows)
    width = widths.stream if backward else widths.products
    found = [*_joined(joins, joins - (way == "again") * (joins > 0), here * width, mesh)] if rows else []
    tables = [one for one in part.weights if one.share == "inner" and not one.expert]
    if part.role == "before" and tables:
        cut = 1 * (mesh.tp <= max(one.most for one in tables))
        if backward:
            found.append(_gathered("tokens' gradients of an embedding", mesh.sequence * cut, here * widths.stream))
        else:
            size = micro.stream * widths.stream
            found.append(Exchange(why="embeddings", kind="all-reduce", over=("tp",), size=size, times=cut))
    heads = [one for one in part.forward if one.share == "column" and one.kind in _PRODUCTS]
    if part.role == "after" and heads:
        cut = 1 * (mesh.tp <= max(one.most for one in heads))
        if backward:
            ways: dict[Kind, Number] = {"all-reduce": cut * (1 - mesh.sequence), "reduce-scatter": cut * mesh.sequence}
            why, size = "gradients of a head's inputs", here * widths.stream
            found += [Exchange(why=why, kind=kind, over=("tp",), size=size, times=ways[kind]) for kind in ways]
        else:
            found.append(_gathered("a head's inputs", mesh.sequence * cut, here * widths.stream))
            size = micro.samples * micro.length / mesh.cp * _CLASSES
            found.append(Exchange(why="classes in the loss", kind="all-reduce", over=("tp",), size=size, times=3 * cut))
    return [replace(one, times=one.times * some) for one in found]


_PRODUCTS = ("matmul", "convolution")


def _joined(gathers: int, sums: int, size: Number, mesh: MeshSizes) -> Iterator[Exchange]:
    why = "row-parallel products"
    yield Exchange(why=why, kind="all-reduce", over=("tp",), size=size, times=sums * (1 - mesh.sequence))
    yield _gathered(why, gathers * mesh.sequence, size)
    yield Exchange(why=why, kind="reduce-scatter", over=("tp",), size=size, times=sums * mesh.sequence)


def _gathered(why: str, times: Number, size: Number) -> Exchange:
    return Exchange(why=why, kind="all-gather", over=("tp",), size=size, times=times)


def context(micro: PartPass, mesh: MeshSizes, widths: Widths, way: Pass) -> list[Exchange]:
    """Return the exchanges over ``cp``.

    Keys and values go around a ring, and in the backward once more with their gradients behind them (Liu et al. 2023);
    or they are gathered and their gradients scattered (Dubey et al. 2024, section 3.3.2); or queries, keys, values and
    results change from tokens to heads and back (Jacobs et al. 2023, section 3.2). A mean over cut tokens adds up its
    sum and its count.
    """
    some, backward = 1 * (mesh.cp > 1), way == "backward"
    found: list[Exchange] = []
    if micro.last and way == "forward":
        found.append(_over_cp("a loss over tokens", "all-reduce", _LOSS, 2 * some))
    for one in micro.part.forward:
        if one.kind != "attention":
            continue
        samples, heads, key_heads, queries, keys, width = (dim.at(micro.samples, micro.length) for dim in one.dims)
        cut = mesh.divided(one.share, one.most)
        asked = samples * heads * queries * width * widths.products / cut
        kept = samples * key_heads * keys * width * widths.products / cut
        ring, gather, turned = (some * mesh.attention.get(name, 0) for name in ("ring", "gather", "alltoall"))
        gathers: Kind = "reduce-scatter" if backward else "all-gather"
        summed = 2 * kept / widths.products * _SUMS
        found += [
            _over_cp("keys and values", "ring", 2 * kept, ring),
            _over_cp("sums of their gradients", "ring", summed, ring * backward),
            _over_cp("keys and values", gathers, kept, 2 * gather),
            _over_cp("queries, keys and values", "all-to-all", (asked + 2 * kept) / mesh.cp, turned),
            _over_cp("attention's results", "all-to-all", asked / mesh.cp, turned),
        ]
    return found


_SUMS = 4  # bytes of a gradient that is added to on its way around the ring
_LOSS = 4  # bytes of a sum of losses, or of their count


def _over_cp(why: str, kind: Kind, size: Number, times: Number) -> Exchange:
    return Exchange(why=why, kind=kind, over=("cp",), size=size, times=times)


def experts(micro: PartPass, mesh: MeshSizes, widths: Widths) -> list[Exchange]:
    """Return the exchanges over ``ep``.

    A row for each expert chosen by a token goes to it with a factor and comes back. Gradients go the same ways
    (Lepikhin et al. 2021, section 3.2). Ranks first tell one another the number of rows for each of their experts.
    """
    first = next((one for one in micro.part.forward if one.expert and one.kind == "matmul"), None)
    if first is None:
        return []
    groups, rows, _, width = (dim.at(micro.samples, micro.length) for dim in first.dims)
    rows = groups * rows / mesh.cp / mesh.tp
    some = 1 * (mesh.ep > 1)
    found = [
        Exchange(why="experts' tokens", kind="all-to-all", over=("ep",), size=rows * width * widths.stream, times=2),
        Exchange(why="experts' factors", kind="all-to-all", over=("ep",), size=rows * widths.stream),
    ]
    return [replace(one, times=one.times * some) for one in found]


def stages(entry: SizeLaw, mesh: MeshSizes, widths: Widths, samples: Number, length: Number) -> Exchange:
    """Return the message between pipeline stages for one micro-batch, or its gradient; see ``sends``."""
    share = 1 + (mesh.tp - 1) * mesh.sequence
    size = entry.at(samples, length) / mesh.cp / share * widths.stream
    return Exchange(why="a stage's outputs", kind="send", over=("pp",), size=size, times=1 * (mesh.pp > 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Parameters on one rank before ``fsdp`` shards them: those that get gradients, and those that do not."""

    learn: Number = 0
    frozen: Number = 0
    expert: bool = False


COPIES = ("dp", "ep", "cp")
"""Dimensions along which ranks hold the same shards, and see other samples or tokens."""

EXPERT_COPIES = ("dp", "cp")
"""The same for experts, of which the ranks of ``ep`` hold different ones."""


def gather(held: Elements, widths: Widths, mesh: MeshSizes, shards: tuple[str, ...] = ("fsdp",)) -> Exchange:
    """Return the gather of sharded parameters: for computing (``zero=3``), or after their step.

    ``shards``: the mesh dimensions of the shards.
    """
    full = 1 * (mesh.zero == 3)
    size = (held.learn + full * held.frozen) * (full * widths.gathered + (1 - full) * widths.weights)
    return Exchange(why="sharded parameters", kind="all-gather", over=shards, size=size, times=1 * (mesh.zero > 0))


def scatter(held: Elements, widths: Widths, mesh: MeshSizes, shards: tuple[str, ...] = ("fsdp",)) -> Exchange:
    """Return the sum of gradients over shards, each rank keeping its own (Rajbhandari et al. 2020, section 7)."""
    size = held.learn * widths.sent
    return Exchange(why="gradients", kind="reduce-scatter", over=shards, size=size, times=1 * (mesh.zero > 0))


def add_up(held: Elements, widths: Widths, mesh: MeshSizes, shards: tuple[str, ...] = ("fsdp",)) -> Exchange:
    """Return the sum of gradients, or shards of them, over copies (Zhao et al. 2023, section 3.2.2)."""
    over = tuple(axis for axis in (EXPERT_COPIES if held.expert else COPIES) if axis not in shards)
    size = held.learn / mesh.ranks(shards) * widths.sent
    return Exchange(why="copies' gradients", kind="all-reduce", over=over, size=size, times=1 * (mesh.ranks(over) > 1))


def replicas(units: Sequence[Elements], widths: Widths, mesh: MeshSizes) -> list[Exchange]:
    """Return all exchanges that keep replicas equal in a step, for ``units`` gathered one by one.

    ``zero=3`` gathers each for forward and for backward of every micro-batch. Stages 2 and 3 scatter the gradients of
    each micro-batch on arrival, and add them up over copies then.
    """
    often, sums = sum(gathers(mesh)), reductions(mesh)
    found: list[Exchange] = []
    for held in units:
        for times, one in ((often, gather), (sums, scatter), (sums, add_up)):
            made = one(held, widths, mesh)
            found.append(replace(made, times=times * made.times))
    return found


def gathers(mesh: MeshSizes) -> tuple[Number, Number, Number]:
    """Return the gathers of sharded parameters in a step: for forwards, for backwards, after the update.

    Without ``zero`` none is needed; see ``gather``.
    """
    each = (mesh.zero == 3) * mesh.micros
    return each * (1 + mesh.twice), each, 1 * (mesh.zero < 3)


def reductions(mesh: MeshSizes) -> Number:
    """Return the number of gradient sums in a step."""
    return 1 + (mesh.zero > 1) * (mesh.micros - 1)


def cut_over(one: Weights, mesh: MeshSizes) -> Number:
    """Return the ranks of ``tp`` that cut these weights: experts only if there are enough for all of ``ep``, too."""
    return mesh.divided(one.share, one.most // mesh.ep if one.expert else one.most)


def elements(weights: Iterable[tuple[Weights, Number]], mesh: MeshSizes) -> list[Elements]:
    """Return a rank's part of these weights, each with its count: of the experts, and of the rest."""
    found: dict[bool, Elements] = {}
    for one, count in weights:
        share = count / cut_over(one, mesh) / (mesh.ep if one.expert else 1)
        had = found.get(one.expert, Elements(expert=one.expert))
        learn, frozen = had.learn + share * one.elements, had.frozen + share * one.frozen
        found[one.expert] = Elements(learn=learn, frozen=frozen, expert=one.expert)
    return list(found.values())
