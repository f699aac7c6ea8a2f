"""A sampler of the user's own: the order of each epoch as a function of (seed, epoch)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.config.fields import is_whole
from phalanx.errors import Problem, SpecError

_INSTEAD = {
    "WeightedRandomSampler": "sampler=px.weighted(weights)",
    "DistributedSampler": "no sampler: each rank is given its share of every global batch",
    "RandomSampler": "shuffle=True",
    "SequentialSampler": "shuffle=False",
    "SubsetRandomSampler": "data=lambda: torch.utils.data.Subset(dataset, indices)",
    "BatchSampler": "batch=32, the global batch",
    "LengthGroupedSampler": "sampler=px.buckets(lengths)",
}
"""Samplers that people have, of torch and transformers → what to write in their place."""

_FUNCTION = "sampler=lambda seed, epoch: np.random.default_rng([seed, epoch]).permutation(1000)"


@dataclass(frozen=True, slots=True)
class Sampler:
    """The order of the samples in each epoch, by a function; ``job.sampler`` takes the function alone as well.

    It is called on every rank and has to give the same there, so it may depend on what it is called with, and on
    nothing else. Torch's, numpy's and Python's global generators are seeded by (seed, epoch) before.

    Attributes:
        function: ``function(seed, epoch)`` gives the indices of the epoch's samples in order: a list, array or
            one-dimensional tensor of whole numbers, as many in every epoch; they may be fewer or more than the data
            have. Global batches are cut from it in order.
        repeats: whether an index may come twice in an epoch.
        by_batch: call it as ``function(seed, epoch, batch)``, with the job's global batch, for orders that keep
            together what shall be in one.
        size: samples that the data must have; ``None``: any number.
    """

    function: Callable[..., Any]
    repeats: bool = False
    by_batch: bool = False
    size: int | None = None

    def __post_init__(self) -> None:
        problems = sampler_problems(self.function, "px.Sampler", 2 + (self.by_batch is True))
        for name in ("repeats", "by_batch"):
            if not isinstance(getattr(self, name), bool):
                given, fix = repr(getattr(self, name)), f"px.Sampler(function, {name}=True)"
                problems.append(Problem(where=f"px.Sampler.{name}", given=given, allowed="True or False", fix=fix))
        if self.size is not None and not is_whole(self.size, 1):
            given, allowed = repr(self.size), "a whole number, 1 or more, or None"
            fix = "px.Sampler(function, size=len(dataset))"
            problems.append(Problem(where="px.Sampler.size", given=given, allowed=allowed, fix=fix))
        if problems:
            raise SpecError(problems)

    @classmethod
    def of(cls, given: Callable[[int, int], Any] | Sampler) -> Sampler:
        """``given``, of which a function alone stands for one that gives no index twice."""
        return given if isinstance(given, Sampler) else cls(given)

    def indices(self, seed: int, epoch: int, batch: int) -> Any:
        """What the function gives for an epoch."""
        return self.function(seed, epoch, batch) if self.by_batch else self.function(seed, epoch)


def sampler_problems(given: Any, where: str = "job.sampler", takes: int = 2) -> list[Problem]:
    """What is wrong with ``job.sampler``, or the function in a ``Sampler``, which is called with so many arguments."""
    if given is None or isinstance(given, Sampler):
        return []
    if callable(given) and not isinstance(given, type):
        return _of_signature(given, where, takes)
    kinds = given if isinstance(given, type) else type(given)
    known = next((kind.__name__ for kind in kinds.__mro__ if kind.__name__ in _INSTEAD), "")
    name = f"the class {kinds.__name__}" if isinstance(given, type) else f"a {kinds.__name__}"
    allowed = "a function of (seed, epoch) that gives the epoch's indices, or a px.Sampler"
    if known:
        allowed += ": an object with a state of its own gives another order on each rank and after a resume"
    return [Problem(where=where, given=name, allowed=allowed, fix=_INSTEAD.get(known, _FUNCTION))]


def _of_signature(function: Callable[..., Any], where: str, takes: int) -> list[Problem]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of one that is not written in Python nothing is known
        return []
    try:
        signature.bind(*range(takes))
    except TypeError:
        allowed = f"one that can be called with {', '.join(('seed', 'epoch', 'batch')[:takes])}"
        return [Problem(where=where, given=f"a function of {signature}", allowed=allowed, fix=_FUNCTION)]
    return []


def beside_sampler(sampler: Any, shuffle: Any) -> list[Problem]:
    """What else orders samples where a sampler does."""
    if sampler is None or shuffle is None:
        return []
    given, allowed = f"shuffle={shuffle!r} with a sampler", "None: the sampler says the order"
    return [Problem(where="job.shuffle", given=given, allowed=allowed, fix="shuffle=None")]
