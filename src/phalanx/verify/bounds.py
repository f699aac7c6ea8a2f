"""What the gradients of a run may be off by, each by what its own rounding is relative to."""

from __future__ import annotations

import math

from phalanx.verify import compare
from phalanx.verify.compare import Bound, FirstGradient, Tolerance
from phalanx.verify.record import FIRST, Record


def bound_of(one: Record, step: int, tolerance: Tolerance, *, used: bool = False) -> Bound:
    """What gradients of ``step`` may be off by: reduced, or with ``used`` as the optimizer gets them."""
    magnitudes, total = one.magnitudes.get(step, {}), one.steps[step].norm if one.magnitudes else None
    if used and total:
        clipped = math.hypot(*(compare.norm(grad) for grad in one.used[step].values()))
        magnitudes = {name: size * clipped / total for name, size in magnitudes.items()}
        total = clipped
    return Bound(tolerance=tolerance, step=step, magnitudes=magnitudes, total=total)


def first_gradients(one: Record, tolerance: Tolerance) -> dict[str, FirstGradient]:
    """The first gradient of each parameter that is not zero but for rounding.

    Adam makes a whole step of rounding: in each step before as far as in the first.
    """
    found: dict[str, FirstGradient] = {}
    after, before = one.values.get(FIRST, {}), dict[str, int]()
    for step, grads in sorted((one.reduced or one.used).items()):
        bound = bound_of(one, step, tolerance)
        total = bound.total or math.hypot(*(compare.norm(grad) for grad in grads.values()))
        for name, grad in grads.items():
            size = compare.norm(grad)
            small = bound.small(size, total)
            if name in found or not size:
                continue
            known = not small or name in bound.magnitudes
            error = bound.allowed(name, grad, small=small) / size if known else math.inf
            if error < 1:
                steps, there = before.get(name, 0), name in after
                rounded = steps * (after[name] - one.initial[name]).abs() if steps and there else None
                how = {"error": error, "stretch": error / tolerance.gradient_at(step)}
                found[name] = FirstGradient(values=grad, rounded=rounded, **how)
            else:
                before[name] = before.get(name, 0) + 1
    return found
