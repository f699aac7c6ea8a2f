"""The learning rate after a user's change of the batch.

The number of devices has no role here. The global batch is the same on any number of them, so the learning rate never
has a reason to follow them.
"""

from __future__ import annotations

import math

from phalanx.errors import Problem, SpecError


def linear_scaling(lr: float, *, batch: int, base_batch: int) -> float:
    """Return the learning rate for ``batch``, if ``lr`` is right for ``base_batch``: in proportion to the batch.

    Goyal et al. 2017, section 2.1: "When the minibatch size is multiplied by k, multiply the learning rate by k",
    together with a gradual warm-up (section 2.2). It is meant for SGD with momentum, and holds up to a batch that
    depends on the job (about 8,192 for ResNet-50 on ImageNet).

    Raises:
        SpecError: a batch below 1, or a learning rate that is no number above 0.
    """
    return lr * _ratio(lr, batch, base_batch)


def scaling_offer(job_batch: int, given_batch: int) -> str | None:
    """Return a hint for a user who gave another batch than the job's own; ``None`` if it is the same.

    The text offers, and never applies: it says that the learning rate stays, and which line changes it. The rule by the
    square root is that of You et al. 2020 (section 4.1) with LAMB, and the usual one with Adam.

    Raises:
        SpecError: a batch below 1.
    """
    ratio = _ratio(1.0, given_batch, job_batch)
    if given_batch == job_batch:
        return None
    warmup = (
        "a larger batch also needs a warm-up: give the job's Schedule warmup_samples or warmup_steps"
        if ratio > 1
        else "a warm-up counted in steps now covers fewer samples: Schedule(warmup_samples=...) stays the same"
    )
    return (
        f"batch {given_batch} instead of the job's {job_batch}: x {ratio:.4g}. The learning rate stays the job's.\n"
        f"  linear rule (Goyal et al. 2017; SGD, LARS):   --lr-scale {ratio:.4g}\n"
        f"  square-root rule (Adam, LAMB):                --lr-scale {math.sqrt(ratio):.4g}\n"
        f"  {warmup}"
    )


def _ratio(lr: float, batch: int, base_batch: int) -> float:
    allowed = "samples in one step: a whole number, 1 or more"
    problems = [
        Problem(where=name, given=repr(value), allowed=allowed, fix=f"{name}=256")
        for name, value in (("batch", batch), ("base_batch", base_batch))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if not (math.isfinite(lr) and lr > 0):
        problems.append(Problem(where="lr", given=repr(lr), allowed="a number above 0", fix="lr=0.1"))
    if problems:
        raise SpecError(problems)
    return batch / base_batch
