"""Launches on a real Slurm of two nodes: trained as on one device, through time limits, a lost node and a stop."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, lacking, slurm_cluster
from launched import await_steps, by_hand, commands_end, phalanx, submission, until, write_job  # noqa: F401

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.errors import RunError
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets.slurm import SlurmTarget
from phalanx.launch.targets.target import Submission

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "slurm.md"
STEPS = 40
FURTHER = {"sbatch": "--mem=100M\n--exclusive\n--mail-type=END"}
NO_FORECAST = {"forecast": "none"}
LONG = 400  # that the time limit comes in
SLOW = """
import os
from pathlib import Path

HERE = Path(__file__).parent
SLOW = not (HERE / "fast").exists() and not list(HERE.glob("run/checkpoints/step-*"))  # until it goes on
"""
SAYS = 'def job():\n    print("rank", os.environ.get("RANK"), "of", os.environ.get("SLURMD_NODENAME"))\n'


def own(folder: Path, **given: Any) -> Submission:
    """The job in a folder of its own, on two nodes unless options say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_job(folder, steps=STEPS)
    text = path.read_text().replace("time.sleep(PAUSE)", "time.sleep(0.25 if SLOW else 0.0)")
    path.write_text(SLOW + text.replace("def job():\n", SAYS))
    return submission("slurm", folder, **{"gpus_per_node": "0", **given})


class Handed:
    def __init__(self, given: Submission) -> None:
        self.target, self.folder = SlurmTarget(""), given.run.folder
        self.ticket = self.target.submit(self.target.prepare(given))

    @property
    def state(self) -> str:
        return self.target.standing(self.ticket, self.folder).state

    @property
    def steps(self) -> list[int]:
        log = self.folder / "events.jsonl"
        return [event["step"] for event in px.load(self.folder).events("step")] if log.exists() else []

    def said(self) -> str:
        log = self.target.log(self.ticket, self.folder, None)
        return log.read_text() if log.exists() else ""

    def wait(self, state: str, seconds: float = 90) -> None:
        over = {state, "ended", "failed", "stopped"}
        until(lambda: self.state in over, seconds, f"it is {state}, with {self.said()}")
        assert self.state == state, self.said()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := lacking():
        pytest.skip(f"no Slurm here: {why}")
    with slurm_cluster() as up:
        yield up


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Handed:
    """A run whose time limit comes while another test runs: Slurm looks for those twice a minute."""
    given = own(tmp_path_factory.mktemp("limited"), time="10m", run={"steps": LONG})
    run = Handed(given)
    until(lambda: len(run.steps) > 3, 90, "it trains")
    assert cluster.set_time_limit(run.ticket["job"], 1)
    return run


def test_two_nodes_train_what_one_device_does(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    run = Handed(own(tmp_path))
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(by_hand(STEPS), rel=1e-4)
    printed = [run.target.log(run.ticket, run.folder, rank).read_text().split() for rank in range(2)]
    assert sorted(node for *_, node in printed) == ["n1", "n2"]
    assert all(words[:2] == ["rank", str(rank)] for rank, words in enumerate(printed))
    assert all(" ".join(words) in run.said() for words in printed)
    assert "Traceback" not in run.said()


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(("plan", "nodes"), [("pp=2 tp=2 micro=4", "2"), *longer(("dp=2 server=1", "3"))])
def test_each_plan_trains_what_one_device_does(cluster: Cluster, tmp_path: Path, plan: str, nodes: str) -> None:
    write_job(tmp_path)
    where = {"nodes": nodes, "sbatch": f"--partition={'three' if nodes == '3' else 'cpu'}"}
    given = submission("slurm", tmp_path, plan, run=NO_FORECAST, gpus_per_node="0", **where)
    run = Handed(given)
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(by_hand(6), rel=1e-5)
    logs = [run.target.log(run.ticket, run.folder, rank) for rank in range(Plan.parse(plan).processes)]
    assert all(log.exists() for log in logs)
    assert not cluster.processes_with(str(run.folder))


def test_after_its_time_a_run_goes_on_by_itself(cluster: Cluster, limited: Handed) -> None:
    run = px.load(limited.folder)
    until(lambda: bool(list(run.events("stopped"))), 90, "its time is over")
    # another test may have taken until its second part is over, too
    until(
        lambda: list(run.events("end")) or cluster.set_time_limit(limited.ticket["job"], 10), 60, "it is queued again"
    )
    limited.wait("ended")
    (stopped,) = run.events("stopped")
    assert limited.steps == list(range(LONG)), "none was taken twice"
    assert run.losses == pytest.approx(by_hand(LONG), rel=1e-3)
    assert [event["step"] for event in run.events("resume")] == [stopped["step"]]
    assert 0 < stopped["step"] < LONG
    assert str(limited.ticket["job"]) not in cluster.jobs()


def test_a_run_that_is_asked_to_stop_saves_and_is_over(cluster: Cluster, tmp_path: Path) -> None:
    folder = own(tmp_path, run={"steps": 400}).run.folder
    words = ["launch", str(tmp_path / "train.py"), "--to", "slurm", "--nodes", "2", "--plan", "dp=2", "--no-check"]
    words += ["--gpus-per-node", "0"]
    told = json.loads(told_by(*words, "--steps", "400", "--run", str(folder), "--grace", "10", "--json"))
    job = str(told["job"])
    events = folder / "events.jsonl"
    until(lambda: events.exists() and events.read_text().count('"event": "step"') > 3, 90, "it trains")
    told_by("stop", str(folder))
    until(lambda: job not in cluster.jobs(), 60, "it has left the queue")
    run = px.load(folder)
    (stopped,) = run.events("stopped")
    assert stopped["step"] == len(run.losses) < 400
    assert newest_step(folder) == stopped["step"]
    said = (folder / "launch" / f"slurm-{job}.out").read_text()
    assert "stopped" in told_by("status", str(folder)), said
    assert "Traceback" not in said
    assert not cluster.processes_with(str(folder)), "nothing is left of it"


@pytest.mark.long
def test_the_script_on_the_page_goes_on_after_its_time(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = own(tmp_path, run={"steps": LONG})
    (tmp_path / "run.toml").write_text(given.run.to_toml())
    found = re.search(r'title="job.sh"\n(.*?)^```$', PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found
    script = (
        found[1].replace("--gpus-per-node=8 ", "").replace("$SLURM_GPUS_ON_NODE", "1").replace("$host", "127.0.0.1")
    )
    (tmp_path / "job.sh").write_text(script)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    told = subprocess.run(["sbatch", "--parsable", "job.sh"], capture_output=True, text=True, check=True).stdout
    log = given.run.folder / "events.jsonl"
    until(lambda: log.exists() and log.read_text().count('"event": "step"') > 3, 90, "it trains")
    subprocess.run(["scancel", "--signal=USR1", "--batch", told.strip()], check=True)
    until(lambda: told.strip() not in cluster.jobs(), 120, "it has come to its end")
    trained = px.load(given.run.folder)
    assert [event["event"] for event in trained.events()].count("stopped") == 1
    assert [event["step"] for event in trained.events("step")] == list(range(LONG)), "none was taken twice"


def test_a_run_goes_on_after_a_node_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    run = Handed(own(tmp_path, run={"checkpoint_every": 2}))
    until(lambda: newest_step(run.folder) is not None, 90, "it has saved")
    cluster.lose_node("n2")
    run.wait("waiting")
    cluster.bring_back("n2")
    run.wait("ended")
    assert set(run.steps) == set(range(STEPS))
    assert px.load(run.folder).losses == pytest.approx(by_hand(STEPS), rel=1e-4)
    assert list(px.load(run.folder).events("resume"))


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ("--partition=nowhere", "Invalid partition name specified"),
        ("--mem=9999999", "node configuration is not available"),
        ("--constraint=a100", "Invalid feature specification"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(cluster: Cluster, tmp_path: Path, further: str, said: str) -> None:
    before = cluster.jobs()
    given = own(tmp_path, plan="dp=6", sbatch=further)
    target = SlurmTarget("")
    with pytest.raises(RunError, match=said):
        target.submit(target.prepare(given))
    assert not given.run.folder.exists()
    assert cluster.jobs() == before


def test_what_is_shown_is_what_slurm_takes(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c #%d\"e"
    options = {"time": "1.5h", "setup": "export ONE=1; true 'a b'", **FURTHER}
    prepared = SlurmTarget("").prepare(own(folder, **options))
    (script,) = [path for path in prepared.files if path.name == "job.sh"]
    assert prepared.files[script] in prepared.shown()
    assert prepared.shown().endswith(f"$ sbatch --parsable {shlex.quote(str(script))}")
    copy = tmp_path / "job.sh"
    copy.write_text(prepared.files[script])
    assert not subprocess.run(["bash", "-n", copy], capture_output=True, check=True).stderr
    subprocess.run(["sbatch", "--test-only", copy], capture_output=True, check=True)
    assert "#SBATCH --time=0-01:30:00\n" in prepared.files[script]


def test_gpus_that_the_cluster_lacks_are_refused_with_the_way_to_none(cluster: Cluster, tmp_path: Path) -> None:
    target = SlurmTarget("")
    with pytest.raises(RunError, match="--gpus-per-node 0 without GPUs"):
        target.submit(target.prepare(own(tmp_path, gpus_per_node="")))


def told_by(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "phalanx", *words], capture_output=True, text=True, check=True).stdout
