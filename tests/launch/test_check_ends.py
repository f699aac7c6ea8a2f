"""A check ends in its time, and leaves nothing behind however it is ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from launched import free_ports, write_job
from ssh_hosts import lacking_for_ssh, ssh_servers

from phalanx.cli import main
from phalanx.launch.check_hosts import (
    CheckTime,
    TargetHost,
    ThisMachine,
    asking,
    host_probe,
    link_findings,
    link_probe,
    run_here,
    started_program,
)
from phalanx.launch.check_hosts.asking_links import ask_links
from phalanx.launch.host_network import HostLink, lacking
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
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_check_that_is_ended_leaves_nothing_behind(number: int, code: int) -> None:
    assert end(number, "--plan", "dp=2") == code
    assert os.listdir("tmp") == []
    if number != signal.SIGKILL:
        assert not list(Path().rglob(".phalanx-check-*"))


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nor_on_a_host(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    problem = lacking(HostLink())
    if why := lacking_for_ssh() or (problem and problem.given):
        pytest.skip(why)
    with ssh_servers(1, tmp_path_factory.mktemp("ssh")) as servers:
        assert end(number, "--to", f"ssh:{servers.write_hosts((1,))}", "--plan", "dp=1") in (143, -9)


def test_a_program_whose_asker_lets_go_ends() -> None:
    """As where the connection to its host is cut."""
    reading, writing = os.pipe()
    boot = started_program.BOOT
    process = subprocess.Popen([sys.executable, "-c", boot], stdin=reading, stderr=subprocess.DEVNULL)
    os.close(reading)
    program = "import time\nopen('begun', 'w').close()\ntime.sleep(1000)"
    os.write(writing, json.dumps({"program": program}).encode() + b"\n")
    try:
        await_file(process, "begun")
        os.close(writing)
        assert process.wait(20)
    finally:
        process.kill()
        process.wait()


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


def test_what_a_program_is_told_may_be_long_and_unread() -> None:
    text = "x" * (1 << 20)
    assert run_here([sys.executable, "-c", "print(len(input()))"], f"{text}\n", 30.0) == f"{1 << 20}\n"
    assert run_here([sys.executable, "-c", "print('hello')"], text, 30.0) == "hello\n"


def test_of_many_hosts_each_reaches_the_first() -> None:
    hosts: list[TargetHost] = []
    for number in range(10):
        hosts.append(ThisMachine())
        hosts[-1].name = f"n{number}"
    closed, *ports = free_ports(len(hosts) + 1)
    told = {one.name: {"address": "127.0.0.1", "free_port": port} for one, port in zip(hosts, ports, strict=True)}

    def ask(host: TargetHost, question: dict[str, Any]) -> dict[str, Any]:
        if host.name == "n5" and "comes" in question:  # its way to the first is closed
            question = {**question, "peer": ["127.0.0.1", closed]}
        return asking._run(host, link_probe, question, 60.0)

    with ThreadPoolExecutor(len(hosts)) as pool:
        said = ask_links(hosts, told, ask, pool, CheckTime(300.0))
    tried = {one.source: one for one in said.links if one.target == "n0"}
    assert sorted(tried) == [f"n{number}" for number in range(1, 10)]
    assert [name for name, one in tried.items() if one.error] == ["n5"]
    assert "refused" in tried["n5"].error
    assert all(one.latency > 0 for one in tried.values() if not one.error)


class HeldUp:
    """One end of a connection, of a process that stands still for a while as the first bytes in bulk have come."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._held = end, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def __enter__(self) -> HeldUp:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def recv(self, size: int) -> bytes:
        data = self._end.recv(size)
        if len(data) > 1 and not self._held:
            self._held = True
            time.sleep(1.0)
        return data


def test_a_host_that_is_held_up_once_is_not_told_to_be_slow() -> None:
    rates: list[float] = []
    for held_up in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        end: Any = HeldUp(far) if held_up else far
        answers = threading.Thread(target=link_probe._answer, args=(end, threading.Event()))
        answers.start()
        with near:
            rates.append(link_probe._rate(near))
        answers.join()
    held, free = rates
    assert held > link_findings._SLOW * free


def test_a_driver_that_takes_its_time_leaves_the_job_that_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the host's answer comes before it is given up."""
    given: list[float] = []

    def communicate(timeout: float) -> tuple[bytes, bytes]:
        given.append(timeout)
        return b"", b""

    job = SimpleNamespace(communicate=communicate, poll=lambda: 0, returncode=0)
    reading, writing = os.pipe()
    monkeypatch.setattr(host_probe, "_job_begun", lambda boot: (job, writing))
    slow = "def driver_told():\n    import time\n    time.sleep(0.5)\n    return {'devices': [], 'error': ''}\n"
    question = {"boot": "", "folder": "none", "token": "", "name": "", "towards": host_probe.ANYWHERE, "meets": False}
    host_probe.answer({**question, "drivers": {"slow": slow}, "job_probe": "", "job": {}, "patience": 10.0})
    os.close(reading)
    assert given[0] <= 9.5
