"""A rank's memory at its peak, by part, and its host's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.config import Cluster, Plan
from phalanx.config.sync import BUCKET_BYTES
from phalanx.forecast.gradient_sync import fed_back, kept_apart
from phalanx.forecast.kernels import itemsize
from phalanx.forecast.layouts import Layouts, Work
from phalanx.forecast.operation_arrays import Array, picked, table
from phalanx.forecast.pipeline import held, parameters_held, stages
from phalanx.forecast.presets import Preset
from phalanx.forecast.saved_activations import Ranks, SavedActivations, ranks, saved_activations
from phalanx.placement.collective_bytes import elements, hidden_states
from phalanx.placement.ownership import keeps_whole_gradients
from phalanx.placement.step_traffic import unit_by_unit
from phalanx.trace import ModelPart, Profile

BLOCK = 2.0 * 2**20
"""Bytes in which the CUDA allocator takes memory at least."""
_COPIED = 2.0
"""Buckets that gloo, which reduces on CPUs, has copies of: one for each of its threads."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryForecast:
    """Bytes on the fullest rank, each part at its own peak: shape (N,) each."""

    parameters: Array  # values, in the precision computed in and in that stepped
    gathered: Array  # sharded parameters that are there whole
    gradients: Array  # while they are summed; with the losses kept by compression
    optimizer: Array  # its state
    activations: Array  # saved for backward, of all micro-batches under way
    working: Array  # temporaries beyond saved tensors
    communication: Array  # buffers of collectives, and gradients on their way
    # 0 or less: these do not all peak at the same time, for activations are gone when the last gradient comes
    apart: Array
    start: Array  # before the first step, when values are made: parameters, and tensors not cut yet
    reserve: Array  # bytes the allocator holds beyond allocated ones

    @property
    def stepping(self) -> Array:
        """Return bytes of tensors at the peak of a step."""
        held = self.parameters + self.gathered + self.gradients + self.optimizer + self.activations + self.working
        return held + self.communication + self.apart

    @property
    def allocated(self) -> Array:
        """Return bytes of tensors at the peak, from a rank's first line on."""
        return np.maximum(self.stepping, self.start)

    @property
    def reserved(self) -> Array:
        """Return bytes the allocator holds."""
        return self.allocated + self.reserve

    def at_peak(self) -> dict[str, Array]:
        """Return the parts except ``apart`` at the common peak: they add up to ``reserved``."""
        moving = self.activations + self.working + self.communication + self.gathered
        computing = moving >= self.gradients
        left = 1 + np.where(computing, 0.0, self.apart / np.maximum(moving, 1.0))
        there = np.where(self.start > self.stepping, 0.0, 1.0)
        begun = np.minimum(self.parameters, self.start)
        return {
            "parameters": np.where(there > 0, self.parameters, begun),
            "gathered": self.gathered * left * there,
            "gradients": (self.gradients + np.where(computing, self.apart, 0.0)) * there,
            "optimizer": self.optimizer * there,
            "activations": self.activations * left * there,
            "working": self.working * left * there,
            "communication": self.communication * left * there,
            "start": np.where(there > 0, 0.0, self.start - begun),
            "reserve": self.reserve,
        }


def memory(profile: Profile, layouts: Layouts, preset: Preset, precision: str, state: float) -> MemoryForecast:
    """Return the memory of every candidate; ``state`` is bytes of optimizer state a parameter."""
    lie = ranks(profile, layouts, preset)
    fixed = _fixed(profile, layouts, preset, lie, state, precision)
    active = saved_activations(profile, layouts, preset, lie, precision)
    gathered, reducing = _gathered(profile, layouts, preset, lie, precision)
    reducing = reducing + _in_buckets(profile, layouts, preset, lie)
    passing = _messages(profile, layouts, lie, precision) + _in_flight(profile, layouts, preset, lie)
    gathered = gathered + _staying(profile, layouts, preset, lie, precision)
    moving = _Moving(gathered=gathered, reducing=reducing, passing=passing)
    there = np.where(lie.there > 0, 0.0, -np.inf)
    every = [_together(active, fixed, moving, layouts, preset, at) for at in range(3)]
    needed = np.stack([one.reserved for one in every]) + there
    return picked(every, needed.argmax(axis=0))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fixed:
    """Bytes that stay from step to step: shape (3, N) each, by rank."""

    parameters: Array
    gradients: Array
    optimizer: Array
    update: Array
    start: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Moving:
    """Bytes of collectives: shape (3, N) each, by rank; ``passing`` is freed with the activations."""

    gathered: Array
    reducing: Array
    passing: Array


def _together(
    active: SavedActivations, fixed: _Fixed, moving: _Moving, layouts: Layouts, preset: Preset, at: int
) -> MemoryForecast:
    """Return one rank's peak: the last forward, the first backward or the optimizer's step, whichever is largest."""
    gradients, activations, working = fixed.gradients[at], active.saved[at], active.working[at]
    there = np.where(_gradients_stay(layouts, preset), gradients, 0.0)
    collectives = moving.gathered[at] + moving.reducing[at]
    computing = activations + working + collectives + moving.passing[at] + there
    stepping = gradients + np.maximum(fixed.update[at], collectives if preset.reducing_last else 0.0)
    together = np.maximum(computing, stepping)
    apart = together - gradients - activations - working - collectives - moving.passing[at]
    allocated = fixed.parameters[at] + fixed.optimizer[at] + together
    most = np.maximum(allocated, fixed.start[at])
    return MemoryForecast(
        parameters=fixed.parameters[at],
        gathered=moving.gathered[at],
        gradients=gradients,
        optimizer=fixed.optimizer[at],
        activations=activations,
        working=working,
        communication=moving.reducing[at] + moving.passing[at],
        apart=np.minimum(apart, 0.0),
        start=fixed.start[at],
        reserve=np.ceil(most * (preset.reserved - 1) / BLOCK) * BLOCK + preset.beside,
    )


def _gradients_stay(layouts: Layouts, preset: Preset) -> Array:
    if preset.gradients_stay:
        return np.ones_like(layouts.pp, dtype=bool)
    buckets = (layouts.alike > 1) & (layouts.zero == 0) & (layouts.pp == 1)
    return (layouts.micros > 1) | buckets


def _fixed(profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks, state: float, precision: str) -> _Fixed:
    learn, still = _counts(profile, layouts, lie)
    shards = _shards(layouts, preset)
    by = {stage: np.where(layouts.zero >= stage, shards, 1.0) for stage in (1, 2, 3)}
    whole = keeps_whole_gradients(layouts.zero, layouts.micros, layouts.pp) | preset.gradients_stay
    split = np.where(whole, by[2], by[1])
    half = 0.0 if precision == "fp32" else preset.master
    outer = learn * kept_apart(layouts) / by[1]
    values, sums = (learn + still) * preset.weights / by[3], learn * preset.gradients / split
    stepped = learn * half / by[1]
    copies, kept_state = learn * preset.weights / by[1], learn * state / by[1]
    served, nothing = layouts.server > 0, np.zeros_like(learn)
    some, everything = layouts.offload == 1, layouts.offload == 2
    here = preset.one_memory
    away = (layouts.offload > 0) & (not here)
    values_here = np.where(everything & away, 0.0, values)
    stepped = np.where(served | (layouts.offload > 0), np.where(some & here, copies, nothing), stepped)
    return _Fixed(
        parameters=values_here + stepped,
        gradients=np.where(everything & away, 0.0, sums) + learn * fed_back(layouts),
        optimizer=np.where(away | served, 0.0, kept_state) + (outer if here else nothing),
        update=np.where(served, 0.0, learn * preset.stepping / by[1]),
        start=values_here + _uncut(profile, layouts, preset, lie),
    )


def _uncut(profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks) -> Array:
    """Return bytes beyond a rank's parameters while they are built on the host: a block before sharding, a tensor
    before cutting.
    """
    block, outer, _ = _units(profile, layouts, lie)
    shared = (layouts.zero == 3) & (_shards(layouts, preset) > 1)
    cut = (layouts.tp * layouts.ep > 1) & preset.one_memory
    one = np.where(cut, max((_largest(part) for part in profile.parts), default=0.0), 0.0)
    return (np.where(shared, np.maximum(block, outer), 0.0) + one) * preset.weights


def _largest(part: ModelPart) -> float:
    return max((float(one.largest or one.elements + one.frozen) for one in part.weights), default=0.0)


def _in_flight(profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks) -> Array:
    learn, still = _counts(profile, layouts, lie)
    there = (layouts.server > 0) & (layouts.staleness > 0)
    return np.where(there, learn * preset.sent + (learn + still) * preset.weights, 0.0)


def _shards(layouts: Layouts, preset: Preset) -> Array:
    return layouts.fsdp * (layouts.cp if preset.shards_over_cp else 1.0)


def _counts(profile: Profile, layouts: Layouts, lie: Ranks) -> tuple[Array, Array]:
    found, none = held(profile, lie.holds, layouts.mesh), np.zeros_like(lie.there)
    return sum((one.learn for one in found), none), sum((one.frozen for one in found), none)


def _units(profile: Profile, layouts: Layouts, lie: Ranks) -> tuple[Array, Array, Array]:
    """Return elements of the largest block, of all parameters outside blocks, and of the largest such part, on one
    rank.
    """
    block, outer, largest = (np.zeros_like(lie.there) for _ in range(3))
    mesh = layouts.mesh
    for index, part in enumerate(profile.parts):
        each = elements(((one, 1) for one in part.weights), mesh)
        one = np.where(lie.holds[:, index] > 0, sum(one.learn + one.frozen for one in each), 0.0)
        if part.role == "block":
            block = np.maximum(block, one)
        else:
            outer = outer + one
            largest = np.maximum(largest, one)
    several = unit_by_unit(profile, list(np.moveaxis(lie.holds, 1, 0)))
    whole = sum(_counts(profile, layouts, lie))  # where all that a rank holds is one block
    return np.where(several, block, whole), np.where(several, outer, 0.0), np.where(several, largest, 0.0)


def _gathered(profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks, precision: str) -> tuple[Array, Array]:
    """Return bytes of gathered parameters under ``zero=3``, with buffers and gradients not yet scattered."""
    size = preset.gathered if precision == "fp32" else min(preset.gathered, itemsize(precision))
    block, outer, largest = _units(profile, layouts, lie)
    around = outer if preset.root_gathered else largest
    gradients = np.maximum(block, largest) * size
    whole = (preset.blocks_gathered * block + around) * size
    buffers = preset.buffered * block * size + preset.unscattered * gradients
    there = (layouts.zero == 3) & (_shards(layouts, preset) > 1) & ~(preset.stages_whole & (layouts.pp > 1))
    return np.where(there, whole, 0.0), np.where(there, buffers, 0.0)


def _in_buckets(profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks) -> Array:
    learn, _ = _counts(profile, layouts, lie)
    shards = _shards(layouts, preset)
    whole = learn * preset.sent
    largest = max((_largest(part) for part in profile.parts), default=0.0) / layouts.tp * preset.sent
    full = np.floor(BUCKET_BYTES / np.maximum(largest, 1.0)) * largest
    one = np.minimum(np.maximum(full, largest), whole)
    # Where whole gradients are there before, a bucket takes the place of those that are in it.
    before = keeps_whole_gradients(layouts.zero, layouts.micros, layouts.pp)
    own = np.where(before, 1.0, preset.buckets)
    copied = _COPIED if preset.one_memory else 0.0
    buckets = np.ceil(whole / np.maximum(one, BUCKET_BYTES))
    count = np.minimum(own, buckets + 1) + np.minimum(copied, buckets)
    there = ((layouts.zero == 1) | (layouts.zero == 2)) & (shards > 1) & (preset.buckets > 0)
    return np.where(there, one * (count + 1.0 / shards), 0.0)


def _staying(profile: Profile, layouts: Layouts, preset: Preset, lie: Ranks, precision: str) -> Array:
    if not preset.stages_whole:
        return np.zeros_like(lie.there)
    learn, still = _counts(profile, layouts, lie)
    size = preset.gathered if precision == "fp32" else min(preset.gathered, itemsize(precision))
    whole = (layouts.zero == 3) & (layouts.pp > 1) & (_shards(layouts, preset) > 1)
    return np.where(whole, (learn + still) * size + learn * preset.sent, 0.0)


def _messages(profile: Profile, layouts: Layouts, lie: Ranks, precision: str) -> Array:
    size = hidden_states(profile.parts).at(layouts.micro, layouts.length / layouts.cp) * itemsize(precision)
    along = (layouts.sequence > 0) & (layouts.tp > 1)
    between = np.where(layouts.pp > 1, 2 * size / np.where(along, layouts.tp, 1.0), 0.0)
    return np.where(along, size, 0.0) + between + np.zeros_like(lie.there)


@dataclass(frozen=True, slots=True, eq=False)
class OnHosts:
    """Bytes in the memory of the host that is fullest relative to its size: shape (N,) each."""

    needed: Array  # of all ranks on it
    room: Array  # that it has; infinite if unknown


def on_hosts(work: Work, plans: Sequence[Plan], cluster: Cluster, preset: Preset) -> OnHosts:
    """Return the bytes in host memory under ``offload``: values, gradients and state of a rank's stepped parameters.

    CPUs hold them as devices in the same memory, so they are not counted here.
    """
    layouts = Layouts.of(plans, work.batch, work.tokens)
    costs = table(work.profile, preset.balances)
    stepped = parameters_held(costs, layouts, stages(costs, layouts)) / np.where(layouts.zero > 0, layouts.fsdp, 1.0)
    each = np.where(layouts.offload > 0, stepped * (4.0 + preset.sent + work.state), 0.0)
    needed = np.stack([each * np.minimum(layouts.devices, group.per_node) for group in cluster.groups])
    room = np.stack([np.full_like(each, group.host.memory or np.inf) for group in cluster.groups])
    every = [OnHosts(*pair) for pair in zip(needed, room, strict=True)]
    return picked(every, (room / np.maximum(needed, 1.0)).argmin(axis=0))
