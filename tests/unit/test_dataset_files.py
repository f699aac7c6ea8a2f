"""Parquet files and tar archives as datasets: which values samples have, in what order, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import phalanx as px
from law_rows import in_one_test
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


def no_parquet(path: Path) -> Path:
    path.write_text("no Parquet")
    return path


def two(path: Path, **columns: Any) -> list[Path]:
    return [write(path), write(path.with_name("second.parquet"), **columns)]


@in_one_test(
    ("made", "options", "message"),
    [
        (no_parquet, {}, "Parquet files that can be read"),
        (lambda path: write(path, rows=0), {}, "without a row"),
        (lambda path: two(path, y=[1] * 10), {}, "where column y is int64, and not there in"),
        (write, {"columns": ["y"]}, "'y', which .* does not have; allowed: columns of x"),
        (write, {"columns": "x"}, "px.ParquetFiles.columns: given 'x'"),
        (write, {"decode": {"y": len}}, "columns that are read: x"),
        (write, {"shuffle_within": 0}, "a whole number of row groups"),
    ],
)
def test_what_is_refused(made: Callable[[Path], Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        px.ParquetFiles(made(tmp_path / "p.parquet"), **options)


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


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """An archive of these names and contents."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def saved(save: Callable[[Any, Any], Any], value: Any, *, turned: bool = False) -> bytes:
    file = io.BytesIO()
    save(*((file, value) if not turned else (value, file)))
    return file.getvalue()


PAIRS = [("a/001.jpg", b"one"), ("a/001.cls", b"1\n"), ("a/002.jpg", b"two"), ("a/002.cls", b"2")]


def test_members_that_share_a_name_are_a_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "s-1.tar", PAIRS)
    write_tar(tmp_path / "s-0.tar", [("a/001.CLS", b"7"), ("a/001.jpg", b"seven")])
    data = px.TarFiles(tmp_path / "s-*.tar")
    assert [data[index] for index in range(3)] == [
        {"__key__": "a/001", "cls": 7, "jpg": b"seven"},  # of the first file
        {"__key__": "a/001", "cls": 1, "jpg": b"one"},
        {"__key__": "a/002", "cls": 2, "jpg": b"two"},
    ]
    assert (len(data), data[-1]["jpg"], pickle.loads(pickle.dumps(data))[1]["jpg"]) == (3, b"two", b"one")
    with pytest.raises(IndexError):
        data[3]


def test_values_are_by_extension(tmp_path: Path) -> None:
    array, tensor = np.arange(6.0).reshape(2, 3), torch.arange(3)
    members = {
        "txt": "grün".encode(),
        "cls": b"12",
        "json": json.dumps({"a": [1]}).encode(),
        "npy": saved(np.save, array),
        "pt": saved(torch.save, {"x": tensor}, turned=True),
        "seg.npy": saved(np.save, array),
        "png": b"picture",
    }
    write_tar(tmp_path / "s.tar", [(f"one.{extension}", content) for extension, content in members.items()])
    (sample,) = [px.TarFiles(tmp_path / "s.tar")[0]]
    assert [sample[key] for key in ("txt", "cls", "json", "png")] == ["grün", 12, {"a": [1]}, b"picture"]
    assert np.array_equal(sample["npy"], array)
    assert np.array_equal(sample["seg.npy"], array)
    assert torch.equal(sample["pt"]["x"], tensor)
    own = px.TarFiles(tmp_path / "s.tar", keys=["png", "seg.npy"], decode={"png": len, "npy": bytes})
    assert own[0] == {"__key__": "one", "png": 7, "seg.npy": members["seg.npy"]}


def test_entries_have_names_and_several_extensions(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [("1.png", b"1"), ("1.cls", b"3"), ("2.cls", b"4"), ("2.JPG", b"22"), ("2.png", b"")])
    keys = {"image": ("jpg", "png"), "label": "cls"}
    data = px.TarFiles(tmp_path / "s.tar", keys=keys)
    assert list(data) == [{"__key__": "1", "image": b"1", "label": 3}, {"__key__": "2", "image": b"22", "label": 4}]
    data = px.TarFiles(tmp_path / "s.tar", keys=keys, decode={"image": len, "cls": bytes})
    assert (data[1]["image"], data[1]["label"]) == (2, b"4")
    with pytest.raises(SpecError, match="'png'; allowed: entries of the samples: image, label, or"):
        px.TarFiles(tmp_path / "s.tar", keys=keys, decode={"png": len})  # not all images are


def test_what_is_no_member_of_a_sample_is_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        folder = tarfile.TarInfo("a.b")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("README", "a/._001.jpg", "a.b/001.cls", "long/" + "x" * 300 + ".cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"5"))
    data = px.TarFiles(tmp_path / "s.tar")
    assert [data[index] for index in range(len(data))] == [
        {"__key__": "a.b/001", "cls": 5},
        {"__key__": "long/" + "x" * 300, "cls": 5},
    ]


def tar_link(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for kind in (tarfile.REGTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo(f"a{int(kind)}.cls")
            member.type, member.linkname = kind, "a0.cls"
            archive.addfile(member, io.BytesIO())
    return path


def tar_cut(path: Path, size: int) -> Path:
    write_tar(path, PAIRS)
    path.write_bytes(path.read_bytes()[:size])
    return path


def joined(path: Path) -> Path:
    write_tar(path, PAIRS)
    path.write_bytes(path.read_bytes() * 2)
    return path


def damaged(path: Path) -> Path:
    content = bytearray(write_tar(path, PAIRS).read_bytes())
    content[1024:1100] = b"?" * 76  # in the second header
    path.write_bytes(content)
    return path


def compressed(path: Path) -> Path:
    content = write_tar(path, PAIRS).read_bytes()
    path.write_bytes(gzip.compress(content))
    return path


def tar_text(path: Path) -> Path:
    path.write_text("no archive\n" * 100)
    return path


@in_one_test(
    ("made", "options", "message"),
    [
        (compressed, {}, r"compressed by gzip.*\n +try: gunzip .*s.tar"),
        (tar_text, {}, "archives that can be read"),
        (tar_link, {}, "a1.cls is a link"),
        (damaged, {}, "cut off or damaged"),
        (joined, {}, "more after the end"),
        (lambda path: tar_cut(path, 1500), {}, "cut off or damaged"),  # within a header
        (lambda path: tar_cut(path, 514), {}, "archives that can be read"),  # within a member
        (lambda path: write_tar(path, [("README", b"")]), {}, "without a sample"),
        (lambda path: write_tar(path, [*PAIRS, ("a/001.txt", b"")]), {}, "a/001.txt lies apart"),
        (lambda path: write_tar(path, [*PAIRS, ("a/002.cls", b"2")]), {}, "a/002.cls twice"),
        (lambda path: write_tar(path, PAIRS[:3]), {}, r"a/002 in .*, without cls .*(.|\n)*keys=\('jpg',\)"),
        (lambda path: write_tar(path, [*PAIRS, ("a/002.txt", b"2")]), {}, "with txt, which the first sample does not"),
        (lambda path: write_tar(path, PAIRS), {"keys": ("jpg", "json")}, "a/001 in .*, without json"),
        (lambda path: write_tar(path, PAIRS), {"keys": "jpg"}, "px.TarFiles.keys: given 'jpg'"),
        (lambda path: write_tar(path, PAIRS), {"keys": [".jpg"]}, "without the dot"),
        (lambda path: write_tar(path, PAIRS), {"keys": {"a": ("jpg", "png"), "b": "png"}}, "each once"),
        (lambda path: write_tar(path, PAIRS), {"keys": {"a": ("gif", "png")}}, "without gif or png"),
        (lambda path: write_tar(path, PAIRS), {"decode": {"png": len}}, "entries of the samples: jpg, cls"),
        (lambda path: write_tar(path, PAIRS), {"decode": {"jpg": "pil"}}, "'jpg': a str"),
    ],
)
def test_what_is_no_archive_is_refused(
    made: Callable[[Path], Path], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        px.TarFiles(made(tmp_path / "s.tar"), **options)


def test_a_value_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [("a.cls", b"cat")])
    with pytest.raises(DataError, match=r"a\.cls in .*s\.tar cannot be decoded(.|\n)*decode=\{'cls': bytes\}"):
        px.TarFiles(tmp_path / "s.tar")[0]
    with pytest.raises(UnicodeDecodeError) as told:
        px.TarFiles(tmp_path / "s.tar", decode={"cls": lambda content: b"\xff".decode()})[0]
    assert "a.cls in " in told.value.__notes__[0]
