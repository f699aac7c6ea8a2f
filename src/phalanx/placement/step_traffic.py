"""All exchanges of one rank in one optimizer step of a synchronous plan, from a model's profile.

``counts`` are a rank's counts of each part of the model: numbers, or arrays with one entry for each plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from phalanx.config import Plan
from phalanx.config.fields import DATA_AXES
from phalanx.config.model_costs import EVERY, Profile, Weights
from phalanx.config.plan import AXES
from phalanx.config.run import DRIFT_EVERY
from phalanx.placement.batch_split import largest_share
from phalanx.placement.collective_bytes import (
    Elements,
    Exchange,
    MeshSizes,
    Number,
    PartPass,
    Pass,
    Widths,
    cut_over,
    elements,
    hidden_states,
    inside,
    replicas,
    stages,
)
from phalanx.placement.stages import on_ranks, sends

COLUMNS = 60
"""Tensors at most that are gathered at one go for a loss over the whole batch."""
HEADER = 5 + COLUMNS
"""Whole numbers of 8 bytes by which ranks tell each other with it what theirs are like."""
_TOTALS, _NORM, _FINGERPRINT = 24, 8, 8
"""Bytes of what a step adds up over ranks to know itself: its loss's sum, its count and how it was divided; the squares
of gradients' norm. And of what a rank tells its replicas of its parameters."""


def step_traffic(profile: Profile, plan: Plan, batch: int, rank: int, widths: Widths) -> list[Exchange]:
    """Return the exchanges of ``rank``, equal ones together; empty ones are left out.

    The gradients' norm is among them, for gradients that no rank holds whole: every step checks by it that they are
    finite.
    """
    mesh, counts = MeshSizes.of(plan, batch), _counts(profile, plan, rank)
    mesh = with_second_forward(profile, mesh)
    samples = batch / plan.replicas / mesh.micros
    handed = stages(hidden_states(profile.parts), mesh, widths, samples, profile.length)
    sent = sum(sends(plan.schedule, plan.pp, plan.stages, plan.coordinate(rank)["pp"]))
    found = [
        *_of_parts(profile, counts, mesh, widths, samples),
        replace(handed, times=handed.times * sent * mesh.micros),
        *replicas(_units(profile, counts, mesh), widths, mesh),
        *once_a_step(profile, counts, mesh, widths, norm=True),
        Exchange(
            why="the loss and its count", kind="all-reduce", over=AXES, size=_TOTALS, times=int(not profile.compared)
        ),
        *rows_of_whole_batch(profile, largest_share(plan, batch), mesh),
        fingerprints(mesh, DRIFT_EVERY),
    ]
    return [one for one in _together(found) if one.times and one.size and mesh.ranks(one.over) > 1]


def with_second_forward(profile: Profile, mesh: MeshSizes) -> MeshSizes:
    """Return ``mesh`` with a second forward if a loss over the whole batch precedes several backwards."""
    return replace(mesh, twice=1 * (mesh.micros > 1)) if profile.compared else mesh


def rows_of_whole_batch(profile: Profile, share: Number, mesh: MeshSizes) -> Iterator[Exchange]:
    """Yield the gathers for a loss over the whole batch; the largest share has this many samples."""
    ranks = mesh.ranks(DATA_AXES)
    for one in profile.compared:
        size = ranks * (8 * HEADER + share * one.rows + one.others)
        yield Exchange(why="rows of the whole batch", kind="all-gather", over=DATA_AXES, size=size)


def fingerprints(mesh: MeshSizes, every: int) -> Exchange:
    """Return the exchange, ``every`` so many steps, of replicas' parameter fingerprints."""
    over = ("dp", "cp")
    size = _FINGERPRINT * mesh.ranks(over)
    return Exchange(why="replicas' fingerprints", kind="all-gather", over=over, size=size, times=1 / every)


def parameters_held(profile: Profile, plan: Plan, rank: int) -> float:
    """Return elements of parameters on ``rank``, frozen ones included; with ``zero=3`` of its shards alone."""
    units = _units(profile, _counts(profile, plan, rank), MeshSizes.of(plan, plan.replicas))
    return sum(one.learn + one.frozen for one in units) / (plan.fsdp if plan.zero == 3 else 1)


def weights_held(profile: Profile, counts: Sequence[Number]) -> Iterator[tuple[Weights, Number]]:
    """Yield parameters of a rank's parts, with their counts.

    Weights shared by the last part and the first, such as an embedding, exist twice if these are on two ranks.
    """
    for part, count in zip(profile.parts, counts, strict=True):
        yield from ((one, count) for one in part.weights)
    yield from tied_copy(profile, counts)


def tied_copy(profile: Profile, counts: Sequence[Number]) -> Iterator[tuple[Weights, Number]]:
    """Yield a rank's additional weights: those of the first part that the last one reads."""
    if profile.tied:
        yield _tied(profile), 1 * ((counts[-1] > 0) & (counts[0] == 0))


def _tied(profile: Profile) -> Weights:
    among = [one for one in profile.parts[0].weights if max(one.elements, one.frozen) >= profile.tied]
    learns = not among or among[0].elements > 0
    share, most = (among[0].share, among[0].most) if among else ("whole", EVERY)
    return Weights(elements=profile.tied * learns, frozen=profile.tied * (not learns), share=share, most=most)


def unit_by_unit(profile: Profile, counts: Sequence[Number]) -> Number:
    """Return True if ``zero=3`` gathers and scatters each block of a rank by itself: if it has several."""
    blocks = sum(count for part, count in zip(profile.parts, counts, strict=True) if part.role == "block")
    return profile.repeated & (blocks > 1)


def once_a_step(
    profile: Profile, counts: Sequence[Number], mesh: MeshSizes, widths: Widths, *, norm: bool
) -> Iterator[Exchange]:
    """Yield exchanges of gradients beyond ``replicas``, after the last gradient.

    They are those of weights that each rank of ``tp`` reads for its own tokens only (Korthikanti et al. 2022), those of
    tied weights on the first and the last rank, and the norm over all that differ.
    """
    shards = 1 + (mesh.fsdp - 1) * (mesh.zero > 0)
    late = [
        (one, count * (cut_over(one, mesh) == 1))
        for part, count in zip(profile.parts, counts, strict=True)
        for one in part.weights
        if part.role != "before" and not one.expert
    ]
    size = _learn(late, mesh) / shards * widths.sent
    yield Exchange(why="gradients of cut tokens", kind="all-reduce", over=("tp",), size=size, times=mesh.sequence)
    if profile.tied:
        size = _learn([(_tied(profile), 1)], mesh) / shards * widths.sent
        apart = 1 * ((counts[0] > 0) != (counts[-1] > 0))
        yield Exchange(
            why="gradients of tied weights", kind="all-reduce", over=("pp",), size=size, times=apart, ends=True
        )
    if norm:
        yield from _norms(profile, counts, mesh)


def _learn(weights: Iterable[tuple[Weights, Number]], mesh: MeshSizes) -> Number:
    return sum(one.learn for one in elements(weights, mesh))


def _norms(profile: Profile, counts: Sequence[Number], mesh: MeshSizes) -> Iterator[Exchange]:
    here = list(weights_held(profile, counts))
    for cut, dealt in product((False, True), repeat=2):
        alike = sum(
            count * ((cut_over(one, mesh) > 1) == cut) * ((one.expert & (mesh.ep > 1)) == dealt) for one, count in here
        )
        for axis, over in (("fsdp", mesh.zero > 0), ("tp", cut), ("ep", dealt)):
            times = 1 * (alike > 0) * over
            yield Exchange(why="gradients' norm", kind="all-reduce", over=(axis,), size=_NORM, times=times)
    yield Exchange(why="gradients' norm", kind="all-reduce", over=("pp",), size=_NORM)


def _counts(profile: Profile, plan: Plan, rank: int) -> tuple[int, ...]:
    each = on_ranks(profile.parts, profile.length, plan.schedule, plan.pp, plan.stages)
    return each[plan.coordinate(rank)["pp"]]


def _units(profile: Profile, counts: Sequence[int], mesh: MeshSizes) -> list[Elements]:
    if mesh.zero < 3 or not unit_by_unit(profile, counts):
        return elements(weights_held(profile, counts), mesh)
    both = list(zip(profile.parts, counts, strict=True))
    units = [elements(weights_held(profile, [count * (part.role != "block") for part, count in both]), mesh)]
    for part, count in both:
        if part.role == "block":
            units += [elements([(one, 1) for one in part.weights], mesh)] * count
    return [one for unit in units for one in unit]


def _of_parts(
    profile: Profile, counts: Sequence[int], mesh: MeshSizes, widths: Widths, samples: float
) -> Iterator[Exchange]:
    for part, count in zip(profile.parts, counts, strict=True):
        micro = PartPass.of(profile.parts, part, samples, profile.length)
        again: list[Pass] = ["again"] if mesh.again and part.role == "block" else []
        forwards: list[Pass] = ["forward"] * (1 + mesh.twice)
        for way in (*forwards, *again, "backward"):
            for one in inside(micro, mesh, widths, way):
                yield replace(one, times=one.times * count * mesh.micros)


def _together(found: Sequence[Exchange]) -> list[Exchange]:
    times: dict[tuple[object, ...], Exchange] = {}
    for one in found:
        key = (one.why, one.kind, one.over, one.size)
        had = times.get(key)
        times[key] = replace(one, times=one.times + had.times) if had else one
    return list(times.values())


def peers(plan: Plan, rank: int, over: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks of one group of an exchange: those that differ from ``rank`` only along ``over``."""
    return tuple(plan.along(over, rank))
