"""Nodes of two kinds in one job of a real Slurm: ranks lie over both in their order, with unequal shares of a batch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import await_steps, by_hand, write_job
from slurm_cluster import Cluster, lacking, slurm_cluster, until

import phalanx as px
from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import Submission
from phalanx.launch.targets.slurm import SlurmTarget

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := lacking():
        pytest.skip(f"no Slurm here: {why}")
    with slurm_cluster(scheduler="backfill") as up:
        yield up


def submission(folder: Path, plan: str, *, run: dict[str, Any] | None = None, **options: str) -> Submission:
    """The job in ``folder``."""
    settings = {"plan": Plan.parse(plan), "grace": 10.0, "resume": "auto", "forecast": "none", **(run or {})}
    spec = RunSpec(job=str(folder / "train.py"), folder=folder / "run", **settings)
    return Submission(run=spec, name="train", python=sys.executable, options=options)


def write_telling_job(folder: Path, *, pause: float = 0.0, steps: int = 6) -> None:
    """The job; each process says at which node it is, and how many samples it takes at a time."""
    path = write_job(folder, pause=pause, steps=steps)
    says = "def loss(output, batch):\n    print('at', os.environ.get('SLURMD_NODENAME'), len(output), flush=True)\n"
    path.write_text("import os\n" + path.read_text().replace("def loss(output, batch):\n", says))


def places(folder: Path, rank: int) -> set[tuple[str, int]]:
    """The node of a rank and the samples that it took, as it has said."""
    text = (folder / "launch" / f"rank-{rank}.log").read_text()
    return {(node, int(samples)) for node, samples in re.findall(r"^at (n\d) (\d+)$", text, flags=re.MULTILINE)}


class Handed:
    """A run that was handed over."""

    def __init__(self, given: Submission) -> None:
        self.target, self.folder = SlurmTarget(""), given.run.folder
        self.ticket = self.target.submit(self.target.prepare(given))

    @property
    def state(self) -> str:
        return self.target.standing(self.ticket, self.folder).state

    def wait(self, state: str) -> None:
        over = {state, "ended", "failed", "stopped"}
        log = self.target.log(self.ticket, self.folder, None)
        until(lambda: self.state in over, 120, f"it is {state}")
        assert self.state == state, log.read_text() if log.exists() else "nothing was said"


@pytest.mark.parametrize(
    ("plan", "also", "laid"),
    [
        ("dp=3 shares=2,1,1", "nodes=2 nodelist=n[2-3]", [("n1", 8), ("n2", 4), ("n3", 4)]),
        pytest.param(
            "dp=3", "nodes=1 nodelist=n3 processes=1", [("n1", 6), ("n1", 5), ("n3", 5)], marks=pytest.mark.long
        ),
    ],
)
def test_ranks_lie_over_both_kinds_and_compute_what_one_device_does(
    cluster: Cluster, tmp_path: Path, plan: str, also: str, laid: list[tuple[str, int]]
) -> None:
    write_telling_job(tmp_path)
    given = submission(tmp_path, plan, nodelist="n1", also=f"partition=three {also}")
    assert SlurmTarget("").why_not(SlurmTarget("").prepare(given)) == ""
    run = Handed(given)
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [places(run.folder, rank) for rank in range(3)] == [{one} for one in laid]
    assert not cluster.jobs()
    assert not cluster.processes_with(str(run.folder))


def test_shares_follow_what_a_node_of_each_kind_takes_for_a_sample(cluster: Cluster, tmp_path: Path) -> None:
    write_telling_job(tmp_path, steps=40)
    job = tmp_path / "train.py"
    slow = "time.sleep(0.01 * len(output) * (3 if os.environ.get('SLURMD_NODENAME') == 'n3' else 1))"
    job.write_text(job.read_text().replace("time.sleep(PAUSE)", slow))
    run = Handed(submission(tmp_path, "dp=2 shares=auto", nodelist="n1", also="partition=three nodelist=n3"))
    run.wait("ended")
    trained = px.load(run.folder)
    assert trained.losses == pytest.approx(by_hand(40), rel=1e-5)
    first, *_, last = [event["shares"] for event in trained.events("shares")]
    assert first == [8, 8]
    assert last[0] > last[1], "what n3 takes for a sample is three times as long"
    assert {node for node, _ in places(run.folder, 1)} == {"n3"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_on_both_kinds_goes_on_by_itself_after_its_time(cluster: Cluster, tmp_path: Path) -> None:
    write_telling_job(tmp_path, pause=3.0, steps=40)
    job = tmp_path / "train.py"
    goes_on = "time.sleep(0 if os.path.exists(os.path.join(os.path.dirname(__file__), 'fast')) else PAUSE)"
    job.write_text(job.read_text().replace("time.sleep(PAUSE)", goes_on))
    also = "partition=three nodelist=n3"
    run = Handed(submission(tmp_path, "dp=2", nodelist="n1", also=also, time="10m", signal="12"))
    await_steps(run.folder, 2, patience=120)
    cluster.let_end(run.ticket["job"], 12)
    trained = px.load(run.folder)
    until(lambda: bool(list(trained.events("stopped"))), 150, "its time is over")
    (tmp_path / "fast").touch()
    cluster.set_time_limit(run.ticket["job"], 10)
    run.wait("ended")
    assert [event["step"] for event in trained.events("step")] == list(range(40)), "none was taken twice"
    assert trained.losses == pytest.approx(by_hand(40), rel=1e-5)
    assert len(list(trained.events("resume"))) == 1
    assert not cluster.jobs()


@pytest.mark.long
def test_a_run_on_both_kinds_goes_on_after_a_node_of_the_second_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    write_telling_job(tmp_path, pause=0.2, steps=20)
    given = submission(tmp_path, "dp=2", run={"checkpoint_every": 2}, nodelist="n1", also="partition=three nodelist=n3")
    run = Handed(given)
    until(lambda: newest_step(run.folder) is not None, 120, "it has saved")
    cluster.lose_node("n3")
    run.wait("waiting")
    cluster.bring_back("n3")
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(by_hand(20), rel=1e-5)
    assert list(px.load(run.folder).events("resume"))


def test_a_run_on_both_kinds_that_is_asked_to_stop_saves_and_is_over(cluster: Cluster, tmp_path: Path) -> None:
    write_telling_job(tmp_path, pause=0.2, steps=400)
    run = Handed(submission(tmp_path, "dp=2", nodelist="n1", also="partition=three nodelist=n3"))
    await_steps(run.folder, 3, patience=120)
    run.target.stop(run.ticket, run.folder)
    run.wait("stopped")
    until(lambda: not cluster.jobs(), 60, "it has left the queue")
    assert len(list(px.load(run.folder).events("stopped"))) == 1
    assert not cluster.processes_with(str(run.folder))


def test_the_script_asks_for_both(tmp_path: Path) -> None:
    write_job(tmp_path)
    given = submission(
        tmp_path,
        "dp=4",
        nodes="1",
        time="1h",
        cpus_per_task="8",
        also="nodes=2 partition=old cpus-per-task=3 processes=1",
    )
    options = {name.replace("_", "-"): value for name, value in given.options.items()}
    prepared = SlurmTarget("").prepare(Submission(run=given.run, name="x", python="python", options=options))
    script = prepared.files[given.folder / "job.sh"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    first, second = script.partition("\n\n")[0].split("#SBATCH hetjob\n")
    assert {"--nodes=1", "--cpus-per-task=8", "--time=0-01:00:00"} <= set(first.split())
    assert {"--nodes=2", "--cpus-per-task=3", "--time=0-01:00:00", "--partition=old"} == set(
        second.replace("#SBATCH", "").split()
    ) - {"--ntasks-per-node=1"}
    assert " 1x2,2x1)" in script
    assert (
        'srun --het-group=0 --cpus-per-task=8 "${node[@]}" : --het-group=1 --cpus-per-task=3 "${node[@]}" &' in script
    )
    assert SlurmTarget("").offer(options) is None


@pytest.mark.parametrize(
    ("also", "given"),
    [
        ("", "''"),
        ("nodes", "nodes"),
        ("nodes=0", "nodes=0"),
        ("nodes=1 nodes=2", "nodes=2"),
        ("time=1h", "time=1h"),
        ("partition='a", "partition='a"),
        ("processes=4", "4 processes on each of 1, so that 0 of the 4 of dp=4 are for 1"),
        ("nodes=3 processes=2", "so that -2 of the 4"),
        ("gres=gpu:1 gpus-per-node=1", "gpus-per-node=1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, also: str, given: str) -> None:
    with pytest.raises(SpecError) as caught:
        SlurmTarget("").prepare(submission(tmp_path, "dp=4", also=also))
    assert {problem.where for problem in caught.value.problems} == {"--also"}
    assert given in caught.value.problems[0].given
