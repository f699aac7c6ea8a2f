"""Diagnosis: from the pattern of differences to the likely cause, also by state kept from step to step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from phalanx.config import Job, Plan
from phalanx.config.sync import Compression
from phalanx.placement.batch_split import micro_batches
from phalanx.units import show_names
from phalanx.verify import diagnose_split as split
from phalanx.verify.evidence import Evidence, copies_apart
from phalanx.verify.record import END, FIRST


def diagnose(evidence: Evidence, job: Job, plan: Plan, look: Callable[[], list[str]]) -> str:
    """Return the likely cause of an inequality, most specific first. ``look`` returns causes in the job itself.

    Patterns of splits come before that: a job that differs by itself may be split wrongly as well.
    """

    def first_of(patterns: Iterable[Callable[[Evidence, Job, Plan], str]]) -> str:
        return next(filter(None, (pattern(evidence, job, plan) for pattern in patterns)), "")

    if cause := first_of((_codec, _not_promised, _skipped, _rates)):
        return cause
    of_the_job = " Also: ".join(look())
    if cause := first_of(_OF_A_SPLIT):
        return f"{cause} Also: {of_the_job}" if of_the_job else cause
    if of_the_job:
        norm = _batch_norm(evidence, job, plan)
        return f"{of_the_job} Also: {norm}" if norm else f"{of_the_job} That is no fault of the split."
    return first_of((*_OF_ANY, split.first_module_that_differs, _mean_of_others)) or (
        "no known pattern. Look for state that forward changes, for losses that use statistics of the batch, and for "
        "values that follow the rank or a clock."
    )


def _mean_of_others(evidence: Evidence, job: Job, plan: Plan) -> str:
    step = evidence.one.steps[0]
    if not evidence.loss_differs or step.count is None or step.count != step.samples:
        return ""
    return (
        "no known pattern. The loss differs in the first step, and is a plain mean, which is taken to be over samples: "
        "likely it is over something that samples have unlike numbers of (tokens, labelled pixels), or uses statistics "
        "of the batch. px.Loss(sum, count) is exact."
    )


def _codec(evidence: Evidence, job: Job, plan: Plan) -> str:
    codec = Compression.parse(plan.compress)
    if not codec.facts.rounds or evidence.loss_differs or plan.precision != "fp32":
        return ""
    mine, others = evidence.one.gradients, evidence.other.gradients
    pairs = [(mine[name].double(), others[name].double()) for name in mine if name in others]
    off, size = (
        math.hypot(*(float(one.norm()) for one in each)) for each in ((b - a for a, b in pairs), mine.values())
    )
    along = abs(math.fsum(float(((b - a) * a).sum()) for a, b in pairs)) / max(size, 1e-300)
    direction = max(abs(math.fsum(float((b - a).sum()) for a, b in pairs)), along) / max(off, 1e-300)
    if off <= _CODEC_ERROR[codec.codec] * size and direction <= _CHANCE:
        return ""
    return (
        f"{plan.compress} changes the gradients of the first step by {off / max(size, 1e-300):.2g} of their norm, and "
        f"their errors add up to {direction:.2g} times what independent ones do. Rounding leaves at most "
        f"{_CODEC_ERROR[codec.codec]:.2g}, and {_CHANCE:g} times: look at how the codec rounds and scales."
    )


_CODEC_ERROR = {"int8": 0.1, "bf16": 2.0**-6, "fp16": 2.0**-9}
"""Largest error of a mean over ranks: each rank rounds its share, and the mean is rounded again."""
_CHANCE = 6.0  # standard deviations of a sum of independent errors


def _not_promised(evidence: Evidence, job: Job, plan: Plan) -> str:
    first = evidence.loss_differs or any(one.relative > 0 for one in evidence.initial)
    unequal = any(one.beyond for one in evidence.gradients)
    if any(check.first for check in evidence.checks if check.kind == "copies"):
        return ""
    if plan.exact or first or (unequal and plan.compress == "none"):
        return ""
    return (
        f"this plan does not promise one device's result (exact: {plan.exactness}): {plan.bound}. "
        "That is no fault of the split."
    )


def _skipped(evidence: Evidence, job: Job, plan: Plan) -> str:
    if evidence.skipped is None:
        return ""
    return (
        f"fp16's loss scale skipped the update of step {evidence.skipped} on one side only. "
        "How many samples one backward adds decides whether a borderline sum overflows; bf16 has no such border."
    )


def _rates(evidence: Evidence, job: Job, plan: Plan) -> str:
    first = next((check for check in evidence.checks if check.first), None)
    if first is None or not first.wrong or not first.wrong[0].startswith("the learning rate of"):
        return ""
    return (
        f"the learning rates differ {first.when}, where loss and gradients do not: {first.wrong[0]}. Look at the lr of "
        "the optimizer, and at the schedule: its warm-up, its shape, and over how many steps it goes."
    )


def _same_samples(evidence: Evidence, job: Job, plan: Plan) -> str:
    seen: dict[int, int] = {}
    firsts: dict[int, int] = {}
    for rank, capture in enumerate(evidence.other.ranks):
        first = firsts.setdefault(plan.part(rank), rank)
        if first != rank:
            if capture.ids != evidence.other.ranks[first].ids:
                return (
                    f"other samples on two ranks of one replica: ranks {first} and {rank} work on the same part of the "
                    "batch and were given unlike parts in step 0. The loader must give ranks of tp, pp and cp the same."
                )
            continue
        for one in capture.ids:
            if one in seen:
                return (
                    f"identical samples on two ranks: sample {one} was on ranks {seen[one]} and {rank} in step 0. "
                    "The sampler gives ranks the same part: look at what feeds the loader."
                )
            seen[one] = rank
    samples = evidence.one.steps[0].samples or 0
    if seen and (other := [one for one in evidence.one.ids if one not in seen]) and len(seen) == samples:
        return (
            f"step 0 trained other samples than one device: {len(other)} of {samples} are missing, sample {other[0]} "
            "the first. Look at the sampler, and at what orders the data."
        )
    if len(seen) < samples and seen:
        return f"step 0 saw {len(seen)} samples where one device saw {samples}: some were dropped by the sampler."
    return ""


def _ranks_apart(evidence: Evidence, job: Job, plan: Plan) -> str:
    if not (found := split.differing_copies(evidence, "end")):
        return ""
    return (
        f"{found} after the last step, where their first gradients are equal: the optimizer's step differs by rank. "
        "Look for clipping by a local norm, an optimizer that looks at whole parameters and gets slices, "
        "or a missing synchronisation after the step."
    )


def _batch_norm(evidence: Evidence, job: Job, plan: Plan) -> str:
    if not evidence.batch_norm:
        return ""
    return (
        f"BatchNorm ({evidence.batch_norm[0]}) takes its statistics from each micro-batch, which is smaller "
        'under this plan. That is no fault of the split; to be equal, use batch_statistics="global".'
    )


def _constant_ratio(evidence: Evidence, job: Job, plan: Plan) -> str:
    usable = [one for one in evidence.gradients if one.residual < max(10 * evidence.rounding, 1e-3)]
    if len(usable) < max(1, len(evidence.gradients) // 2):
        return ""
    ratio = statistics.median(one.ratio for one in usable)
    spread = max(abs(one.ratio / ratio - 1) for one in usable) if ratio else 1.0
    # A ratio explains a difference only where little is left once it is taken out.
    left = max(one.residual for one in usable)
    if spread > 1e-2 or abs(ratio - 1) < 4 * max(evidence.rounding, left):
        return ""
    micros = micro_batches(plan, job.batch)
    names = {
        "the number of replicas": plan.replicas,
        "the number of micro-batches": micros,
        "replicas × micro-batches": plan.replicas * micros,
    }
    for name, number in names.items():
        if number > 1 and abs(ratio - number) < 0.02 * number:
            return (
                f"every gradient is {ratio:.4g} × one device's: {name}. "
                "Sums are not divided by the global count: a sum where a mean was meant."
            )
        if number > 1 and abs(ratio * number - 1) < 0.02:
            return (
                f"every gradient is 1/{1 / ratio:.4g} of one device's: {name}. "
                "A mean of means: divided once more than needed."
            )
    return (
        f"every gradient is {ratio:.5g} × one device's, a constant ratio that is neither replicas nor micro-batches: "
        "a mean weighted by the wrong count (samples where tokens were meant, or padded where real tokens were)."
    )


def _one_parameter(evidence: Evidence, job: Job, plan: Plan) -> str:
    wrong = [one for one in evidence.gradients if one.beyond]
    if wrong and len(wrong) <= max(1, len(evidence.gradients) // 4):
        return (
            f"only {', '.join(one.name for one in wrong[:4])} differ: something particular to them. "
            "Look for parameters used outside forward, hooks on them, or a part of the batch that only they see."
        )
    return ""


def _after_the_gradient(evidence: Evidence, job: Job, plan: Plan) -> str:
    if any(one.beyond for one in evidence.gradients) or evidence.loss_differs:
        return ""
    return (
        "the first step's loss and gradients are equal, what follows is not: the optimizer's step differs. "
        "Look for an optimizer that looks at whole parameters (norms, factored moments) "
        "and gets shards, or for clipping by a local norm."
    )


def changed_before_the_update(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match gradients that equal one device's when reduced, and differ, or their norm, when used."""
    for step in sorted(evidence.one.used):
        scales = [check.first for check in evidence.checks if check.kind == "scale" and check.step == step]
        factor = any(first.startswith("all gradients in") for first in scales)  # that reduced ones have in common
        if factor or any(one.beyond for one in evidence.of("gradient", step)):
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


def buffers_apart(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match buffers that differ between ranks, or from one device's, without an earlier difference."""
    if evidence.batch_norm or any(one.beyond for one in (*evidence.gradients, *evidence.initial)):
        return ""
    for moment in (FIRST, END):
        _, found = copies_apart(evidence.other, moment, everywhere=plan.sync == "each")
        if names := list(dict.fromkeys(one.name for one in found if one.kind == "buffer")):
            return (
                f"the buffers of ranks differ: {show_names(names, 3)}. They are updated in forward, by what each rank "
                "sees of the batch, and they are not synchronised. Compute them from the whole batch (an all-reduce "
                "in forward), or make them parameters."
            )
        if names := [one.name for one in evidence.of("buffer", 0 if moment == FIRST else None) if one.beyond]:
            return (
                f"a buffer differs from one device's: {show_names(names, 3)}. It is updated in forward, once for each "
                "micro-batch and from that micro-batch alone, which is smaller under this plan."
            )
    return ""


def state_apart(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match optimizer state that differs between ranks, while their parameters do not."""
    for moment in (FIRST, END):
        _, found = copies_apart(evidence.other, moment, everywhere=plan.sync == "each")
        if any(one.kind == "value" for one in found):
            return ""
        if names := list(dict.fromkeys(one.name for one in found if one.kind == "state")):
            return (
                f"the optimizer's state differs between ranks that hold the same parameters: {show_names(names, 3)}. "
                "Their parameters part with the next step. Look for state that is changed or restored on some ranks."
            )
    return ""


def copies_part(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match copies of parameters that were equal at the start and differ after the first update."""
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


def scaled(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match gradients with a common wrong factor, small beside the rounding of half precision."""
    check = next((one for one in evidence.checks if one.kind == "scale" and one.first), None)
    if check is None or any(one.beyond for one in evidence.gradients if one.relative > 2 * check.largest):
        return ""
    return (
        f"{check.first}: a constant ratio. A mean weighted by the wrong count (samples where tokens were meant, or "
        "padded where real tokens were), or divided by another number than both."
    )


def wrong_from_later_on(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match a parameter without gradient at first that gets a wrong one later."""
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


_OF_A_SPLIT = (
    _same_samples,
    split.other_start,
    split.copies_apart_at_the_start,
    split.passed_on_in_parts,
    split.auxiliary_once_per_rank,
    split.not_synchronised,
    state_apart,
    copies_part,
    changed_before_the_update,
    _ranks_apart,
)
"""Ranks that disagree where they must not, or parts of a sum: whatever the job is."""
_OF_ANY = (
    buffers_apart,
    wrong_from_later_on,
    _batch_norm,
    _constant_ratio,
    scaled,
    _one_parameter,
    _after_the_gradient,
)
