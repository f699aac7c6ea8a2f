"""What a rank's memory holds when it holds most, by part."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from phalanx.forecast.apart import kept_apart
from phalanx.forecast.compressed import fed_back
from phalanx.forecast.flight import Ranks, ranks
from phalanx.forecast.habits import Habits
from phalanx.forecast.kept import Kept, kept
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.price import itemsize
from phalanx.forecast.tables import Array
from phalanx.profile import Part, Profile

BLOCK = 2.0 * 2**20
"""Bytes in which the CUDA allocator takes memory at least."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Memory:
    """Bytes on the rank that needs most, each part at its own peak: shape (N,) each.

    Attributes:
        parameters: values, in the precision computed in and in that stepped.
        gradients: while they are summed; and what compression left out of those before.
        optimizer: its state.
        activations: saved for backward, of all micro-batches under way.
        working: temporaries beyond what is saved.
        communication: buffers of collectives, and parameters gathered.
        apart: 0 or less: these do not all peak at the same time, for activations are gone when the last gradient comes.
        reserve: what the allocator holds beyond what is allocated.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    working: Array
    communication: Array
    apart: Array
    reserve: Array

    @property
    def allocated(self) -> Array:
        """Bytes of tensors when there are most."""
        held = self.parameters + self.gradients + self.optimizer + self.activations + self.working
        return held + self.communication + self.apart

    @property
    def reserved(self) -> Array:
        """Bytes the allocator holds."""
        return self.allocated + self.reserve

    def at_peak(self) -> dict[str, Array]:
        """The parts but ``apart``, each as it is when all together are most: they add up to ``reserved``."""
        moving = self.activations + self.working + self.communication
        computing = moving >= self.gradients
        left = 1 + np.where(computing, 0.0, self.apart / np.maximum(moving, 1.0))
        return {
            "parameters": self.parameters,
            "gradients": self.gradients + np.where(computing, self.apart, 0.0),
            "optimizer": self.optimizer,
            "activations": self.activations * left,
            "working": self.working * left,
            "communication": self.communication * left,
            "reserve": self.reserve,
        }


def memory(profile: Profile, layouts: Layouts, habits: Habits, precision: str, state: float) -> Memory:
    """The memory of every candidate; ``state`` is bytes of optimizer state a parameter."""
    lie = ranks(profile.parts, layouts, habits.ahead)
    fixed = _fixed(profile, layouts, habits, lie, state, precision)
    active = kept(profile, layouts, habits, lie, precision)
    communication = _gathered(profile, layouts, habits, lie, precision) + _messages(profile, layouts, lie, precision)
    communication += _staying(profile, layouts, habits, lie, precision) + _in_flight(profile, layouts, habits, lie)
    there = np.where(lie.there > 0, 0.0, -np.inf)
    every = [_together(active, fixed, communication, layouts, habits, at) for at in range(3)]
    needed = np.stack([one.reserved for one in every]) + there
    worst = needed.argmax(axis=0)[None]
    return Memory(
        **{
            one.name: np.take_along_axis(np.stack([getattr(rank, one.name) for rank in every]), worst, axis=0)[0]
            for one in fields(Memory)
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fixed:
    """What stays from step to step: shape (3, N) each, by rank."""

    parameters: Array
    gradients: Array
    optimizer: Array
    update: Array


def _together(active: Kept, fixed: _Fixed, communication: Array, layouts: Layouts, habits: Habits, at: int) -> Memory:
    """One rank: in the last forward or the first backward, or in the optimizer's step, whichever needs more."""
    gradients, activations, working = fixed.gradients[at], active.saved[at], active.working[at]
    there = np.where(_gradients_stay(layouts, habits), gradients, 0.0)
    computing = activations + working + communication[at] + there
    stepping = gradients + fixed.update[at]
    together = np.maximum(computing, stepping)
    allocated = fixed.parameters[at] + fixed.optimizer[at] + together
    return Memory(
        parameters=fixed.parameters[at],
        gradients=gradients,
        optimizer=fixed.optimizer[at],
        activations=activations,
        working=working,
        communication=communication[at],
        apart=np.minimum(together - gradients - activations - working - communication[at], 0.0),
        reserve=np.ceil(allocated * (habits.reserved - 1) / BLOCK) * BLOCK + habits.beside,
    )


def _gradients_stay(layouts: Layouts, habits: Habits) -> Array:
    """Whether gradients are there in a forward: kept from step to step, or of the micro-batch before."""
    if habits.gradients_stay:
        return np.ones_like(layouts.pp, dtype=bool)
    buckets = (layouts.summed > 1) & (layouts.zero == 0) & (layouts.pp == 1)
    return (layouts.micros > 1) | buckets


def _fixed(profile: Profile, layouts: Layouts, habits: Habits, lie: Ranks, state: float, precision: str) -> _Fixed:
    learn, still = _counts(profile, layouts, lie)
    shards = _shards(layouts, habits)
    by = {stage: np.where(layouts.zero >= stage, shards, 1.0) for stage in (1, 2, 3)}
    whole = (learn + still) * habits.weights / by[3]
    whole = np.where(layouts.offload == 2, 0.0, whole)
    once = (layouts.zero == 1) & (layouts.micros == 1) & (layouts.pp == 1) & (not habits.gradients_stay)
    split = np.where(once, shards, by[2])
    half = 0.0 if precision == "fp32" else habits.master
    away = (layouts.offload >= 1) | (layouts.server > 0)
    outer = kept_apart(layouts) if habits.outer_here else 0.0
    return _Fixed(
        parameters=whole + np.where(away, 0.0, learn * half / by[1]),
        gradients=np.where(layouts.offload == 2, 0.0, learn * habits.gradients / split) + learn * fed_back(layouts),
        optimizer=np.where(away, 0.0, learn * state / by[1]) + learn * outer / by[1],
        update=np.where(layouts.server > 0, 0.0, learn * habits.stepping / by[1]),
    )


def _in_flight(profile: Profile, layouts: Layouts, habits: Habits, lie: Ranks) -> Array:
    """Gradients on their way to servers, and parameters from them, while the next ones are computed."""
    learn, still = _counts(profile, layouts, lie)
    there = (layouts.server > 0) & (layouts.staleness > 0)
    return np.where(there, learn * habits.sent + (learn + still) * habits.weights, 0.0)


def _shards(layouts: Layouts, habits: Habits) -> Array:
    return layouts.fsdp * (layouts.cp if habits.shards_over_cp else 1.0)


def _counts(profile: Profile, layouts: Layouts, lie: Ranks) -> tuple[Array, Array]:
    """Elements that learn and that do not on each rank, before sharding: shape (3, N) each."""
    learn, still = np.zeros_like(lie.there), np.zeros_like(lie.there)
    for index, part in enumerate(profile.parts):
        for weights in part.weights:
            cut = _cut(layouts, weights.share, weights.expert)
            learn += lie.holds[:, index] * weights.elements / cut
            still += lie.holds[:, index] * weights.frozen / cut
    if profile.tied:
        apart = (layouts.pp > 1) & (lie.holds[0, -1] == 0)
        learn[2] += np.where(apart, profile.tied / layouts.tp, 0.0)
    return learn, still


def _cut(layouts: Layouts, share: str, expert: bool) -> Array:
    return (layouts.tp if share == "inner" else 1.0) * (layouts.ep if expert else np.ones_like(layouts.tp))


def _gathered(profile: Profile, layouts: Layouts, habits: Habits, lie: Ranks, precision: str) -> Array:
    """Under ``zero=3``: blocks' parameters that are there whole, and gradients that are not scattered yet."""
    size = habits.gathered if precision == "fp32" else min(habits.gathered, itemsize(precision))
    block, outer = np.zeros_like(lie.there), np.zeros_like(lie.there)
    largest = np.zeros_like(lie.there)
    for index, part in enumerate(profile.parts):
        one = _elements(part, layouts)
        if part.role == "block":
            block = np.maximum(block, np.where(lie.holds[:, index] > 0, one, 0.0))
        else:
            outer += np.where(lie.holds[:, index] > 0, one, 0.0)
            largest = np.maximum(largest, np.where(lie.holds[:, index] > 0, one, 0.0))
    around = outer if habits.root_gathered else largest
    gradients = np.maximum(block, largest) * size
    found = (habits.blocks_gathered * block + around) * size + habits.unscattered * gradients
    there = (layouts.zero == 3) & (_shards(layouts, habits) > 1)
    return np.where(there & ~(habits.stages_whole & (layouts.pp > 1)), found, 0.0)


def _staying(profile: Profile, layouts: Layouts, habits: Habits, lie: Ranks, precision: str) -> Array:
    """What is there whole from a step's first micro-batch to its last, where stages are not sharded in between."""
    if not habits.stages_whole:
        return np.zeros_like(lie.there)
    learn, still = _counts(profile, layouts, lie)
    size = habits.gathered if precision == "fp32" else min(habits.gathered, itemsize(precision))
    whole = (layouts.zero == 3) & (layouts.pp > 1) & (_shards(layouts, habits) > 1)
    return np.where(whole, (learn + still) * size + learn * habits.sent, 0.0)


def _elements(part: Part, layouts: Layouts) -> Array:
    none = np.zeros_like(layouts.tp)
    each = [(one.elements + one.frozen) / _cut(layouts, one.share, one.expert) for one in part.weights]
    return sum(each, none)


def _messages(profile: Profile, layouts: Layouts, lie: Ranks, precision: str) -> Array:
    """Activations on their way: the whole stream gathered from ``tp``, and what goes between stages."""
    entry = next((part.entry for part in profile.parts if part.role == "block"), profile.parts[0].entry)
    size = entry.at(layouts.micro, layouts.length / layouts.cp) * itemsize(precision)
    along = (layouts.sequence > 0) & (layouts.tp > 1)
    between = np.where(layouts.pp > 1, 2 * size / np.where(along, layouts.tp, 1.0), 0.0)
    return np.where(along, size, 0.0) + between + np.zeros_like(lie.there)
