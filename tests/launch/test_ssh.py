"""Runs on hosts that SSH reaches: equal to one device, ended whole, and nothing left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launched import (
    await_none_left,
    await_steps,
    by_hand,
    commands_end,  # noqa: F401
    phalanx,
    working_in,
    write_job,
)
from ssh_hosts import SshServers, lacking_for_ssh, ssh_servers

import phalanx as px
from phalanx.errors import RunError, SpecError, WorkerError
from phalanx.launch import load_job
from phalanx.launch.host_network import lacking
from phalanx.launch.targets.hosts_file import HostsFile


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    problem = lacking(px.Hosts(2).link)
    if why := lacking_for_ssh() or (problem and problem.given):
        pytest.skip(why)
    with ssh_servers(2, tmp_path_factory.mktemp("ssh")) as made:
        yield made


def fit(folder: Path, file: Path, plan: str) -> px.Run:
    """The job in ``folder`` on the hosts of ``file``."""
    job = load_job(str(write_job(folder)))
    spec = px.RunSpec(job=str(folder / "train.py"), plan=px.Plan.parse(plan), folder=folder / "run")
    return px.fit(job, run=spec, launcher=f"ssh:{file}", watch=False)


@pytest.mark.parametrize(
    ("plan", "devices"),
    [("dp=2", (1, 1)), ("fsdp=4", (2, 2)), ("pp=2 tp=2 micro=4", (2, 2)), ("dp=2 server=1", (2, 1))],
)
def test_a_run_on_two_hosts_is_that_of_one_device(
    servers: SshServers, tmp_path: Path, plan: str, devices: tuple[int, int]
) -> None:
    run = fit(tmp_path, servers.write_hosts(devices), plan)
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [event["event"] for event in run.events()][-1] == "end"
    await_none_left(tmp_path)


def begun(
    servers: SshServers, folder: Path, *options: str, pause: float = 0.05, steps: int = 60
) -> subprocess.Popen[str]:
    """``phalanx launch`` of a slow job on both hosts, a few steps after its beginning."""
    job = write_job(folder, pause=pause, steps=steps)
    file = servers.write_hosts((1, 1), folder=f'"{folder}"')
    words = ("launch", str(job), "--to", f"ssh:{file}", "--plan", "dp=2", "--run", "run", "--no-check")
    process = phalanx(*words, *options, cwd=folder)
    await_steps(folder / "run", 4, process)
    return process


@pytest.mark.parametrize("held", [0.0, 1.5], ids=["at once", "once its peers have failed"])
def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(
    servers: SshServers, tmp_path: Path, held: float
) -> None:
    """``held``: seconds until its agent comes to tell how it has ended."""
    process = begun(servers, tmp_path, "--checkpoint-every", "3")
    worker = psutil.Process(int(next(one for one in working_in(tmp_path) if "phalanx worker" in one).partition(":")[0]))
    agent = worker.parent()
    assert agent
    agent.suspend()
    worker.kill()
    time.sleep(held)
    agent.resume()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    run = px.load(tmp_path / "run")
    (restart,) = run.events("restart")
    assert "SIGKILL" in restart["cause"], restart
    assert run.losses == pytest.approx(by_hand(60), rel=1e-4)
    assert "each sample seen exactly once per epoch: yes" in " ".join(out.split())


def test_stop_saves_and_resume_goes_on(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path, pause=0.5)
    status = phalanx("status", "run", "--json", cwd=tmp_path)
    assert '"state": "running"' in status.communicate(timeout=30)[0]
    stop = phalanx("stop", "run", cwd=tmp_path)
    assert stop.communicate(timeout=60) == ("run: stopped\n", "")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert "newest checkpoint: step-" in err
    await_none_left(tmp_path)
    taken = len(px.load(tmp_path / "run").losses)
    assert 4 <= taken < 60
    write_job(tmp_path, steps=60)
    again = phalanx(
        *(
            "launch",
            "train.py",
            "--to",
            f"ssh:{servers.folder / 'hosts.toml'}",
            "--run",
            "run",
            "--resume",
            "--no-check",
        ),
        cwd=tmp_path,
    )
    _, err = again.communicate(timeout=90)
    assert again.returncode == 0, err
    assert px.load(tmp_path / "run").losses == pytest.approx(by_hand(60), rel=1e-4)


def test_a_second_launch_of_a_folder_is_refused_and_writes_nothing(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path, pause=0.5, steps=600)
    writer = (tmp_path / "run" / "writer.json").read_text()
    words = ("launch", "train.py", "--to", f"ssh:{servers.folder / 'hosts.toml'}", "--plan", "dp=2", "--run", "run")
    second = phalanx(*words, "--no-check", cwd=tmp_path)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2, err
    assert f"in which another training goes on: process {process.pid} on" in err
    assert (tmp_path / "run" / "writer.json").read_text() == writer
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err


def test_ctrl_c_saves_and_stops(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "newest checkpoint: step-" in err
    assert f"try: phalanx launch {tmp_path / 'train.py'} --to ssh:" in err
    assert "hosts.toml --run run --resume" in err
    await_none_left(tmp_path)


def test_a_rank_that_fails_is_named_with_its_host(servers: SshServers, tmp_path: Path) -> None:
    path = write_job(tmp_path)
    fails = 'if os.environ.get("RANK") == "1":\n        raise ValueError("its own")'
    path.write_text("import os\n\n" + path.read_text().replace("time.sleep(PAUSE)", fails))
    file = servers.write_hosts((1, 1), folder=f'"{tmp_path}"')
    words = ("launch", str(path), "--to", f"ssh:{file}", "--plan", "dp=2", "--run", "run")
    process = phalanx(*words, "--no-check", cwd=tmp_path)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 3, err
    assert "rank 1 of 2, on n1, failed in step 0: ValueError: its own" in err


def test_nothing_outlives_a_launcher_that_is_killed(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path)
    assert working_in(tmp_path)
    process.kill()
    process.communicate()
    await_none_left(tmp_path)


def test_a_host_that_is_lost_ends_the_others_and_is_named(tmp_path: Path) -> None:
    if why := lacking_for_ssh():
        pytest.skip(why)
    with ssh_servers(2, tmp_path) as servers:
        process = begun(servers, tmp_path)
        servers.hosts.cut(1)
        began = time.monotonic()
        _, err = process.communicate(timeout=90)
        assert process.returncode == 3, err
        assert "host n1" in err
        assert time.monotonic() - began < 40
        servers.hosts.restore(1)
    assert "newest checkpoint" in err or "no checkpoint yet" in err


def test_a_rank_that_does_not_come_is_named_with_where_it_stands(servers: SshServers, tmp_path: Path) -> None:
    path = write_job(tmp_path)
    waits = 'if os.environ.get("RANK") == "1" and len(CALLS) > 2:\n        time.sleep(600)\n    CALLS.append(1)'
    path.write_text("import os\n\nCALLS = []\n" + path.read_text().replace("time.sleep(PAUSE)", waits))
    spec = px.RunSpec(job=str(path), plan=px.Plan.parse("dp=2"), folder=tmp_path / "run", timeout=8.0, restarts=0)
    with pytest.raises(WorkerError) as caught:
        px.fit(load_job(str(path)), run=spec, launcher=f"ssh:{servers.write_hosts((1, 1))}", watch=False)
    text = str(caught.value)
    assert caught.value.rank == 1, text
    assert "did not come to" in text
    assert "train.py" in text
    (hang,) = px.load(tmp_path / "run").events("hang")
    assert hang["ranks"] == [1]
    await_none_left(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"Port": "2222"}, "Connection refused"),
        ({"UserKnownHostsFile": "{folder}/none"}, "Host key verification failed"),
        ({"IdentityFile": "{folder}/other_key"}, "Permission denied"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_at_once(
    servers: SshServers, tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    file = servers.write_hosts((1, 1))
    servers.write_config(**{name: value.format(folder=servers.folder) for name, value in changed.items()})
    began = time.monotonic()
    try:
        with pytest.raises(RunError) as caught:
            fit(tmp_path, file, "dp=2")
    finally:
        servers.write_config()
    text = str(caught.value)
    assert time.monotonic() - began < 15
    assert re.search(rf"host n0 .*{said}.*\nhost n1 .*{said}", text), text
    assert "try: " in text
    assert not (tmp_path / "run").exists()


def test_an_interpreter_that_is_not_there_is_told(servers: SshServers, tmp_path: Path) -> None:
    file = servers.write_hosts((1, 1), python='"/nowhere/python"')
    with pytest.raises(RunError, match=r"host n0 cannot be used: .*/nowhere/python[\s\S]*python = "):
        fit(tmp_path, file, "dp=2")


def test_a_folder_that_is_not_there_is_told(servers: SshServers, tmp_path: Path) -> None:
    file = servers.write_hosts((1, 1), folder='"/nowhere/there"')
    with pytest.raises(RunError, match=r"host n[01].*No such file or directory: /nowhere/there"):
        fit(tmp_path, file, "dp=2")


def test_a_plan_for_other_devices_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text('[[host]]\nname = "a.invalid"\ndevices = 4\n')
    with pytest.raises(SpecError) as caught:
        fit(tmp_path, file, "dp=2")
    (problem,) = caught.value.problems
    assert problem.given == "dp=2, of 2 processes, for 4 devices (a.invalid: 4)"
    assert problem.fix == "--plan dp=4"


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


def test_a_dry_run_shows_the_commands_and_does_nothing(servers: SshServers, tmp_path: Path) -> None:
    write_job(tmp_path)
    file = servers.write_hosts((1, 1))
    shown = phalanx("launch", "train.py", "--to", f"ssh:{file}", "--plan", "dp=2", "--dry-run", cwd=tmp_path)
    out, err = shown.communicate(timeout=60)
    assert shown.returncode == 0, err
    assert [line.startswith("$ ssh -T ") for line in out.splitlines()][-2:] == [True, True]
    assert "code.txt\nfor a host that has it not: 1 file of" in out
    assert re.search(r"\d  train.py\n", out)
    assert "StrictHostKeyChecking=yes" in out
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"train.py"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "shh:hosts.toml"], "--to ssh"),
        (["--to", "ssh"], "--to ssh:hosts.toml"),
        (["--to", "ssh:hosts.toml", "--time", "12h"], "ssh, with --time"),
        (["--to", "ssh:nowhere.toml"], "nowhere.toml"),
        (["--to", "ssh:hosts.toml", "--python", "/opt/python"], "python = in the hosts file"),
    ],
)
def test_what_is_no_target_is_told(tmp_path: Path, words: list[str], said: str) -> None:
    write_job(tmp_path)
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "a.invalid"\n')
    process = phalanx("launch", "train.py", "--plan", "single", *words, cwd=tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert said in err
    assert sorted(os.listdir(tmp_path)) == ["hosts.toml", "train.py"]
