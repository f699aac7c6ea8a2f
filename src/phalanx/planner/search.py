"""Every plan worth pricing, as arrays, and their prices: memory for all, time for those that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.config import Plan
from phalanx.config.plan import Precision
from phalanx.config.sync import AUTO
from phalanx.forecast.forecast import times
from phalanx.forecast.layouts import RECOMPUTES, SCHEDULES, Layouts
from phalanx.forecast.step_time import ForecastInput
from phalanx.forecast.uncertainty import SAFE
from phalanx.forecast.unequal_devices import device_shares, memory_of
from phalanx.placement.batch_split import largest_even, pieces
from phalanx.placement.limits import Limits
from phalanx.placement.schedules import SCHEDULES as PIPELINE_SCHEDULES
from phalanx.planner.question import Question
from phalanx.planner.rules import limits_of

Whole = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Columns = dict[str, Whole]

# Not gpipe, which takes as long as 1f1b and keeps more; not dualpipev, which is priced as zbv is.
_SCHEDULES = [(name, stages) for name, one in PIPELINE_SCHEDULES.items() for stages in one.searched]
_FEWEST_TOKENS = 128  # on a rank of cp: below, products are too small to gain
MESH = ("dp", "fsdp", "tp", "pp", "cp", "ep")
SEARCHED = (*MESH, "zero", "schedule", "stages", "sequence", "micro", "recompute", "shares")
"""Keys of a plan that are tried; the others are left at their default."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Space:
    """N plans of one number of devices; three in a row differ in ``recompute`` only."""

    # keys of a plan → their values, shape (N,); ``schedule`` and ``recompute`` by index, ``micro`` never 0
    columns: Columns
    share: Whole  # samples of a replica: where ``micro`` is as many, a plan need not say
    batch: int  # global
    tokens: int  # of a sample
    precision: Precision  # of all

    def __len__(self) -> int:
        return len(self.share)

    def layouts(self) -> Layouts:
        each = {name: column.astype(float) for name, column in self.columns.items() if name not in ("micro", "shares")}
        full, none = np.ones(len(self)), np.zeros(len(self))
        micro = self.columns["micro"]
        return Layouts(
            **each,
            asked=np.where(micro >= self.share, 0, micro).astype(float),
            batch=full * self.batch,
            samples=self.batch / (each["dp"] * each["fsdp"] * each["ep"]),
            length=full * self.tokens,
            attention=none,
            offload=none,
            sync=none,
            every=full,
            outer=none,
            server=none,
            staleness=none,
            compiles=none,
            shares=np.where(self.columns["shares"] > 0, AUTO, ""),
            compress=np.full(len(self), "none"),
        )

    def plan(self, index: int) -> Plan:
        given: dict[str, Any] = {name: int(column[index]) for name, column in self.columns.items()}
        given["schedule"] = SCHEDULES[given["schedule"]]
        given["recompute"] = RECOMPUTES[given["recompute"]]
        given["sequence"] = bool(given["sequence"])
        given["shares"] = AUTO if given["shares"] else ""
        given["micro"] = None if given["micro"] >= self.share[index] else given["micro"]
        return Plan(**given, precision=self.precision)

    def where(self, held: Mapping[str, Any]) -> Mask:
        found = np.ones(len(self), dtype=bool)
        for name, value in held.items():
            if name not in self.columns:
                continue
            if name == "shares":
                value = value == AUTO
            if name in ("schedule", "recompute"):
                value = (SCHEDULES if name == "schedule" else RECOMPUTES).index(value)
            found &= self.columns[name] == int(value)
        return found

    def take(self, rows: npt.NDArray[Any]) -> Space:
        return Space(
            columns={name: column[rows] for name, column in self.columns.items()},
            share=self.share[rows],
            batch=self.batch,
            tokens=self.tokens,
            precision=self.precision,
        )


def space(question: Question) -> Space:
    """Return the plans that use every device of the question's cluster, are allowed by its work, and can be run."""
    limits = limits_of(question.work)
    meshes = list(_meshes(question, limits))
    columns = {name: np.array([mesh[at] for mesh in meshes], dtype=np.int64) for at, name in enumerate(MESH)}
    columns = _crossed(columns, ("zero",), [(zero,) for zero in range(4)], _zero_fits)
    choices = [(SCHEDULES.index(name), stages) for name, stages in _SCHEDULES]
    columns = _crossed(
        columns,
        ("schedule", "stages"),
        choices,
        lambda one: (
            (one["schedule"] == SCHEDULES.index("1f1b"))
            | ((one["pp"] > 1) & (one["pp"] * one["stages"] <= limits.blocks))
        ),
    )
    columns["sequence"] = ((columns["tp"] > 1) & (columns["cp"] == 1) & limits.attends).astype(np.int64)
    columns = _crossed(
        columns,
        ("shares",),
        [(0,), (1,)],
        lambda one: (one["shares"] == 0) | ((one["dp"] > 1) & (one["pp"] == 1) & question.mixed),
    )
    share = largest_even(limits.batch, columns["dp"] * columns["fsdp"] * columns["ep"])
    most = int(share.max(initial=1))
    powers = [(2**at,) for at in range(most.bit_length() + 1)]
    columns["share"] = share
    columns = _crossed(columns, ("micro",), powers, _micro_fits)
    share = columns.pop("share")
    columns["micro"] = np.minimum(columns["micro"], share)
    count = len(RECOMPUTES)
    columns = {name: np.repeat(column, count) for name, column in columns.items()}
    columns["recompute"] = np.tile(np.arange(count), len(share))
    return Space(
        columns=columns,
        share=np.repeat(share, count),
        batch=question.work.batch,
        tokens=question.work.tokens,
        precision=question.precision,
    )


def _meshes(question: Question, limits: Limits) -> Iterator[tuple[int, ...]]:
    cluster = question.cluster
    node = gcd(*(group.per_node for group in cluster.groups))  # a tp group stays inside a node of each kind
    whole = [group.devices for group in cluster.groups] if question.mixed else []
    for tp in divisors(cluster.devices):
        if node % tp or not limits.evenly(tp=tp):
            continue
        for pp in divisors(cluster.devices // tp):
            if pp > max(1, limits.blocks):
                continue
            for cp in divisors(cluster.devices // tp // pp):
                if not limits.evenly(cp=cp) or (cp > 1 and limits.tokens // cp < _FEWEST_TOKENS):
                    continue
                replicas = cluster.devices // tp // pp // cp
                if replicas > min((limits.batch, *question.work.smaller)):
                    continue
                for ep in divisors(replicas):
                    if not limits.evenly(ep=ep):
                        continue
                    for fsdp in divisors(replicas // ep):
                        if not any(devices % (tp * cp * ep * fsdp) for devices in whole):
                            yield replicas // ep // fsdp, fsdp, tp, pp, cp, ep


def divisors(number: int) -> list[int]:
    """Return the divisors of an integer, in order."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _crossed(
    columns: Columns,
    names: Sequence[str],
    values: Sequence[tuple[int, ...]],
    fits: Callable[[Columns], npt.NDArray[Any]],
) -> Columns:
    rows, count = len(columns["dp"]), len(values)
    grown = {name: np.repeat(column, count) for name, column in columns.items()}
    for at, name in enumerate(names):
        grown[name] = np.tile(np.array([value[at] for value in values], dtype=np.int64), rows)
    kept = fits(grown)
    return {name: column[kept] for name, column in grown.items()}


def _zero_fits(one: Columns) -> Mask:
    """Return True if ``zero`` fits:

    ``fsdp`` shards parameters, and pipeline stages never hold all gradients at once.
    """
    return ((one["fsdp"] > 1) == (one["zero"] > 0)) & ~((one["zero"] == 2) & (one["pp"] > 1))


def _micro_fits(one: Columns) -> Mask:
    """Return True if a micro-batch count is worth pricing; other orders than 1f1b need one for each rank to gain."""
    micros = pieces(one["share"], one["micro"])
    plain = one["schedule"] == SCHEDULES.index("1f1b")
    return (one["micro"] < 2 * one["share"]) & (plain | (micros >= one["pp"]))


Array = npt.NDArray[np.float64]
_KINDS = 3  # of recompute, three rows in a row
_NEAR = 2000  # plans among which the first are looked for
_ALIKE = 12  # of them, at most so many are run because they are nearly as fast as the first
_SLACK = 2e-3  # by which the formula of a pipeline may say too much
_ROUNDS = 24
_LONG = 8  # micro-batches for each stage, from which on the ends of a pipeline hardly count and running it takes long


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Search:
    """The results of pricing."""

    question: Question  # that was asked
    considered: int  # plans whose memory was priced
    fitting: int  # how many of them fit
    safe: int  # how many of these leave a margin; plans without are ranked only where there are no others
    least: float  # bytes that the least hungry of them reserves; 0 if there was none
    leanest: Plan | None  # it; ``None`` where there was none
    # those whose time was priced, too: of plans that differ in recompute only, the one that fits and computes least
    # again
    space: Space
    seconds: Array  # of a step, of those: shape (N,)
    reserved: Array  # bytes on the rank that needs most, of those
    order: npt.NDArray[np.intp]  # of those, the fastest first

    @property
    def best(self) -> Plan | None:
        """Return the fastest plan that fits."""
        return self.space.plan(int(self.order[0])) if len(self.order) else None

    @property
    def step(self) -> float:
        """Return seconds of its step; infinite if none fits."""
        return float(self.seconds[self.order[0]]) if len(self.order) else float("inf")

    def by_mesh(self, most: int) -> list[Plan]:
        """Return the fastest plan of each mesh, the fastest first, at most this many."""
        if not len(self.order):
            return []
        first = _first_of_mesh(self.space, self.order)
        return [self.space.plan(int(self.order[at])) for at in first[:most]]


def search(question: Question, held: Mapping[str, Any] | None = None, *, most: int = 1) -> Search:
    """Price every plan of the question.

    ``held``: keys of a plan → values that all must have; ``most``: number of meshes whose best plans must be in the
    right order.
    """
    whole = space(question)
    if held:
        whole = whole.take(whole.where(held))
    work, precision = question.work, question.precision
    scene = ForecastInput(work=work, cluster=question.cluster, precision=precision, preset=question.preset)
    needed, room = memory_of(scene, device_shares(scene, whole.layouts()))
    reserved = needed.reserved
    fits: npt.NDArray[np.bool_] = reserved <= room
    safe: npt.NDArray[np.bool_] = reserved <= SAFE * room
    ranked = safe if safe.any() else fits
    if not (held and "recompute" in held):  # of three that differ in recompute, the first that fits
        each = ranked.reshape(-1, _KINDS)
        ranked = (each & (each.cumsum(axis=1) == 1)).reshape(-1)
    kept = np.flatnonzero(ranked)
    found = whole.take(kept)
    seconds, order = _priced(question, found, reserved[kept], most)
    at = int((reserved - room).argmin()) if len(reserved) else -1
    return Search(
        question=question,
        considered=len(whole),
        fitting=int(fits.sum()),
        safe=int(safe.sum()),
        least=float(reserved[at]) if at >= 0 else 0.0,
        leanest=whole.plan(at) if at >= 0 else None,
        space=found,
        seconds=seconds,
        reserved=reserved[kept],
        order=order,
    )


def _priced(question: Question, found: Space, reserved: Array, most: int) -> tuple[Array, npt.NDArray[np.intp]]:
    """Return the seconds of every plan, and the order, fastest first.

    A formula prices all pipelines, and rarely overestimates. The first ones are simulated event by event until the best
    of the first ``most`` meshes have been, and all that are nearly as fast as the first.
    """
    if not len(found):
        return np.zeros(0), np.zeros(0, dtype=np.intp)
    work, precision, preset = question.work, question.precision, question.preset
    seconds: Array = times(work, found.layouts(), question.cluster, precision, preset).total
    order = _order(found, seconds, reserved)
    near = order[:_NEAR]
    columns = found.columns
    micros = pieces(found.share, columns["micro"])
    run = (columns["pp"] == 1) | (micros >= _LONG * columns["pp"] * columns["stages"])
    for _ in range(_ROUNDS):
        alike = near[:_ALIKE][seconds[near[:_ALIKE]] < seconds[near[0]] * (1 + _SLACK)]
        first = np.union1d(near[_first_of_mesh(found, near)[:most]], alike)
        waiting = first[~run[first]]
        if not len(waiting):
            break
        layouts = found.take(waiting).layouts()
        seconds[waiting] = times(work, layouts, question.cluster, precision, preset, events=True).total
        run[waiting] = True
        near = near[_order(found.take(near), seconds[near], reserved[near])]
    return seconds, np.concatenate([near, order[_NEAR:]])


def _first_of_mesh(found: Space, order: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    mesh = np.zeros(len(order), dtype=np.int64)
    for name in MESH:
        mesh = mesh * (int(found.columns[name].max(initial=0)) + 1) + found.columns[name][order]
    return np.sort(np.unique(mesh, return_index=True)[1])


def _order(found: Space, seconds: Array, reserved: Array) -> npt.NDArray[np.intp]:
    columns = found.columns
    keys = (reserved, columns["zero"], columns["schedule"], columns["fsdp"], np.round(seconds, 9))
    return np.lexsort(keys) if len(seconds) else np.zeros(0, dtype=np.intp)
