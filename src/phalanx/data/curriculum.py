"""Data that change with the optimizer step: one data set up to a step, another from it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch.utils.data import IterableDataset

from phalanx.config.batching import Sampler, batches
from phalanx.config.fields import held_in, steps_misfit
from phalanx.config.job import Job
from phalanx.data.changing_batches import ChangingBatchSampler, Stretch
from phalanx.data.dataset_facts import MapStyle
from phalanx.data.own_orders import EpochOrders, order_digest
from phalanx.data.part_index import PartIndex
from phalanx.data.token_batches import TokenBatchSampler, beside_token_batches, lengths_digest
from phalanx.errors import Problem, SpecError

_EXAMPLE = "px.Curriculum({0: short, 1000: long})"


@final
class Curriculum(MapStyle):
    """A map-style dataset of several sources, used one after the other by optimizer step.

    ``Job(data=lambda: px.Curriculum({0: short, 1000: long}), steps=...)``: steps 0 to 999 use ``short``, steps from
    1000 on use ``long``. Each source is shuffled by (seed, pass over it) and repeated as often as needed, as in a run
    over it alone. Samples may differ in length between sources, because a global batch never mixes two. A
    ``px.Mixture`` as source keeps its own order.

    Attributes:
        sources: first step → dataset. Indices count through all of the first, then the second and so on.
    """

    draws, keeps_orders = True, True

    def __init__(self, sources: Mapping[int, Any]) -> None:
        """Check and keep the sources.

        Args:
            sources: first optimizer step → map-style dataset (``__getitem__`` and ``__len__``); the first step is 0.

        Raises:
            SpecError: if steps do not begin with 0 or do not increase, or a source is no such dataset.
        """
        if problem := _problem(sources):
            given, allowed = problem
            raise SpecError([Problem(where="px.Curriculum.sources", given=given, allowed=allowed, fix=_EXAMPLE)])
        self.sources = dict(sources)
        self._firsts = tuple(self.sources)
        self._index = PartIndex(len(source) for source in self.sources.values())

    def __len__(self) -> int:
        """Return the samples of all sources together."""
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        first, place = self.locate(index)
        return self.sources[first][place]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the first step of the source that holds sample ``index``, and its place there.

        Raises:
            IndexError: if there is no such sample.
        """
        number, place = self._index.locate(index)
        return self._firsts[number], place

    def places(self) -> dict[int, range]:
        """Map first step to the indices of its source."""
        return {first: self._index.places(number) for number, first in enumerate(self._firsts)}


def _problem(sources: Any) -> tuple[str, str] | None:
    if not isinstance(sources, Mapping) or not sources:
        given = "no source" if isinstance(sources, Mapping) else f"a {type(sources).__name__}"
        return given, "step → dataset from that step on"
    if wrong := steps_misfit(list(sources), "a dataset"):
        return wrong
    for step, source in sources.items():
        reads = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if isinstance(source, IterableDataset | Curriculum) or not reads:
            return f"a {type(source).__name__} from step {step} on", "map-style data (__getitem__ and __len__)"
        if not len(source):
            return f"no sample from step {step} on", "1 sample or more"
    return None


def changing_sampler(dataset: Any, job: Job) -> ChangingBatchSampler | TokenBatchSampler | None:
    """Return the sampler of a job whose batch or data change with the step; ``None`` for other jobs.

    Raises:
        SpecError: if other keys of the job do not fit data that change.
    """
    changes = isinstance(dataset, Curriculum)
    if job.batch_tokens is not None:
        if changes:
            raise beside_token_batches(dataset)
        return TokenBatchSampler(job, len(dataset))
    if not changes and job.batch_ramp is None:
        return None
    if changes and (problems := _beside_curriculum(job)):
        raise SpecError(problems)
    parts = dataset.places() if changes else {0: range(len(dataset))}
    orders = {places.start: _order(dataset, first, job) for first, places in parts.items()}
    ramp = batches(job)
    stretches: list[Stretch] = []
    for first in sorted({*ramp, *parts}):
        places = held_in(first, parts)
        own = orders[places.start]
        batch = held_in(first, ramp)
        each = len(places) if own is None else own.length
        stretches.append(Stretch(first, batch, places.start, len(places), each))
    return ChangingBatchSampler(
        stretches,
        seed=job.seed,
        shuffle=job.shuffle is not False,
        drop_last=job.drop_last,
        orders={begin: own for begin, own in orders.items() if own is not None},
    )


def _order(dataset: Any, first: int, job: Job) -> EpochOrders | None:
    if not isinstance(dataset, Curriculum):
        return EpochOrders.of(job, len(dataset))
    source: Any = dataset.sources[first]
    size = len(source)
    own = source.sampler if isinstance(source, MapStyle) else None
    if own is None:
        return None
    return EpochOrders(sampler=own, seed=job.seed, size=size, batch=job.batch)


def _beside_curriculum(job: Job) -> list[Problem]:
    found: list[Problem] = []
    if job.sampler is not None:
        given, allowed = "a sampler with a px.Curriculum", "None: the curriculum says which samples are due in a step"
        found.append(Problem(where="job.sampler", given=given, allowed=allowed, fix="sampler=None"))
    if job.steps is None:
        given = f"epochs={job.epochs} with a px.Curriculum, whose data sets are gone through for so many steps each"
        found.append(Problem(where="job.epochs", given=given, allowed="steps", fix="steps=2000"))
    return found


def order_text(dataset: Any, job: Job, length: int | None) -> str | None:
    """Return a text that identifies the order of a job's data; ``None`` if (seed, epoch) does."""
    if not isinstance(dataset, Curriculum):
        return "; ".join(filter(None, (order_digest(job, length), lengths_digest(job, length)))) or None
    each: list[str] = []
    for first, source in dataset.sources.items():
        order = _order(dataset, first, job)
        each.append(f"from step {first} on {len(source)} samples{'' if order is None else f' ({order.text})'}")
    return ", ".join(each)


def may_repeat(dataset: Any, job: Job) -> bool:
    """Return True if a sampler may give a sample more than once in a pass."""
    if isinstance(dataset, Curriculum):
        inner = (source.sampler for source in dataset.sources.values() if isinstance(source, MapStyle))
        return any(own is not None and own.repeats for own in inner)
    return job.sampler is not None and Sampler.of(job.sampler).repeats
