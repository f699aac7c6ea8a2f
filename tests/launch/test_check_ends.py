"""A check ends in its time, leaves nothing behind however it is ended, and reads answers as those of strangers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from launched import write_job
from ssh_hosts import ssh_servers

from law_rows import longer
from phalanx.cli import main
from phalanx.errors import RunError
from phalanx.launch import check
from phalanx.launch.check import (
    CheckTime,
    HostFacts,
    HostSurvey,
    LinkAnswer,
    ThisMachine,
    read_answer,
    run_here,
    survey,
)
from phalanx.launch.check_findings import findings
from phalanx.launch.check_probe import MARK
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
    monkeypatch.setattr(check, "MOST", 24.0)
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


def asked(folder: Path) -> HostSurvey:
    """Ask a host for the job ``gone.py`` in ``folder``."""
    return survey([ThisMachine()], folder, str(folder / "gone.py"))


def test_a_host_without_the_job_is_looked_at_and_fails(tmp_path: Path) -> None:
    said = asked(tmp_path)
    assert said.hosts[0].facts
    assert "torch" in said.hosts[0].facts.versions
    assert [one.what for one in findings(said)] == ["the job's file is not there"]


def test_an_answer_of_another_form_is_none(tmp_path: Path) -> None:
    facts = asked(tmp_path).hosts[0].facts
    assert facts
    told = json.loads(json.dumps(asdict(facts)))
    assert read_answer(f"Welcome!\n{MARK}{json.dumps(told)}\nBye\n", HostFacts) == facts
    others = [{**told, name: value} for name in told for value in ({"a": [0]}, -2, [0], "x" * 2**17)]
    others += [{key: value for key, value in told.items() if key != name} for name in ("cores", "shared", "clock")]
    texts = [
        MARK + text for text in ("{", "[" * 10**5, "null", '{"python": "3", "python": "3"}', *map(json.dumps, others))
    ]
    for text in ("", "Welcome!", *texts):
        with pytest.raises(RunError, match="gives another answer"):
            read_answer(text, HostFacts)
    with pytest.raises(RunError, match="gives another answer"):
        read_answer(MARK + json.dumps(told), LinkAnswer)
    steered = read_answer(MARK + json.dumps({**told, "ending": "\x1b[2Jgone"}), HostFacts)
    assert "\x1b" not in steered.ending


def test_a_host_that_does_not_stop_talking_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match="gives no answer within 1 s"):
        run_here(["yes"], "", CheckTime(1.0))
    assert time.monotonic() - began < 10.0


def test_words_of_a_program_that_fails_do_not_steer_the_terminal() -> None:
    with pytest.raises(RunError, match=r"^\\x1b\[2Jgone$"):
        run_here(["sh", "-c", "printf '\\33[2Jgone' >&2; exit 3"], "", CheckTime(10.0))


def test_a_quick_survey_loads_no_torch_and_compares_the_job_with_this_machines(tmp_path: Path) -> None:
    write_job(tmp_path)
    said = survey([ThisMachine()], tmp_path, str(tmp_path / "train.py"), quick=True)
    assert said.hosts[0].facts
    assert said.hosts[0].facts.versions == {}
    assert said.hosts[0].facts.free_port
    assert findings(said) == []
    (finding,) = findings(replace(said, files={"train.py": "other"}))
    assert finding.hosts == ("this machine",)
    assert "train.py is another file" in finding.what
