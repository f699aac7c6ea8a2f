"""Parquet files, read at any row, a row group at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, final

import numpy as np

from phalanx.config.batching import Sampler
from phalanx.config.fields import is_whole
from phalanx.data.dataset_facts import MapStyle, digest_of_bytes
from phalanx.data.file_names import Names, file_paths
from phalanx.data.part_index import PartIndex
from phalanx.data.sampler import Permutation
from phalanx.errors import DataError, MissingExtraError, Problem, SpecError

_EXAMPLE = 'px.ParquetFiles("train-*.parquet", columns=["text", "label"])'
_KEPT = 2  # row groups in memory, where shuffle_within does not say how many

Value = Callable[[int], Any]  # place in a row group → the value of a column there


@final
@dataclass(frozen=True, eq=False)
class ParquetFiles(MapStyle):
    """A map-style dataset of the rows of Parquet files, one file after another.

    A sample is a dict: column → value. Numbers and booleans are numpy's, of the column's own type; lists of them are
    arrays of one dimension; text is a str, and whatever else there is as pyarrow gives it to Python. A missing value is
    ``None``, which torch's default collation does not take.

    A file is read in row groups, as it was written. Each process keeps those that it used last, uncompressed. **In an
    order shuffled over all rows nearly every sample costs the reading of a whole row group.** ``shuffle_within`` reads
    a few at a time instead: row groups are shuffled, taken so many at a time, and the rows of these shuffled together,
    all by (seed, epoch). Give ``sampler=dataset.sampler`` to the job then.

    Attributes:
        files: a file, a pattern such as ``train-*.parquet``, whose files are taken in the order of their names, or a
            list of both.
        columns: that are read; ``None``: all. Others cost nothing.
        decode: column → a function of the value that gives another, such as that of an image's bytes. It may draw from
            Python's, numpy's and torch's global generators, which are seeded for each sample.
        shuffle_within: row groups whose rows are shuffled together, and that a process keeps in memory; ``None``: rows
            are read in any order, and 2 row groups kept.
        sampler: with ``shuffle_within``, to be the job's; else ``None``.

    Raises:
        MissingExtraError: if pyarrow is not installed.
        SpecError: if an option is wrong, a file is not there, is no Parquet file or has other columns than the first,
            or there is no row.
    """

    files: Names
    _: KW_ONLY
    columns: Sequence[str] | None = None
    decode: Mapping[str, Callable[[Any], Any]] | None = None
    shuffle_within: int | None = None
    _names: tuple[str, ...] = field(init=False, repr=False)  # of the columns
    _groups: tuple[tuple[str, int], ...] = field(init=False, repr=False)  # file, and number of the row group in it
    _index: PartIndex = field(init=False, repr=False)  # of rows in row groups
    _kept: _Kept = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise SpecError(problems)
        first, groups, rows, footers = None, list[tuple[str, int]](), list[int](), list[bytes]()
        for path in file_paths(self.files, "px.ParquetFiles.files", _EXAMPLE):
            columns, sizes = _looked_at(path, self.columns)
            first = first or (path, columns)
            if columns != first[1]:
                raise _problem(_difference(path, columns, *first), "files with the same columns, of the same types")
            groups += [(path, number) for number, size in enumerate(sizes) if size]
            rows += filter(None, sizes)
            footers.append(_footer(path))
        assert first is not None
        if not rows:
            raise _problem(f"{first[0]}, without a row", "1 row or more")
        if unread := [name for name in self.decode or {} if name not in first[1]]:
            raise _problem(repr(unread[0]), f"columns that are read: {', '.join(first[1])}", "decode")
        if self.shuffle_within is not None:
            order = _GroupedOrder(tuple(rows), self.shuffle_within)
            object.__setattr__(self, "sampler", Sampler(order, size=sum(rows)))
        object.__setattr__(self, "_names", tuple(first[1]))
        object.__setattr__(self, "_groups", tuple(groups))
        object.__setattr__(self, "_index", PartIndex(rows, "row"))
        object.__setattr__(self, "_kept", _Kept(self.shuffle_within or _KEPT))
        object.__setattr__(self, "draws", bool(self.decode))
        object.__setattr__(self, "files_digest", digest_of_bytes(footers))
        lists = (name for name, kind in first[1].items() if _is_list(kind) and not _is_number(kind.value_type))
        object.__setattr__(self, "lists", tuple(name for name in lists if name not in (self.decode or {})))

    def __len__(self) -> int:
        """Return the rows of all files."""
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the row ``index``, 0 is the first of the first file.

        Raises:
            IndexError: if there is no such row.
            DataError: if the file has changed its number of rows, or is damaged.
        """
        number, place = self._index.locate(index, from_end=True)
        values = self._kept.get(number)
        if values is None:
            values = _row_group(*self._groups[number], self._names, len(self._index.places(number)))
            self._kept.put(number, values)
        sample = {name: value(place) for name, value in zip(self._names, values, strict=True)}
        for name, function in (self.decode or {}).items():
            try:
                sample[name] = function(sample[name])
            except Exception as error:
                error.add_note(f"while decoding {name} of row {place} in {self._groups[number][0]}")
                raise
        return sample


@dataclass(frozen=True, slots=True)
class _GroupedOrder:
    """The order that reads ``together`` row groups of ``rows`` rows at a time."""

    rows: tuple[int, ...]
    together: int

    def __call__(self, seed: int, epoch: int) -> np.ndarray:
        ends: list[int] = np.cumsum(self.rows).tolist()
        groups = _shuffled(np.arange(len(self.rows)), seed, epoch)
        cuts = [*range(0, len(groups), self.together), len(groups)]
        found: list[np.ndarray] = []
        for start, stop in pairwise(cuts):
            ranges = [np.arange(ends[group] - self.rows[group], ends[group]) for group in groups[start:stop].tolist()]
            found.append(_shuffled(np.concatenate(ranges), seed, epoch, start))
        return np.concatenate(found)


def _shuffled(values: np.ndarray, *key: int) -> np.ndarray:
    return values[Permutation.keyed(len(values), *key)(np.arange(len(values)))]


class _Kept:
    """The values of recently used row groups; pickled, it is empty."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[int, list[Value]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, (self._most,)

    def get(self, number: int) -> list[Value] | None:
        if number in self._values:
            self._values.move_to_end(number)
        return self._values.get(number)

    def put(self, number: int, values: list[Value]) -> None:
        self._values[number] = values
        while len(self._values) > self._most:
            self._values.popitem(last=False)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet") from None
    return pyarrow


def _looked_at(path: str, wanted: Sequence[str] | None) -> tuple[dict[str, Any], list[int]]:
    pa = _pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise _problem(f"{path}: {error}", "Parquet files that can be read") from error
    types = dict(zip(schema.names, schema.types, strict=True))
    if missing := [name for name in wanted or () if name not in types]:
        raise _problem(f"{missing[0]!r}, which {path} does not have", f"columns of {', '.join(types)}", "columns")
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return {name: types[name] for name in wanted or types}, rows


def _footer(path: str) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - 8)  # the length of it, and 4 letters
        length = int.from_bytes(file.read(4), "little")
        file.seek(size - 8 - length)
        return size.to_bytes(8, "little") + file.read(length)


def _row_group(path: str, number: int, names: tuple[str, ...], rows: int) -> list[Value]:
    pa = _pyarrow()
    try:
        # No threads: those of pyarrow do not live on in the processes that load data.
        with pa.parquet.ParquetFile(path, pre_buffer=False) as file:
            table = file.read_row_group(number, columns=list(names), use_threads=False)
        columns = [table.column(name) for name in names]
    except (OSError, IndexError, KeyError, pa.ArrowException) as error:
        raise DataError(f"row group {number} of {path} cannot be read: {error}\n    try: the file as it was") from error
    if len(table) != rows:
        raise DataError(f"row group {number} of {path} had {rows} rows, and has {len(table)} now")
    return [_values(column) for column in columns]


def _values(column: Any) -> Value:
    kind, whole = column.type, column.combine_chunks()
    if _is_number(kind) and not whole.null_count:
        return whole.to_numpy(zero_copy_only=False).__getitem__
    if _is_list(kind) and _is_number(kind.value_type):
        return lambda place: _array(whole[place])
    return lambda place: whole[place].as_py()


def _array(scalar: Any) -> Any:
    values = scalar.values
    if values is None or values.null_count:
        return scalar.as_py()
    return np.array(values.to_numpy(zero_copy_only=False))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _difference(path: str, columns: dict[str, Any], first: str, others: dict[str, Any]) -> str:
    name = next(one for one in [*others, *columns] if columns.get(one) != others.get(one))
    here, there = (str(of.get(name, "not there")) for of in (columns, others))
    return f"{path}, where column {name} is {here}, and {there} in {first}"


def _problem(given: str, allowed: str, name: str = "files", fix: str = _EXAMPLE) -> SpecError:
    return SpecError.of(f"px.ParquetFiles.{name}", given, allowed, fix)


def _problems(files: ParquetFiles) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, given: str, allowed: str, fix: str) -> None:
        found.append(Problem(where=f"px.ParquetFiles.{name}", given=given, allowed=allowed, fix=fix))

    columns, decode = files.columns, files.decode
    if columns is not None:
        listed = isinstance(columns, Sequence) and not isinstance(columns, str)
        if not listed or not columns or not all(isinstance(name, str) for name in columns):
            wrong("columns", repr(columns), "names of columns, or None for all", 'columns=["text", "label"]')
        elif len(set(columns)) < len(columns):
            wrong("columns", repr(columns), "each column once", 'columns=["text", "label"]')
    if decode is not None and (not isinstance(decode, Mapping) or not all(map(callable, decode.values()))):
        wrong("decode", repr(decode), "column → function of its value", 'decode={"image": decode_image}')
    if files.shuffle_within is not None and not is_whole(files.shuffle_within, 1):
        wrong("shuffle_within", repr(files.shuffle_within), "a whole number of row groups, or None", "shuffle_within=4")
    return found
