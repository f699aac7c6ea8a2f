"""Parquet files as datasets: which values rows have, the order by row groups, and what is refused."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import phalanx as px
from phalanx.data import Lane, Loader
from phalanx.errors import DataError, MissingExtraError, SpecError

pytestmark = pytest.mark.quick


def write(path: Path, rows: int = 10, group: int = 4, begin: int = 0, **columns: Any) -> Path:
    """Rows numbered in column ``x``, in row groups of so many."""
    x = np.arange(begin, begin + rows, dtype=np.int32)
    pq.write_table(pa.table({"x": x, **columns}), path, row_group_size=group)
    return path


def test_rows_of_all_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "p-1.parquet", rows=3, begin=10)
    write(tmp_path / "p-0.parquet", rows=10)
    write(tmp_path / "p-2.parquet", rows=0)
    data = px.ParquetFiles(tmp_path / "p-*.parquet")
    assert [data[index]["x"] for index in range(len(data))] == list(range(13))
    assert (data[-1]["x"], pickle.loads(pickle.dumps(data))[4]["x"], data.sampler) == (12, 4, None)
    with pytest.raises(IndexError):
        data[13]


def test_values_by_type(tmp_path: Path) -> None:
    columns = {
        "float": pa.array([0.5, 1.5], pa.float32()),
        "bool": [True, False],
        "missing": [1, None],
        "text": ["a", "b"],
        "bytes": [b"a", b"b"],
        "list": [[1.0, 2.0], [3.0]],
        "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
        "holes": [[1, None], None],
        "nested": [[[1]], [[2], [3]]],
        "struct": [{"a": 1}, {"a": 2}],
    }
    write(tmp_path / "p.parquet", rows=2, **columns)
    first, second = (px.ParquetFiles(tmp_path / "p.parquet")[index] for index in (0, 1))
    assert (first["float"].dtype, first["x"].dtype, first["bool"].dtype) == (np.float32, np.int32, np.bool_)
    assert [second[name] for name in ("missing", "text", "bytes", "holes")] == [None, "b", b"b", None]
    assert (first["list"].tolist(), second["list"].tolist(), first["list"].dtype) == ([1.0, 2.0], [3.0], np.float64)
    assert (second["fixed"].tolist(), second["fixed"].dtype) == ([3, 4], np.int16)
    assert (first["holes"], second["nested"], second["struct"]) == ([1, None], [[2], [3]], {"a": 2})
    first["list"][0] = 7.0  # a copy: torch warns of arrays that cannot be written to
    batch = torch.utils.data.default_collate([px.ParquetFiles(tmp_path / "p.parquet", columns=["x", "fixed"])[0]])
    assert (batch["x"].dtype, batch["fixed"].dtype, list(batch)) == (torch.int32, torch.int16, ["x", "fixed"])


def test_decode_gives_another_value(tmp_path: Path) -> None:
    write(tmp_path / "p.parquet", image=[{"bytes": b"x" * size} for size in range(10)])
    data = px.ParquetFiles(tmp_path / "p.parquet", decode={"image": lambda image: len(image["bytes"])})
    assert data[7] == {"x": 7, "image": 7}
    assert (data.draws, px.ParquetFiles(tmp_path / "p.parquet").draws) == (True, False)


def orders(data: px.ParquetFiles, epoch: int, seed: int = 0) -> list[int]:
    assert data.sampler is not None
    return data.sampler.indices(seed, epoch, 4).tolist()


def test_an_order_reads_row_groups_so_many_at_a_time(tmp_path: Path) -> None:
    data = px.ParquetFiles(write(tmp_path / "p.parquet", rows=23), shuffle_within=2)  # 5 groups of 4, one of 3
    order = orders(data, 0)
    assert sorted(order) == list(range(23))
    assert order != sorted(order)
    cuts, seen = [], list[int]()
    for row in order:
        if row // 4 not in seen:
            seen.append(row // 4)
        cuts.append(len(seen))
    assert cuts[: 4 + 4 - 1][-1] <= 2  # the third group begins when the first two have ended
    assert order == orders(px.ParquetFiles(tmp_path / "p.parquet", shuffle_within=2), 0)
    assert len({tuple(orders(data, epoch, seed)) for epoch in (0, 1) for seed in (0, 1)}) == 4
    firsts = {tuple(sorted({row // 4 for row in orders(data, epoch)[:4]})) for epoch in range(20)}
    assert len(firsts) > 5  # groups are shuffled too


def test_in_that_order_each_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reads = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, number, **how: (read.append(number), reads(self, number, **how))[1],
    )
    data = px.ParquetFiles(write(tmp_path / "p.parquet", rows=40), shuffle_within=3)
    for row in orders(data, 0):
        assert data[row]["x"] == row
    assert sorted(read) == list(range(10))


def loader(data: px.ParquetFiles, **how: Any) -> Loader:
    given: dict[str, Any] = {"model": torch.nn.Module, "loss": min, "optimizer": min, "batch": 4, "epochs": 1, **how}
    return Loader(data, px.Job(data=lambda: data, **given), Lane(), micro=None)


def test_its_order_has_to_be_the_jobs(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet")
    data, again = (px.ParquetFiles(path, shuffle_within=2) for _ in range(2))
    assert loader(data, sampler=again.sampler).epoch_samples == 10
    with pytest.raises(SpecError, match=r"none with a px\.ParquetFiles(.|\n)*sampler=dataset\.sampler"):
        loader(data)
    subset: Any = torch.utils.data.Subset(data, [1, 2])
    for other in (subset, px.Mixture({"a": data}, {"a": 1.0})):
        with pytest.raises(SpecError, match=r"px\.ParquetFiles with an order of its own, within a"):
            loader(other, sampler=getattr(other, "sampler", None))


def test_lists_that_are_no_arrays_need_a_collate(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", words=[["a", "b"]] * 10)
    with pytest.raises(SpecError, match=r"columns of lists that are not of numbers \(words\)"):
        loader(px.ParquetFiles(path))
    assert loader(px.ParquetFiles(path, columns=["x"])).length == 10
    assert loader(px.ParquetFiles(path, decode={"words": len})).length == 10
    assert loader(px.ParquetFiles(path), collate=list).length == 10


def text(path: Path) -> Path:
    path.write_text("no Parquet")
    return path


def two(path: Path, **columns: Any) -> list[Path]:
    return [write(path), write(path.with_name("second.parquet"), **columns)]


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (text, {}, "Parquet files that can be read"),
        (lambda path: path, {}, "where no file is"),
        (lambda path: write(path, rows=0), {}, "without a row"),
        (lambda path: two(path, y=[1] * 10), {}, "where column y is int64, and not there in"),
        (write, {"columns": ["y"]}, "'y', which .* does not have; allowed: columns of x"),
        (write, {"columns": "x"}, "px.ParquetFiles.columns: given 'x'"),
        (write, {"columns": ["x", "x"]}, "each column once"),
        (write, {"decode": {"y": len}}, "columns that are read: x"),
        (write, {"decode": {"x": 1}}, "column → function"),
        (write, {"shuffle_within": 0}, "a whole number of row groups"),
    ],
)
def test_what_is_refused(made: Callable[[Path], Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        px.ParquetFiles(made(tmp_path / "p.parquet"), **options)


def test_files_may_differ_in_columns_that_are_not_read(tmp_path: Path) -> None:
    assert len(px.ParquetFiles(two(tmp_path / "p.parquet", y=[1] * 10), columns=["x"])) == 20


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    data = px.ParquetFiles(write(tmp_path / "p.parquet"))
    write(tmp_path / "p.parquet", group=2)
    with pytest.raises(DataError, match="had 4 rows, and has 2 now"):
        data[0]
    (tmp_path / "p.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        data[0]


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "p.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"phalanx\[parquet\]"):
        px.ParquetFiles(path)
