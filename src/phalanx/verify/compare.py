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
    section 4.2, for random signs). A gradient adds over the samples of a batch and has passed through the layers, so n
    is batch + layers at the precision of the computation. A loss has passed through the layers at that precision, and
    is added over the batch in fp32. The factor of 16 leaves room for sums whose terms nearly cancel, such as the
    gradient of a single scale. In fp32 neither goes above 1e-5, which is what is promised.

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
        gradient = 16 * unit * math.sqrt(batch + layers)
        loss = 16 * (unit * math.sqrt(layers) + _UNIT_ROUNDOFF["fp32"] * math.sqrt(batch))
        if precision == "fp32":
            gradient, loss = min(gradient, _PROMISE), min(loss, _PROMISE)
        parameter = min(1.0, 100 * gradient * math.sqrt(steps))
        return cls(loss=loss, gradient=gradient, noise=gradient, parameter=parameter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One tensor's.

    Attributes:
        name: the parameter's.
        relative: norm of the difference over the norm it is measured by.
        ratio: the factor that brings the reference closest to the other; 1 where they agree.
        residual: what then still differs, relative.
    """

    name: str
    relative: float
    ratio: float
    residual: float


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
    skip: list[str],
) -> list[Difference]:
    """Differences of final parameters relative to how far each moved; ``skip`` names those not compared."""
    found: list[Difference] = []
    for name, expected in reference.items():
        if name in skip:
            continue
        moved = float((expected.double() - initial[name].double()).norm())
        found.append(_difference(name, expected, other[name], max(moved, 1e-30)))
    return found


def _difference(name: str, expected: torch.Tensor, given: torch.Tensor, scale: float) -> Difference:
    if expected.shape != given.shape:
        return Difference(name=name, relative=math.inf, ratio=math.nan, residual=math.inf)
    a, b = expected.double().flatten(), given.double().flatten()
    square = float(a @ a)
    ratio = float(a @ b) / square if square else math.nan
    residual = float((b - ratio * a).norm()) / max(scale, 1e-300) if square else math.inf
    return Difference(name=name, relative=float((a - b).norm()) / max(scale, 1e-300), ratio=ratio, residual=residual)
