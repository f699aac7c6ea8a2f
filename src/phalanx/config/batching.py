"""Global batches and their order: a sampler of the user's own, batches that change with the step, batches of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx.config.fields import SelfChecked, is_whole, option, plan_problem, steps_misfit
from phalanx.config.optimizing import Schedule
from phalanx.config.plan_rules import batch_problems, share_problems
from phalanx.config.sync import AUTO
from phalanx.errors import Problem

if TYPE_CHECKING:
    from phalanx.config.job import Job
    from phalanx.config.plan import Plan

BatchRamp = Mapping[int, int]
"""Optimizer step, the first of which is 0 → the global batch from that step on."""

_FUNCTION = "sampler=lambda seed, epoch: np.random.default_rng([seed, epoch]).permutation(1000)"
_INSTEAD = {
    "WeightedRandomSampler": "sampler=px.weighted(weights)",
    "DistributedSampler": "no sampler: each rank is given its share of every global batch",
    "RandomSampler": "shuffle=True",
    "SequentialSampler": "shuffle=False",
    "SubsetRandomSampler": "data=lambda: torch.utils.data.Subset(dataset, indices)",
    "BatchSampler": "batch=32, the global batch",
    "LengthGroupedSampler": "sampler=px.buckets(lengths)",
}
"""Samplers of torch and transformers → their replacement."""


@dataclass(frozen=True, slots=True)
class Sampler(SelfChecked, where="px.Sampler", call="px.Sampler(function, {})"):
    """The order of the samples in each epoch, by a function; ``job.sampler`` takes the function alone as well.

    Every rank calls it and must get the same order, so it may depend on its arguments only. The global generators of
    torch, numpy and Python are seeded by (seed, epoch) before.

    Attributes:
        function: ``function(seed, epoch)`` gives the indices of the epoch's samples in order: a list, array or
            one-dimensional tensor of whole numbers, as many in every epoch, fewer or more than the data have.
        repeats: an index may come twice in an epoch.
        by_batch: call it as ``function(seed, epoch, batch)`` with the job's global batch.
        size: samples that the data must have; ``None``: any number.
    """

    function: Callable[..., Any] = field(metadata={"accepts": lambda _: True})
    repeats: bool = False
    by_batch: bool = False
    size: int | None = option(None, "size=len(dataset)", least=1)

    def more_problems(self) -> list[Problem]:
        """Return the problem of a function that cannot be called as it will be."""
        return sampler_problems(self.function, "px.Sampler", 2 + (self.by_batch is True))

    @classmethod
    def of(cls, given: Callable[[int, int], Any] | Sampler) -> Sampler:
        """Return ``given``, or the sampler of that function without repeats."""
        return given if isinstance(given, Sampler) else cls(given)

    def indices(self, seed: int, epoch: int, batch: int) -> Any:
        """Return the indices of an epoch."""
        return self.function(seed, epoch, batch) if self.by_batch else self.function(seed, epoch)


def sampler_problems(given: Any, where: str = "job.sampler", takes: int = 2) -> list[Problem]:
    """Return the problems of ``job.sampler``, or of a ``Sampler``'s function, called with ``takes`` arguments."""
    if given is None or isinstance(given, Sampler):
        return []
    if callable(given) and not isinstance(given, type):
        try:
            signature = inspect.signature(given)
        except (TypeError, ValueError):  # not written in Python, so its arguments are not known
            return []
        try:
            signature.bind(*range(takes))
        except TypeError:
            allowed = f"one that can be called with {', '.join(('seed', 'epoch', 'batch')[:takes])}"
            return [Problem(where=where, given=f"a function of {signature}", allowed=allowed, fix=_FUNCTION)]
        return []
    kinds = given if isinstance(given, type) else type(given)
    known = next((kind.__name__ for kind in kinds.__mro__ if kind.__name__ in _INSTEAD), "")
    name = f"the class {kinds.__name__}" if isinstance(given, type) else f"a {kinds.__name__}"
    allowed = "a function of (seed, epoch) that gives the epoch's indices, or a px.Sampler"
    if known:
        allowed += ": an object with a state of its own gives another order on each rank and after a resume"
    return [Problem(where=where, given=name, allowed=allowed, fix=_INSTEAD.get(known, _FUNCTION))]


_TOKENS = {
    "least": 1,
    "allowed": "tokens in one optimizer step: a whole number, 1 or more",
    "example": "px.TokenBatch(8192, [len(text) for text in texts])",
}
_LENGTHS = {
    "accepts": lambda given: hasattr(given, "__len__") and not isinstance(given, str | bytes),
    "allowed": "one whole number, 0 or more, for each sample",
    "example": "px.TokenBatch(8192, [len(text) for text in texts])",
}


@dataclass(frozen=True, slots=True)
class TokenBatch(SelfChecked, where="px.TokenBatch"):
    """Global batches of so many tokens, for ``Job(batch_tokens=...)``: accumulate until there are enough, then step.

    A step takes samples in the order of the epoch until their lengths sum up to ``tokens``, or until they are
    ``job.batch``. The last step of an epoch has the rest. The steps follow from (seed, epoch, lengths), so they are the
    same under every plan and after a resume. The loss is divided by its count over the global batch.

    Attributes:
        tokens: fewest tokens of a step's samples.
        lengths: of each sample of the data, in tokens: a list, an array or a one-dimensional tensor of whole numbers.
    """

    tokens: int = field(metadata=_TOKENS)
    lengths: Any = field(repr=False, compare=False, metadata=_LENGTHS)

    def given(self, name: str) -> str:
        """Return the tokens, or the type of the lengths."""
        return repr(self.tokens) if name == "tokens" else f"a {type(self.lengths).__name__}"


def batches(job: Job) -> dict[int, int]:
    """Return optimizer step → the global batch from it on; of a job without a ramp, 0 → ``job.batch``."""
    return {0: job.batch} if job.batch_ramp is None else dict(job.batch_ramp)


def smaller_batches(job: Job) -> tuple[int, ...]:
    """Return the global batches of full steps other than ``job.batch``, the smallest first."""
    return tuple(sorted(set(batches(job).values()) - {job.batch}))


def ramp_problems(given: Any) -> list[Problem]:
    """Return the problem of ``job.batch_ramp`` by itself."""
    wrong = None
    if given is not None and not (isinstance(given, Mapping) and given):
        wrong = "no step" if isinstance(given, Mapping) else f"a {type(given).__name__}", "step → global batch, or None"
    elif given:
        bad = [f"{batch!r} from step {step} on" for step, batch in given.items() if not is_whole(batch, 1)]
        whole = "samples in one optimizer step: a whole number, 1 or more"
        wrong = steps_misfit(list(given), "a batch") or ((bad[0], whole) if bad else None)
    example = "batch=64, batch_ramp={0: 16, 500: 32, 1000: 64}"
    return [Problem(where="job.batch_ramp", given=wrong[0], allowed=wrong[1], fix=example)] if wrong else []


def warms_up_in_samples(job: Any) -> bool:
    """Return True if a schedule of the job counts its warm-up in samples."""
    schedules = [job.schedule, *(getattr(phase, "schedule", None) for phase in job.phases)]
    return any(isinstance(one, Schedule) and one.warmup_samples for one in schedules)


def global_batch_problems(job: Job, plan: Plan) -> Iterator[Problem]:
    """Yield the problems of a plan whose replicas do not each get a share of every global batch of the job."""
    yield from batch_problems(plan, job.batch)
    yield from share_problems(plan, job.batch)
    if plan.shares == AUTO and (job.batch_tokens is not None or job.batch_ramp is not None):
        name = "batch_tokens" if job.batch_tokens is not None else "a batch_ramp"
        given = f"shares=auto with {name}: shares by speed are measured on full batches of one size"
        yield plan_problem("shares", given, "shares that are stated, or even ones", "no shares")
    if job.batch < plan.replicas:
        return
    for step, batch in batches(job).items():
        for problem in (*batch_problems(plan, batch), *share_problems(plan, batch)) if batch < job.batch else ():
            yield replace(problem, given=f"{problem.given}, which batch_ramp has from step {step} on")
