"""A launch on a real Slurm of two nodes: trained as on one device, through time limits, a lost node and a stop."""

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

import launched
import pytest
import torch
from slurm_cluster import Cluster, lacking, slurm_cluster, until
from torch import Tensor, nn

import phalanx as px
from longer import longer
from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.launch.reaper import SAVED
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import Submission, find_target
from phalanx.launch.targets.slurm import SlurmTarget
from phalanx.report.run_standing import run_standing, stop_run

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "slurm.md"
STEPS = 40
FURTHER = {"sbatch": "--exclusive\n--mail-type=END"}
LONG = 400  # that the time limit comes in
FIELDS = {
    "resume": {"step": 3, "path": "checkpoints/step-3"},
    "stopped": {"step": 3, "signal": "SIGTERM"},
    "error": {"rank": 0, "step": 3, "kind": "ValueError", "message": "no"},
    "end": {"step": 3, "samples": 48, "seconds": 1.0, "loss": 0.5},
}
JOB = f"""
import os
import time
from pathlib import Path

import torch
from torch import nn

import phalanx as px

HERE = Path(__file__).parent
SLOW = not (HERE / "fast").exists() and not list(HERE.glob("run/checkpoints/step-*"))  # until it goes on


def model():
    made = nn.Linear(4, 2)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def loss(output, batch):
    time.sleep(0.25 if SLOW else 0.0)
    return px.cross_entropy(output, batch["y"])


def job():
    print("rank", os.environ.get("RANK"), "of", os.environ.get("SLURMD_NODENAME"))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return px.Job(
        model=model,
        data=lambda: px.Table(input=x, y=(x.sum(1) > 0).long()),
        shuffle=False,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=16,
        steps={STEPS},
    )
"""


def by_hand(steps: int = STEPS) -> list[float]:
    """The loss of each step, by plain PyTorch on one device."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y, model, losses = (x.sum(1) > 0).long(), nn.Linear(4, 2), list[Tensor]()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        part = slice(16 * (step % 4), 16 * (step % 4) + 16)
        losses.append(nn.functional.cross_entropy(model(x[part]), y[part]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [one.item() for one in losses]


def submission(folder: Path, *, run: dict[str, Any] | None = None, **options: str) -> Submission:
    """The job in a folder of its own, on two nodes unless ``options`` say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(JOB)
    settings = {"plan": Plan.parse("dp=2"), "grace": 10.0, "resume": "auto", **(run or {})}
    spec = RunSpec(job=str(folder / "train.py"), folder=folder / "run", **settings)
    named = {name.replace("_", "-"): value for name, value in {"nodes": "2", **options}.items()}
    return Submission(run=spec, name="digits", python=sys.executable, options=named)


class Handed:
    """A run that was handed over."""

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
    given = submission(tmp_path_factory.mktemp("limited"), time="10m", signal="12", run={"steps": LONG})
    run = Handed(given)
    until(lambda: len(run.steps) > 3, 90, "it trains")
    cluster.set_time_limit(run.ticket["job"], 1)
    return run


@pytest.mark.usefixtures("limited")  # first of all
def test_two_nodes_train_what_one_device_does(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    run = Handed(submission(tmp_path))
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(by_hand(), rel=1e-5)
    printed = [run.target.log(run.ticket, run.folder, rank).read_text().split() for rank in range(2)]
    assert sorted(node for *_, node in printed) == ["n1", "n2"]
    assert all(words[:2] == ["rank", str(rank)] for rank, words in enumerate(printed))
    assert all(" ".join(words) in run.said() for words in printed)
    assert "Traceback" not in run.said()


def test_after_its_time_a_run_goes_on_by_itself(cluster: Cluster, limited: Handed) -> None:
    run = px.load(limited.folder)
    until(lambda: bool(list(run.events("stopped"))), 90, "its time is over")
    cluster.set_time_limit(limited.ticket["job"], 10)
    limited.wait("ended")
    (stopped,) = run.events("stopped")
    assert limited.steps == list(range(LONG)), "none was taken twice"
    assert run.losses == pytest.approx(by_hand(LONG), rel=1e-5)
    assert [event["step"] for event in run.events("resume")] == [stopped["step"]]
    assert 0 < stopped["step"] < LONG
    assert str(limited.ticket["job"]) not in cluster.jobs()


@pytest.mark.parametrize(
    ("plan", "nodes"),
    [
        ("pp=2 tp=2 micro=4", "2"),
        *longer(("fsdp=4", "2"), ("dp=2 server=1", "3")),
    ],
)
def test_each_plan_trains_what_one_device_does(cluster: Cluster, tmp_path: Path, plan: str, nodes: str) -> None:
    settings: dict[str, Any] = {"plan": Plan.parse(plan), "forecast": "none"}
    given = submission(tmp_path, nodes=nodes, partition="three" if nodes == "3" else "cpu", run=settings)
    launched.write_job(tmp_path)
    run = Handed(given)
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(launched.by_hand(6), rel=1e-5)
    logs = [run.target.log(run.ticket, run.folder, rank) for rank in range(Plan.parse(plan).processes)]
    assert all(log.exists() for log in logs)
    assert not cluster.processes_with(str(run.folder))


def test_a_run_that_is_asked_to_stop_saves_and_is_over(cluster: Cluster, tmp_path: Path) -> None:
    """By the commands that a user types."""
    folder = submission(tmp_path, run={"steps": 400}).run.folder
    words = ["launch", str(tmp_path / "train.py"), "--to", "slurm", "--nodes", "2", "--plan", "dp=2", "--no-check"]
    told = json.loads(phalanx(*words, "--steps", "400", "--run", str(folder), "--grace", "10", "--json"))
    job = str(told["job"])
    events = folder / "events.jsonl"
    until(lambda: events.exists() and events.read_text().count('"event": "step"') > 3, 90, "it trains")
    phalanx("stop", str(folder))
    until(lambda: job not in cluster.jobs(), 60, "it has left the queue")
    run = px.load(folder)
    (stopped,) = run.events("stopped")
    assert stopped["step"] == len(run.losses) < 400
    assert newest_step(folder) == stopped["step"]
    said = (folder / "launch" / f"slurm-{job}.out").read_text()
    assert "stopped" in phalanx("status", str(folder)), said
    assert "Traceback" not in said
    assert not cluster.processes_with(str(folder)), "nothing is left of it"


@pytest.mark.long
def test_the_script_on_the_page_goes_on_after_its_time(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = submission(tmp_path, run={"steps": LONG})
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
    run = Handed(submission(tmp_path, run={"checkpoint_every": 2}))
    until(lambda: newest_step(run.folder) is not None, 90, "it has saved")
    cluster.lose_node("n2")
    run.wait("waiting")
    cluster.bring_back("n2")
    run.wait("ended")
    assert set(run.steps) == set(range(STEPS))
    assert px.load(run.folder).losses == pytest.approx(by_hand(), rel=1e-5)
    assert list(px.load(run.folder).events("resume"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "nowhere"}, "Invalid partition name specified"),
        ({"mem": "9999999"}, "node configuration is not available"),
        ({"cpus_per_task": "17"}, "would keep it waiting for ever: Partition"),
        ({"nodes": "3"}, "would keep it waiting for ever: Partition"),
        ({"time": "2d"}, "would keep it waiting for ever: Partition"),
        ({"constraint": "a100"}, "Invalid feature specification"),
        ({"also": "partition=three"}, "Requested operation"),  # this cluster's scheduler is not backfill
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(
    cluster: Cluster, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    before = cluster.jobs()
    given = submission(tmp_path, run={"plan": Plan.parse("dp=6")}, **options)
    target = SlurmTarget("")
    with pytest.raises(RunError, match=said):
        target.submit(target.prepare(given))
    assert not given.run.folder.exists()
    assert cluster.jobs() == before


def test_a_refusal_leaves_what_was_there(cluster: Cluster, tmp_path: Path) -> None:
    given = submission(tmp_path, partition="nowhere")
    given.folder.mkdir(parents=True)
    given.runfile.write_text("of an earlier launch")
    target = SlurmTarget("")
    with pytest.raises(RunError):
        target.submit(target.prepare(given))
    assert [path.name for path in given.folder.iterdir()] == ["run.toml"]
    assert given.runfile.read_text() == "of an earlier launch"


def test_what_is_shown_is_what_slurm_takes(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c #%d\"e"
    options = {"time": "1.5h", "mem": "100M", "setup": "export ONE=1; true 'a b'", **FURTHER}
    prepared = SlurmTarget("").prepare(submission(folder, **options))
    (script,) = [path for path in prepared.files if path.name == "job.sh"]
    assert prepared.files[script] in prepared.shown()
    assert prepared.shown().endswith(f"$ sbatch --parsable {shlex.quote(str(script))}")
    copy = tmp_path / "job.sh"
    copy.write_text(prepared.files[script])
    assert not subprocess.run(["bash", "-n", copy], capture_output=True, check=True).stderr
    subprocess.run(["sbatch", "--test-only", copy], capture_output=True, check=True)
    assert "#SBATCH --time=0-01:30:00\n" in prepared.files[script]


@pytest.mark.usefixtures("cluster")
def test_it_says_what_its_nodes_have() -> None:
    offer = SlurmTarget("").offer({"nodes": "2", "cpus-per-task": "1"})
    assert offer
    assert (offer.nodes, offer.devices, offer.device, offer.cores) == (2, 1, "", 1)
    assert offer.memory > 0


def test_a_folder_may_have_any_name_and_a_waiting_run_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c #%d\"e"
    folder.mkdir()
    (folder / "fast").touch()
    run = Handed(submission(folder, nodelist="n1", nodes="1", run={"plan": Plan()}, mem="10M"))
    run.wait("ended")
    assert px.load(run.folder).losses == pytest.approx(by_hand(), rel=1e-5)
    subprocess.run(["scontrol", "update", "partitionname=cpu", "state=down"], check=True)
    try:
        waits = Handed(submission(tmp_path / "waits"))
        waits.wait("waiting")
        assert "PENDING" in waits.target.standing(waits.ticket, waits.folder).detail
        waits.target.stop(waits.ticket, waits.folder)
        waits.wait("stopped")
    finally:
        subprocess.run(["scontrol", "update", "partitionname=cpu", "state=up"], check=True)


def test_what_slurm_has_forgotten_the_run_itself_tells(cluster: Cluster, tmp_path: Path) -> None:
    target, forgotten = SlurmTarget(""), {"job": 4_000_000}
    log = tmp_path / "events.jsonl"
    assert target.standing(forgotten, tmp_path).state == "unknown"
    for word, state in {"stopped": "stopped", "resume": "unknown", "end": "ended", "error": "failed"}.items():
        with log.open("a") as file:
            file.write(json.dumps({"event": word, "time": 1.0, **FIELDS[word]}) + "\n")
        assert target.standing(forgotten, tmp_path).state == state, word
    target.stop(forgotten, tmp_path)


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, **tools: str) -> Path:
    """A Slurm whose commands are these lines of shell. Returns the file with what has been asked of it."""
    made = folder / "tools"
    made.mkdir()
    for name, text in {"sbatch": "echo 7", "scontrol": "exit 1", "scancel": "true", "sinfo": "true", **tools}.items():
        (made / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/asked\n{text}\n')
        (made / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{made}{os.pathsep}{os.environ['PATH']}")
    return folder / "asked"


def test_what_a_shell_says_to_sbatch_is_no_more_than_what_the_script_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, monkeypatch, sbatch=f"env | grep ^SBATCH_ | sort > {tmp_path}/told; echo 7")
    for name in ("TIMELIMIT", "SIGNAL", "OUTPUT", "ERROR", "NO_REQUEUE", "OPEN_MODE", "JOB_NAME", "PARTITION", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "other")
    target = SlurmTarget("")
    prepared = target.prepare(submission(tmp_path, time="1h", partition="gpu"))
    assert target.submit(prepared) == {"job": 7}
    assert (tmp_path / "told").read_text() == "SBATCH_QOS=other\n"
    assert target.why_not(prepared) == ""
    assert (tmp_path / "told").read_text() == "SBATCH_QOS=other\n"


@pytest.mark.parametrize(("word", "state"), [("stopped", "stopped"), ("error", "failed"), ("resume", "stopped")])
def test_a_run_that_failed_as_it_was_to_stop_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, state: str
) -> None:
    pretend(tmp_path, monkeypatch, scontrol="echo JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=75:0")
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": word, "time": 1.0, **FIELDS[word]}) + "\n")
    assert SlurmTarget("").standing({"job": 7}, tmp_path).state == state


def test_a_copied_folder_does_not_stop_the_run_that_it_is_a_copy_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"JobId=7 JobState=RUNNING Reason=None Command={tmp_path}/a run/launch/job.sh WorkDir=/"
    asked = pretend(tmp_path, monkeypatch, sbatch="echo '7;far'", scontrol=f"echo '{job}'")
    given = submission(tmp_path)
    target = SlurmTarget("")
    ticket = target.submit(target.prepare(given))
    assert ticket == {"job": 7, "cluster": "far"}
    (tmp_path / "linked").symlink_to(tmp_path)
    for folder, state in ((given.run.folder, "unknown"), (tmp_path / "linked" / "a run", "running")):
        assert target.standing(ticket, folder).state == state
        assert "scancel" not in asked.read_text()
        target.stop(ticket, folder)
    assert asked.read_text().splitlines()[-1] == "scancel -M far --signal=USR2 --batch 7"
    of_the_job = [
        line for line in asked.read_text().splitlines() if not line.startswith(("sinfo", "sbatch", "scancel"))
    ]
    assert of_the_job
    assert all(line.startswith("scontrol -M far ") for line in of_the_job)


def test_what_slurm_took_is_handed_over_also_where_it_says_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend(tmp_path, monkeypatch, scontrol="echo busy >&2; exit 1")
    given = submission(tmp_path)
    assert SlurmTarget("").submit(SlurmTarget("").prepare(given)) == {"job": 7}
    assert given.runfile.exists()
    assert "scancel" not in asked.read_text()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # what is asked is killed, not waited for
def test_a_launch_that_is_interrupted_leaves_nothing_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancels = f"test -e {tmp_path}/run/launch/job.sh && echo with its files >> {tmp_path}/asked"
    asked = pretend(tmp_path, monkeypatch, scontrol="kill -INT $PPID; exec sleep 1", scancel=cancels)
    given = submission(tmp_path)
    prepared = SlurmTarget("").prepare(given)
    with pytest.raises(KeyboardInterrupt):
        SlurmTarget("").submit(prepared)
    assert asked.read_text().splitlines()[-2:] == ["scancel 7", "with its files"]
    assert not given.run.folder.exists()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="deep"),
        *("", "{", "5", '{"to": 5}', '{"to": "nowhere", "job": 1}', '{"to": "slurm"}'),
        *(f'{{"to": "slurm", "job": {job}}}' for job in ('"--me"', '"7"', "1.5", "true", "-7", "null")),
        *(f'{{"to": "slurm", "job": 7, "cluster": {name}}}' for name in ('"--me"', '""', "7", '"a b"')),
    ],
)
def test_a_damaged_ticket_is_one_error_that_says_how_to_get_rid_of_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "launch").mkdir()
    ticket = tmp_path / "launch" / "ticket.json"
    ticket.write_text(text)
    for ask in (run_standing, stop_run):
        with pytest.raises(SpecError, match="which is damaged") as caught:
            ask(tmp_path)
        (problem,) = caught.value.problems
        assert problem.fix == f"rm {ticket}"


@pytest.mark.parametrize(
    ("options", "where", "given"),
    [
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"nodes": "0"}, "--nodes", "'0'"),
        ({"nodes": "two"}, "--nodes", "'two'"),
        ({"time": "soon"}, "--time", "'soon'"),
        ({"time": "0"}, "--time", "'0'"),
        ({"time": "1m", "signal": "60"}, "--time", "last 60 seconds"),
        ({"signal": "5"}, "--signal", "grace of 10"),
        ({"signal": "70000"}, "--signal", "70000"),
        ({"partition": "a b"}, "--partition", "'a b'"),
        ({"account": "x\n#SBATCH --uid=0"}, "--account", "uid"),
        ({"qos": ""}, "--qos", "''"),
        ({"setup": "true\nfalse\x1b"}, "--setup", "false"),
        ({"gres": "gpu:1", "gpus_per_node": "1"}, "--gpus-per-node", "--gres gpu:1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, str], where: str, given: str) -> None:
    with pytest.raises(SpecError) as caught:
        SlurmTarget("").prepare(submission(tmp_path, **options))
    (problem,) = caught.value.problems
    assert problem.where == where
    assert given in problem.given
    assert not (tmp_path / "run").exists()


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        SlurmTarget("").prepare(submission(tmp_path, run={"devices": "1:2"}, nodes="x", time="y", mem="z z"))
    assert [problem.where for problem in caught.value.problems] == ["--mem", "--nodes", "--time", "-n"]
    with pytest.raises(SpecError, match="never goes on"):
        SlurmTarget("").prepare(submission(tmp_path, run={"grace": 0.0, "checkpoint_every": "1h"}, time="30m"))
    with pytest.raises(SpecError, match="nothing after the colon"):
        find_target("slurm:gpu")


@pytest.mark.parametrize(
    ("text", "slurms"),
    [
        ("90s", "0-00:02:00"),
        ("12h", "0-12:00:00"),
        ("2d", "2-00:00:00"),
        ("30", "0-00:30:00"),
        ("30:30", "0-00:31:00"),
        ("1:30:00", "0-01:30:00"),
        ("1-12", "1-12:00:00"),
        ("1-00:00:00", "1-00:00:00"),
    ],
)
def test_a_time_limit_may_be_written_as_slurm_does(tmp_path: Path, text: str, slurms: str) -> None:
    prepared = SlurmTarget("").prepare(submission(tmp_path, time=text))
    assert f"#SBATCH --time={slurms}\n" in prepared.shown()


def test_each_node_is_asked_for_what_its_workers_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(partitions: str, plan: str = "dp=4", **options: str) -> str:
        tools = tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "sinfo").write_text(f"#!/bin/sh\nprintf '{partitions}'\n")
        (tools / "sinfo").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        given = submission(tmp_path, run={"plan": Plan.parse(plan)}, **options)
        return SlurmTarget("").prepare(given).files[given.folder / "job.sh"]

    without = shown("cpu*|8|1000|(null)\\ngpu|8|1000|gpu:8\\n")
    assert "#SBATCH --cpus-per-task=2\n" in without
    assert "gpus" not in without
    with_gpus = shown("cpu|8|1000|(null)\\ngpu*|8|1000|gpu:8\\n")
    assert "#SBATCH --gpus-per-node=2\n" in with_gpus
    assert "cpus" not in with_gpus.partition("\n\n")[0]
    assert "#SBATCH --gpus-per-node=2\n" in shown("gpu|8|1000|gpu:8\\n", partition="gpu")
    assert "--gpus" not in shown("gpu*|8|1000|gpu:8\\n", gpus_per_node="0")
    assert "--gres=gpu:a100:2\n" in shown("gpu*|8|1000|gpu:8\\n", gres="gpu:a100:2")
    assert "--gpus" not in shown("gpu*|8|1000|gpu:8\\n", gres="gpu:a100:2")
    assert "--gpus" not in shown("gpu*|8|1000|gpu:8\\n", plan="dp=4 device=cpu")
    with pytest.raises(SpecError, match=r"2 nodes with 1 x A100-80GB \(sinfo\) have 2"):
        shown("gpu*|8|1000|gpu:a100:1\\n")
    with pytest.raises(SpecError, match=r"which computes on GPUs: 2 nodes with 1 cores \(sinfo\)"):
        shown("cpu*|8|1000|(null)\\n", plan="dp=4 device=cuda")


GUESSED = "sinfo is not here: taken as nodes without GPUs; give --gpus-per-node"


@pytest.mark.parametrize(
    ("plan", "options", "words", "notes"),
    [
        ("dp=4", {"partition": "gpu"}, "--cpus-per-task=2", (GUESSED,)),
        ("dp=4", {"also": "nodes=2", "nodes": "2"}, "--cpus-per-task=1", (GUESSED,)),
        ("dp=4", {"partition": "gpu", "gpus_per_node": "2"}, "--gpus-per-node=2", ()),
        ("dp=4", {"gpus_per_node": "0"}, "--cpus-per-task=2", ()),
        ("dp=4", {"gres": "gpu:2"}, "--gres=gpu:2", ()),
        ("dp=4 device=cuda", {"partition": "gpu"}, "--gpus-per-node=2", ()),
        ("dp=4 device=cpu", {"partition": "gpu"}, "--cpus-per-task=2", ()),
    ],
)
def test_what_is_taken_for_granted_without_slurm_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, options: dict[str, str], words: str, notes: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    prepared = SlurmTarget("").prepare(submission(tmp_path, run={"plan": Plan.parse(plan)}, **options))
    assert f"#SBATCH {words}\n" in prepared.shown()
    assert prepared.notes == notes
    assert prepared.shown().endswith("".join(f"\nnote: {note}" for note in notes))
    runs = [submission(tmp_path / "bench", run={"plan": Plan.parse(plan)}, **options)]
    if "also" not in options:
        assert SlurmTarget("").prepare_array(runs, 1).notes == notes


def test_a_slurm_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, sinfo="exit 1")
    assert SlurmTarget("").prepare(submission(tmp_path)).notes == (GUESSED.replace("is not here", "does not answer"),)


@pytest.mark.parametrize(
    ("setup", "code", "said"),
    [
        ("export ONE=1 # comment\n# nothing\n\nexport TWO=$ONE", 0, ""),
        (
            "export ONE=1\nno-such-module load cuda\nexport TWO=2",
            3,
            "this line of --setup failed: no-such-module load cuda",
        ),
        (
            "[ -d /no/such/place ] # 'quoted",
            3,
            "the run does not begin: this line of --setup failed: [ -d /no/such/place ] # 'quoted",
        ),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, code: int, said: str
) -> None:
    asked = pretend(tmp_path, monkeypatch, scontrol="echo NodeAddr=127.0.0.1", srun='echo "$ONE$TWO"')
    given = submission(tmp_path, setup=setup, gpus_per_node="1")
    script = SlurmTarget("").prepare(given).files[given.folder / "job.sh"]
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    begun = "srun" in (asked.read_text() if asked.exists() else "")
    assert begun == (code == 0)
    assert done.stdout == ("11\n" if begun else "")


def test_a_word_to_stop_that_comes_just_as_the_run_begins_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bash has started srun, and does not wait for it yet."""
    waits = f"trap 'exit {SAVED}' USR1; for n in $(seq 200); do sleep 0.1; done"
    pretend(tmp_path, monkeypatch, scontrol="echo NodeAddr=127.0.0.1", srun=waits)
    given = submission(tmp_path, gpus_per_node="1")
    script = SlurmTarget("").prepare(given).files[given.folder / "job.sh"]
    begun = "step=$!\n"
    assert script.count(begun) == 1
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    asked = script.replace(begun, f"{begun}sleep 1\nkill -USR2 $$\n")
    done = subprocess.run(["bash", "-c", asked], env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == SAVED, done.stderr


def test_a_warning_does_not_hide_why_slurm_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "sbatch: error: Batch job submission failed: Invalid qos specification"
    pretend(tmp_path, monkeypatch, sbatch=f"echo 'sbatch: warning: much' >&2; echo '{words}' >&2; exit 1")
    target = SlurmTarget("")
    assert target.why_not(target.prepare(submission(tmp_path))) == words


def test_a_machine_without_slurm_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = submission(tmp_path)
    target = SlurmTarget("")
    prepared = target.prepare(given)
    with pytest.raises(RunError, match="sbatch is not on this machine"):
        target.submit(prepared)
    assert not given.run.folder.exists()


def phalanx(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "phalanx", *words], capture_output=True, text=True, check=True).stdout
