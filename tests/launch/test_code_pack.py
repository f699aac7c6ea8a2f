"""Code that is sent, and hosts files."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from phalanx.errors import RunError, SpecError
from phalanx.launch.code_files import digest_of
from phalanx.launch.targets import code_pack
from phalanx.launch.targets.code_pack import CodePack, check_digest, folder_and_problems, job_within, unpack
from phalanx.launch.targets.hosts_file import HostsFile


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "deep"
        folder.mkdir(parents=True)
        (folder / "one.py").write_text("1")
        (folder.parent / "run.sh").write_text("2")
        (folder.parent / "run.sh").chmod(0o700)
    os.utime(tmp_path / "b" / "run.sh", (1, 1))
    packs = [CodePack.of(tmp_path / name, without=tmp_path / "run") for name in ("a", "b")]
    written = [pack.write(tmp_path / f"{pack.root.name}.tar.gz") for pack in packs]
    assert written[0] == written[1] == digest_of(tmp_path / "a.tar.gz")
    (tmp_path / "a" / "run.sh").write_text("3")
    assert CodePack.of(tmp_path / "a", without=tmp_path / "run").write(tmp_path / "a.tar.gz") != written[0]
    unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    assert (tmp_path / "out" / "deep" / "one.py").read_text() == "1"
    assert os.access(tmp_path / "out" / "run.sh", os.X_OK)


def test_runs_and_what_is_never_code_are_left_out(tmp_path: Path) -> None:
    files = ["train.py", "lib/net.py", "lib/__pycache__/net.pyc", ".git/config", ".env", "data/big.bin", "a.log"]
    runs = ["runs/1/events.jsonl", "runs/2/launch/ticket.json", "mine/run.toml"]
    for name in (*files, *runs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".phalanxignore").write_text("# not code\n/data/\n*.log\n!.env\n")
    packed = CodePack.of(tmp_path, without=tmp_path / "mine").files
    assert sorted(packed) == [".phalanxignore", "lib/net.py", "train.py"], "a secret is never taken in again"


def test_no_link_is_followed(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "train.py").write_text("x")
    (tmp_path / "secret").write_text("x")
    (inside / "file").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to(tmp_path)
    pack = CodePack.of(inside, without=tmp_path / "run")
    assert (sorted(pack.files), pack.links) == (["train.py"], ("file", "folder"))
    assert pack.to_text().startswith(f"1 file of {inside}, 1 B\n")
    assert "left out" in pack.to_text()


def test_what_is_too_large_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_pack, "LARGEST", 1000)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "all.bin").write_bytes(bytes(1001))
    with pytest.raises(SpecError, match=r"largest file is data/all.bin.*\n.*echo '/data/all.bin' >> .*\.phalanxignore"):
        CodePack.of(tmp_path, without=tmp_path / "run")


def test_what_is_not_what_was_packed_is_not_unpacked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz"):
        pass
    check_digest(tmp_path / "code.tar.gz", digest_of(tmp_path / "code.tar.gz"))
    with pytest.raises(RunError, match="is not what was sent"):
        check_digest(tmp_path / "code.tar.gz", "0" * 64)


@pytest.mark.parametrize(
    "lines",
    [
        ["*.log", "!keep.log", "/data/", "build/"],
        ["docs/*", "!docs/a.md", "**/cache/", "lib/**/z.py"],
        ["# a comment", "", "\\!odd", "*.[ch]", "t?mp", "/*.txt", "!/b.txt"],
        ["deep/**", "!deep/er/one.py", "/lib/*/", "x y"],
        ["*", "!*.py", "!*/", "lib/"],
        ["f[0-9]?", "f[!0-9]", "docs/*.md", "lib/**/z.py", "/cache/*", "a.b"],
    ],
)
def test_what_is_packed_is_what_git_would_take(tmp_path: Path, lines: list[str]) -> None:
    names = [
        *("train.py", "a.txt", "b.txt", "x y", "!odd", "a.c", "a.log", "keep.log", "tamp", "data/one.bin", "lib/z.py"),
        *("lib/q/z.py", "lib/q/r/z.py", "lib/data/two.bin", "docs/a.md", "docs/b.md", "docs/d/c.md", "build/x"),
        *(
            *("f12", "f1", "fx1", "fx", "axb", "lib/build/y", "cache/1", "lib/cache/2", "deep/one.py"),
            *("deep/er/one.py", "deep/keep.log"),
        ),
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for file in (".gitignore", ".phalanxignore"):
        (tmp_path / file).write_text("\n".join(lines) + "\n")
    alone = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, env=alone, check=True)
    words = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    taken = subprocess.run(words, cwd=tmp_path, env=alone, check=True, capture_output=True, text=True).stdout
    assert [*CodePack.of(tmp_path, without=tmp_path / "run").files] == sorted(filter(None, taken.split("\0")))


def test_a_line_that_is_no_pattern_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".phalanxignore").write_text("[z-a]\n")
    with pytest.raises(SpecError, match="bad character range"):
        CodePack.of(tmp_path, without=tmp_path / "run")


def test_a_job_is_named_from_the_folder_that_is_packed(tmp_path: Path) -> None:
    file = tmp_path / "all" / "jobs" / "train.py"
    file.parent.mkdir(parents=True)
    file.touch()
    assert folder_and_problems(f"{file}:other", None) == (file.parent, [])
    assert folder_and_problems(f"{file}:other", str(tmp_path / "all")) == (tmp_path / "all", [])
    assert job_within(f"{file}:other", tmp_path / "all") == "jobs/train.py:other"
    assert job_within("package.train:other", tmp_path) == "package.train:other"
    for wrong in (str(tmp_path / "none"), "/usr"):
        (problem,) = folder_and_problems(str(file), wrong)[1]
        assert problem.allowed == f"a folder that holds the job's file, {file}"


@pytest.mark.parametrize("name", ["../outside", "link"])
def test_nothing_but_files_inside_is_unpacked(name: str, tmp_path: Path) -> None:
    archive = tmp_path / "code.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        entry = tarfile.TarInfo(name)
        if name == "link":
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        opened.addfile(entry)
    with pytest.raises(RunError, match="cannot be unpacked"):
        unpack(archive, tmp_path / "in" / "out")
    assert not any(path.name in ("outside", "link") for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", ["no [[host]]"]),
        ("[[host]]\n", ["None"]),
        ('[[host]]\nname = "-oProxyCommand=x"\n', ["'-oProxyCommand=x'"]),
        ('[[host]]\nname = "a; rm"\ndevices = 0\n', ["'a; rm'", "0"]),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"\n', ["a: named twice"]),
        ('[[host]]\nname = "a"\ncores = 2\n', ["cores = ..."]),
        ('[[host]]\nname = "a"\naddress = "fd00::1"\n', ["'fd00::1'"]),
        (
            'scratch = 3\ncode = []\n[[host]]\nname = "root@[::1]"\n',
            ["code = ...", "scratch = ...", "'root@[::1]'"],
        ),
        ('python = 3\nssh = "-v"\nhot = 1\n[[host]]\nname = "a"\n', ["hot = ...", "3", "'-v'"]),
        ('[[host]]\nname = "a"\n[environment]\nA_1 = "1"\n"-S x" = "1"\n1A = "1"\n', ["'-S x'", "'1A'"]),
        ('ssh = 3\nenvironment = 4\n[[host]]\nname = "a"\n', ["3", "4"]),
    ],
)
def test_everything_that_is_wrong_in_a_hosts_file_is_told(tmp_path: Path, text: str, given: list[str]) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        HostsFile.read(path)
    assert [problem.given for problem in caught.value.problems] == given
