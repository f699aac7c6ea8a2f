"""A check ends in its time, and leaves nothing behind however it is ended; code that is sent for it is looked at."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from launched import write_job
from ssh_hosts import ssh_servers

from law_rows import longer
from phalanx.cli import main
from phalanx.config import Plan
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
    started_program,
    survey,
)
from phalanx.launch.host_messages import checked_answer
from phalanx.launch.targets import host_agent, host_folder
from phalanx.preflight import launch_check

DATA = "data=lambda: px.Table(x=x, y=x[:, :4].argmax(1))"
HANGS = """
import os
import time
from pathlib import Path


def data():
    Path("begun.part").write_text(f"{os.getppid()} {os.getpid()}")
    Path("begun.part").rename("begun")
    while True:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            pass
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A job whose data never come, and leave in ``begun`` which processes wait for them."""
    for name in ("train", "hangs"):  # of another folder
        sys.modules.pop(name, None)
    path = write_job(tmp_path)
    (tmp_path / "hangs.py").write_text(HANGS)
    text = path.read_text()
    assert DATA in text
    path.write_text(f"import hangs\n{text.replace(DATA, 'data=hangs.data')}")
    yield path
    for name in ("train", "hangs"):
        sys.modules.pop(name, None)


def await_gone(pids: list[int], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.realtime("the check gives its hosts, which are programs, real seconds")
def test_data_that_hang_end_a_check_in_its_time(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_program, "MOST", 24.0)
    monkeypatch.setattr(launch_check, "host_needs", lambda *given: pytest.fail("a forecast takes the data, too"))
    result = CliRunner().invoke(main, ["check", "train.py", "--plan", "dp=2", "--json"])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    (finding,) = told["findings"]
    assert "has not come to its end within " in finding["what"]
    assert told["seconds"] < 30.0
    assert "memory that the plan needs: the job's data could not be read" in told["not_looked_at"]
    await_gone([int(word) for word in Path("begun").read_text().split()])


def end(number: int, *words: str) -> int:
    """Signal a check of the job whose data hang; its exit code, once all that was asked has ended, too."""
    Path("tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "check", "train.py", *words],
        env={**os.environ, "TMPDIR": str(Path("tmp").absolute())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while not Path("begun").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(20)  # not once the data's time is over
    finally:
        process.kill()
        process.wait()
    await_gone([int(word) for word in Path("begun").read_text().split()])
    return code


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), *longer((signal.SIGINT, 130), (signal.SIGKILL, -9))]
)
def test_a_check_that_is_ended_leaves_nothing_behind(number: int, code: int) -> None:
    assert end(number, "--plan", "dp=2") == code
    assert os.listdir("tmp") == []
    if number != signal.SIGKILL:
        assert not list(Path().rglob(".phalanx-check-*"))


@pytest.mark.engine
@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nor_on_a_host(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    with ssh_servers(1, tmp_path_factory.mktemp("ssh")) as servers:
        assert end(number, "--to", f"ssh:{servers.write_hosts((1,))}", "--plan", "dp=1") in (143, -9)


def test_a_program_that_stands_still_as_its_asker_lets_go_clears_away_before_it_ends() -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", started_program.BOOT], stdin=reading, stderr=subprocess.DEVNULL)
    os.close(reading)
    program = """
import time
try:
    open("begun", "w").close()
    time.sleep(1000)
except KeyboardInterrupt:
    open("told", "w").close()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    open("cleared", "w").close()
"""
    os.write(writing, json.dumps({"program": program}).encode() + b"\n")
    try:
        await_file(process, "begun")
        os.close(writing)
        await_file(process, "told")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(20) is not None
        assert Path("cleared").exists()
    finally:
        process.kill()
        process.wait()


def await_file(process: subprocess.Popen[bytes], name: str) -> None:
    while not Path(name).exists():
        assert process.poll() is None
        time.sleep(0.02)


class Lacking(TargetHost):
    name = "n1"
    address = "127.0.0.1"

    def __init__(self, scratch: Path, code: CodeForHost) -> None:
        self.scratch, self._code = str(scratch), code

    def sent_code(self, reference: str, run_folder: Path) -> CodeForHost:
        return self._code

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        return run_here([sys.executable, *arguments], text, patience)


def asked(folder: Path, code: CodeForHost) -> HostSurvey:
    file = str(folder / "gone.py")
    return survey([Lacking(folder, code)], CheckQuestion(reference=file, file=file, folder=folder, cwd=str(folder)))


def pack(name: str) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return whole.getvalue()


def failing(said: HostSurvey) -> list[str]:
    return [one.what for one in findings(said, Needs(plan=Plan())) if one.fails]


def code(folder: Path, **what: Any) -> CodeForHost:
    return CodeForHost(root=folder, digests={"gone.py": sha256(b"").hexdigest()}, nbytes=40 << 20, **what)


def test_an_answer_that_no_host_gives_is_none(tmp_path: Path) -> None:
    told = {**asked(tmp_path, code(tmp_path)).hosts[0].told}
    assert checked_answer(json.dumps(told), of_link=False) == told
    others = [{**told, name: value} for name in told for value in ({"a": [0]}, -2)]
    others += [{key: value for key, value in told.items() if key != name} for name in ("gpus", "folder", "began")]
    for text in ("{", "[" * 10**5, "null", *map(json.dumps, others)):
        assert checked_answer(text, of_link=False) is None
    assert checked_answer(json.dumps(told), of_link=True) is None


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


def test_what_was_copied_by_hand_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launch sends nothing then; the file here is another than the host's."""
    monkeypatch.setattr(asking.code_files, "stamp_of", lambda path: [])
    (tmp_path / "gone.py").touch()
    (host,) = asked(tmp_path, code(tmp_path)).hosts
    assert (host.sent, host.unsent) == (0, 0)
    assert "source" in host.told


def test_what_is_sent_is_of_the_standard_library() -> None:
    text = program_text(code_files, host_folder, host_agent)
    assert "from phalanx" not in text
    assert "import phalanx" not in text
    made: dict[str, object] = {"__name__": "sent"}
    exec(compile(text, "sent", "exec"), made)
    assert {"unpack_files", "HostFiles", "Agent"} <= {*made}
