"""Files of a run folder, through no link; documents are a value or one error; texts that stand for a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from law_rows import in_one_test
from phalanx.cli.options import duration
from phalanx.config import Plan, RunSpec
from phalanx.data.saved_batch import SavedBatch
from phalanx.errors import SpecError, is_out_of_memory
from phalanx.files import json_value, open_plain, read_json, read_text, read_toml, replace_text
from phalanx.units import parse_duration, show_number, visible

pytestmark = pytest.mark.quick


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def bound(path: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)
        listener.bind(path.name)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a symbolic link": lambda path, victim: path.symlink_to(victim),
    "a folder": lambda path, victim: path.mkdir(),
    "a FIFO": fifo,
    "a socket": bound,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str, flags: int) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    KINDS[kind](tmp_path / "f", victim)
    with pytest.raises(SpecError, match=f"which is {kind}; allowed: in a run folder, plain files only"):
        os.close(open_plain(tmp_path / "f", flags))
    assert victim.read_text() == "mine"


def test_a_link_to_the_folder_is_followed_where_the_user_has_named_it(tmp_path: Path) -> None:
    (tmp_path / "there" / "ledger").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "there")
    for path, below in ((tmp_path / "run" / "a", 1), (tmp_path / "run" / "ledger" / "b", 2)):
        os.close(open_plain(path, os.O_WRONLY | os.O_CREAT, below=below))
    with pytest.raises(SpecError, match="run, which is a symbolic link"):
        open_plain(tmp_path / "run" / "a", os.O_RDONLY, below=2)


def test_a_second_name_is_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    os.link(tmp_path / "a", tmp_path / "b")
    assert read_text(tmp_path / "b", where="b", fix="") == "mine"
    with pytest.raises(SpecError, match="hard link"):
        open_plain(tmp_path / "b", os.O_WRONLY)


def test_a_file_is_replaced_whole_and_a_link_in_its_place_with_it(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "f"
    victim.write_text("mine")
    path.symlink_to(victim)
    (tmp_path / f".f.{os.getpid()}").symlink_to(victim)
    replace_text(path, "new")
    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("new", False, "mine")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["f", "victim"]


@in_one_test(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "which is no text: byte 0 is 0xff"),
        (b"a = " + b"[" * 5000, "nested too deeply|Invalid"),
        (b"a = " + b"9" * 5000, "digits|integer"),
        (b"x" * 300, "longer than 200 bytes"),
    ],
)
def test_a_toml_file_that_cannot_be(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "f.toml").write_bytes(content)
    if "longer" in words:
        with pytest.raises(SpecError, match=words):
            read_text(tmp_path / "f.toml", where="f", fix="", most=200)
        return
    with pytest.raises(SpecError, match=words) as caught:
        read_toml(tmp_path / "f.toml", where="plan", fix="dp = 2")
    assert caught.value.problems[0].fix == "dp = 2"


@in_one_test("text", ["", "{", "[" * 100_000, "NaN", "-Infinity", "1e999", '{"a": 1, "a": 2}', "9" * 5000])
def test_json_that_cannot_be(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        json_value(text)
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(SpecError, match="no JSON"):
        read_json(tmp_path / "f.json", where="f", fix="")


def test_what_would_steer_a_terminal_is_shown_as_text() -> None:
    assert visible("plain\n\ttext, Ünïcode 漢字") == "plain\n\ttext, Ünïcode 漢字"
    assert visible("\x1b[2J \x9b31m \r \u202e \u2066 \ud800 \x00") == (
        "\\x1b[2J \\x9b31m \\x0d \\u202e \\u2066 \\ud800 \\x00"
    )


@pytest.mark.parametrize("linked", ["accidents", "accidents/step-00000000", "accidents/step-00000000/accident.json"])
def test_no_link_is_written_or_read_through(linked: str, tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", Path("run", linked)
    link.parent.mkdir(parents=True)
    victim.write_text("mine") if link.suffix else victim.mkdir()
    saved = SavedBatch(
        folder=Path("run/accidents/step-00000000"), step=0, reason="r", where="w", samples=(1,), rank=0, micro=0, seed=5
    )
    link.symlink_to(victim)
    if link.suffix:
        with pytest.raises(SpecError, match="a symbolic link"):
            SavedBatch.read(saved.folder)
        saved.write({"a": 1})  # in the place of the link
        assert (victim.read_text(), SavedBatch.read(saved.folder)) == ("mine", saved)
        return
    for attempt in (lambda: saved.write({"a": 1}), lambda: SavedBatch.read(saved.folder), lambda: saved.batch):
        with pytest.raises(SpecError, match="a symbolic link"):
            attempt()
    assert list(victim.iterdir()) == []


TIMES = {"90s": 90.0, "15m": 900.0, "1.5h": 5400.0, "3d": 259200.0, ".5h": 1800.0, "1e3s": 1000.0, " 5 m ": 300.0}
NO_TIMES = ["", "m", "15", "0m", "-3s", "15 minutes", "20ms", "infs", "nand", "1e308d", "2w"]


@in_one_test(("text", "seconds"), TIMES.items())
def test_a_time_means_the_same_wherever_it_is_given(text: str, seconds: float) -> None:
    run = RunSpec(job="digits.py", plan=Plan(), folder=Path("runs/1"), checkpoint_every=text)
    assert parse_duration(text) == duration(text) == run.save_seconds == pytest.approx(seconds)


@in_one_test(
    ("number", "text"), [(0, "0"), (1650.4, "1,650"), (12.34, "12.3"), (0.00123, "0.00123"), (1e7, "10,000,000")]
)
def test_numbers_have_no_exponent(number: float, text: str) -> None:
    assert show_number(number) == text


@in_one_test("text", NO_TIMES)
def test_what_is_no_time_is_refused_wherever_it_is_given(text: str) -> None:
    with pytest.raises(ValueError, match="s, m, h or d, such as 15m"):
        parse_duration(text)
    with pytest.raises(click.BadParameter, match="s, m, h or d"):
        duration(text)
    with pytest.raises(SpecError, match="s, m, h or d"):
        RunSpec(job="digits.py", plan=Plan(), folder=Path("runs/1"), checkpoint_every=text)


MESSAGES = [
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    ("_ArrayMemoryError", "Unable to allocate 745. GiB for an array with shape (100000000000,) and data type float64"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("RuntimeError", "[enforce fail] not enough memory: you tried to allocate 4000 bytes"),
    ("MemoryError", ""),
]


@in_one_test(("kind", "message"), MESSAGES)
def test_messages_of_memory_that_ran_out(kind: str, message: str) -> None:
    assert is_out_of_memory(kind, message)


def test_other_messages_are_not() -> None:
    assert not is_out_of_memory("RuntimeError", "mat1 and mat2 shapes cannot be multiplied")
