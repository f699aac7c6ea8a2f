"""Compares two captures: by how much losses, gradients and parameters differ, and how much may come from rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from phalanx.verify.record import Tensors

_UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_PROMISE = 1e-5
_RMS = math.sqrt(1 / (8 * math.log(2)))  # of one rounding, in units of u


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """What rounding may make differ.

    Two orders of adding n numbers differ by about u·sqrt(n) of their sum, u being the unit roundoff (Higham 2002,
    section 4.2, for random signs). A gradient is added over the samples of a batch and has passed through the layers,
    all in fp32; the factor of 16 leaves room for sums whose terms nearly cancel, such as the gradient of a single
    scale. Neither loss nor gradient then goes above 1e-5, which is what is promised.

    Half precision rounds what passes from layer to layer, products being added in fp32. One rounding errs by 0.42 of
    its own u in the root mean square (an error spread evenly over half a unit in the last place, of numbers spread
    evenly over the logarithm: u / sqrt(3) · sqrt(3 / (8 ln 2))), errors are independent (Higham and Mary 2019), and
    both sides round in each layer: sigma = 0.42 u sqrt(2 layers). A gradient may differ by twice that. What all
    gradients have in common, their scale, and the loss are means over the samples, whose errors cancel: three sigma
    over sqrt(batch).

    Parameters drift apart with the root of the steps; Adam, which divides each gradient by its own size, makes more of
    small ones, for which there is a factor of 10.

    Attributes:
        loss: relative, each step.
        gradient: of each parameter's first gradient, relative to its norm.
        scale: of all gradients of the first step together, how far the factor between both sides' may be from 1.
        noise: a parameter whose gradient is below this share of the global norm is zero but for rounding.
        parameter: of each parameter after the last step, relative to how far it moved.
        rounding: of sums in fp32, relative.
        term: of one rounding in half precision on both sides, relative; 0 in fp32.
    """

    loss: float
    gradient: float
    scale: float
    noise: float
    parameter: float
    rounding: float = 0.0
    term: float = 0.0

    def gradient_at(self, step: int) -> float:
        """Of a gradient of this step, at parameters that have drifted apart since the first.

        Steps that do not blow up are short against the curvature: they change a gradient by no more than twice its size
        (a step of rate lr along the sharpest direction is stable up to lr times its curvature = 2; Cohen et al. 2021,
        for adaptive optimizers 2022). So parameters that differ by a share of their way change gradients by no more
        than twice that share.
        """
        return self.gradient + 2 * self.parameter_at(step) if step else self.gradient

    def scale_at(self, step: int) -> float:
        """Of all gradients of this step together.

        What the steps before had in common by mistake, at most this of their way, changes gradients by no more than
        twice that, and with it what the steps have in common by then.
        """
        return self.scale * (1 + 2 * step)

    def parameter_at(self, steps: int) -> float:
        """Of a parameter after so many steps."""
        return min(0.25, 10 * self.gradient * math.sqrt(steps))

    @classmethod
    def of(cls, precision: str, *, batch: int, layers: int, steps: int) -> Tolerance:
        unit = _UNIT_ROUNDOFF[precision]
        rounding = min(16 * _UNIT_ROUNDOFF["fp32"] * (math.sqrt(batch) + math.sqrt(layers)), _PROMISE)
        sigma = 0.0 if precision == "fp32" else _RMS * unit * math.sqrt(2 * layers)
        made = cls(
            loss=rounding + 3 * sigma / math.sqrt(batch),
            gradient=rounding + 2 * sigma,
            scale=rounding + 3 * sigma / math.sqrt(batch),
            noise=rounding + sigma / 4,
            parameter=0.0,
            rounding=rounding,
            term=sigma / math.sqrt(layers),
        )
        return replace(made, parameter=made.parameter_at(steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What tells rounding from a difference in the gradients of one step.

    Attributes:
        magnitudes: what the rounding of a gradient is relative to, by parameter; where it is known.
        total: norm of all gradients of the step; that of those compared where it is not given.
    """

    tolerance: Tolerance
    step: int = 0
    magnitudes: Mapping[str, float] = field(default_factory=dict[str, float])
    total: float | None = None

    def small(self, size: float, total: float) -> bool:
        """Whether a gradient of this norm may be rounding of what is larger than itself."""
        return size <= self.tolerance.noise * (self.total or total)

    def allowed(self, name: str, gradient: Tensor, *, small: bool) -> float:
        """Norm of the difference that a gradient of the reference may have."""
        tolerance, size, magnitude = self.tolerance, norm(gradient), self.magnitudes.get(name)
        drift = tolerance.gradient_at(self.step) - tolerance.gradient
        if magnitude is None or not (small or tolerance.term):
            return (tolerance.gradient + drift) * size
        # The norm of n independent errors is off its expectation by 1 / sqrt(2 n) of it, here three times that.
        share = tolerance.rounding + tolerance.term * (1 + 3 / math.sqrt(2 * max(1, gradient.numel())))
        return max(tolerance.gradient * size, share * magnitude) + drift * (max(size, magnitude) if small else size)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstGradient:
    """The first gradient of a parameter that is more than rounding.

    Attributes:
        error: what rounding may make it differ, relative to its norm.
        stretch: how many times its norm its rounding is relative to; 1 where no terms cancel.
        rounded: how far gradients of rounding alone have moved each element before; ``None`` where there were none.
    """

    values: Tensor
    error: float
    stretch: float = 1.0
    rounded: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One tensor's.

    Attributes:
        relative: norm of the difference over the norm it is measured by.
        ratio: the factor that brings the reference closest to the other; 1 where they agree.
        residual: what then still differs, relative.
        where: the part of the tensor that the difference is in, and which ranks hold it; empty where it is everywhere.
        allowed: what ``relative`` may be.
        rounding: it is of something that is zero but for rounding, so that the ratio says nothing.
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
        """Whether it is more than is allowed; what is not a number is."""
        return not self.relative <= self.allowed


def losses(reference: Sequence[float], other: Sequence[float]) -> list[float]:
    """Relative difference of each step's loss."""
    return [relative_difference(a, b) for a, b in zip(reference, other, strict=True)]


def relative_difference(a: float, b: float) -> float:
    """Relative difference of two numbers; 0 where both are no number, or the same infinity."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), 1e-30)


def values(reference: Tensors, other: Tensors, allowed: float = 0.0) -> list[Difference]:
    """Differences of tensors, each relative to its norm; of those that only one side has, all of it."""
    found = [
        difference(name, expected, other[name], norm(expected), allowed) if name in other else missing(name)
        for name, expected in reference.items()
    ]
    return found + [missing(name) for name in other if name not in reference]


def gradients(reference: Tensors, other: Tensors, bound: Bound) -> tuple[list[Difference], list[str]]:
    """Differences of gradients, and the names of those that are zero but for rounding.

    A small one is judged by what its rounding is relative to, which may be more than its own size; where that is not
    known, it is not compared. One that is not there is as good as one of zeros: what an optimizer makes of either shows
    in its state.
    """
    found: list[Difference] = []
    silent: list[str] = []
    total = math.sqrt(sum(norm(tensor) ** 2 for tensor in reference.values()))
    for name in dict.fromkeys((*reference, *other)):
        here, there = reference.get(name), other.get(name)
        sizes = [0.0 if one is None else norm(one) for one in (here, there)]
        small, magnitude = bound.small(max(sizes), total), bound.magnitudes.get(name, math.inf)
        if not max(sizes):
            continue
        if small and math.isinf(magnitude):
            silent.append(name)
        elif not small and (here is None or there is None):
            found.append(missing(name))
        else:
            zeros = torch.zeros_like(next(one for one in (here, there) if one is not None))
            a, b = (zeros if one is None else one for one in (here, there))
            allowed, scale = bound.allowed(name, a, small=small), max(sizes[0], magnitude) if small else sizes[0]
            rounding = small and sizes[0] <= allowed
            silent += [name] if rounding else []
            found.append(replace(difference(name, a, b, scale, allowed / scale if scale else 0.0), rounding=rounding))
    return found, silent


def scale(found: Sequence[Difference], reference: Tensors) -> float:
    """The factor that brings all tensors of the reference together closest to the other side's; 1 where they agree."""
    squares = {one.name: norm(reference[one.name]) ** 2 for one in found if one.name in reference}
    total = math.fsum(squares.values())
    known = (one for one in found if squares.get(one.name))
    return math.fsum(one.ratio * squares[one.name] for one in known) / total if total else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragedWeights:
    """What an average is held against: the ``last`` weights, and the ``steps`` after each of which it may be updated.

    An update a + s (w - a) rounds three times, of which the last, by u of the average, is the largest where s is small:
    by 2 u of it both sides together, and by no more than 4 u with the other two.
    """

    last: Tensors
    steps: int

    def rounding(self, values: Tensor) -> float:
        """What rounding makes of the updates at most, in the norm, in fp32."""
        return 4 * _UNIT_ROUNDOFF["fp32"] * self.steps * norm(values)


def parameters(
    initial: Tensors,
    reference: Tensors,
    other: Tensors,
    first: Mapping[str, FirstGradient],
    tolerance: Tolerance,
    averaged: AveragedWeights | None = None,
) -> list[Difference]:
    """Differences of final parameters relative to how far each moved; of their averages to how far they did.

    Adam divides a gradient by its own size, and so makes a whole step out of one that is zero but for rounding.
    Elements whose ``first`` gradient is below ``noise`` times the root mean square of their tensor's are left out: the
    key third of a fused bias, rows of an embedding not seen yet. Of the others each may differ by as much of its way as
    its gradient may by rounding, and by twice its way where that may turn the gradient's sign; and by twice as far as
    gradients of rounding alone have moved it.
    """
    found: list[Difference] = []
    for name, known in first.items():
        if name not in reference or name not in other:
            found.append(missing(name))
            continue
        grad = known.values
        meaningful = grad.abs() > tolerance.noise * norm(grad) / math.sqrt(max(1, grad.numel()))
        start, here, there = (tensor[name][meaningful] for tensor in (initial, reference, other))
        if here.numel():
            moved = (averaged.last[name][meaningful] if averaged else here) - start
            way = max(norm(moved), 1e-30)
            error = known.error * norm(grad) / math.sqrt(grad.numel())
            share = error / grad[meaningful].abs()
            off = share.where(share < 1, 2.0) * moved.abs()
            off += 0.0 if known.rounded is None else 2 * known.rounded[meaningful]
            turned = norm(off) / way
            turned += averaged.rounding(here) / way if averaged else 0.0
            found.append(difference(name, here, there, way, max(tolerance.parameter * known.stretch, turned)))
    return found


def difference(name: str, expected: Tensor, given: Tensor, scale: float, allowed: float) -> Difference:
    """Of one tensor, relative to ``scale``."""
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
    """Of a tensor that only one side has."""
    return Difference(name=name, relative=math.inf, ratio=math.nan, residual=math.inf)


def norm(tensor: Tensor) -> float:
    """The L2 norm, added up in fp64."""
    return float(torch.linalg.vector_norm(_numbers(tensor)))


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).double()
