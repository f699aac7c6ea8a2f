"""Launches on a real Ray of two nodes: as on one device, through a lost worker and actor, stopped, and without head."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import RayCluster, lacking_for_ray, ray_cluster
from launched import await_steps, by_hand, commands_end, phalanx, steps_in, until, write_job  # noqa: F401

import phalanx as px
from phalanx.errors import RunError
from phalanx.launch.runfile import newest_step
from phalanx.report.run_standing import run_standing, stop_run
from phalanx.report.samples_seen import samples_seen

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ray.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    if why := lacking_for_ray():
        pytest.skip(f"no Ray here: {why}")
    with ray_cluster() as up:
        yield up


def answer(*words: str, cwd: Path, code: int = 0) -> str:
    process = phalanx(*words, cwd=cwd, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    return said


def launched(cluster: RayCluster, folder: Path, *options: str, plan: str = "dp=2", **job: Any) -> Any:
    folder.mkdir(exist_ok=True)
    write_job(folder, **job)
    words = (
        "launch",
        "train.py",
        "--to",
        f"ray:{cluster.address}",
        "--plan",
        plan,
        "--run",
        "run",
        "--no-check",
        "--gpus-per-node",
        "0",
        *options,
    )
    return phalanx(*words, cwd=folder, stderr=subprocess.STDOUT)


def launch(cluster: RayCluster, folder: Path, *options: str, plan: str = "dp=2", **job: Any) -> Path:
    """The job in a folder of its own, handed over. Returns its run folder."""
    assert "handed to ray: job " in launched(cluster, folder, *options, plan=plan, **job).communicate(timeout=120)[0]
    return folder / "run"


def said(run: Path) -> str:
    output = run / "launch" / "output.log"
    return output.read_text() if output.exists() else ""


def await_state(run: Path, state: str, seconds: float = 200) -> None:
    until(lambda: not run_standing(run).goes_on, seconds, f"it is over, with {said(run)}")
    found = run_standing(run)
    assert found.state == state, (found, said(run))


def await_saved(run: Path) -> None:
    until(lambda: newest_step(run) is not None, 120, f"it has saved: {said(run)}")


@pytest.mark.parametrize("plan", ["dp=2", "pp=2 tp=2 micro=4"])
def test_a_run_on_two_nodes_is_that_of_one_device(cluster: RayCluster, tmp_path: Path, plan: str) -> None:
    run = launch(cluster, tmp_path, "--nodes", "2", plan=plan)
    await_state(run, "ended")
    assert px.load(run).losses == pytest.approx(by_hand(6), rel=1e-5)
    assert samples_seen(run).once
    assert "Traceback" not in said(run)


def test_a_run_resumes_after_a_worker_and_then_an_actor_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    """torchrun's agents start the workers again, and then the driver starts all actors again."""
    own = ("--nodes", "2", "--cpus-per-worker", "2", "--checkpoint-every", "3")
    run = launch(cluster, tmp_path, *own, pause=0.1, steps=60)
    await_steps(run, 1)
    workers = cluster.processes(word=f"phalanx worker {run}")
    assert len(workers) == 2
    await_saved(run)
    workers[0].kill()
    until(lambda: bool(list(px.load(run).events("resume"))), 120, f"it resumes: {said(run)}")
    assert "lost the actor" not in said(run)
    before = len(list(px.load(run).events("resume")))
    await_steps(run, steps_in(run) + 4)
    (tmp_path / "train.py").unlink()  # the run has the code that it was launched with
    (actor,) = cluster.processes(1, "ray::RayNode")
    actor.kill()
    await_state(run, "ended")
    assert len(list(px.load(run).events("resume"))) > before
    assert "phalanx: lost the actor on" in said(run)
    assert px.load(run).losses == pytest.approx(by_hand(60), rel=2e-3)  # one device, too, by its order of sums
    assert samples_seen(run).once
    until(lambda: not cluster.processes(word="ray::RayNode"), 60, "no actor is left")
    until(lambda: not cluster.processes(word=str(run)), 60, "no driver, no agent and no worker is left")


def test_a_driver_that_is_killed_leaves_no_agent_and_no_worker(cluster: RayCluster, tmp_path: Path) -> None:
    run = launch(cluster, tmp_path, "--nodes", "2", pause=0.1, steps=2000)
    await_steps(run, 1)
    driver = min(cluster.processes(0, f"ray_driver {run}"), key=lambda process: process.create_time())
    driver.kill()
    await_state(run, "failed")
    until(lambda: not cluster.processes(word=str(run)), 60, "nothing of it is left")


def test_by_the_commands_of_the_page_a_run_is_found_stopped_and_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    write_job(tmp_path, pause=0.3, steps=300)
    (tmp_path / "examples").mkdir()
    (tmp_path / "train.py").rename(tmp_path / "examples" / "digits.py")
    shown = re.search(
        r"<!-- not run: needs Ray.*?-->\n```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown
    commands = [shlex.split(line.removeprefix("$ phalanx ")) for line in shown[1].splitlines()]
    begin, status, logs, stop = (
        [f"ray:{cluster.address}" if word == "ray:http://head:8265" else word for word in words] for words in commands
    )
    assert "handed to ray: job digits-" in answer(*begin, "--gpus-per-node", "0", cwd=tmp_path)
    run = tmp_path / "runs" / "ray"
    await_steps(run, 3)
    assert "running: on " in answer(*status, cwd=tmp_path)
    assert answer(*stop, cwd=tmp_path) == "runs/ray: stopped\n"
    (stopped,) = px.load(run).events("stopped")
    assert 3 <= stopped["step"] == len(px.load(run).losses) < 300
    assert (run / "launch" / "rank-1.log").exists()
    answer(*logs, cwd=tmp_path)
    until(lambda: not cluster.processes(word="ray::RayNode"), 60, "no actor is left")
    assert not cluster.processes(word=str(run))


def test_a_plan_that_the_cluster_has_no_room_for_waits_and_is_stopped(cluster: RayCluster, tmp_path: Path) -> None:
    run = launch(cluster, tmp_path, plan="dp=16")
    until(lambda: "for room on 1 nodes: 16 CPUs" in run_standing(run).detail, 120, "its driver waits")
    assert run_standing(run).state == "waiting"
    stop_run(run)
    await_state(run, "stopped")
    until(lambda: not cluster.processes(word=str(run)), 60, "no driver is left")


def test_inside_ray_train_a_loop_of_ones_own_reports_the_loss_of_the_global_batch(
    cluster: RayCluster, tmp_path: Path
) -> None:
    write_job(tmp_path).rename(tmp_path / "digits.py")
    shown = re.search(r'```python title="ray_train.py"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    told = tmp_path / "told"
    keeps = f"print(metrics, file=open({str(told)!r}, 'a'))"
    (tmp_path / "ray_train.py").write_text(shown[1].replace("print(metrics[0])", keeps))
    done = subprocess.run(
        [sys.executable, "ray_train.py"],
        env={**os.environ, "RAY_ADDRESS": f"127.0.0.1:{cluster.port}", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, done.stderr
    reports = [ast.literal_eval(line) for line in told.read_text().splitlines()]
    assert all(one == other for one, other in reports), "both ranks report the same"
    assert [one["loss"] for one, _ in reports] == pytest.approx(by_hand(6), rel=1e-5)
    assert [(one["step"], one["samples"], one["lr"]) for one, _ in reports] == [(n, 16, 0.1) for n in range(6)]


@pytest.mark.realtime("a cluster that is gone is not waited for")
def test_when_the_head_is_away_status_says_so_at_once(cluster: RayCluster, tmp_path: Path) -> None:
    run = launch(cluster, tmp_path, "--nodes", "2", pause=0.3, steps=400)
    await_steps(run, 2)
    cluster.lose(0)
    until(lambda: not cluster.processes(0), 60, "it is gone")
    began = time.monotonic()
    standing = run_standing(run)
    assert time.monotonic() - began < 30
    assert f"no Ray dashboard answers at {cluster.address}" in standing.detail
    with pytest.raises(RunError, match="no Ray dashboard answers"):
        stop_run(run)
    cluster.lose(None)
    until(lambda: not cluster.processes(word=str(run)), 60, "what it started is gone")
    until(lambda: run_standing(run).state in ("unknown", "failed"), 60, "by the log, if a worker came to say so")
