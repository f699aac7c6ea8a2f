"""The law of a target, on the one that CONTRIBUTING shows: handed over, found again by its folder, stopped."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from launched import await_steps, by_hand, write_job

import phalanx as px
from phalanx.cli import main
from phalanx.launch.reaper import fork
from phalanx.launch.targets import TARGETS, QueueTarget, ticket_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r'```python title="background.py"\n(.*?)```', (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "background.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "background", raising=False)
    monkeypatch.setitem(TARGETS, "background", "background:BackgroundTarget")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def command(*words: str) -> int:
    """The exit code of ``phalanx`` in a process forked from this one, which ends before what it has started."""
    return os.waitstatus_to_exitcode(os.waitpid(begun(*words), 0)[1])


def begun(*words: str) -> int:
    """The process id of ``phalanx``, begun."""
    pid = fork()
    if pid == 0:
        code = 3
        try:
            main(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return pid


def await_end(pid: int) -> None:
    """Wait until the process is gone, or nobody has asked for how it ended."""
    until = time.monotonic() + 60
    with suppress(OSError):  # it is gone
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < until
            time.sleep(0.05)


GIVEN = ("launch", "train.py", "--to", "background", "--run", "run", "--plan", "dp=2", "--no-check")


def test_the_target_that_is_shown_has_40_lines(tmp_path: Path) -> None:
    lines = (tmp_path / "background.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def launch(*words: str) -> int:
    return command(*GIVEN, *words)


def test_of_two_launches_of_a_folder_at_the_same_time_one_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, pause=1.0, steps=30)
    both = [begun(*GIVEN) for _ in range(2)]
    assert sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both) == [0, 2]
    err = capfd.readouterr().err
    assert "whose run background has already" in err or "in which another training goes on" in err
    ticket = json.loads(Path("run/launch/ticket.json").read_text())
    assert command("stop", "run") == 0
    await_end(ticket["pid"])


def test_a_run_is_handed_over_found_by_its_folder_stopped_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, pause=1.0, steps=30)
    assert launch("--nice", "1", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["to"] == "background"
    await_steps(Path("run"), 2)
    assert command("status", "run", "--json") == 0
    assert json.loads(capfd.readouterr().out)["state"] == "running"
    assert launch() == 2
    assert "whose run background has already: running" in capfd.readouterr().err
    assert command("stop", "run") == 0
    await_end(told["pid"])
    assert command("status", "run") == 0
    assert "stopped" in capfd.readouterr().out
    write_job(tmp_path, steps=30)
    assert launch("--resume", "--json") == 0
    again = json.loads(capfd.readouterr().out)
    await_end(again["pid"])
    assert command("status", "run", "--json") == 0
    assert json.loads(capfd.readouterr().out)["state"] == "ended"
    target, ticket = ticket_of(Path("run"))
    assert isinstance(target, QueueTarget)
    assert target.standing(ticket, Path("run")).state == "ended"
    assert command("logs", "run") == 0
    assert command("logs", "run", "--rank", "1") == 2
    assert "none: all ranks print into one file" in capfd.readouterr().err
    assert px.load("run").losses == pytest.approx(by_hand(30), rel=1e-4)


def test_a_folder_that_was_used_needs_resume_and_resume_needs_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    assert launch("--resume") == 2
    assert "does not exist" in capfd.readouterr().err
    assert command("train", "train.py", "--run", "run", "--plan", "dp=2", "--quiet") == 0
    assert launch() == 2
    assert "which holds a run of" in capfd.readouterr().err
    assert not (Path("run") / "launch").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nise", "1"], "try: --nice\n"),
        (["--nice"], "--nice 10"),
        (["--partition", "gpu"], "options of background: --nice"),
    ],
)
def test_options_of_another_target_are_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    write_job(tmp_path)
    assert launch(*words) == 2
    assert said in capfd.readouterr().err
    assert not Path("run").exists()


def test_a_plan_has_to_be_given_where_devices_are_not_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path)
    assert command("launch", "train.py", "--to", "background", "--run", "run") == 2
    assert "--plan" in capfd.readouterr().err
    assert not Path("run").exists()


def test_what_the_plan_cannot_serve_is_refused_before_anything_is_handed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    assert command("launch", "train.py", "--to", "background", "--run", "run", "--plan", "ep=2", "--no-check") == 2
    assert "ep" in capfd.readouterr().err
    assert not Path("run").exists()


def test_what_training_would_fail_by_is_shown_and_nothing_is_handed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("data=lambda: px.Table", "data=lambda: open('none') and px.Table"))
    words = ("launch", "train.py", "--to", "background", "--run", "run", "--plan", "dp=2")
    assert command(*words) == 1
    said = capfd.readouterr()
    assert "fails  this machine: the job's data: FileNotFoundError" in said.out
    assert "--no-check" in said.err
    assert not Path("run").exists()


def test_a_run_that_nothing_is_wrong_with_is_handed_over_after_the_check(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    assert command("launch", "train.py", "--to", "background", "--run", "run", "--plan", "dp=2", "--json") == 0
    await_end(json.loads(capfd.readouterr().out)["pid"])
    assert px.load("run").losses == pytest.approx(by_hand(6), rel=1e-4)


def test_a_dry_run_shows_files_and_commands_and_does_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path)
    assert launch("--dry-run") == 0
    shown = capfd.readouterr().out
    assert 'plan = "dp=2"' in shown
    assert "$ nice -n 0 " in shown
    assert not Path("run").exists()


def test_devices_are_those_of_the_other_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """There is no CUDA here, which says nothing of there; what is there says so itself."""
    write_job(tmp_path)
    assert launch("--plan", "dp=2 device=cuda", "--json") == 0
    await_end(json.loads(capfd.readouterr().out)["pid"])
    assert "CUDA devices here: 0" in (Path("run") / "launch" / "output.log").read_text()


def test_a_run_that_goes_on_here_is_no_more_its_targets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path)
    assert launch("--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert command("train", "train.py", "--run", "run", "--plan", "dp=2", "--resume", "auto", "--quiet") == 2
    assert "whose run background has already: running" in capfd.readouterr().err
    await_end(told["pid"])
    write_job(tmp_path, steps=8)
    assert command("train", "train.py", "--run", "run", "--resume", "--quiet") == 0
    assert not (Path("run") / "launch" / "ticket.json").exists()
    capfd.readouterr()
    assert command("status", "run", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["state"], found["to"], found["step"]) == ("ended", "", 7)


def test_a_run_of_another_machine_is_not_taken_for_one_that_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").touch()
    owner = {"number": 1, "identity": "a", "host": "n7.invalid", "pid": 4711, "since": 0.0}
    (folder / "writer.json").write_text(json.dumps(owner))
    assert command("status", "run") == 0
    assert "written by process 4711 on n7.invalid" in capfd.readouterr().out
    assert command("stop", "run") == 3
    assert "ssh n7.invalid kill -TERM 4711" in capfd.readouterr().err
