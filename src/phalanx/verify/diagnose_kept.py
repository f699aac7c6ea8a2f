"""Causes told by what is kept from step to step: buffers, the optimizer's state, copies, gradients that come later."""

from __future__ import annotations

from phalanx.config import Job, Plan
from phalanx.units import show_names
from phalanx.verify.compare import Tolerance
from phalanx.verify.copies import copies_apart
from phalanx.verify.evidence import Evidence
from phalanx.verify.record import END, FIRST


def changed_before_the_update(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """The gradients are one device's when they are reduced, and others, or of another norm, when they are used."""
    for step in sorted(evidence.one.used):
        if any(one.beyond for one in evidence.of("gradient", step)) or _scaled(evidence, step):
            return ""
        _, copies = copies_apart(evidence.other, f"used-{step}", everywhere=plan.sync == "each")
        norm = any("norm is" in one for check in evidence.checks if check.step == step for one in check.wrong)
        if norm or copies or any(one.beyond for one in evidence.of("used", step)):
            break
    else:
        return ""
    ratios = [one.ratio for one in evidence.of("used", step) if one.residual <= 1e-3]
    times = f": {ratios[0]:.4g} × one device's" if ratios and max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0]) else ""
    return (
        f"gradients are one device's once they are reduced in step {step}, and are changed between backward and the "
        f"update{times}. Look for clipping by a local norm in place of that of all ranks, for hooks on the "
        "optimizer's step, and for a division or a sum done twice."
    )


def _scaled(evidence: Evidence, step: int) -> bool:
    """Whether the reduced gradients of a step have a factor in common."""
    scales = (check for check in evidence.checks if check.kind == "scale" and check.step == step)
    return any(check.first.startswith("all gradients in") for check in scales)


def buffers_apart(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """Buffers differ between ranks, or from one device's, and nothing that is computed before does."""
    if evidence.batch_norm or any(one.beyond for one in (*evidence.gradients, *evidence.initial)):
        return ""
    for moment in (FIRST, END):
        _, found = copies_apart(evidence.other, moment, everywhere=plan.sync == "each")
        names = list(dict.fromkeys(one.name for one in found if one.kind == "buffer"))
        if names:
            return (
                f"the buffers of ranks differ: {show_names(names, 3)}. They are updated in forward, by what each rank "
                "sees of the batch, and nobody brings them together. Compute them from the whole batch (an all-reduce "
                "in forward), or make them parameters."
            )
        names = [one.name for one in evidence.of("buffer", 0 if moment == FIRST else None) if one.beyond]
        if names:
            return (
                f"a buffer differs from one device's: {show_names(names, 3)}. It is updated in forward, once for each "
                "micro-batch and from that micro-batch alone, which is smaller under this plan."
            )
    return ""


def state_apart(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """The optimizer's state differs between ranks, while their parameters do not."""
    for moment in (FIRST, END):
        _, found = copies_apart(evidence.other, moment, everywhere=plan.sync == "each")
        if any(one.kind == "value" for one in found):
            return ""
        names = list(dict.fromkeys(one.name for one in found if one.kind == "state"))
        if names:
            return (
                f"the optimizer's state differs between ranks that hold the same parameters: {show_names(names, 3)}. "
                "Their parameters part with the next step. Look for state that is changed or restored on some ranks."
            )
    return ""


def copies_part(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """Copies of parameters that were equal at the start are not after the first update."""
    _, found = copies_apart(evidence.other, FIRST, everywhere=plan.sync == "each")
    values = [one for one in found if one.kind in ("value", "stepped")]
    if not values or any(one.beyond for one in evidence.gradients):
        return ""
    who = values[0].who
    names = list(dict.fromkeys(one.name for one in values if one.who == who))
    return (
        f"{who} hold different values of {show_names(names, 1)} after the first update, where the "
        "first gradients are equal: the update differs by rank. Look for values changed on one rank only, clipping by "
        "a local norm, or a missing synchronisation after the step."
    )


def scaled(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """All gradients have one factor too many, which is small beside what half precision rounds."""
    check = next((one for one in evidence.checks if one.kind == "scale" and one.first), None)
    if check is None or any(one.beyond for one in evidence.gradients if one.relative > 2 * check.largest):
        return ""
    return (
        f"{check.first}: a constant ratio. A mean weighted by the wrong count (samples where tokens were meant, or "
        "padded where real tokens were), or divided by another number than both."
    )


def wrong_from_later_on(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """A parameter that has no gradient at first gets a wrong one when it has."""
    early = {name for name, grad in evidence.one.gradients.items() if bool(grad.any())}
    for step in sorted(evidence.one.reduced):
        names = (
            [one.name for one in evidence.of("gradient", step) if one.beyond and one.name not in early] if step else []
        )
        if names:
            return (
                f"the gradient of {show_names(names, 3)} is there from step {step} on, when what multiplies it is no "
                "longer zero, and is wrong then: what comes back to it differs by rank, or is not added up over ranks."
            )
    return ""
