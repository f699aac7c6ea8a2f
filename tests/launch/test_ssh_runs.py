"""Runs on hosts that SSH reaches, with and without a shared disk: as one device's, ended, and nothing left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    working_in,
    write_job,
)
from ssh_hosts import SshServers, ssh_servers

import phalanx as px
from phalanx.checkpoint import checkpoints, verify
from phalanx.errors import RunError, SpecError
from phalanx.launch import load_job


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    with ssh_servers(2, tmp_path_factory.mktemp("ssh")) as made:
        yield made


def fit(folder: Path, file: Path, plan: str) -> px.Run:
    job = load_job(str(write_job(folder)))
    spec = px.RunSpec(job=str(folder / "train.py"), plan=px.Plan.parse(plan), folder=folder / "run")
    return px.fit(job, run=spec, launcher=f"ssh:{file}", watch=False)


@pytest.mark.parametrize(
    ("plan", "devices"), [("dp=2", (1, 1)), ("pp=2 tp=2 micro=4", (2, 2)), ("dp=2 server=1", (2, 1))]
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


@dataclass(frozen=True)
class Apart:
    """Two hosts on which ``job`` and ``scratch`` are folders of their own, empty as the hosts begin."""

    servers: SshServers
    job: Path
    scratch: Path

    def hosts(self, devices: Sequence[int] = (1, 1), **top: str) -> Path:
        return self.servers.write_hosts(devices, **{"scratch": f'"{self.scratch}"', **top})

    def on(self, host: int, command: str) -> str:
        words = ["ssh", "-F", str(self.servers.folder / "config"), f"n{host}", command]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def files(self, host: int, below: str) -> list[str]:
        return self.on(host, f"cd {self.scratch}/{below} 2>/dev/null && find . -type f || true").split()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    folders = [tmp_path / name for name in ("ssh", "job", "scratch")]
    for folder in folders:
        folder.mkdir()
    with ssh_servers(2, folders[0], own=folders[1:]) as servers:
        yield Apart(servers, *folders[1:])


def fit_apart(apart: Apart, plan: str, devices: Sequence[int] = (1, 1), run: str = "run", **given: Any) -> px.Run:
    if not (apart.job / "train.py").exists():
        write_job(apart.job)
    job = load_job(str(apart.job / "train.py"))
    spec = px.RunSpec(job=str(apart.job / "train.py"), plan=px.Plan.parse(plan), folder=apart.job / run, **given)
    return px.fit(job, run=spec, launcher=f"ssh:{apart.hosts(devices)}", watch=False)


def refuse_damage(folder: Path, newest: int) -> None:
    """The newest checkpoint is that of a step, and all that are there are whole."""
    found = checkpoints(folder / "checkpoints")
    assert [one.step for one in found][:1] == [newest]
    assert [verify(one.path) for one in found] == [[]] * len(found)


@pytest.mark.parametrize(("plan", "devices"), [("fsdp=2", (1, 1))])
def test_a_run_without_a_shared_disk_is_that_of_one_device(apart: Apart, plan: str, devices: Sequence[int]) -> None:
    run = fit_apart(apart, plan, devices, checkpoint_every=2)
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [event["event"] for event in run.events()][-1] == "end"
    refuse_damage(run.folder, 6)
    assert {file.name for file in (run.folder / "checkpoints" / "step-00000006").glob("rank-*")} >= {
        f"rank-{rank:05d}.safetensors" for rank in (0, 1)
    }
    runfile = (run.folder / "run.toml").read_text()
    assert str(apart.scratch) not in runfile + (run.folder / "events.jsonl").read_text()
    assert str(apart.job / "train.py") in runfile
    for host in range(2):
        assert apart.files(host, "runs") == []
        assert [name for name in apart.files(host, "code") if name.endswith("train.py")]
    await_none_left(apart.scratch)


def test_a_run_goes_on_under_another_plan_from_what_has_come_here(apart: Apart) -> None:
    fit_apart(apart, "fsdp=2", steps=4, checkpoint_every=2)
    refuse_damage(apart.job / "run", 4)
    run = fit_apart(apart, "dp=2", steps=8, resume=True)
    assert run.losses == pytest.approx(by_hand(8), rel=1e-4)
    refuse_damage(run.folder, 8)
    audit = phalanx("audit", "run", cwd=apart.job)
    assert "yes" in audit.communicate(timeout=60)[0]
    assert audit.returncode == 0


def begun_apart(apart: Apart, *options: str, pause: float = 0.05) -> subprocess.Popen[str]:
    """``phalanx launch`` of a slow job, a few steps after its beginning, as the run folder here has it."""
    write_job(apart.job, pause=pause, steps=60)
    words = ("launch", "train.py", "--to", f"ssh:{apart.hosts()}", "--plan", "fsdp=2", "--run", "run", "--no-check")
    process = phalanx(*words, *options, cwd=apart.job)
    await_steps(apart.job / "run", 4, process)
    return process


def await_checkpoint(apart: Apart) -> None:
    until = time.monotonic() + 60
    while not checkpoints(apart.job / "run" / "checkpoints"):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_stop_brings_the_checkpoint_and_resume_goes_on(apart: Apart) -> None:
    process = begun_apart(apart, pause=0.5)  # two commands come before its end
    status = phalanx("status", "run", "--json", cwd=apart.job)
    assert '"state": "running"' in status.communicate(timeout=30)[0]
    assert phalanx("stop", "run", cwd=apart.job).communicate(timeout=60) == ("run: stopped\n", "")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert "newest checkpoint: step-" in err
    await_none_left(apart.scratch)
    taken = len(px.load(apart.job / "run").losses)
    refuse_damage(apart.job / "run", taken)
    write_job(apart.job, steps=60)
    again = phalanx(
        *("launch", "train.py", "--to", f"ssh:{apart.hosts()}", "--run", "run", "--resume", "--no-check"), cwd=apart.job
    )
    _, err = again.communicate(timeout=150)
    assert again.returncode == 0, err
    assert px.load(apart.job / "run").losses == pytest.approx(by_hand(60), rel=1e-4)


def test_check_looks_at_code_that_is_sent_and_leaves_nothing_there(apart: Apart) -> None:
    write_job(apart.job)
    (apart.job / "beside.py").write_text("import not_installed_anywhere\n")
    words = ("check", "train.py", "--to", f"ssh:{apart.hosts()}", "--plan", "fsdp=2", "--run", "run", "--json")
    out, err = phalanx(*words, cwd=apart.job).communicate(timeout=120)
    told = json.loads(out)
    assert not told["would_fail"], (told["findings"], err)
    said = [one["what"] for one in told["findings"] if one["hosts"] == ["n0", "n1"]]
    assert [what for what in said if "of it are sent" in what]
    assert [what for what in said if "it gets a copy, whose changes are brought here" in what]
    assert [one["told"]["data"]["samples"] for one in told["hosts"]] == [64, 64]
    (apart.job / "train.py").write_text("import beside\n" + (apart.job / "train.py").read_text())
    checked = phalanx(*words, cwd=apart.job)
    out, _ = checked.communicate(timeout=120)
    assert checked.returncode == 1
    assert [one["what"] for one in json.loads(out)["findings"] if "not_installed_anywhere" in one["what"]]
    assert apart.files(0, ".") + apart.files(1, ".") == []


def test_a_host_that_is_lost_leaves_here_only_what_is_whole(apart: Apart) -> None:
    process = begun_apart(apart, "--checkpoint-every", "3")
    await_steps(apart.job / "run", 8, process)
    apart.servers.hosts.cut(1)
    _, err = process.communicate(timeout=120)
    apart.servers.hosts.restore(1)
    assert process.returncode == 3, err
    assert "host n1" in err
    assert f"what a host has of it stays there: n0:{apart.scratch}/runs/run-" in err
    found = checkpoints(apart.job / "run" / "checkpoints")
    assert [verify(one.path) for one in found] == [[]] * len(found)


def test_after_the_launcher_is_killed_a_run_goes_on_from_what_had_come(apart: Apart) -> None:
    process = begun_apart(apart, "--checkpoint-every", "3")
    await_checkpoint(apart)
    process.kill()
    process.communicate()
    await_none_left(apart.scratch)
    write_job(apart.job, steps=60)
    words = ("launch", "train.py", "--to", f"ssh:{apart.hosts()}", "--run", "run", "--resume", "--no-check")
    again = phalanx(*words, cwd=apart.job)
    out, err = again.communicate(timeout=150)
    assert again.returncode == 0, err
    assert px.load(apart.job / "run").losses == pytest.approx(by_hand(60), rel=1e-4)
    assert "each sample seen exactly once per epoch: yes" in " ".join(out.split())


@pytest.mark.parametrize(
    ("plan", "given", "where"),
    [
        ("dp=1 server=1", {}, "plan.server"),
        ("dp=2", {"on_nonfinite": "rollback"}, "run.on_nonfinite"),
        ("dp=2", {"mirror": "file:///tmp/nowhere"}, "run.mirror"),
    ],
)
def test_what_needs_a_shared_run_folder_is_refused_before_anything_is_written(
    apart: Apart, plan: str, given: dict[str, Any], where: str
) -> None:
    with pytest.raises(SpecError) as caught:
        fit_apart(apart, plan, **given)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert "that not all hosts share" in problem.given
    assert not (apart.job / "run").exists()
    assert apart.files(0, ".") == []
