"""What has to be known of the data sets of Hugging Face's ``datasets``, which is not imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.data.dataset_facts import MapStyle, wrapped
from phalanx.errors import SpecError


def refuse_lists(dataset: Any, collate: Any, where: str = "job.data") -> None:
    """Refuse data of ``datasets`` or ``px.ParquetFiles`` with Python lists that torch's default collation would join.

    It takes the first number of each sample, then the second, and so on: as many tensors as a list has numbers.
    ``where`` the dataset stands in the job.

    Raises:
        SpecError: if ``dataset`` is such, and the job has no ``collate``.
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
