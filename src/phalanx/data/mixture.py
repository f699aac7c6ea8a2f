"""Several data sets as one, with a fixed number of samples of each in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from phalanx.config.batching import Sampler
from phalanx.config.fields import is_number, is_whole
from phalanx.config.sync import split_by_weight
from phalanx.data.dataset_facts import MapStyle, draws
from phalanx.data.part_index import PartIndex
from phalanx.data.sampler import Permutation
from phalanx.errors import Problem, SpecError

_EXAMPLE = 'px.Mixture({"web": web, "books": books}, {"web": 0.7, "books": 0.3})'


@final
class Mixture(MapStyle):
    """A map-style dataset of several, with the sampler that mixes them: ``Job(data=..., sampler=mixture.sampler)``.

    An epoch has ``counts[name]`` samples of each source, in an order shuffled by (seed, epoch). Each source is read in
    its own order, and the next epoch continues at the end of the previous one: every sample of a source comes once
    before any comes again, over all epochs. With the job's ``drop_last`` the samples of an epoch that fill no batch are
    left out, and come again in the source's next pass. With ``samples`` a multiple of the batch, none is left out.

    Attributes:
        sources: name → dataset. Indices of the mixture count through all of the first, then the second and so on.
        counts: name → its samples in an epoch: ``samples`` by weight, rounded so that they add up.
        sampler: to be the job's.
    """

    example = "mixture"

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float], *, samples: int | None = None) -> None:
        """Check and keep the sources.

        Args:
            sources: map-style datasets (``__getitem__`` and ``__len__``), by name.
            weights: of each; only their ratios count.
            samples: in an epoch; ``None``: the samples of all sources together.

        Raises:
            SpecError: if sources are not such, or weights and samples do not fit them.
        """
        if problems := _problems(sources, weights, samples):
            raise SpecError(problems)
        self.sources = dict(sources)
        self.draws = any(map(draws, self.sources.values()))
        sizes = [len(source) for source in self.sources.values()]
        self._names, self._index = tuple(self.sources), PartIndex(sizes)
        total = len(self) if samples is None else samples
        counts = split_by_weight(total, [float(weights[name]) for name in self._names])
        if not all(counts):
            given = f"{total}, of which {dict(zip(self._names, counts, strict=True))}"
            allowed = "enough for a sample of each source"
            raise SpecError.of("px.Mixture.samples", given, allowed, "samples=100_000")
        self.counts = dict(zip(self._names, counts, strict=True))
        # an epoch that begins in one pass over a source and ends in the next may have a sample of each pass twice
        repeats = any(size % count for count, size in zip(counts, sizes, strict=True))
        self.sampler = Sampler(_MixedOrder(tuple(sizes), counts), repeats=repeats, size=len(self))

    def __len__(self) -> int:
        """Return the samples of all sources together."""
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        name, place = self.locate(index)
        return self.sources[name][place]

    def locate(self, index: int) -> tuple[str, int]:
        """Return the source that holds sample ``index``, and its place there.

        Raises:
            IndexError: if there is no such sample.
        """
        number, place = self._index.locate(index)
        return self._names[number], place


@dataclass(frozen=True, slots=True)
class _MixedOrder:
    """The order of a mixture: the size of each source, and its number of samples an epoch."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    def __call__(self, seed: int, epoch: int) -> np.ndarray:
        due: list[np.ndarray] = []
        begin = 0
        for number, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            due.append(begin + _due(size, range(epoch * count, (epoch + 1) * count), (seed, number)))
            begin += size
        order = np.concatenate(due)
        return order[Permutation.keyed(len(order), seed, epoch)(np.arange(len(order)))]


def _due(size: int, turns: range, key: tuple[int, ...]) -> np.ndarray:
    found: list[np.ndarray] = []
    turn = turns.start
    while turn < turns.stop:
        number, place = divmod(turn, size)
        count = min(size - place, turns.stop - turn)
        found.append(Permutation.keyed(size, *key, number)(np.arange(place, place + count)))
        turn += count
    return np.concatenate(found)


def _problems(sources: Any, weights: Any, samples: Any) -> list[Problem]:
    def problem(where: str, given: str, allowed: str, fix: str = _EXAMPLE) -> Problem:
        return Problem(where=f"px.Mixture.{where}", given=given, allowed=allowed, fix=fix)

    if not isinstance(sources, Mapping) or not sources:
        what = "no source" if isinstance(sources, Mapping) else f"a {type(sources).__name__}"
        return [problem("sources", what, "name → dataset")]
    found: list[Problem] = []
    for name, source in sources.items():
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            given = f"{name!r}: a {type(source).__name__}"
            found.append(problem("sources", given, "map-style data (__getitem__ and __len__)"))
        elif not len(source):
            found.append(problem("sources", f"{name!r} without a sample", "1 sample or more"))
    if not isinstance(weights, Mapping) or set(weights) != set(sources):
        given = (
            f"weights of {sorted(map(str, weights))}" if isinstance(weights, Mapping) else f"a {type(weights).__name__}"
        )
        found.append(problem("weights", given, f"one weight of each source: {sorted(map(str, sources))}"))
    elif bad := {name: weight for name, weight in weights.items() if not is_number(weight) or weight <= 0}:
        found.append(problem("weights", repr(bad), "finite numbers above 0; leave out a source that gives nothing"))
    if samples is not None and not is_whole(samples, 1):
        found.append(problem("samples", repr(samples), "a whole number, 1 or more, or None", "samples=100_000"))
    return found
