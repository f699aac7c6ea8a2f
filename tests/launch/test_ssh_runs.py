"""Runs on hosts that SSH reaches: as on one device, stopped, resumed after a loss, and no process left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import (
    await_none_left,
    await_steps,
    by_hand,
    commands_end,  # noqa: F401
    phalanx,
    until,
    working_in,
    write_job,
)
from ssh_hosts import SshServers, ssh_servers

import phalanx as px
from phalanx.checkpoint import checkpoints, verify
from phalanx.errors import RunError
from phalanx.launch.jobfile import load_job
from phalanx.launch.targets import ssh


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    with ssh_servers(2, tmp_path_factory.mktemp("ssh")) as made:
        yield made


def fit(folder: Path, file: Path, plan: str) -> px.Run:
    job = load_job(str(folder / "train.py"))
    spec = px.RunSpec(job=str(folder / "train.py"), plan=px.Plan.parse(plan), folder=folder / "run")
    return px.fit(job, run=spec, launcher=f"ssh:{file}", watch=False)


@pytest.mark.parametrize(
    ("plan", "devices"), [("fsdp=4", (2, 2)), ("pp=2 tp=2 micro=4", (2, 2)), ("dp=2 server=1", (2, 1))]
)
def test_a_run_on_two_hosts_is_that_of_one_device(
    servers: SshServers, tmp_path: Path, plan: str, devices: tuple[int, int]
) -> None:
    write_job(tmp_path)
    run = fit(tmp_path, servers.write_hosts(devices), plan)
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [event["event"] for event in run.events()][-1] == "end"
    await_none_left(tmp_path)


def launch(servers: SshServers, folder: Path, *options: str, **top: str) -> subprocess.Popen[str]:
    file = servers.write_hosts((1, 1), folder=f'"{folder}"', **top)
    words = ("launch", "train.py", "--to", f"ssh:{file}", "--plan", "dp=2", "--run", "run", "--no-check")
    return phalanx(*words, *options, cwd=folder)


def begun(servers: SshServers, folder: Path, *options: str, pause: float = 0.05) -> subprocess.Popen[str]:
    """``phalanx launch`` of a slow job on both hosts, a few steps after its beginning."""
    write_job(folder, pause=pause, steps=60)
    process = launch(servers, folder, *options)
    await_steps(folder / "run", 4, process)
    return process


def workers(folder: Path) -> list[psutil.Process]:
    found = [
        int(line.partition(":")[0]) for line in working_in(folder) if f"{sys.executable} -m phalanx worker" in line
    ]
    return sorted(map(psutil.Process, found), key=lambda one: one.environ()["RANK"])


@pytest.fixture(scope="module")
def undisturbed(servers: SshServers, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the same 60 steps on the same hosts, of a run in which nothing is lost."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_job(folder, steps=60)
    return fit(folder, servers.write_hosts((1, 1)), "dp=2").losses


@pytest.mark.parametrize("lost", ["worker", "host"])
def test_what_is_lost_is_started_again_and_the_numbers_are_the_same(
    servers: SshServers, tmp_path: Path, undisturbed: list[float], lost: str
) -> None:
    process = begun(servers, tmp_path, "--checkpoint-every", "3")
    worker = workers(tmp_path)[-1]
    agent = worker.parent()
    assert agent
    (worker if lost == "worker" else agent).kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    run = px.load(tmp_path / "run")
    (restart,) = run.events("restart")
    assert restart["rank"] == 1
    assert ("SIGKILL" if lost == "worker" else "cut off") in restart["cause"], restart
    assert lost == "worker" or "host n1 was lost" in err
    assert run.losses == undisturbed
    assert "each sample seen exactly once per epoch: yes" in " ".join(out.split())
    await_none_left(tmp_path)


def test_a_host_that_falls_silent_ends_the_run_with_its_name_and_whole_checkpoints(
    servers: SshServers, tmp_path: Path
) -> None:
    process = begun(servers, tmp_path, "--checkpoint-every", "3", "--restarts", "0")
    servers.hosts.cut(1)
    try:
        _, err = process.communicate(timeout=120)
    finally:
        servers.hosts.restore(1)
    assert process.returncode == 3, err
    assert re.search("error: host n1 was lost: .*not responding", err), err
    found = checkpoints(tmp_path / "run" / "checkpoints")
    assert found
    assert [verify(one.path) for one in found] == [[]] * len(found)
    await_none_left(tmp_path, patience=120)  # the agent there ends once it hears nothing


def test_no_worker_outlives_a_killed_launcher(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path, pause=0.2)
    process.kill()
    process.communicate()
    await_none_left(tmp_path)
    write_job(tmp_path, steps=60)
    again = launch(servers, tmp_path, "--resume")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert px.load(tmp_path / "run").losses == pytest.approx(by_hand(60), rel=1e-4)


def test_ctrl_c_saves_and_stops(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "newest checkpoint: step-" in err
    assert "try: phalanx launch train.py --to ssh:" in err
    assert "hosts.toml --run run --resume" in err
    await_none_left(tmp_path)


def test_status_and_stop_find_the_run_and_resume_goes_on(servers: SshServers, tmp_path: Path) -> None:
    process = begun(servers, tmp_path, pause=0.5)  # two commands come before its end
    status = phalanx("status", "run", "--json", cwd=tmp_path).communicate(timeout=60)[0]
    assert '"state": "running"' in status
    assert f'"to": "ssh:{servers.folder}/hosts.toml"' in status
    again = launch(servers, tmp_path, "--resume").communicate(timeout=60)[1]
    assert "one launch of a folder at a time" in again
    assert phalanx("stop", "run", cwd=tmp_path).communicate(timeout=90) == ("run: stopped\n", "")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    write_job(tmp_path, steps=60)
    resumed = launch(servers, tmp_path, "--resume")
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert px.load(tmp_path / "run").losses == pytest.approx(by_hand(60), rel=1e-4)


def test_a_run_in_the_background_stops_with_a_checkpoint(servers: SshServers, tmp_path: Path) -> None:
    job = load_job(str(write_job(tmp_path, pause=0.05, steps=60)))
    spec = px.RunSpec(job=str(tmp_path / "train.py"), plan=px.Plan(dp=2), folder=tmp_path / "run")
    run = px.start(job, run=spec, launcher=f"ssh:{servers.write_hosts((1, 1))}")
    await_steps(tmp_path / "run", 4)
    assert run.running
    run.stop()
    assert [event["event"] for event in run.events()][-1] == "stopped"
    assert checkpoints(tmp_path / "run" / "checkpoints")
    await_none_left(tmp_path)


def test_a_rank_that_fails_is_named_with_its_host_and_its_output(servers: SshServers, tmp_path: Path) -> None:
    path = write_job(tmp_path)
    fails = 'if os.environ.get("RANK") == "1":\n        print("\\33[2Jits words")\n        raise ValueError("its own")'
    path.write_text("import os\n\n" + path.read_text().replace("time.sleep(PAUSE)", fails))
    process = launch(servers, tmp_path)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 3, err
    assert "rank 1 of 2 failed in step 0: ValueError: its own\n    on n1; the output" in err
    assert "[rank 1] \\x1b[2Jits words" in out
    assert 'raise ValueError("its own")' in out
    log = phalanx("logs", "run", "--rank", "1", cwd=tmp_path).communicate(timeout=60)[0]
    assert "its words" in log
    assert len([*px.load(tmp_path / "run").events("error")]) == 1


@pytest.mark.realtime("a host that refuses is not waited for")
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
    write_job(tmp_path)
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
    assert {name for name in ("n0", "n1") if re.search(rf"host .*{name}.* cannot be used: .*{said}", text)} == {
        "n0",
        "n1",
    }
    assert "try: " in text
    assert not (tmp_path / "run").exists()


def test_variables_of_the_hosts_file_reach_workers_and_no_command_line(
    servers: SshServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(tmp_path, pause=0.05, steps=60)
    path.write_text("import os\nassert os.environ['WORD'] == 'a-secret'\n" + path.read_text())
    monkeypatch.setenv("WORD", "a-secret")  # for the look at the job here
    given = f'{{PYTHONPATH = "{os.environ.get("PYTHONPATH", "")}", WORD = "a-secret"}}'
    process = launch(servers, tmp_path, environment=given)
    await_steps(tmp_path / "run", 4, process)
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            assert "a-secret" not in " ".join(one.cmdline())
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)
    assert process.returncode == 75


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[SshServers, Path]]:
    """Two hosts, on each of which ``job`` is an empty folder of its own; ``run`` is shared by all."""
    for name in ("ssh", "job", "run"):
        (tmp_path / name).mkdir()
    with ssh_servers(2, tmp_path / "ssh", own=[tmp_path / "job"]) as servers:
        yield servers, tmp_path / "job"


def fit_in(folder: Path, run: Path, file: Path) -> px.Run:
    job = load_job(str(write_job(folder)))
    spec = px.RunSpec(job=str(folder / "train.py"), plan=px.Plan.parse("dp=2"), folder=run)
    return px.fit(job, run=spec, launcher=f"ssh:{file}", watch=False)


def test_a_host_without_the_run_folder_or_the_job_is_refused_before_anything_starts(
    apart: tuple[SshServers, Path],
) -> None:
    servers, folder = apart
    with pytest.raises(RunError) as caught:
        fit_in(folder, folder / "run", servers.write_hosts((1, 1)))
    text = str(caught.value)
    assert "host n0, n1 cannot be used: the job's file is not there" in text
    assert f"host n0, n1 cannot be used: {folder} is not the folder of that path here" in text
    assert "try: " in text
    assert not (folder / "run").exists()
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["train.py"]


def test_a_host_without_phalanx_is_named(servers: SshServers, tmp_path: Path) -> None:
    write_job(tmp_path)
    file = servers.write_hosts((1, 1), environment="{}", python=f'"{sys.base_prefix}/bin/python3"')
    with pytest.raises(RunError, match=r"host n0, n1 cannot be used: .*phalanx.*\n +try: install the same Phalanx"):
        fit(tmp_path, file, "dp=2")


def test_the_agent_ends_its_workers_once_its_input_closes(tmp_path: Path) -> None:
    write_job(tmp_path, pause=0.2, steps=60)
    run = px.RunSpec(job=str(tmp_path / "train.py"), plan=px.Plan(), folder=tmp_path / "run")
    (tmp_path / "run" / "launch").mkdir(parents=True)
    runfile = tmp_path / "run" / "launch" / "run.toml"
    runfile.write_text(run.to_toml())
    place = f'{{"name": "n", "rank": 0, "workers": 1, "runfile": "{runfile}", "folder": "{tmp_path}", "nodes": 1,'
    words = [sys.executable, "-m", "phalanx.launch.targets.ssh_node"]
    agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdin
    agent.stdin.write(f'{place} "meet": "127.0.0.1:29511", "start": "1"}}\n')
    agent.stdin.flush()
    await_steps(tmp_path / "run", 2)
    agent.stdin.close()
    until(lambda: agent.poll() is not None, 60, "the agent ended")
    assert agent.stdout
    agent.stdout.close()
    assert checkpoints(tmp_path / "run" / "checkpoints")
    await_none_left(tmp_path)


def agent_that(tmp_path: Path, program: str) -> ssh._Agent:
    words = [sys.executable, "-c", program]
    return ssh._Agent("n1", 1, words, tmp_path / "run" / "launch" / "output.log")


def test_what_a_host_prints_is_text_and_no_line_is_endless(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    agent = agent_that(tmp_path, "print('\\33]0;x\\7' + '\\u202e', flush=True); print('y' * 200_000)")
    until(lambda: agent.poll() is not None, 30, "it ended")
    agent.tell("", last=True)
    agent.end(time.monotonic() + 3.0)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "\\x1b]0;x\\x07\\u202e"
    assert max(map(len, lines)) == ssh._LINE
    assert (tmp_path / "run" / "launch" / "output.log").read_text().splitlines() == lines


LOST = {"event": "error", "rank": 0, "step": 7, "kind": "RuntimeError", "message": "rank 0 lost", "lost": True}
STEP = {"event": "step", "step": 6}


@pytest.mark.parametrize(
    ("events", "codes", "said", "found"),
    [
        ([LOST | {"lost": False, "kind": "RefusedError"}], (2, 255), "", (0, "RefusedError", False, 2)),
        ([LOST | {"lost": False, "kind": "ValueError"}, LOST], (1, 1), "", (0, "ValueError", False, 3)),
        ([STEP, LOST], (1, 1), "n1: rank 1 ended with -9", (1, "signal 9", True, 3)),
        ([STEP, LOST], (1, 1), "n1: rank 1 ended with 3", (0, "RuntimeError", True, 3)),
        ([STEP, LOST], (1, 255), "Timeout", (1, "lost host", True, 3)),
        ([STEP], (None, 255), "Timeout", (1, "lost host", True, 3)),
        ([], (0, 1), "No module named phalanx", (1, "exit 1", False, 3)),
        ([], (0, 0), "", (0, "exit 0", False, 3)),
    ],
)
def test_the_first_failure_is_named(
    tmp_path: Path, events: list[dict[str, Any]], codes: Any, said: str, found: tuple[int, str, bool, int]
) -> None:
    agents = [agent_that(tmp_path, "") for _ in range(2)]
    for number, agent in enumerate(agents):
        agent.end(time.monotonic() + 3.0)
        agent.tell("", last=True)
        agent.first, agent.said = number, [said] if number else []
    failure = ssh._failure(agents, codes, events)
    assert (failure.rank, failure.kind, failure.is_loss, failure.exit_code) == found
    assert not events or events[0] is not STEP or failure.step == 6


@pytest.mark.parametrize("said", ["", "hello", "phalanx-check:[]", 'phalanx-check:{"free_port": 9}'])
def test_other_answers_than_those_to_the_question_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    write_job(tmp_path)
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "n1"\n')
    target = ssh.SshTarget(str(tmp_path / "hosts.toml"))
    run = px.RunSpec(job=str(tmp_path / "train.py"), plan=px.Plan(), folder=tmp_path / "run")
    monkeypatch.setattr(ssh.SshAskedHost, "run", lambda *given: said)
    with pytest.raises(RunError, match="host n1 cannot be used: gives another answer"):
        target._ask(run)
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "hosts.toml"}
