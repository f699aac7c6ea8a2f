"""What a host keeps for a launch: code by its SHA-256, copies of run folders, nothing outside them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from phalanx.config.run_files import RUN_FILES
from phalanx.launch.targets import CodePack
from phalanx.launch.targets.host_folder import HostFiles

pytestmark = pytest.mark.quick


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def copy(tmp_path: Path) -> tuple[HostFiles, Path]:
    """A copy of a run folder, followed."""
    files = HostFiles()
    where = files.begin(str(tmp_path / "scratch"), "run-1")
    files.put("events.jsonl", encoded(b"one\n"))
    files.follow("manifest.json", [name for name, file in RUN_FILES.items() if not file.brought])
    return files, Path(where)


def test_code_is_unpacked_by_its_digest_and_another_is_not(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text("job = 1\n")
    pack = CodePack.of(tmp_path / "job", without=tmp_path / "run")
    digest, scratch, files = pack.write(tmp_path / "pack"), str(tmp_path / "scratch"), HostFiles()
    assert files.code(scratch, digest) == ""
    files.receive(scratch)
    files.put("pack", encoded((tmp_path / "pack").read_bytes()[:-1]))
    with pytest.raises(OSError, match="its SHA-256 is"):
        files.unpack(scratch, digest)
    assert list((tmp_path / "scratch" / "code").iterdir()) == []
    files.receive(scratch)
    files.put("pack", encoded((tmp_path / "pack").read_bytes()))
    folder = Path(files.unpack(scratch, digest))
    assert folder.name == digest
    assert (folder / "train.py").read_text() == "job = 1\n"
    assert not (folder / "train.py").stat().st_mode & 0o222
    assert [path.name for path in folder.parent.iterdir()] == [digest]
    assert files.compare(str(folder), {"train.py": "0" * 64}) is False


def test_changes_are_told_once_and_what_is_no_launchers_business_never(copy: tuple[HostFiles, Path]) -> None:
    files, where = copy
    assert files.changes() == {}
    for path in ("ledger/1.bin", "launch/out.log", "checkpoints/.step-1.tmp/x", "checkpoints/step-2/x", ".secret"):
        (where / path).parent.mkdir(parents=True, exist_ok=True)
        (where / path).write_bytes(b"12")
    (where / "checkpoints" / "step-2" / "manifest.json").write_bytes(b"3")
    changed = files.changes()["changed"]
    assert {path: size for path, (size, _) in changed.items()} == {
        "ledger/1.bin": 2,
        "checkpoints/step-2/manifest.json": 1,
    }
    assert files.changes() == {}
    (where / "ledger" / "1.bin").unlink()
    assert files.changes() == {"changed": {}, "gone": ["ledger/1.bin"]}


def test_what_is_held_of_a_checkpoint_stays_until_it_is_released(copy: tuple[HostFiles, Path]) -> None:
    files, where = copy
    whole, other = where / "checkpoints" / "step-2", where / "checkpoints" / ".step-1.tmp"
    for folder in (whole, other):
        folder.mkdir(parents=True)
        (folder / "rank-0").write_bytes(b"12")
    assert files.hold("step-2", ["step-1"]) == {".held/step-2/rank-0": 2}
    (whole / "rank-0").unlink()
    assert files.read(".held/step-2/rank-0", 0)["data"] == encoded(b"12")
    assert other.is_dir()
    whole.rmdir()
    (where / "checkpoints" / ".step-3.tmp").mkdir()
    assert files.hold("step-3", ["step-1"]) == {}
    assert not other.exists()
    files.release("step-2")
    assert "error" in files.read(".held/step-2/rank-0", 0)
    files.drop()
    assert not where.exists()


@pytest.mark.parametrize("path", ["../other", "/etc/hostname", "a/../../b"])
def test_nothing_outside_is_written_or_read(copy: tuple[HostFiles, Path], path: str) -> None:
    files, _ = copy
    with pytest.raises(OSError, match="in no folder"):
        files.put(path, encoded(b"1"))
    assert "error" in files.read(path, 0)
