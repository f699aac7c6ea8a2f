"""A host that has not the job's code, which the target sends: what a check says of it, and what it leaves unsaid."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.config import Plan
from phalanx.launch import unpacking
from phalanx.launch.check_hosts import (
    CheckQuestion,
    CodeForHost,
    HostSurvey,
    Needs,
    TargetHost,
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


def test_code_that_is_too_much_for_a_check_is_no_fault(tmp_path: Path) -> None:
    said = asked(tmp_path, CodeForHost(root=tmp_path, nbytes=40 << 20))
    assert failing(said) == []
    (unsaid,) = said.not_looked_at
    assert "on n1: its code is not there, and 40.0 MiB" in unsaid
    assert "32.0 MiB at most" in unsaid
    assert "versions" in said.hosts[0].told  # the host itself was looked at


def test_code_that_is_sent_is_looked_at(tmp_path: Path) -> None:
    said = asked(tmp_path, CodeForHost(root=tmp_path, nbytes=1, pack=pack("gone.py")))
    assert said.not_looked_at == []
    (fault,) = failing(said)
    assert "job" in fault  # of which there is none in an empty file
    assert "not there" not in fault


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_what_is_nothing_that_is_packed_is_said(name: str, tmp_path: Path) -> None:
    (fault,) = failing(asked(tmp_path, CodeForHost(root=tmp_path, nbytes=1, pack=pack(name))))
    assert fault == f"the job's code cannot be unpacked there: {name!r} is nothing that is packed"


@pytest.mark.quick
def test_what_is_sent_is_of_the_standard_library() -> None:
    """Its names of Phalanx are those of the texts that go before it."""
    text = program_text(unpacking, host_folder, host_agent)
    assert "from phalanx" not in text
    assert "import phalanx" not in text
    made: dict[str, object] = {"__name__": "sent"}
    exec(compile(text, "sent", "exec"), made)
    assert {"unpack_files", "HostFiles", "Agent"} <= {*made}
