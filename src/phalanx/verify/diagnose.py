"""From the pattern of differences to the likely cause."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from phalanx.config import Job, Plan
from phalanx.parallel import micro_batches
from phalanx.verify import diagnose_kept as kept
from phalanx.verify import diagnose_split as split
from phalanx.verify.compare import Tolerance
from phalanx.verify.evidence import Evidence


def diagnose(
    evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan, look: Callable[[], list[str]] = list
) -> str:
    """The likely cause of an inequality, most specific first. ``look`` gives what a look at the job itself shows.

    Patterns that only a split has come before that: a job that differs by itself may be split wrongly as well.
    """

    def first_of(patterns: Iterable[Callable[[Evidence, Tolerance, Job, Plan], str]]) -> str:
        return next(filter(None, (pattern(evidence, tolerance, job, plan) for pattern in patterns)), "")

    if cause := first_of((_not_promised, _skipped)):
        return cause
    of_the_job = " Also: ".join(look())
    if cause := first_of(_OF_A_SPLIT):
        return f"{cause} Also: {of_the_job}" if of_the_job else cause
    if of_the_job:
        return f"{of_the_job} That is no fault of the split."
    return first_of(_OF_ANY) or (
        "no known pattern. Likely a random number or a state that depends on the rank or on the order of calls: "
        "look for unseeded randomness in the model, for buffers updated in forward, and for losses that use statistics "
        "of the batch."
    )


def _not_promised(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    """Replicas that are not kept equal differ after the first step; in it, only what is rounded where it is sent."""
    first = evidence.losses[0] > tolerance.loss or any(one.relative > 0 for one in evidence.initial)
    unequal = any(one.beyond for one in evidence.gradients)
    if plan.exact or first or (unequal and plan.compress == "none"):
        return ""
    return (
        f"this plan does not promise one device's result (exact: {plan.exactness}): {plan.bound}. "
        "That is no fault of the split."
    )


def _skipped(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    if evidence.skipped is None:
        return ""
    return (
        f"fp16's loss scale skipped the update of step {evidence.skipped} on one side only. "
        "How many samples one backward adds decides whether a borderline sum overflows; bf16 has no such border."
    )


def _same_samples(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
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
    if len(seen) < samples and seen:
        return f"step 0 saw {len(seen)} samples where one device saw {samples}: some were dropped by the sampler."
    return ""


def _ranks_apart(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    found = split.apart(evidence, "end")
    if not found:
        return ""
    return (
        f"{found} after the last step, where their first gradients are equal: the optimizer's step differs by rank. "
        "Look for clipping by a local norm, an optimizer that looks at whole parameters and gets slices, "
        "or a missing synchronisation after the step."
    )


def _batch_norm(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    if not evidence.batch_norm:
        return ""
    return (
        f"BatchNorm ({evidence.batch_norm[0]}) takes its statistics from each micro-batch, which is smaller "
        "under this plan. That is no fault of the split; to be equal, use group or layer normalisation."
    )


def _constant_ratio(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    usable = [one for one in evidence.gradients if one.residual < max(100 * tolerance.gradient, 1e-3)]
    if len(usable) < max(1, len(evidence.gradients) // 2):
        return ""
    ratio = statistics.median(one.ratio for one in usable)
    spread = max(abs(one.ratio / ratio - 1) for one in usable) if ratio else 1.0
    # A ratio explains a difference only where little is left once it is taken out.
    left = max(one.residual for one in usable)
    if spread > 1e-2 or abs(ratio - 1) < 10 * max(tolerance.gradient, left):
        return ""
    micros = micro_batches(job, plan)
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


def _one_parameter(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    wrong = [one for one in evidence.gradients if one.beyond]
    if wrong and len(wrong) <= max(1, len(evidence.gradients) // 4):
        return (
            f"only {', '.join(one.name for one in wrong[:4])} differ: something particular to them. "
            "Look for parameters used outside forward, hooks on them, or a part of the batch that only they see."
        )
    return ""


def _after_the_gradient(evidence: Evidence, tolerance: Tolerance, job: Job, plan: Plan) -> str:
    if any(one.beyond for one in evidence.gradients) or evidence.losses[0] > tolerance.loss:
        return ""
    return (
        "the first step's loss and gradients are equal, what follows is not: the optimizer's step differs. "
        "Look for an optimizer that looks at whole parameters (norms, factored moments) "
        "and gets shards, or for clipping by a local norm."
    )


_OF_A_SPLIT = (
    _same_samples,
    split.other_start,
    split.copies_apart_at_the_start,
    split.passed_on_in_parts,
    split.auxiliary_once_per_rank,
    split.not_synchronised,
    kept.state_apart,
    kept.copies_part,
    kept.changed_before_the_update,
    _ranks_apart,
)
"""Ranks that disagree where they must not, or parts of a sum: whatever the job is."""
_OF_ANY = (
    kept.buffers_apart,
    kept.wrong_from_later_on,
    _batch_norm,
    _constant_ratio,
    kept.scaled,
    _one_parameter,
    _after_the_gradient,
)
