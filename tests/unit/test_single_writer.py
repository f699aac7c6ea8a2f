"""One run folder has one writer: a lock that the kernel frees, and a token that the next writer replaces."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import checkpoint
from phalanx.errors import CheckpointError, RunError, SpecError
from phalanx.files import check_writer, join, refuse_taken, release, take

OWNER = """
import sys, time
from pathlib import Path
from phalanx.files import take
take(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the folder."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none, such as that of two hosts."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_second_writer_is_refused_and_a_killed_one_lets_go(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    before = (tmp_path / "writer.json").read_bytes()
    for action in (take, refuse_taken):
        with pytest.raises(SpecError, match=f"process {owner.pid} on {re.escape(socket.gethostname())}, since 20"):
            action(tmp_path)
    assert (tmp_path / "writer.json").read_bytes() == before
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    token = take(tmp_path)
    assert token.number == json.loads(before)["number"] + 1
    token.check()
    release(token)


def test_released_it_is_free(tmp_path: Path) -> None:
    release(take(tmp_path))
    refuse_taken(tmp_path)
    token = take(tmp_path)
    assert take(tmp_path) == token, "the same process, the same token"
    assert token.number == 2
    release(token)
    check_writer(tmp_path)  # nobody's: what saves without a run is not asked


@pytest.mark.usefixtures("no_locks")
def test_where_there_are_no_locks_the_earlier_writer_is_told_to_stop(tmp_path: Path) -> None:
    token = take(tmp_path)
    check_writer(tmp_path)
    code = "import sys, fcntl, errno\nfrom pathlib import Path\nfrom phalanx.files import take\ntake(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    with pytest.raises(RunError, match=r"was taken over by process \d+ on .*: this run ends without writing there"):
        check_writer(tmp_path)
    with pytest.raises(RunError, match="taken over"):
        join(tmp_path, token.identity)
    release(token)


@pytest.mark.parametrize("where", ["", "checkpoints", "servers/0/step-00000001"])
def test_whoever_writes_in_the_run_folder_is_told(tmp_path: Path, where: str) -> None:
    token, path = take(tmp_path), tmp_path / where
    check_writer(path)
    (tmp_path / "writer.json").write_text(json.dumps({"identity": "another"}))
    with pytest.raises(RunError, match="taken over"):
        check_writer(path)
    check_writer(tmp_path.parent)
    release(token)
    check_writer(path)


@pytest.mark.parametrize("kind", ["gone", "empty", "link", "another's text"])
def test_a_token_that_cannot_be_read_counts_as_lost(tmp_path: Path, kind: str) -> None:
    token = take(tmp_path)
    path = tmp_path / "writer.json"
    content = path.read_text()
    path.unlink()
    match kind:
        case "empty":
            path.touch()
        case "link":
            (tmp_path / "elsewhere").write_text(content)
            path.symlink_to(tmp_path / "elsewhere")
        case "another's text":
            path.write_text("[" * 5000)
        case _:
            pass
    with pytest.raises(RunError):
        token.check()
    release(token)


def test_workers_are_writers_with_their_launcher(tmp_path: Path) -> None:
    token = take(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            check_writer(tmp_path)
            release(token)  # which is the launcher's to do
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    descriptor = os.open(tmp_path / "writer.json", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(descriptor)
    release(token)


def test_a_run_that_has_lost_its_folder_leaves_what_the_new_owner_is_writing(tmp_path: Path) -> None:
    token, folder = take(tmp_path), tmp_path / "checkpoints"
    (tmp_path / "writer.json").write_text(json.dumps({"identity": "another"}))
    being_written = folder / ".step-00000004.tmp"
    being_written.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="taken over"):
        checkpoint.save(folder, step=4, tensors={}, state={})
    assert being_written.is_dir()
    release(token)


@pytest.mark.parametrize("before", [False, True], ids=["never taken", "let go of by who takes it again"])
def test_a_look_is_not_in_the_way_of_a_writer(tmp_path: Path, before: bool) -> None:
    if before:
        release(take(tmp_path))
    looks = os.open(tmp_path / "writer.json", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looks, fcntl.LOCK_SH)
    later = threading.Timer(0.3, os.close, [looks])
    later.start()
    release(take(tmp_path))
    later.join()


def test_a_folder_is_asked_for_on_nfs_where_only_who_may_write_locks_alone(
    tmp_path: Path, owner: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def of_nfs(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    with pytest.raises(SpecError, match=f"process {owner.pid} on "):
        refuse_taken(tmp_path)
    owner.kill()
    owner.wait()
    refuse_taken(tmp_path)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    (run / "writer.json").symlink_to(victim)
    with pytest.raises(SpecError, match="a symbolic link"):
        take(run)
    assert victim.read_text() == "mine"
