"""Hosts that share no disk with the launcher: code is sent, and what they write is brought here, to go on from."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from phalanx.checkpoint import checkpoints, verify
from phalanx.errors import SpecError
from phalanx.launch import load_job
from phalanx.launch.host_network import lacking
from phalanx.launch.targets import ssh_host


@dataclass(frozen=True)
class Apart:
    """Two hosts on which ``job`` and ``scratch`` are folders of their own, empty as the hosts begin."""

    servers: SshServers
    job: Path
    scratch: Path

    def hosts(self, devices: Sequence[int] = (1, 1), **top: str) -> Path:
        """A hosts file."""
        return self.servers.write_hosts(devices, **{"scratch": f'"{self.scratch}"', **top})

    def on(self, host: int, command: str) -> str:
        """What a shell there prints."""
        words = ["ssh", "-F", str(self.servers.folder / "config"), f"n{host}", command]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def files(self, host: int, below: str) -> list[str]:
        """Files below a folder in ``scratch`` there."""
        return self.on(host, f"cd {self.scratch}/{below} 2>/dev/null && find . -type f || true").split()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    problem = lacking(px.Hosts(2).link)
    if why := lacking_for_ssh() or (problem and problem.given):
        pytest.skip(why)
    folders = [tmp_path / name for name in ("ssh", "job", "scratch")]
    for folder in folders:
        folder.mkdir()
    with ssh_servers(2, folders[0], own=folders[1:]) as servers:
        yield Apart(servers, *folders[1:])


def fit(apart: Apart, plan: str, devices: Sequence[int] = (1, 1), run: str = "run", **given: Any) -> px.Run:
    """The job, written into its folder here, on the hosts."""
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


@pytest.mark.parametrize(("plan", "devices"), [("fsdp=4", (2, 2)), ("pp=2 tp=2 micro=4", (2, 2))])
def test_a_run_without_a_shared_disk_is_that_of_one_device(apart: Apart, plan: str, devices: Sequence[int]) -> None:
    run = fit(apart, plan, devices, checkpoint_every=2)
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [event["event"] for event in run.events()][-1] == "end"
    refuse_damage(run.folder, 6)
    assert {file.name for file in (run.folder / "checkpoints" / "step-00000006").glob("rank-*")} >= {
        f"rank-{rank:05d}.safetensors" for rank in (0, 3)
    }
    runfile = (run.folder / "run.toml").read_text()
    assert str(apart.scratch) not in runfile + (run.folder / "events.jsonl").read_text()
    assert str(apart.job / "train.py") in runfile
    for host in range(2):
        assert apart.files(host, "runs") == []
        assert [name for name in apart.files(host, "code") if name.endswith("train.py")]
    await_none_left(apart.scratch)


def test_a_copy_is_gone_with_the_run_also_where_its_host_is_held_up(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, text = '"""All of the copy has come to the launcher."""', ssh_host._agent_text().decode()
    assert begins in text
    held_up = text.replace(begins, "import time; time.sleep(1.5)").encode()
    monkeypatch.setattr(ssh_host, "_agent_text", lambda: held_up)
    fit(apart, "dp=2")
    assert apart.files(0, "runs") + apart.files(1, "runs") == []


def test_a_run_goes_on_under_another_plan_from_what_has_come_here(apart: Apart) -> None:
    fit(apart, "fsdp=2", steps=4, checkpoint_every=2)
    refuse_damage(apart.job / "run", 4)
    run = fit(apart, "dp=2", steps=8, resume=True)
    assert run.losses == pytest.approx(by_hand(8), rel=1e-4)
    refuse_damage(run.folder, 8)
    audit = phalanx("audit", "run", cwd=apart.job)
    assert "yes" in audit.communicate(timeout=60)[0]
    assert audit.returncode == 0


def begun(apart: Apart, *options: str, pause: float = 0.05) -> subprocess.Popen[str]:
    """``phalanx launch`` of a slow job, a few steps after its beginning, as the run folder here has it."""
    write_job(apart.job, pause=pause, steps=60)
    words = ("launch", "train.py", "--to", f"ssh:{apart.hosts()}", "--plan", "fsdp=2", "--run", "run", "--no-check")
    process = phalanx(*words, *options, cwd=apart.job)
    await_steps(apart.job / "run", 4, process)
    return process


def await_checkpoint(apart: Apart) -> None:
    """Wait until one has come here."""
    until = time.monotonic() + 60
    while not checkpoints(apart.job / "run" / "checkpoints"):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_worker_that_is_killed_is_started_again_from_what_has_come_here(apart: Apart) -> None:
    process = begun(apart, "--checkpoint-every", "3")
    await_checkpoint(apart)
    worker = next(one for one in working_in(apart.scratch) if "phalanx worker" in one)
    os.kill(int(worker.partition(":")[0]), signal.SIGKILL)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    run = px.load(apart.job / "run")
    (restart,) = run.events("restart")
    assert "SIGKILL" in restart["cause"], restart
    assert "from the checkpoint of step" in restart["source"], restart
    assert run.losses == pytest.approx(by_hand(60), rel=1e-4)
    assert "each sample seen exactly once per epoch: yes" in " ".join(out.split())
    refuse_damage(run.folder, 60)


def test_stop_brings_the_checkpoint_and_resume_goes_on(apart: Apart) -> None:
    process = begun(apart, pause=0.5)  # two commands come before its end
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
        *("launch", "train.py", "--to", f"ssh:{apart.hosts()}", "--run", "run", "--resume", "--no-check"),
        cwd=apart.job,
    )
    _, err = again.communicate(timeout=150)
    assert again.returncode == 0, err
    assert px.load(apart.job / "run").losses == pytest.approx(by_hand(60), rel=1e-4)


def test_code_is_sent_once_and_again_only_where_it_is_another(apart: Apart) -> None:
    fit(apart, "dp=2", run="one")
    (first,) = apart.on(0, f"ls {apart.scratch}/code").split()
    inode = apart.on(1, f"stat -c %i {apart.scratch}/code/{first}/train.py")
    fit(apart, "dp=2", run="two")
    assert apart.on(1, f"stat -c %i {apart.scratch}/code/{first}/train.py") == inode
    write_job(apart.job, steps=3)
    (apart.job / ".phalanxignore").write_text("one\ntwo\n")
    assert len(fit(apart, "dp=2", run="three").losses) == 3
    assert len(apart.on(0, f"ls {apart.scratch}/code").split()) == 2
    assert re.search(r"sha256 [0-9a-f]{64}", (apart.job / "three" / "launch" / "code.txt").read_text())


def test_what_is_at_the_same_path_there_is_left_as_it_is(apart: Apart) -> None:
    for host in range(2):
        apart.on(
            host, f"mkdir -p {apart.job}/run && echo mine > {apart.job}/train.py && echo mine > {apart.job}/run/mine"
        )
    run = fit(apart, "dp=2")
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    for host in range(2):
        assert apart.on(host, f"cd {apart.job}; cat train.py run/mine; ls -A . run").split() == [
            *("mine", "mine"),
            *(".:", "run", "train.py", "run:", "mine"),
        ]


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


def test_code_that_only_a_launch_sends_fails_no_check(apart: Apart) -> None:
    write_job(apart.job)
    with (apart.job / "weights.bin").open("wb") as file:
        file.truncate(33 << 20)
    words = ("check", "train.py", "--to", f"ssh:{apart.hosts()}", "--plan", "fsdp=2", "--run", "run", "--json")
    out, err = phalanx(*words, cwd=apart.job).communicate(timeout=120)
    told = json.loads(out)
    assert not told["would_fail"], (told["findings"], err)
    (unsaid,) = [words for words in told["not_looked_at"] if "its code is not there" in words]
    assert "on n0, n1" in unsaid
    assert "33.0 MiB" in unsaid
    assert apart.files(0, ".") + apart.files(1, ".") == []


def test_a_scratch_that_cannot_be_is_told_by_the_check_and_by_the_launch(apart: Apart) -> None:
    write_job(apart.job)
    file = apart.hosts(scratch='"/etc/hostname/here"')
    words = ("train.py", "--to", f"ssh:{file}", "--plan", "fsdp=2", "--run", "run")
    out, _ = phalanx("check", *words, cwd=apart.job).communicate(timeout=120)
    assert "/etc/hostname cannot be written to" in " ".join(out.split())
    launch = phalanx("launch", *words, "--no-check", cwd=apart.job)
    _, err = launch.communicate(timeout=120)
    assert launch.returncode == 3
    assert re.search(r"host n[01]: Not a directory: /etc/hostname/here", err), err


def test_a_host_that_is_lost_leaves_here_only_what_is_whole(apart: Apart) -> None:
    process = begun(apart, "--checkpoint-every", "3")
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
    process = begun(apart, "--checkpoint-every", "3")
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
        fit(apart, plan, **given)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert "that not all hosts share" in problem.given
    assert not (apart.job / "run").exists()
    assert apart.files(0, ".") == []
