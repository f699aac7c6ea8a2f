"""All exchanges of one rank in one optimizer step of a synchronous plan, from a model's profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from phalanx.config import Plan
from phalanx.config.model_costs import ModelPart, Profile, SizeLaw
from phalanx.config.plan import AXES
from phalanx.placement.collective_bytes import (
    Elements,
    Exchange,
    MeshSizes,
    PartPass,
    Pass,
    Widths,
    context,
    elements,
    experts,
    replicas,
    stages,
    tensor,
)
from phalanx.placement.schedules import holders
from phalanx.placement.stages import on_ranks

_TOTALS, _NORM, _LOSS = 24, 8, 4
"""Bytes of what a step adds up over ranks to know itself: its loss's sum, its count and how it was divided; the squares
of gradients' norm; of one sample's or token's loss where tokens are cut."""


def step_traffic(profile: Profile, plan: Plan, batch: int, rank: int, widths: Widths, *, clips: bool) -> list[Exchange]:
    """What ``rank`` takes part in, alike exchanges together; empty ones are left out.

    ``clips``: whether gradients' norm is wanted, of what no rank holds whole.
    """
    mesh = MeshSizes.of(plan, batch)
    samples = batch / plan.replicas / mesh.micros
    here = _Here.of(profile, plan, rank)
    found = [
        *_inside(profile, plan, mesh, widths, here, samples),
        *_between(profile, plan, mesh, widths, here, samples),
    ]
    found += [replace(one, times=one.times * mesh.micros) for one in _loss_of_tokens(plan, here)]
    found += replicas(here.units(profile, mesh), widths, mesh)
    found += _late(mesh, widths, here)
    found += _for_itself(plan, here, clips)
    return [one for one in _together(found) if one.times and one.size and mesh.ranks(one.over) > 1]


def parameters_held(profile: Profile, plan: Plan, rank: int) -> float:
    """Elements of parameters on ``rank``, frozen ones among them; with ``zero=3`` of its shards alone."""
    units = _Here.of(profile, plan, rank).units(profile, MeshSizes.of(plan, plan.replicas))
    return sum(one.learn + one.frozen for one in units) / (plan.fsdp if plan.zero == 3 else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Here:
    """The stages of one rank.

    Attributes:
        stages: their numbers.
        parts: the parts in them, with how many alike.
        last: whether the loss is computed here.
    """

    stages: tuple[int, ...]
    parts: tuple[tuple[ModelPart, int], ...]
    last: bool

    @classmethod
    def of(cls, profile: Profile, plan: Plan, rank: int) -> _Here:
        """Of ``rank``."""
        count = plan.pp * plan.stages
        place = plan.coordinate(rank)["pp"]
        mine = [stage for stage, holder in enumerate(holders(plan.schedule, plan.pp, count)) if holder == place]
        each = on_ranks(profile.parts, profile.length, plan.schedule, plan.pp, plan.stages)[place]
        kept = zip(profile.parts, each, strict=True)
        parts = tuple((part, number) for part, number in kept if number)
        return cls(stages=tuple(mine), parts=parts, last=count - 1 in mine)

    def units(self, profile: Profile, mesh: MeshSizes) -> list[Elements]:
        """What is gathered and scattered one by one: with ``zero=3`` blocks, where there are several, and the rest."""
        outside = [weights for part, _ in self.parts if part.role != "block" for weights in part.weights]
        blocks = [part.weights for part, number in self.parts if part.role == "block" for _ in range(number)]
        if mesh.zero < 3 or not profile.repeated or len(blocks) < 2:
            return elements([*outside, *(one for block in blocks for one in block)], mesh)
        return [one for unit in (outside, *blocks) for one in elements(unit, mesh)]


def _entry(profile: Profile, part: ModelPart) -> SizeLaw:
    """Hidden states that enter ``part``, or that it makes."""
    after = next((one for one in profile.parts if one.role == "block"), profile.parts[-1])
    return after.entry if part.role == "before" else part.entry


def _inside(
    profile: Profile, plan: Plan, mesh: MeshSizes, widths: Widths, here: _Here, samples: float
) -> Iterator[Exchange]:
    for part, number in here.parts:
        micro = PartPass(part=part, entry=_entry(profile, part), samples=samples, length=profile.length)
        for one in (tensor, context, experts):
            again: list[Pass] = ["again"] if mesh.again and part.role == "block" else []
            for way in ("forward", *again, "backward"):
                for made in one(micro, mesh, widths, way):
                    yield replace(made, times=made.times * number * mesh.micros)


def _between(
    profile: Profile, plan: Plan, mesh: MeshSizes, widths: Widths, here: _Here, samples: float
) -> Iterator[Exchange]:
    """Messages that this rank sends: outputs to the stage after, gradients to the one before, on other ranks."""
    if plan.pp == 1:
        return
    place = holders(plan.schedule, plan.pp, plan.pp * plan.stages)
    entry = _entry(profile, profile.parts[0])
    sends = sum(
        place[stage] != place[other]
        for stage in here.stages
        for other in (stage - 1, stage + 1)
        if 0 <= other < len(place)
    )
    message = stages(entry, mesh, widths, samples, profile.length)
    yield replace(message, times=message.times * sends * mesh.micros)


def _loss_of_tokens(plan: Plan, here: _Here) -> list[Exchange]:
    """A mean over tokens that are cut: its sum and its count."""
    return (
        [Exchange(why="a loss over tokens", kind="all-reduce", over=("cp",), size=_LOSS, times=2)] if here.last else []
    )


def _late(mesh: MeshSizes, widths: Widths, here: _Here) -> list[Exchange]:
    """Gradients of weights that each rank of ``tp`` reads for its own tokens only (Korthikanti et al. 2022)."""
    whole = sum(
        number * one.elements
        for part, number in here.parts
        if part.role != "before"
        for one in part.weights
        if _alike(one)
    )
    size = whole / (mesh.fsdp if mesh.zero else 1) * widths.sent
    return [Exchange(why="gradients of cut tokens", kind="all-reduce", over=("tp",), size=size, times=mesh.sequence)]


def _alike(weights: object) -> bool:
    return getattr(weights, "share", "") == "whole" and not getattr(weights, "expert", False)


def _for_itself(plan: Plan, here: _Here, clips: bool) -> Iterator[Exchange]:
    yield Exchange(why="the loss and its count", kind="all-reduce", over=AXES, size=_TOTALS)
    if not clips:
        return
    kinds: set[tuple[str, ...]] = set()
    for part, _ in here.parts:
        for one in part.weights:
            over = [
                axis for axis, cut in (("fsdp", plan.zero > 0), ("tp", one.share == "inner"), ("ep", one.expert)) if cut
            ]
            kinds.add(tuple(axis for axis in over if getattr(plan, axis) > 1))
    for over in kinds:
        for axis in over:
            yield Exchange(why="gradients' norm", kind="all-reduce", over=(axis,), size=_NORM)
    yield Exchange(why="gradients' norm", kind="all-reduce", over=("pp",), size=_NORM)


def _together(found: Sequence[Exchange]) -> list[Exchange]:
    """Alike ones as one."""
    times: dict[tuple[object, ...], Exchange] = {}
    for one in found:
        key = (one.why, one.kind, one.over, one.size)
        had = times.get(key)
        times[key] = replace(one, times=one.times + had.times) if had else one
    return list(times.values())


def peers(plan: Plan, rank: int, over: Sequence[str]) -> tuple[int, ...]:
    """Ranks of one group of an exchange: those that differ from ``rank`` along ``over`` at most."""
    mine = plan.coordinate(rank)
    rest = [axis for axis in mine if axis not in over]
    every = range(prod(plan.mesh.values()))
    return tuple(other for other in every if all(plan.coordinate(other)[axis] == mine[axis] for axis in rest))
