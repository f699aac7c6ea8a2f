"""Forecasts of a source that no constant has seen: every constant is fitted anew on all other sources.

Of a framework only what is known of it is used: which kernels it joins, what it overlaps, what it sends in which
precision. What was fitted to runs (of a family of devices, of collectives, of how far such kernels and overlaps go) is
fitted without the source that is judged, from physical defaults. So is a whole family of devices left out, whose
constants are then those of the family most like it.

The fit is Gauss-Newton on the logarithm of forecast over measured, each source with the square root of its rows as
weight, large errors cut down (Huber, "Robust estimation of a location parameter", 1964). The fit without a source goes
on from the fit of all with the slopes found there, which saves most of the time and changes nothing where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.config import Cluster
from phalanx.forecast import PHALANX, Forecast, Preset, Work, forecasts
from phalanx.forecast.forecast import times
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.rates import family
from phalanx.trace import Profile
from published.accuracy import Comparison, forecast_rows, traced
from published.rows import Row
from published.spread import SHARE
from published.subject import Subject, subject

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_MOST = 24  # rows of a source that constants are fitted on: its others differ from them by one setting
_CUT = 0.25  # errors of a logarithm beyond which they count by their size, not its square
_ROUNDS = 3
_AGAIN = 3
_FARTHEST = 4.0  # from where a constant starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A constant that is fitted.

    Attributes:
        name: a field of ``Kernels``, ``Wires`` or ``Preset``, or one of ``_GENERIC``.
        start: what is known of it without any run.
        spread: by how much it may plausibly be another: the fit is held to ``start`` as if that had been measured so.
        family: of devices that it is of; empty for all.
        grows: whether it is positive, and ``spread`` is of its logarithm.
        most: the largest that it can be.
    """

    name: str
    start: float
    spread: float
    family: str = ""
    grows: bool = True
    most: float = np.inf

    def value(self, at: float) -> float:
        """The constant, ``at`` spreads from its start."""
        if self.grows:
            return min(self.most, self.start * float(np.exp(at * self.spread)))
        return min(self.most, max(0.0 if self.name != "eager" else -4.0, self.start + at * self.spread))


_KERNELS = (
    Constant(name="product", start=0.8, spread=0.2, most=1.0),
    Constant(name="waves", start=0.5, spread=0.3, grows=False, most=1.0),
    Constant(name="depth", start=128.0, spread=1.0),
    Constant(name="attention", start=0.6, spread=0.3, most=1.0),
    Constant(name="attention_backward", start=0.5, spread=0.3, most=1.0),
    Constant(name="stream", start=0.8, spread=0.2, most=1.0),
    Constant(name="floor", start=3e-6, spread=0.7),
    Constant(name="host", start=6e-6, spread=0.7),
)
CONSTANTS = (
    *(replace(one, family=name) for name in ("ampere", "hopper") for one in _KERNELS),
    Constant(name="inside", start=0.75, spread=0.2, most=1.0),
    Constant(name="between", start=0.8, spread=0.2, most=1.0),
    Constant(name="start", start=20e-6, spread=0.7),
    Constant(name="start_between", start=30e-6, spread=0.7),
    Constant(name="hop", start=1e-6, spread=1.0),
    Constant(name="hop_between", start=5e-6, spread=0.7),
    Constant(name="jitter", start=0.0, spread=0.02, grows=False),
    Constant(name="crowd", start=0.01, spread=0.05, grows=False),
    Constant(name="eager", start=0.0, spread=1.0, grows=False, most=1.0),
    Constant(name="fused", start=0.8, spread=0.3, grows=False, most=1.0),
    Constant(name="scores", start=5.0, spread=0.4),
    Constant(name="contention", start=0.1, spread=0.1, grows=False, most=1.0),
    Constant(name="overlap", start=0.5, spread=0.3, grows=False, most=1.0),
    Constant(name="overlap_tensor", start=0.3, spread=0.3, grows=False, most=1.0),
    Constant(name="rest", start=2e-3, spread=1.0),
)
_LIKE = {"ampere": "hopper", "hopper": "ampere"}  # whose constants a family has that was never measured
_GENERIC = ("eager", "fused", "scores", "contention", "overlap", "overlap_tensor", "rest")

_JOINS = ("megatron", "zero-bubble", "nvidia", "deepspeed", "torchtitan-compiled", "torchtitan-async", "nemo")
"""Frameworks that join elementwise kernels, by the beginnings of their names; those of ``aa-`` join norms at most."""

_SCORES_APART = 8.0  # passes over scores that are scaled, masked, made a softmax of and dropped one by one
_FIRST_FLASH = 0.6  # of the second's speed: Dao, "FlashAttention-2", 2023, figure 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Without:
    """What was forecast of rows whose source, or family of devices, no constant had seen.

    Attributes:
        source: that was left out.
        found: its rows with their forecasts.
    """

    source: str
    found: tuple[Comparison, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Everything that was forecast unseen.

    Attributes:
        sources: frameworks, each left out in turn.
        devices: families of devices, likewise.
        constants: fitted on all rows.
    """

    sources: tuple[Without, ...]
    devices: tuple[Without, ...]
    constants: dict[str, float]


def left_out(rows: Iterable[Row]) -> LeftOut:
    """Forecasts of ``rows`` whose framework, or family of devices, no constant has seen. Takes minutes."""
    fit = Fit(rows, lambda one: traced(one.shape))
    return LeftOut(sources=fit.without(framework), devices=fit.without(generation), constants=fit.values())


def own_preset(rows: Iterable[Row]) -> tuple[Comparison, ...]:
    """Forecasts of ``rows`` with Phalanx's own preset, as users get them."""
    timed = [row for row in rows if row.step and not row.ran_out]
    return forecast_rows(timed, preset=PHALANX).found


def spread(groups: Sequence[Without], share: float = SHARE) -> float:
    """The size of errors that ``share`` of those of another group stay within: each group counts the same.

    Rows of one source are alike, sources are what is drawn anew: Dunn, Wasserman and Ramdas, "Distribution-free
    prediction sets for two-layer hierarchical models", 2022, section 3 (pooling).
    """
    sizes = [(abs(one.log_error), 1 / len(group.found)) for group in groups for one in group.found]
    sizes.sort()
    reached = np.cumsum([weight for _, weight in sizes])
    return sizes[min(len(sizes) - 1, int(np.searchsorted(reached, share * reached[-1])))][0]


def coverage(groups: Sequence[Without]) -> dict[str, float]:
    """By group, the share of its errors that stay within the spread of all others."""
    others = {one.source: spread([other for other in groups if other is not one]) for one in groups}
    return {
        one.source: sum(abs(each.log_error) <= others[one.source] for each in one.found) / len(one.found)
        for one in groups
    }


def framework(row: Row) -> str:
    """What is left out together: all that was published of a framework."""
    return row.text("framework").removesuffix("-memory")


def generation(row: Row) -> str:
    """The family of a row's devices."""
    return family(subject(row).cluster.groups[0].device)


class Fit:
    """Constants fitted on published runs, whole and without each group of them."""

    def __init__(self, rows: Iterable[Row], profile: Callable[[Subject], Profile]) -> None:
        self._profile = profile
        self._all = [(row, subject(row, network=False)) for row in rows if row.step and not row.ran_out]
        counts: dict[str, int] = {}
        self._few: list[tuple[Row, Subject]] = []
        for row, one in sorted(self._all, key=lambda pair: pair[0].mark):
            counts[framework(row)] = counts.get(framework(row), 0) + 1
            if counts[framework(row)] <= _MOST:
                self._few.append((row, one))
        self._weights = np.array([min(counts[framework(row)], _MOST) ** -0.25 for row, _ in self._few])
        self.at = np.zeros(len(CONSTANTS))
        self._errors, self._slopes = self._fitted()

    def values(self) -> dict[str, float]:
        """Every constant, fitted on all rows, those of a family by ``family.name``."""
        return _values(self.at)

    def without(self, key: Callable[[Row], str]) -> tuple[Without, ...]:
        """Forecasts of the rows of each group by ``key``, from constants of the others."""
        names = dict.fromkeys(key(row) for row, _ in self._all)
        made: list[Without] = []
        for name in names:
            kept = np.array([key(row) != name for row, _ in self._few])
            values = _values(self._refitted(kept))
            for one in _KERNELS if name in _LIKE else ():
                values[f"{name}.{one.name}"] = values[f"{_LIKE[name]}.{one.name}"]
            left = [(row, one) for row, one in self._all if key(row) == name]
            found = [replace_constants(one, values) for _, one in left]
            made.append(Without(source=name, found=tuple(self._compared([row for row, _ in left], found))))
        return tuple(made)

    def _compared(self, rows: Sequence[Row], subjects: Sequence[Subject]) -> list[Comparison]:
        made: dict[int, Forecast] = {}
        for indices in _alike(subjects).values():
            first = subjects[indices[0]]
            work = Work(profile=self._profile(first), batch=first.batch, length=first.length)
            plans = [subjects[index].plan for index in indices]
            made |= dict(zip(indices, forecasts(work, plans, first.cluster, first.preset), strict=True))
        return [
            Comparison(row=row, subject=one, forecast=made[index])
            for index, (row, one) in enumerate(zip(rows, subjects, strict=True))
        ]

    def _fitted(self) -> tuple[Array, Array]:
        """Errors and their slopes at the best constants for all rows, which ``at`` then holds."""
        everything = np.ones(len(self._few), dtype=bool)
        errors = self._off(self.at)
        slopes = self._sloped(errors)
        for _ in range(_ROUNDS):
            self.at, errors = self._towards(self.at, errors, slopes, everything)
            slopes = self._sloped(errors)
        return errors, slopes

    def _sloped(self, errors: Array) -> Array:
        slopes = np.zeros((len(errors), len(CONSTANTS)))
        for index in (at for at, one in enumerate(CONSTANTS) if one.spread):
            moved = self.at.copy()
            moved[index] += 0.1
            slopes[:, index] = (self._off(moved, only=CONSTANTS[index].family, like=errors) - errors) / 0.1
        return slopes

    def _refitted(self, kept: Mask) -> Array:
        """The best constants for the rows ``kept``: steps from those of all, with the slopes there.

        Where they end does not depend on the slopes, nor on where they began.
        """
        at, errors = self.at, self._errors
        for _ in range(_AGAIN):
            at, errors = self._towards(at, errors, self._slopes, kept)
        return at

    def _towards(self, at: Array, errors: Array, slopes: Array, kept: Mask) -> tuple[Array, Array]:
        """A step of Gauss-Newton, as far as it makes things better for the rows ``kept``, and the errors there."""
        weights = self._weights * kept * np.sqrt(_CUT / np.maximum(np.abs(errors), _CUT)) / _CUT
        rows, wanted = weights[:, None] * slopes, -weights * errors
        by = np.linalg.solve(rows.T @ rows + np.eye(len(at)), rows.T @ wanted - at)
        before = self._loss(at, errors, kept)
        for share in (1.0, 0.5, 0.25):
            there = np.clip(at + share * by, -_FARTHEST, _FARTHEST)
            found = self._off(there)
            if self._loss(there, found, kept) < before:
                return there, found
        return at, errors

    def _loss(self, at: Array, errors: Array, kept: Mask) -> float:
        sizes = np.abs(errors) / _CUT
        cut = np.where(sizes < 1, sizes**2, 2 * sizes - 1)
        return float((self._weights**2 * cut)[kept].sum() + (at**2).sum())

    def _off(self, at: Array, only: str = "", like: Array | None = None) -> Array:
        """Logarithms of forecast over measured; of rows of other families than ``only`` as in ``like``."""
        values = _values(at)
        subjects = [replace_constants(one, values) for _, one in self._few]
        found = np.zeros(len(subjects)) if like is None else like.copy()
        for indices in _alike(subjects).values():
            first = subjects[indices[0]]
            if only and _kernels_of(first.cluster) != only:
                continue
            work = Work(profile=self._profile(first), batch=first.batch, length=first.length)
            layouts = Layouts.of([subjects[index].plan for index in indices], work.batch, work.tokens)
            total = times(work, layouts, first.cluster, first.plan.precision, first.preset).total
            for place, index in enumerate(indices):
                found[index] = np.log(total[place] / self._few[index][0].step)
        return found


def _alike(subjects: Sequence[Subject]) -> Mapping[object, list[int]]:
    groups: dict[object, list[int]] = {}
    for index, one in enumerate(subjects):
        network = (one.cluster.network.bandwidth, one.cluster.network.latency)
        key = (one.shape, str(one.cluster.groups), network, one.preset.name, one.batch, one.plan.precision)
        groups.setdefault(key, []).append(index)
    return groups


def _values(at: Array) -> dict[str, float]:
    return {
        f"{one.family}.{one.name}" if one.family else one.name: one.value(float(where))
        for one, where in zip(CONSTANTS, at, strict=True)
    }


def _kernels_of(cluster: Cluster) -> str:
    """The family whose constants devices of ``cluster`` have."""
    return "hopper" if family(cluster.groups[0].device) in ("hopper", "blackwell") else "ampere"


def replace_constants(one: Subject, values: Mapping[str, float]) -> Subject:
    """``one`` with ``values`` for everything that was fitted, and of its framework only what is known of it."""
    mine = f"{_kernels_of(one.cluster)}."
    found = {name.removeprefix(mine): value for name, value in values.items() if name.startswith(mine)}
    found |= {name: value for name, value in values.items() if "." not in name and name not in _GENERIC}
    groups = tuple(replace(group, device=replace(group.device, measured=found)) for group in one.cluster.groups)
    return replace(one, cluster=replace(one.cluster, groups=groups), preset=known(one.preset, values))


def known(preset: Preset, values: Mapping[str, float]) -> Preset:
    """What is known of a framework, with ``values`` for how far it goes."""
    joins = preset.name.startswith(_JOINS)
    apart = preset.name == "aa-megatron-eager"
    return replace(
        preset,
        joined=values["fused"] if joins else values["eager"],
        scores=_SCORES_APART if apart else values["scores"],
        launches=min(preset.launches, 1.0),
        overlap=values["overlap"] if preset.overlap else 0.0,
        overlap_tensor=values["overlap_tensor"] if preset.overlap_tensor else 0.0,
        speed=_FIRST_FLASH if preset.name == "aa-megatron-flash1" else 1.0,
        relay=0.0,
        network=0.0,
        contention=values["contention"],
        reach=1.0,
        rest=values["rest"],
    )
