"""A global batch of so many tokens, as it is known before the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.config.batch_ramp import unlike_batch_problems
from phalanx.config.fields import is_whole
from phalanx.errors import Problem, SpecError

if TYPE_CHECKING:
    from phalanx.config.job import Job

_EXAMPLE = "px.TokenBatch(8192, [len(text) for text in texts])"


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Global batches of so many tokens, for ``Job(batch_tokens=...)``: accumulate until there are enough, then step.

    A step takes samples in the order of the epoch until their lengths come to ``tokens`` or more, the one with which
    they do being the last, or until they are ``job.batch``. So a sample that is longer than that ends its step, and is
    one by itself where it comes first. The last step of an epoch has what is left. It follows from (seed, epoch,
    lengths) alone, and is the same under every plan, after a resume, and on another number of devices. The loss is
    divided by what it counts over the whole global batch, as ever.

    Attributes:
        tokens: that a step's samples come to at least.
        lengths: of each sample of the data, in tokens: a list, an array or a one-dimensional tensor of whole numbers.
    """

    tokens: int
    lengths: Any = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if not is_whole(self.tokens, 1):
            given, allowed = repr(self.tokens), "tokens in one optimizer step: a whole number, 1 or more"
            problems.append(Problem(where="px.TokenBatch.tokens", given=given, allowed=allowed, fix=_EXAMPLE))
        lengths: object = self.lengths
        if isinstance(lengths, str | bytes) or not hasattr(lengths, "__len__"):
            given, allowed = f"a {type(lengths).__name__}", "one whole number, 0 or more, for each sample"
            problems.append(Problem(where="px.TokenBatch.lengths", given=given, allowed=allowed, fix=_EXAMPLE))
        if problems:
            raise SpecError(problems)


def token_problems(job: Job) -> list[Problem]:
    """What cannot stand beside ``job.batch_tokens``."""
    if not isinstance(job.batch_tokens, TokenBatch):
        return []
    found = unlike_batch_problems(job, "batch_tokens")
    if job.batch_ramp is not None:
        given, allowed = "batch_tokens and a batch_ramp, which counts samples", "one of the two"
        found.append(Problem(where="job.batch_ramp", given=given, allowed=allowed, fix="batch_ramp=None"))
    if job.drop_last is True:
        given = "drop_last=True with batch_tokens"
        allowed = "False: the last step of an epoch has what is left, divided by its own count"
        found.append(Problem(where="job.drop_last", given=given, allowed=allowed, fix="drop_last=False"))
    return found
