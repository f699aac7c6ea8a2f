"""A host that has not the job's code, which the target sends: what a check says of it, and what it leaves unsaid."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Plan
from phalanx.errors import Problem
from phalanx.launch import code_files
from phalanx.launch.check_hosts import (
    CheckQuestion,
    CodeForHost,
    HostSurvey,
    Needs,
    TargetHost,
    asking,
    findings,
    program_text,
    run_here,
    survey,
)
from phalanx.launch.targets import host_agent, host_folder


class Lacking(TargetHost):
    """This machine, as a host to which the target sends ``code``."""

    name = "n1"
    address = "127.0.0.1"

    def __init__(self, scratch: Path, code: CodeForHost) -> None:
        self.scratch, self._code = str(scratch), code

    def sent_code(self, reference: str, run_folder: Path) -> CodeForHost:
        return self._code

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        return run_here([sys.executable, *arguments], text, patience)


def asked(folder: Path, code: CodeForHost) -> HostSurvey:
    """Of the job ``gone.py``, which is not there."""
    file = str(folder / "gone.py")
    return survey([Lacking(folder, code)], CheckQuestion(reference=file, file=file, folder=folder, cwd=str(folder)))


def pack(name: str) -> bytes:
    """Of one empty file of that name."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return whole.getvalue()


def failing(said: HostSurvey) -> list[str]:
    return [one.what for one in findings(said, Needs(plan=Plan())) if one.fails]


def code(folder: Path, **what: Any) -> CodeForHost:
    """One empty file, ``gone.py``."""
    return CodeForHost(root=folder, digests={"gone.py": sha256(b"").hexdigest()}, nbytes=40 << 20, **what)


def test_code_that_is_too_much_for_a_check_is_no_fault(tmp_path: Path) -> None:
    said = asked(tmp_path, code(tmp_path))
    assert failing(said) == []
    (unsaid,) = said.not_looked_at
    assert "on n1: its code is not there, and 40.0 MiB" in unsaid
    assert "32.0 MiB at most" in unsaid
    assert "versions" in said.hosts[0].told  # the host itself was looked at


def test_code_that_is_sent_is_looked_at(tmp_path: Path) -> None:
    said = asked(tmp_path, code(tmp_path, pack=pack("gone.py")))
    assert said.not_looked_at == []
    assert said.hosts[0].sent
    (fault,) = failing(said)
    assert "job" in fault  # of which there is none in an empty file
    assert "not there" not in fault


@pytest.mark.parametrize(("text", "unsent"), [("", 0), ("another = 1\n", 40 << 20)])
def test_what_was_copied_by_hand_is_looked_at_where_all_of_it_is_alike(
    text: str, unsent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launch sends nothing then; the file here is another than the host's."""
    monkeypatch.setattr(asking, "_stamp", lambda path: [])
    (tmp_path / "gone.py").write_text(text)
    (host,) = asked(tmp_path, code(tmp_path)).hosts
    assert (host.sent, host.unsent) == (0, unsent)
    assert ("source" in host.told) is not bool(unsent)


def test_code_that_is_not_sent_fails_as_it_does_for_a_launch(tmp_path: Path) -> None:
    problem = Problem(where="--code", given="4 GiB to be packed", allowed="at most 1 GiB", fix="echo /data")
    said = asked(tmp_path, CodeForHost(refused=problem))
    (found,) = [one for one in findings(said, Needs(plan=Plan())) if one.fails]
    assert found.what == "the job's code is not there, or another, and is not sent: 4 GiB to be packed"
    assert found.fix == "echo /data"


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_what_is_nothing_that_is_packed_is_said(name: str, tmp_path: Path) -> None:
    (fault,) = failing(asked(tmp_path, code(tmp_path, pack=pack(name))))
    assert fault == f"the job's code cannot be unpacked there: {name!r} is nothing that is packed"


@pytest.mark.quick
def test_what_is_sent_is_of_the_standard_library() -> None:
    """Its names of Phalanx are those of the texts that go before it."""
    text = program_text(code_files, host_folder, host_agent)
    assert "from phalanx" not in text
    assert "import phalanx" not in text
    made: dict[str, object] = {"__name__": "sent"}
    exec(compile(text, "sent", "exec"), made)
    assert {"unpack_files", "HostFiles", "Agent"} <= {*made}
