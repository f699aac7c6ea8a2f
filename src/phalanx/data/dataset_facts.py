"""Facts that a data set declares: whether its samples draw random numbers, and the order it must be read in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import Dataset, Subset, TensorDataset

from phalanx.config.batching import Sampler
from phalanx.errors import SpecError

if TYPE_CHECKING:
    from phalanx.data.sampler import EpochSeeds


class MapStyle(Dataset[Any]):
    """Base class of Phalanx's map-style data sets, with facts that other data sets do not declare.

    Attributes:
        draws: whether samples may draw random numbers, each from its own seed.
        sampler: the order required of the job; ``None``: any order.
        keeps_orders: whether inner data sets are read in their own orders.
        lists: entries of a sample that are Python lists, which torch's default collation would transpose.
        files_digest: identifies the files read; empty if unknown.
        example: the text for such a dataset in a line to copy.
    """

    draws: bool = False
    sampler: Sampler | None = None
    keeps_orders: ClassVar[bool] = False
    lists: tuple[str, ...] = ()
    files_digest: str = ""
    example: ClassVar[str] = "dataset"


class DrawsTogether(MapStyle, ABC):
    """Base class of data sets that draw for several samples at once, from seeds they choose themselves."""

    @abstractmethod
    def seeded(self, seeds: EpochSeeds) -> None:
        """Take the seeds of the next epoch to be read."""


def draws(dataset: Any) -> bool:
    """Return True if samples may draw random numbers; unknown data sets count as drawing."""
    if type(dataset) is Subset:
        return draws(dataset.dataset)
    if isinstance(dataset, MapStyle):
        return dataset.draws
    return type(dataset) not in (TensorDataset, list, tuple, range)


def wrapped(dataset: Any) -> list[Any]:
    """Return the data sets inside ``px.Mixture``, ``px.Curriculum``, torch's ``Subset`` and ``ConcatDataset``."""
    if isinstance(dataset, MapStyle) and isinstance(sources := getattr(dataset, "sources", None), Mapping):
        return list(sources.values())
    if not type(dataset).__module__.startswith("torch.utils.data."):
        return []
    inner = getattr(dataset, "dataset", None)
    return [*getattr(dataset, "datasets", ()), *([] if inner is None else [inner])]


def files_digest(dataset: Any) -> str:
    """Return a text that identifies the files a dataset reads, directly or through others; empty if unknown."""
    own = dataset.files_digest if isinstance(dataset, MapStyle) else ""
    return " ".join(filter(None, [own, *map(files_digest, wrapped(dataset))]))


def digest_of_bytes(pieces: Iterable[bytes]) -> str:
    """Return a digest of ``pieces`` in order, 16 hexadecimal digits."""
    digest = sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()[:16]


def refuse_other_order(dataset: Any, sampler: Any) -> None:
    """Refuse a job whose data require another order than the job's.

    Raises:
        SpecError: if ``sampler``, the job's, is another, or an outer data set has another order.
    """
    own = dataset.sampler if isinstance(dataset, MapStyle) else None
    if own is not None and sampler != own:
        given = f"{'none' if sampler is None else 'another'} with a px.{type(dataset).__name__} as data"
        allowed = "the sampler of the data, which says what is in an epoch and in which order"
        raise SpecError.of("job.sampler", given, allowed, f"sampler={dataset.example}.sampler")
    for inner in _within(dataset):
        if isinstance(inner, MapStyle) and inner.sampler is not None:
            given = f"a px.{type(inner).__name__} with an order of its own, within a {type(dataset).__name__}"
            allowed = "it alone: its order is lost where another data set reads it"
            raise SpecError.of("job.data", given, allowed, f"data=lambda: {inner.example}")


def _within(dataset: Any) -> list[Any]:
    keeps = isinstance(dataset, MapStyle) and dataset.keeps_orders
    read = wrapped(dataset)
    return ([] if keeps else read) + [deeper for one in read for deeper in _within(one)]


def refuse_lists(dataset: Any, collate: Any, where: str = "job.data") -> None:
    """Refuse data of ``datasets`` or ``px.ParquetFiles`` with Python lists, unless the job has a ``collate``.

    torch's default collation takes the first number of each sample, then the second: it makes a tensor for each number
    in a list. ``where`` is the dataset's key in the job.

    Raises:
        SpecError: if ``dataset`` has such lists, and the job has no ``collate``.
    """
    for part in wrapped(dataset):
        refuse_lists(part, collate, where)
    kind = type(dataset)
    if collate is None and isinstance(dataset, MapStyle) and dataset.lists:
        given = f"a px.{kind.__name__} with columns of lists that are not of numbers ({', '.join(dataset.lists)})"
        allowed = (
            "a job with a collate, or a decode for the column: torch's own collation would turn lists on their side"
        )
        raise SpecError.of(where, given, allowed, f"decode={{{dataset.lists[0]!r}: function}}")
    told = getattr(dataset, "format", None)  # of a table; a stream keeps something of it
    form = told.get("type") if isinstance(told, Mapping) else getattr(dataset, "_formatting", None)
    if collate is not None or not kind.__module__.startswith("datasets.") or form is not None:
        return
    features = getattr(dataset, "features", None)
    lists = [name for name, feature in features.items() if _is_list(feature)] if isinstance(features, Mapping) else []
    if lists:
        given = f"a datasets.{kind.__name__} without a format, with columns of lists ({', '.join(lists)})"
        allowed = "one that gives tensors, or a job with a collate: torch's own would turn lists on their side"
        fix = f'{where.removeprefix("job.")}=lambda: dataset.with_format("torch")'
        raise SpecError.of(where, given, allowed, fix)


def _is_list(feature: Any) -> bool:
    return isinstance(feature, list) or type(feature).__name__ in ("List", "LargeList", "Sequence")
