"""Code that is sent, what hosts by SSH do with it, hosts files, and the agent of a host."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from phalanx.config.run_files import RUN_FILES
from phalanx.errors import RunError, SpecError
from phalanx.launch.code_files import digest_of
from phalanx.launch.targets import code_pack, ssh_host
from phalanx.launch.targets.code_pack import CodePack, folder_to_pack, job_within, unpack
from phalanx.launch.targets.host_folder import HostFiles
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
    assert written[0] == written[1] == packs[0].digest == digest_of(tmp_path / "a.tar.gz")
    (tmp_path / "a" / "run.sh").write_text("3")
    assert CodePack.of(tmp_path / "a", without=tmp_path / "run").digest != written[0]
    unpack(tmp_path / "b.tar.gz", written[0], tmp_path / "out")
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
    assert sorted(packed) == [".env", ".phalanxignore", "lib/net.py", "train.py"]


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
    with pytest.raises(SpecError, match=r"most of it: data/ 1001 B.*\n.*echo '/data/' >> .*\.phalanxignore"):
        CodePack.of(tmp_path, without=tmp_path / "run")


def test_what_is_not_what_was_packed_is_not_unpacked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz"):
        pass
    with pytest.raises(RunError, match="is not what was packed"):
        unpack(tmp_path / "code.tar.gz", "0" * 64, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "lines",
    [
        ["*.log", "!keep.log", "/data/", "build/"],
        ["docs/*", "!docs/a.md", "**/cache/", "lib/**/z.py"],
        ["# a comment", "", "\\!odd", "*.[ch]", "t?mp", "/*.txt", "!/b.txt"],
        ["deep/**", "!deep/er/one.py", "/lib/*/", "x y"],
        ["*", "!*.py", "!*/", "lib/"],
        ["f[0-9]?", "f[!0-9]", "docs/*.md", "lib/**/z.py", "/cache/*", "[z-a]", "a.b"],
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


def test_a_job_is_named_from_the_folder_that_is_packed(tmp_path: Path) -> None:
    file = tmp_path / "all" / "jobs" / "train.py"
    file.parent.mkdir(parents=True)
    file.touch()
    assert folder_to_pack(f"{file}:other", None) == file.parent
    assert folder_to_pack(f"{file}:other", str(tmp_path / "all")) == tmp_path / "all"
    assert job_within(f"{file}:other", tmp_path / "all") == "jobs/train.py:other"
    assert job_within("package.train:other", tmp_path) == "package.train:other"
    with pytest.raises(SpecError, match="which is no folder"):
        folder_to_pack(str(file), str(tmp_path / "none"))
    with pytest.raises(SpecError, match="a folder that holds the job's file"):
        folder_to_pack(str(file), "/usr")


@pytest.mark.parametrize("name", ["../outside", "/outside", "link"])
def test_nothing_but_files_inside_is_unpacked(name: str, tmp_path: Path) -> None:
    archive = tmp_path / "code.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        entry = tarfile.TarInfo(name)
        if name == "link":
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        opened.addfile(entry)
    with pytest.raises(RunError, match="is nothing that is packed"):
        unpack(archive, digest_of(archive), tmp_path / "in" / "out")
    assert not any(path.name in ("outside", "link") for path in tmp_path.rglob("*"))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def copy(tmp_path: Path) -> tuple[HostFiles, Path]:
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


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", ["no [[host]]"]),
        ("[[host]]\n", ["None", "None"]),
        ('[[host]]\nname = "-oProxyCommand=x"\n', ["'-oProxyCommand=x'", "'-oProxyCommand=x'"]),
        ('[[host]]\nname = "a; rm"\ndevices = 0\n', ["'a; rm'", "'a; rm'", "0"]),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"\n', ["a: named twice"]),
        ('[[host]]\nname = "a"\ncores = 2\n', ["cores = ..."]),
        ('[[host]]\nname = "a"\naddress = "fd00::1"\n', ["'fd00::1', an address of IPv6"]),
        ('scratch = 3\ncode = []\n[[host]]\nname = "root@[::1]"\n', ["'[::1]', an address of IPv6", "[]", "3"]),
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


pytestmark = pytest.mark.timeout(120)
WORKER = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


def asked(pipe: IO[bytes], **what: Any) -> None:
    pipe.write(json.dumps(what).encode() + b"\n")
    pipe.flush()


def first_lines(told: Iterator[dict[str, Any]], ranks: int) -> dict[int, int]:
    """The number that each rank has printed; a line may come in two parts, of a worker that holds no output back."""
    printed = dict.fromkeys(range(ranks), b"")
    while not all(text.endswith(b"\n") for text in printed.values()):
        if "output" in (one := next(told)):
            printed[one["output"]] += base64.b64decode(one["data"])
    return {rank: int(text) for rank, text in printed.items()}


@contextmanager
def agent_of(
    changed: str, other: str, ranks: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], Any, list[int]]]:
    """The agent of a host with a text changed in it: the process, its pipe, what it tells, and its workers."""
    text = ssh_host._agent_text().decode()
    assert changed in text
    words = [sys.executable, "-c", text.replace(changed, other)]
    agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin
    assert agent.stdout
    try:
        argv = [sys.executable, "-c", WORKER]
        asked(agent.stdin, do="load", named=False, folder="", environment={}, argv=argv, count=ranks)
        asked(agent.stdin, do="start", files={}, ranks={str(rank): {} for rank in range(ranks)}, folder="")
        told = map(json.loads, agent.stdout)
        yield agent, agent.stdin, told, [*first_lines(told, ranks).values()]
    finally:
        agent.kill()
        agent.communicate()


def test_what_ended_a_worker_is_told_also_where_the_launcher_has_all_ended() -> None:
    """Its peers have failed as it was lost, and their launcher has not waited for more."""
    with agent_of("_LOOK = 0.05", "_LOOK = 600.0", 2) as (_, pipe, told, pids):
        worker = psutil.Process(pids[1])
        worker.kill()
        while worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
        asked(pipe, do="end")
        said = takewhile(lambda one: "over" not in one, told)
        assert [one for one in said if "ended" in one] == [{"ended": 1, "code": -signal.SIGKILL}]


@pytest.mark.realtime("the agent is a program whose clock is its own")
def test_a_launcher_that_says_nothing_for_long_is_taken_to_be_gone() -> None:
    """Its connection stays open: of a machine without power, or behind a network that is cut."""
    with agent_of("SILENCE = 60.0", "SILENCE = 2.0", 1) as (agent, pipe, _, pids):
        worker = psutil.Process(pids[0])
        until = time.monotonic() + 3.0
        while time.monotonic() < until:  # it is not its age that ends it
            asked(pipe, do="still")
            time.sleep(0.2)
        assert worker.is_running()
        assert agent.poll() is None
        assert agent.wait(60) == 0
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
