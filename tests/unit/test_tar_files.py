"""Tar archives as datasets: which members are a sample, what its values are, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.errors import DataError, SpecError

pytestmark = pytest.mark.quick


def write(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
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
    write(tmp_path / "s-1.tar", PAIRS)
    write(tmp_path / "s-0.tar", [("a/001.CLS", b"7"), ("a/001.jpg", b"seven")])
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
    write(tmp_path / "s.tar", [(f"one.{extension}", content) for extension, content in members.items()])
    (sample,) = [px.TarFiles(tmp_path / "s.tar")[0]]
    assert [sample[key] for key in ("txt", "cls", "json", "png")] == ["grün", 12, {"a": [1]}, b"picture"]
    assert np.array_equal(sample["npy"], array)
    assert np.array_equal(sample["seg.npy"], array)
    assert torch.equal(sample["pt"]["x"], tensor)
    own = px.TarFiles(tmp_path / "s.tar", keys=["png", "seg.npy"], decode={"png": len, "npy": bytes})
    assert own[0] == {"__key__": "one", "png": 7, "seg.npy": members["seg.npy"]}


def test_only_the_keys_are_read(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [*PAIRS, ("a/003.cls", b"3"), ("a/003.webp", b"three")])
    data = px.TarFiles(tmp_path / "s.tar", keys=["cls"])
    assert [sorted(data[index]) for index in range(len(data))] == [["__key__", "cls"]] * 3
    assert data[2]["cls"] == 3


def test_entries_have_names_and_several_extensions(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [("1.png", b"1"), ("1.cls", b"3"), ("2.cls", b"4"), ("2.JPG", b"22"), ("2.png", b"")])
    keys = {"image": ("jpg", "png"), "label": "cls"}
    data = px.TarFiles(tmp_path / "s.tar", keys=keys)
    assert list(data) == [
        {"__key__": "1", "image": b"1", "label": 3},
        {"__key__": "2", "image": b"22", "label": 4},
    ]
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


def test_headers_are_read_once_until_the_archive_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    opens = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda *given, **how: (opened.append(how), opens(*given, **how))[1])
    path = tmp_path / "s.tar"
    write(path, PAIRS)
    opened.clear()
    assert [len(px.TarFiles(path)) for _ in range(2)] == [2, 2]
    assert len(opened) == 1
    write(path, PAIRS[:2])
    assert len(px.TarFiles(path)) == 1


def link(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for kind in (tarfile.REGTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo(f"a{int(kind)}.cls")
            member.type, member.linkname = kind, "a0.cls"
            archive.addfile(member, io.BytesIO())
    return path


def cut(path: Path, size: int) -> Path:
    write(path, PAIRS)
    path.write_bytes(path.read_bytes()[:size])
    return path


def joined(path: Path) -> Path:
    write(path, PAIRS)
    path.write_bytes(path.read_bytes() * 2)
    return path


def damaged(path: Path) -> Path:
    content = bytearray(write(path, PAIRS).read_bytes())
    content[1024:1100] = b"?" * 76  # in the second header
    path.write_bytes(content)
    return path


def compressed(path: Path) -> Path:
    content = write(path, PAIRS).read_bytes()
    path.write_bytes(gzip.compress(content))
    return path


def text(path: Path) -> Path:
    path.write_text("no archive\n" * 100)
    return path


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (compressed, {}, r"compressed by gzip.*\n +try: gunzip .*s.tar"),
        (text, {}, "archives that can be read"),
        (link, {}, "a1.cls is a link"),
        (damaged, {}, "cut off or damaged"),
        (joined, {}, "more after the end"),
        (lambda path: cut(path, 1500), {}, "cut off or damaged"),  # within a header
        (lambda path: cut(path, 514), {}, "archives that can be read"),  # within a member
        (lambda path: cut(path, 2 * 1024), {}, "cut off or damaged"),  # between two members
        (lambda path: write(path, [("README", b"")]), {}, "without a sample"),
        (lambda path: write(path, []), {"keys": ["cls"]}, "without a sample"),
        (lambda path: write(path, [*PAIRS, ("a/001.txt", b"")]), {}, "a/001.txt lies apart"),
        (lambda path: write(path, [*PAIRS, ("a/002.cls", b"2")]), {}, "a/002.cls twice"),
        (lambda path: write(path, PAIRS[:3]), {}, r"a/002 in .*, without cls .*(.|\n)*keys=\('jpg',\)"),
        (lambda path: write(path, [*PAIRS, ("a/002.txt", b"2")]), {}, "with txt, which the first sample does not"),
        (lambda path: write(path, PAIRS), {"keys": ("jpg", "json")}, "a/001 in .*, without json"),
        (lambda path: write(path, PAIRS), {"keys": "jpg"}, "px.TarFiles.keys: given 'jpg'"),
        (lambda path: write(path, PAIRS), {"keys": [".jpg"]}, "without the dot"),
        (lambda path: write(path, PAIRS), {"keys": ["jpg", "JPG"]}, "each once"),
        (lambda path: write(path, PAIRS), {"keys": {"a": ("jpg", "png"), "b": "png"}}, "each once"),
        (lambda path: write(path, PAIRS), {"keys": {"a": ()}}, "px.TarFiles.keys"),
        (lambda path: write(path, PAIRS), {"keys": {"a": ("gif", "png")}}, "without gif or png"),
        (lambda path: write(path, PAIRS), {"decode": {"png": len}}, "entries of the samples: jpg, cls"),
        (lambda path: write(path, PAIRS), {"decode": len}, "px.TarFiles.decode: given a builtin"),
        (lambda path: write(path, PAIRS), {"decode": {"jpg": "pil"}}, "'jpg': a str"),
        (lambda path: path.with_name("other-*.tar"), {}, "where no file is"),
    ],
)
def test_what_is_refused(made: Callable[[Path], Path], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        px.TarFiles(made(tmp_path / "s.tar"), **options)


def test_a_value_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [("a.cls", b"cat")])
    with pytest.raises(DataError, match=r"a\.cls in .*s\.tar cannot be decoded(.|\n)*decode=\{'cls': bytes\}"):
        px.TarFiles(tmp_path / "s.tar")[0]
    with pytest.raises(UnicodeDecodeError) as told:
        px.TarFiles(tmp_path / "s.tar", decode={"cls": lambda content: b"\xff".decode()})[0]
    assert "a.cls in " in told.value.__notes__[0]


def test_an_archive_that_became_shorter(tmp_path: Path) -> None:
    data = px.TarFiles(write(tmp_path / "s.tar", PAIRS))
    (tmp_path / "s.tar").write_bytes(b"")
    with pytest.raises(DataError, match="has become shorter"):
        data[1]
