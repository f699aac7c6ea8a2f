"""The job's code on a node of a Ray cluster: its own folder where that is the same, else a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import RunError
from phalanx.launch.targets import CodePack
from phalanx.launch.targets.ray_code import CodePlace, RequestCode


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("import lib.net\n")
    (folder / "lib" / "net.py").write_text("width = 8\n")
    return folder


def sent(project: Path, works: Path, reference: str = "train.py:tiny?lr=0.1") -> tuple[RequestCode, Path]:
    """The code as a request says it, and the archive."""
    archive = project.parent / "code.tar.gz"
    digest = CodePack.of(project, without=project / "run").write(archive)
    return RequestCode(root=str(project), sha256=digest, reference=reference, works=str(works)), archive


def test_where_the_folder_has_the_same_files_it_is_worked_in_whatever_else_is_there(
    project: Path, tmp_path: Path
) -> None:
    code, archive = sent(project, works=tmp_path)
    (project / "data.bin").write_text("made since")
    assert code.found(archive, tmp_path / "copy") == CodePlace(folder=tmp_path, job="", why="")
    assert not (tmp_path / "copy").exists()
    elsewhere, archive = sent(project, works=tmp_path / "not-there")
    assert elsewhere.found(archive, tmp_path / "copy").folder == project


@pytest.mark.parametrize("changed", ["lib/net.py", "train.py"])
@pytest.mark.parametrize("text", ["width = 9\n", "another length", ""])
def test_where_a_file_is_another_a_copy_is_worked_in(project: Path, tmp_path: Path, changed: str, text: str) -> None:
    code, archive = sent(project, works=project / "lib")
    (project / changed).write_text(text) if text else (project / changed).unlink()
    found, copy = code.found(archive, tmp_path / "copy"), tmp_path / "copy"
    assert found.why == f"{project / changed} is another there"
    assert (found.folder, found.job) == (copy / "lib", f"{copy}/train.py:tiny?lr=0.1")
    assert (copy / "lib" / "net.py").read_text() == "width = 8\n"


def test_where_there_is_no_such_folder_a_copy_is_worked_in(project: Path, tmp_path: Path) -> None:
    code, archive = sent(project, works=tmp_path, reference="")
    project.rename(tmp_path / "away")
    found = code.found(archive, tmp_path / "copy")
    assert (found.folder, found.job, found.why) == (tmp_path / "copy", "", f"{project} is not there")


def test_what_is_not_what_was_packed_is_not_worked_with(project: Path, tmp_path: Path) -> None:
    """Not even where the folder is as it was."""
    code, archive = sent(project, works=project)
    packed = archive.read_bytes()
    for damaged in (packed[:-9], b"", b"no archive"):
        archive.write_bytes(damaged)
        with pytest.raises(RunError, match="is not what was packed"):
            code.found(archive, tmp_path / "copy")
    archive.unlink()
    with pytest.raises(RunError, match=r"code\.tar\.gz: No such file"):
        code.found(archive, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
