"""Plans that are measured on a real Slurm as the tasks of one array: the table that is measured here, and why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from launched import await_steps, by_hand, commands_end, phalanx, write_job  # noqa: F401
from slurm_cluster import Cluster, lacking, slurm_cluster, until

import phalanx as px
from phalanx.cli import main
from phalanx.errors import SpecError
from phalanx.launch.targets.slurm import SlurmTarget
from phalanx.report.run_standing import run_standing

pytestmark = pytest.mark.timeout(300)
ROW = {
    *("plan", "devices", "device", "step_seconds", "samples_per_second", "speed_up", "efficiency", "peak_bytes"),
}
STEPS = 5
NODES = ("--to", "slurm", "--nodes", "2", "--steps", f"{STEPS}", "--run", "bench")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := lacking():
        pytest.skip(f"no Slurm here: {why}")
    with slurm_cluster() as up:
        yield up


def write_failing_job(folder: Path) -> None:
    """The job, which says where it is, and fails on four processes."""
    path = write_job(folder)
    says = 'def job():\n    print("at", os.environ.get("SLURMD_NODENAME"), os.environ.get("OMP_NUM_THREADS"))\n'
    fails = 'def loss(output, batch):\n    if os.environ.get("WORLD_SIZE") == "4":\n        raise ValueError("four")\n'
    text = path.read_text().replace("def loss(output, batch):\n", fails).replace("def job():\n", says)
    path.write_text("import os\n" + text)


def places(folder: Path) -> set[tuple[str, str]]:
    """The nodes of a run's processes, and for how many threads each was told to compute."""
    printed = [log.read_text().split() for log in (folder / "launch").glob("rank-*.log")]
    return {(words[words.index("at") + 1], words[words.index("at") + 2]) for words in printed}


def test_plans_are_measured_side_by_side_and_one_that_fails_is_named(cluster: Cluster, tmp_path: Path) -> None:
    write_failing_job(tmp_path)
    words = ("bench", "train.py", *NODES, "--plan", "dp=2", "--plan", "dp=4")
    process = phalanx(*words, "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 3, err
    told = json.loads(out)
    assert (told["job"], told["batch"], told["steps"], told["to"]) == ("train", 16, STEPS, "slurm")
    assert [row["plan"] for row in told["plans"]] == ["single", "dp=2"]
    assert all(set(row) == ROW and row["samples_per_second"] > 0 for row in told["plans"]), told
    (failed,) = told["failed"]
    assert failed["plan"] == "dp=4"
    assert "ValueError: four" in failed["why"]
    assert "four" in Path(failed["log"]).read_text()
    folder = tmp_path / "bench"
    assert told["folder"] == str(folder)
    for run in (folder / "0", folder / "1"):
        assert px.load(run).losses == pytest.approx(by_hand(STEPS), rel=1e-5)
        assert run_standing(run).state == "ended"
    assert places(folder / "0") == {("n1", "1")}, "a node that one device fits on, and a core, as when measured here"
    assert places(folder / "1") == {("n1", "1"), ("n2", "1")}
    assert run_standing(folder / "2").state == "failed"
    assert not list(folder.glob("[01]/checkpoints")), "measured, not trained"
    assert not cluster.jobs()
    again = phalanx(*words, cwd=tmp_path)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 3, err
    assert "train: 16 samples a step, 5 steps a plan" in out
    assert [line.split()[0] for line in out.splitlines() if "cpu" in line] == ["single", "dp=2"], "not measured again"
    assert "dp=4 failed: rank" in out
    other = phalanx(*words, "--plan", "tp=2", cwd=tmp_path)
    assert "bench, which holds something" in other.communicate(timeout=60)[1]
    assert other.returncode == 2


def test_ctrl_c_leaves_nothing_in_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path, pause=0.3)
    words = ("bench", "train.py", *NODES, "--plan", "dp=2", "--steps", "400")
    process = phalanx(*words, cwd=tmp_path)
    await_steps(tmp_path / "bench" / "0", 2, process, patience=120)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    until(lambda: not cluster.jobs(), 90, "the queue is empty")
    assert not cluster.processes_with(str(tmp_path))
    assert not (tmp_path / "bench" / "1" / "events.jsonl").exists()


def test_a_command_that_was_killed_is_given_again(cluster: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path, pause=0.1)
    words = ("bench", "train.py", *NODES, "-n", "2", "--steps", "20", "--json")
    process = phalanx(*words, cwd=tmp_path)
    await_steps(tmp_path / "bench" / "0", 2, process, patience=120)
    process.kill()
    process.communicate()
    again = phalanx(*words, cwd=tmp_path)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert [row["plan"] for row in json.loads(out)["plans"]] == ["dp=2"]
    assert px.load(tmp_path / "bench" / "0").losses == pytest.approx(by_hand(20), rel=1e-5), "once"


@pytest.mark.long
def test_a_node_that_is_lost_delays_a_plan(cluster: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path, pause=0.2)
    words = ("bench", "train.py", *NODES, "--plan", "dp=2", "--steps", "20", "-n", "2", "--json")
    process = phalanx(*words, cwd=tmp_path)
    await_steps(tmp_path / "bench" / "0", 4, process, patience=120)
    cluster.lose_node("n2")
    cluster.bring_back("n2")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert [row["plan"] for row in json.loads(out)["plans"]] == ["dp=2"]
    assert px.load(tmp_path / "bench" / "0").losses == pytest.approx(by_hand(20), rel=1e-5)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_plan_whose_time_is_over_goes_on_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path, pause=3.0)
    goes_on = f"time.sleep(0 if os.path.exists({str(tmp_path / 'fast')!r}) else PAUSE)"
    job.write_text("import os\n" + job.read_text().replace("time.sleep(PAUSE)", goes_on))
    words = ("bench", "train.py", *NODES, "--plan", "dp=2", "-n", "2", "--steps", "40", "--time", "10m", "--json")
    process = phalanx(*words, "--signal", "35", cwd=tmp_path)
    folder = tmp_path / "bench" / "0"
    await_steps(folder, 2, process, patience=120)
    ticket = json.loads((folder / "launch" / "ticket.json").read_text())
    task = f"{ticket['job']}_{ticket['task']}"
    cluster.let_end(task, 35)
    run = px.load(folder)
    until(lambda: bool(list(run.events("stopped"))), 150, "its time is over")
    (tmp_path / "fast").touch()
    cluster.set_time_limit(task, 10)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [row["plan"] for row in json.loads(out)["plans"]] == ["dp=2"]
    assert [event["step"] for event in run.events("step")] == list(range(40)), "none was taken twice"
    assert run.losses == pytest.approx(by_hand(40), rel=1e-5)
    assert not cluster.jobs()


def test_what_slurm_refuses_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path)
    process = phalanx("bench", "train.py", *NODES, "--plan", "dp=2", "--partition", "nowhere", cwd=tmp_path)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 3, err
    assert "Invalid partition name specified" in err
    assert not (tmp_path / "bench").exists()
    assert not cluster.jobs()


def test_the_script_is_shown_in_full_and_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b'c #%d\"e"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_job(folder)
    words = ("bench", "train.py", *NODES, "--plan", "dp=2", "--at-once", "2", "--time", "1h", "--dry-run")
    told = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    names = ["launch/measured.py", "0/launch/run.toml", "1/launch/run.toml", "launch/job.sh"]
    assert list(told["files"]) == [str(folder / "bench" / name) for name in names]
    script = told["files"][str(folder / "bench" / "launch" / "job.sh")]
    assert "#SBATCH --array=0-1%2\n" in script
    assert "nodes=(1 2) " in script
    assert told["commands"] == [["sbatch", "--parsable", str(folder / "bench" / "launch" / "job.sh")]]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script in CliRunner().invoke(main, [*words]).stdout
    assert not (folder / "bench").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--run", "there"), "--run: given without --to"),
        (("--at-once", "2"), "--at-once: given without --to"),
        (("--dry-run",), "--dry-run: given without --to"),
        (("--nodes", "2"), "No such option '--nodes'"),
        ((*NODES, "--hosts", "2"), "--hosts: given together with --to slurm"),
        ((*NODES, "--rate", "1gbit"), "--rate: given together with --to slurm"),
        (("--to", "ray://head:1", "--plan", "dp=2"), "which takes no arrays of jobs; allowed: slurm"),
        (("--to", "slurn", "--plan", "dp=2"), "--to slurm"),
        ((*NODES, "--plan", "dp=2", "--qoz", "long"), "try: --qos"),
        ((*NODES, "-n", "1", "--dry-run"), "--nodes: given 2, for the plans single"),
        ((*NODES, "-n", "2", "--time", "soon", "--dry-run"), "--time: given 'soon'"),
        ((*NODES, "--constraint", "a100", "--dry-run"), "which there are is not known here"),
        ((*NODES, "-n", "2", "--plan", "ep=2"), "refused"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    done = CliRunner().invoke(main, ["bench", "train.py", *words])
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize("task", ["-1", "true", '"0"', "1.5"])
def test_a_damaged_ticket_is_said_to_be(tmp_path: Path, task: str) -> None:
    with pytest.raises(SpecError, match="which is damaged"):
        SlurmTarget("").standing(json.loads(f'{{"job": 7, "task": {task}}}'), tmp_path)


def test_a_copied_plan_does_not_stop_the_array_that_it_is_a_copy_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    told = f"JobId=8 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING Command={tmp_path}/bench/launch/job.sh WorkDir=/"
    for name, text in {"scontrol": f"echo '{told}'", "scancel": "true"}.items():
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\n{text}\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    target, ticket = SlurmTarget(""), {"job": 7, "task": 1}
    for folder, state in (("copy", "unknown"), ("bench", "running")):
        assert target.standing(ticket, tmp_path / folder / "1").state == state
        target.stop(ticket, tmp_path / folder / "1")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line for line in asked if line.startswith("scancel")] == ["scancel --signal=USR2 --batch 7_1"]
    assert "scontrol show job 7_1 --oneliner" in asked
