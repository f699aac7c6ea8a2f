"""Compares two captures: by how much losses, gradients and parameters differ, and how much may come from rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_PROMISE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """What rounding may make differ.

    Two orders of adding n numbers differ by about u·sqrt(n) of their sum, u being the unit roundoff (Higham 2002,
    section 4.2, for random signs). A gradient is added over the samples of a batch and has passed through the layers,
    all in fp32; the factor of 16 leaves room for sums whose terms nearly cancel, such as the gradient of a single
    scale. Neither loss nor gradient then goes above 1e-5, which is what is promised. Half precision rounds what passes
    from layer to layer, once each (products are added in fp32): u·sqrt(layers) of its own u, for gradients 4 times it.
    Parameters drift apart with the root of the steps; Adam, which divides each gradient by its own size, makes more of
    small ones, for which there is a factor of 10.

    Attributes:
        loss: relative, each step.
        gradient: of each parameter's first gradient, relative to its norm.
        noise: a parameter whose gradient is below this share of the global norm is zero but for rounding.
        parameter: of each parameter after the last step, relative to how far it moved.
    """

    loss: float
    gradient: float
    noise: float
    parameter: float

    @classmethod
    def of(cls, precision: str, *, batch: int, layers: int, steps: int) -> Tolerance:
        """The tolerance of a proof over ``steps`` steps at this precision."""
        unit = _UNIT_ROUNDOFF[precision]
        rounding = min(16 * _UNIT_ROUNDOFF["fp32"] * (math.sqrt(batch) + math.sqrt(layers)), _PROMISE)
        halves = 0.0 if precision == "fp32" else unit * math.sqrt(layers)
        loss, gradient = rounding + halves, rounding + 4 * halves
        parameter = min(0.25, 10 * gradient * math.sqrt(steps))
        return cls(loss=loss, gradient=gradient, noise=rounding + halves / 4, parameter=parameter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One tensor's.

    Attributes:
        name: the parameter's.
        relative: norm of the difference over the norm it is measured by.
        ratio: the factor that brings the reference closest to the other; 1 where they agree.
        residual: what then still differs, relative.
        where: the part of the tensor that the difference is in, and which ranks hold it; empty where it is everywhere.
    """

    name: str
    relative: float
    ratio: float
    residual: float
    where: str = ""


def losses(reference: list[float], other: list[float]) -> list[float]:
    """Relative difference of each step's loss."""
    return [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(reference, other, strict=True)]


def gradients(
    reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor], noise: float
) -> tuple[list[Difference], list[str]]:
    """Differences of gradients, and the names of those that are zero but for rounding and so not compared."""
    total = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in reference.values()))
    found: list[Difference] = []
    silent: list[str] = []
    for name, expected in reference.items():
        given = other.get(name)
        if given is None:
            found.append(Difference(name=name, relative=math.inf, ratio=0.0, residual=math.inf))
        elif float(expected.double().norm()) <= noise * total and float(given.double().norm()) <= noise * total:
            silent.append(name)
        else:
            found.append(_difference(name, expected, given, float(expected.double().norm())))
    found += [
        Difference(name=name, relative=math.inf, ratio=math.inf, residual=math.inf)
        for name in other
        if name not in reference
    ]
    return found, silent


def parameters(
    initial: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    first: dict[str, torch.Tensor],
    noise: float,
) -> list[Difference]:
    """Differences of final parameters relative to how far each moved.

    Adam divides a gradient by its own size, and so makes a whole step out of one that is zero but for rounding.
    Elements whose ``first`` gradient is below ``noise`` times the root mean square of their tensor's are left out: the
    key third of a fused bias, rows of an embedding not seen yet.
    """
    found: list[Difference] = []
    for name in reference:
        if name not in first:
            continue
        grad = first[name].double()
        meaningful = grad.abs() > noise * grad.square().mean().sqrt()
        start, here, there = (tensor[name].double()[meaningful] for tensor in (initial, reference, other))
        if here.numel():
            found.append(_difference(name, here, there, max(float((here - start).norm()), 1e-30)))
    return found


def _difference(name: str, expected: torch.Tensor, given: torch.Tensor, scale: float) -> Difference:
    if expected.shape != given.shape:
        return Difference(name=name, relative=math.inf, ratio=math.nan, residual=math.inf)
    a, b = expected.double().flatten(), given.double().flatten()
    square = float(a @ a)
    ratio = float(a @ b) / square if square else math.nan
    residual = float((b - ratio * a).norm()) / max(scale, 1e-300) if square else math.inf
    return Difference(name=name, relative=float((a - b).norm()) / max(scale, 1e-300), ratio=ratio, residual=residual)
