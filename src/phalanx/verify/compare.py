"""Comparison of two captures: the differences of losses, gradients and parameters, and those due to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from phalanx.verify.record import START, RunRecord, Tensors
from phalanx.witness.rounding import CAP, FLOOR, LAST_PLACE, LOSS_TERMS, SUM_FLOOR, SUMS, TIMES, spread

Noise = Mapping[str, float]
"""Key of a result, such as ``reduced|0|head.weight`` → how far it moves where weights change in their last place."""
KINDS = ("buffers", "state", "reduced", "used")
FirstGradients = Mapping[str, tuple[Tensor, float]]
"""Parameter → its first gradient that is more than rounding, and the norm of the noise of that."""


def noise_of(one: RunRecord, others: Sequence[RunRecord], precision: str) -> dict[str, float]:
    """Return the largest movement of each result of ``one`` in ``others``, as absolute numbers."""
    noise = _largest(moved for other in others for moved in _moved(one, other))
    first = first_gradients(one, Bounds(precision=precision, noise=noise))
    return noise | _largest(way for other in others for way in _ways(one, other, first))


def _largest(moved: Iterable[tuple[str, float, int]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, off, count in moved:
        off *= spread(count)
        found[key] = max(off if math.isfinite(off) else 0.0, found.get(key, 0.0))
    return found


def _ways(one: RunRecord, other: RunRecord, first: FirstGradients) -> Iterator[tuple[str, float, int]]:
    for moment, values in one.values.items():
        for name, (grad, noise) in first.items() if moment != START else ():
            if name in values and name in other.values.get(moment, {}):
                chosen = meaningful(grad, noise)[0]
                off = values[name] - one.values[START][name]
                off = off - (other.values[moment][name] - other.values[START][name])
                yield f"values|{moment}|{name}", norm(off[chosen]), int(chosen.sum())


def _moved(one: RunRecord, other: RunRecord) -> Iterator[tuple[str, float, int]]:
    for step, (a, b) in enumerate(zip(one.steps, other.steps, strict=False)):
        numbers = {"": (a.loss, b.loss)} | {name: (loss, b.losses[name]) for name, loss in a.losses.items()}
        yield from ((f"loss|{step}|{name}", abs(here - there), SUMS) for name, (here, there) in numbers.items())
        yield f"norm|{step}|", abs((a.norm or 0.0) - (b.norm or 0.0)), SUMS
    for kind in KINDS:
        for moment, tensors in getattr(one, kind).items():
            there = getattr(other, kind).get(moment, {})
            both = {name: (tensor, there[name]) for name, tensor in tensors.items() if name in there}
            if kind in ("reduced", "used"):
                yield f"scale|{moment}|{kind}", abs(_factor(both.values()) - 1), SUMS
            for name, (here, beside) in both.items():
                yield f"{kind}|{moment}|{name}", norm(_numbers(here) - _numbers(beside)), here.numel()
    for step, here in one.evaluations.items():
        beside = other.evaluations.get(step, here)
        numbers = {"loss": (here["loss"], beside["loss"])}
        numbers |= {name: (float(value), float(beside["metrics"][name])) for name, value in here["metrics"].items()}
        yield from ((f"evaluation|{step}|{name}", abs(a - b), SUMS) for name, (a, b) in numbers.items())


_UNKNOWN = 100  # times the floor of parameters, buffers and state if their noise was not measured
_SMALL = 0.02  # share of the norm of all gradients above which none is nothing but rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Allowed differences by rounding, at one ``precision``; without ``noise`` by floors alone, which are then
    higher.
    """

    precision: str = "fp32"
    noise: Noise = field(default_factory=dict[str, float])

    def of(self, key: str, size: float) -> float:
        """Return the allowed norm of the difference of a tensor with norm ``size``."""
        return TIMES * self.noise.get(key, 0.0) + FLOOR[self.precision] * size * (1 if self.noise else _UNKNOWN)

    def of_sum(self, key: str, size: float) -> float:
        """Return the allowed difference of a sum over samples with this ``size``."""
        noise, size = TIMES * self.noise.get(key, 0.0), max(abs(size), LOSS_TERMS if key.startswith("loss") else 0.0)
        noise = min(noise, CAP[self.precision] * size) if key.split("|")[1] == "0" else noise
        return noise + SUM_FLOOR[self.precision] * size

    def of_gradient(self, key: str, size: float, total: float) -> float:
        """Return the allowed norm of a gradient's difference; ``total``: norm of all gradients of the step."""
        noise = TIMES * self.noise.get(key, 0.0)
        noise = min(noise, CAP[self.precision] * total) if key.split("|")[1] == "0" else noise
        least = LAST_PLACE["fp32"] if self.noise else FLOOR[self.precision]
        return (noise or least * total) + FLOOR[self.precision] * size

    def is_rounding(self, key: str, size: float, total: float) -> bool:
        """Return True if a gradient with norm ``size`` may be pure rounding."""
        return size <= min(self.of_gradient(key, 0.0, total), _SMALL * total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference of one tensor.

    Attributes:
        relative: norm of the difference over the norm it is measured by.
        ratio: the factor that brings the reference closest to the other; 1 if they agree.
        residual: the remaining difference, relative.
        where: the part of the tensor with the difference, and its ranks; empty if it is everywhere.
        allowed: largest ``relative`` that rounding explains.
        rounding: whether the tensor is zero except for rounding, so that the ratio has no meaning.
    """

    name: str
    relative: float
    ratio: float
    residual: float
    where: str = ""
    allowed: float = 0.0
    rounding: bool = False

    @property
    def beyond(self) -> bool:
        """Return True if rounding does not explain the difference, or it is not a number."""
        return not self.relative <= self.allowed


def losses(reference: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the relative difference of each step's loss."""
    return [relative_difference(a, b) for a, b in zip(reference, other, strict=True)]


def relative_difference(a: float, b: float) -> float:
    """Return the relative difference of two numbers; 0 if both are NaN, or the same infinity."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), 1e-30)


def values(
    reference: Tensors, other: Tensors, allowed: Callable[[str, float], float] | None = None
) -> list[Difference]:
    """Return differences of tensors, each relative to its norm; a tensor on one side only differs wholly.

    ``allowed``: the allowed norm of a tensor's difference, by its name and norm; 0 by default.
    """
    found: list[Difference] = []
    for name, expected in reference.items():
        size = norm(expected)
        most = allowed(name, size) / max(size, 1e-300) if allowed else 0.0
        found.append(difference(name, expected, other[name], size, most) if name in other else missing(name))
    return found + [missing(name) for name in other if name not in reference]


def gradients(reference: Tensors, other: Tensors, bounds: Bounds, moment: str) -> list[Difference]:
    """Return differences of gradients; those of rounding alone are relative to the norm of all.

    A missing gradient counts as zeros: the optimizer's treatment of either shows in its state.

    Args:
        moment: start of the keys of their noise, such as ``reduced|0``.
    """
    found: list[Difference] = []
    total = math.hypot(*map(norm, reference.values())) or 1e-300
    for name in dict.fromkeys((*reference, *other)):
        here, there = reference.get(name), other.get(name)
        some = here if here is not None else there
        assert some is not None
        a, b = (torch.zeros_like(some) if one is None else one for one in (here, there))
        size, key = norm(a), f"{moment}|{name}"
        allowed, rounding = bounds.of_gradient(key, size, total), bounds.is_rounding(key, size, total)
        by = total if rounding else size
        if size or norm(b):
            found.append(replace(difference(name, a, b, by, allowed / by), rounding=rounding))
    return found


def scale(found: Sequence[Difference], reference: Tensors) -> float:
    """Return the factor that brings all reference tensors together closest to the other side's; 1 if they agree."""
    squares = {one.name: norm(reference[one.name]) ** 2 for one in found if one.name in reference}
    total = math.fsum(squares.values())
    known = (one for one in found if squares.get(one.name))
    return math.fsum(one.ratio * squares[one.name] for one in known) / total if total else 1.0


def _factor(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    products = [(torch.dot(_numbers(a), _numbers(b)), torch.dot(_numbers(a), _numbers(a))) for a, b in pairs]
    total = math.fsum(float(square) for _, square in products)
    return math.fsum(float(product) for product, _ in products) / total if total else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """The distance and the begin of parameters' movement in training.

    Attributes:
        moved: values whose movement counts: the last ones for an average.
        first: the first gradient beyond rounding of each parameter, and the norm of its noise.
        moment: of the values compared, in the keys of their noise.
    """

    start: Tensors
    moved: Tensors
    first: FirstGradients
    moment: str


def parameters(reference: Tensors, other: Tensors, way: Way, bounds: Bounds) -> list[Difference]:
    """Return differences of parameters, relative to their movement.

    Adam divides a gradient by its own size, and so makes a whole step, in either direction, for an element that is zero
    except for rounding. Such elements are left out. The movement of any other may differ by as much as rounding may
    change its gradient.
    """
    found: list[Difference] = []
    for name, (grad, noise) in way.first.items():
        if name not in reference or name not in other or other[name].shape != reference[name].shape:
            found.append(missing(name))
            continue
        chosen, share = meaningful(grad, noise)
        here, moved = reference[name][chosen], (way.moved[name] - way.start[name])[chosen]
        if here.numel():
            far = max(norm(moved), 1e-30)
            allowed = bounds.of(f"values|{way.moment}|{name}", far) + norm(share[chosen] * moved)
            allowed += 2 * LAST_PLACE["fp32"] * norm(here)
            found.append(difference(name, here, other[name][chosen], far, allowed / far))
    return found


def meaningful(grad: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Return the elements of a first gradient beyond rounding, and the share of each that rounding may change.

    Rows of zeros, such as those of an embedding that no sample has used yet, are exact.
    """
    size, limit = grad.abs(), TIMES * noise / math.sqrt(max(1, grad.numel()))
    unused = ~size.flatten(1).any(1) if grad.dim() > 1 else torch.zeros(grad.shape[:1], dtype=torch.bool)
    unused = unused.reshape(-1, *(1 for _ in grad.shape[1:])).expand(grad.shape) if grad.dim() else size < 0
    share = torch.where(unused | (size == 0), 0.0, limit / size)
    return (size > limit) | unused, share


def first_gradients(one: RunRecord, bounds: Bounds) -> dict[str, tuple[Tensor, float]]:
    """Return the first gradient beyond rounding of each parameter, and the norm of its noise."""
    found: dict[str, tuple[Tensor, float]] = {}
    kind = "reduced" if one.reduced else "used"
    for step, grads in sorted((one.reduced or one.used).items()):
        total = math.hypot(*(norm(grad) for grad in grads.values())) or 1e-300
        for name, grad in grads.items():
            key = f"{kind}|{step}|{name}"
            if name not in found and not bounds.is_rounding(key, norm(grad), total):
                found[name] = grad, bounds.noise.get(key, 0.0)
    return found


def difference(name: str, expected: Tensor, given: Tensor, scale: float, allowed: float) -> Difference:
    """Return the difference of one tensor, relative to ``scale``."""
    if expected.shape != given.shape:
        return Difference(name=name, relative=math.inf, ratio=math.nan, residual=math.inf, allowed=allowed)
    if torch.equal(expected, given):
        return Difference(name=name, relative=0.0, ratio=1.0, residual=0.0, allowed=allowed)
    a, b = _numbers(expected), _numbers(given)
    square = float(torch.dot(a, a))
    ratio = float(torch.dot(a, b)) / square if square else math.nan
    residual = norm(b - ratio * a) / max(scale, 1e-300) if square else math.inf
    relative = norm(a - b) / max(scale, 1e-300)
    return Difference(name=name, relative=relative, ratio=ratio, residual=residual, allowed=allowed)


def missing(name: str) -> Difference:
    """Return the difference of a tensor on one side only."""
    return Difference(name=name, relative=math.inf, ratio=math.nan, residual=math.inf)


def norm(tensor: Tensor) -> float:
    """Return the L2 norm, added up in fp64."""
    return float(torch.linalg.vector_norm(_numbers(tensor)))


def _numbers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).double()
