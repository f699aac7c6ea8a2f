"""What stands in a run folder is opened without following a link; documents are a value or one error."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.errors import SpecError
from phalanx.files import json_value, open_plain, read_json, read_text, read_toml, replace_text
from phalanx.units import visible

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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "which is no text: byte 0 is 0xff"),
        (b"a = " + b"[" * 5000, "nested too deeply|Invalid"),
        (b"a = " + b"9" * 5000, "digits|integer"),
        (b"a = 1\na = 2", "overwrite"),
        (b"a", "Expected"),
        (b"x" * 300, "longer than 200 bytes"),
    ],
)
def test_a_toml_file_that_cannot_be(
    tmp_path: Path, content: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.toml").write_bytes(content)
    if "longer" in words:
        with pytest.raises(SpecError, match=words):
            read_text(tmp_path / "f.toml", where="f", fix="", most=200)
        return
    with pytest.raises(SpecError, match=words) as caught:
        read_toml(tmp_path / "f.toml", where="plan", fix="dp = 2")
    assert caught.value.problems[0].fix == "dp = 2"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "NaN", "-Infinity", "1e999", '{"a": 1, "a": 2}', "9" * 5000])
def test_json_that_cannot_be(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        json_value(text)
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(SpecError, match="no JSON"):
        read_json(tmp_path / "f.json", where="f", fix="")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        read_text(tmp_path / "f", where="f", fix="")
    with pytest.raises(SpecError, match="null"):
        read_text(tmp_path / "f\0", where="f", fix="")


def test_what_would_steer_a_terminal_is_shown_as_text() -> None:
    assert visible("plain\n\ttext, Ünïcode 漢字") == "plain\n\ttext, Ünïcode 漢字"
    assert visible("\x1b[2J \x9b31m \r \u202e \u2066 \ud800 \x00") == (
        "\\x1b[2J \\x9b31m \\x0d \\u202e \\u2066 \\ud800 \\x00"
    )
