"""A launch on Kubernetes from end to end: pods are processes, the cluster a stand-in."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes_cluster import JOBSETS, PODS, Cluster, kubernetes_cluster
from launched import (
    await_none_left,
    await_steps,
    by_hand,
    steps_in,
    write_job,
)
from slurm_cluster import until

import phalanx as px
from phalanx.cli import main
from phalanx.config import Plan, RunSpec
from phalanx.data import audit
from phalanx.events.log import EventLog
from phalanx.launch.reaper import fork
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import Submission, kubernetes_node, write_ticket
from phalanx.launch.targets.kubernetes import KubernetesTarget
from phalanx.launch.targets.node_agent import NodePlace

pytestmark = pytest.mark.timeout(300)
STEPS = 30


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with kubernetes_cluster(tmp_path / "cluster") as up:
        monkeypatch.setenv("PATH", f"{up.tools}{os.pathsep}{os.environ['PATH']}")
        yield up
        print(up.seen())  # for who reads why a test has failed
    await_none_left(tmp_path)


def say(cluster: Cluster, *words: str, code: int = 0) -> str:
    """What the command prints, in a process forked from this one, which ends with that code."""
    said = Path("said.txt")
    with cluster.held():
        pid = fork()
    if pid == 0:
        ended = 3
        try:
            with said.open("w") as out, redirect_stdout(out), redirect_stderr(out):
                main(list(words))
        except SystemExit as error:
            ended = int(error.code or 0)
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, said.read_text()
    return said.read_text()


class Handed:
    """A run that was handed over as a launch does it; without GPUs, on two pods unless ``options`` say more."""

    def __init__(self, folder: Path, plan: str = "dp=2", *, run: dict[str, Any] | None = None, **options: str) -> None:
        settings = {"plan": Plan.parse(plan), "grace": 20.0, "resume": "auto", "forecast": "none", **(run or {})}
        spec = RunSpec(job=str(folder / "train.py"), folder=folder / "run", **settings)
        given = {"image": "registry/train:1", "nodes": "2", "volume": f"data:{folder}", "gpus-per-node": "0"}
        named = {**given, **{name.replace("_", "-"): value for name, value in options.items()}}
        submission = Submission(run=spec, name="train", python=sys.executable, options=named)
        self.target, self.folder = KubernetesTarget(""), spec.folder
        self.ticket = self.target.submit(self.target.prepare(submission))
        write_ticket(submission, "kubernetes", self.ticket)

    @property
    def state(self) -> str:
        return self.target.standing(self.ticket, self.folder).state

    def await_end(self, cluster: Cluster, state: str = "ended") -> None:
        """By a look at the objects, which costs less than to ask."""

        def over() -> bool:
            return any(one.get("status", {}).get("conditions") for one in cluster.objects(JOBSETS))

        until(over, 120, f"it ends: {[path.read_text() for path in (cluster.folder / 'logs').iterdir()]}")
        assert self.state == state, self.target.log(self.ticket, self.folder, None).read_text()

    def is_what_one_device_trains(self, *, twice: bool = False) -> None:
        """The loss of every step, and each sample once; ``twice``: some steps were taken again."""
        run = px.load(self.folder)
        steps = [event["step"] for event in run.events("step")]
        assert sorted(set(steps)) == list(range(STEPS))
        assert twice or steps == list(range(STEPS)), "none was taken twice"
        assert run.losses == pytest.approx(by_hand(STEPS), rel=1e-4)
        assert audit(self.folder / "ledger", length=64, batch=16, drop_last=False) == []


@pytest.mark.parametrize(
    ("plan", "pods"),
    [
        ("dp=2", "2"),
        pytest.param("fsdp=4", "2", marks=pytest.mark.long),
        ("pp=2 tp=2", "2"),
        ("server=1 dp=2", "3"),
    ],
)
def test_pods_train_what_one_device_does(cluster: Cluster, tmp_path: Path, plan: str, pods: str) -> None:
    job = write_job(tmp_path, steps=STEPS)
    says = 'def job():\n    import os\n    if "RANK" in os.environ:\n        print("I am", os.environ["RANK"])\n'
    job.write_text(job.read_text().replace("def job():\n", says))
    run = Handed(tmp_path, plan, nodes=pods)
    run.await_end(cluster)
    run.is_what_one_device_trains()
    each = Plan.parse(plan).processes // int(pods)
    printed = run.target.log(run.ticket, run.folder, None).read_text()
    for index, pod in enumerate(cluster.objects(PODS)):
        assert pod["status"]["phase"] == "Succeeded"
        log = (cluster.folder / "logs" / pod["metadata"]["name"]).read_text()
        assert "Traceback" not in log
        for rank in range(each * int(pods)):
            here = rank // each == index
            assert (f"[rank {rank}] I am {rank}\n" in log) is here, "the index of a pod is the rank of its node"
            assert f"I am {rank}\n" in run.target.log(run.ticket, run.folder, rank).read_text()
            assert f"[rank {rank}] I am {rank}\n" in printed


def test_a_pod_that_has_to_go_costs_no_step_and_one_that_is_lost_is_made_anew(cluster: Cluster, tmp_path: Path) -> None:
    """By itself all pods are made anew; only who is lost without a word counts towards ``--max-restarts``."""
    write_job(tmp_path, pause=1.0, steps=STEPS)
    run = Handed(tmp_path, run={"checkpoint_every": 2}, max_restarts="1")

    def steps() -> list[int]:
        return [event["step"] for event in px.load(run.folder).events("step")]

    await_steps(run.folder, 4)
    cluster.preempt(1)
    until(lambda: cluster.restarts() == (1, 0), 60, "all pods are made anew")
    before = len(steps())
    until(lambda: len(steps()) > before + 2, 60, "it goes on")
    taken = steps()
    assert taken == list(range(len(taken))), "none was taken twice"
    write_job(tmp_path, steps=STEPS)
    cluster.kill(1)
    run.await_end(cluster)
    assert cluster.restarts() == (2, 1)
    assert len(list(px.load(run.folder).events("resume"))) == 2
    run.is_what_one_device_trains(twice=True)


def test_a_node_less_and_a_node_more(cluster: Cluster, tmp_path: Path) -> None:
    """The run goes on with the pods that there are; the global batch is the same, and so are the losses."""
    write_job(tmp_path, pause=0.2, steps=STEPS)
    cluster.places = 2
    run = Handed(tmp_path, run={"devices": "1:2", "checkpoint_every": 2}, wait="20s")
    log = run.folder / "events.jsonl"

    def worlds() -> list[int]:
        return [event["world_size"] for event in px.load(run.folder).events("start")] if log.exists() else []

    until(lambda: worlds() == [2] and steps_in(run.folder) > 4, 90, "it trains on two")
    write_job(tmp_path, pause=1.0, steps=STEPS)  # on one it goes on for longer than another pod takes to start
    cluster.kill(1)
    until(lambda: worlds() == [2, 1], 90, "it goes on on one")
    before = steps_in(run.folder)
    until(lambda: steps_in(run.folder) > before + 2, 90, "it comes on")
    assert run.target.standing(run.ticket, run.folder).detail.startswith("1 of 2 pods on n0: Unschedulable")
    write_job(tmp_path, steps=STEPS)
    cluster.places = 2
    until(lambda: worlds() == [2, 1, 2], 90, "it goes on on two")
    run.await_end(cluster)
    resizes = [(event["from"], event["to"]) for event in px.load(run.folder).events("resize")]
    assert resizes == [(2, 1), (1, 2)]
    run.is_what_one_device_trains(twice=True)


def test_by_commands_a_run_is_stopped_and_goes_on_by_another_launch(cluster: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path, pause=1.0, steps=STEPS)
    words = ["launch", "train.py", "--to", "kubernetes", "--nodes", "2", "--plan", "dp=2", "--run", "run"]
    words += ["--image", "registry/train:1", "--volume", f"data:{tmp_path}", "--gpus-per-node", "0", "--json"]
    words += ["--python", sys.executable, "--no-forecast", "--no-check"]
    name = json.loads(say(cluster, *words))["jobset"]
    await_steps(Path("run"), 3)
    assert "has already: running" in say(cluster, *words, code=2)
    assert "stopped" in say(cluster, "stop", "run")
    assert cluster.objects(JOBSETS) == cluster.objects(PODS) == cluster.objects("configmaps") == []
    await_none_left(tmp_path)
    (stopped,) = px.load("run").events("stopped")
    assert newest_step(Path("run")) == stopped["step"] == steps_in(Path("run")) < STEPS
    write_job(tmp_path, steps=STEPS)
    followed = json.loads(say(cluster, *words, "--resume"))
    assert followed["jobset"] != name
    say(cluster, "logs", "run", "--follow")  # until its end
    assert json.loads(say(cluster, "status", "run", "--json"))["state"] == "ended"
    assert px.load("run").losses == pytest.approx(by_hand(STEPS), rel=1e-4)


def test_a_job_that_fails_is_told_of_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=4)
    fails = '    import os\n    if "RANK" in os.environ:\n        raise ValueError("of the job")\n'
    job.write_text(job.read_text().replace("    time.sleep(PAUSE)\n", fails))
    run = Handed(tmp_path, max_restarts="3")
    run.await_end(cluster, "failed")
    assert "an exception of the job's own code" in run.target.standing(run.ticket, run.folder).detail
    assert cluster.restarts() == (0, 0), "what would come again is not started again"
    assert "of the job" in run.target.log(run.ticket, run.folder, None).read_text()


def test_what_fails_before_the_run_has_begun_is_started_again_up_to_its_number(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = write_job(tmp_path, steps=4)
    fails = '    import os\n    if "RANK" in os.environ:\n        os._exit(3)\n'
    job.write_text(job.read_text().replace("def job():\n", f"def job():\n{fails}"))
    run = Handed(tmp_path, max_restarts="1")
    run.await_end(cluster, "failed")
    assert "max number of restarts" in run.target.standing(run.ticket, run.folder).detail
    assert cluster.restarts() == (1, 1)


class TestNode:
    """What a pod does before torch is asked for anything."""

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[NodePlace]:
        places: list[NodePlace] = []

        def be_agent(spec: RunSpec, place: NodePlace, worker: list[str]) -> int:
            places.append(place)
            assert spec.plan == px.Plan.parse("dp=4"), "on the most devices"
            assert worker[3:] == [sys.executable, str(tmp_path / "run.toml"), str(tmp_path / "run" / "launch")]
            return 75

        spec = RunSpec(job="train.py", plan=px.Plan.parse("dp=2"), devices="1:4", folder=tmp_path / "run")
        (tmp_path / "run.toml").write_text(spec.to_toml())
        monkeypatch.setattr(kubernetes_node, "be_agent", be_agent)
        monkeypatch.setattr(kubernetes_node, "_LOOK", 0.01)
        monkeypatch.setattr(kubernetes_node, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15))
        monkeypatch.setenv("RESTART_ATTEMPT", "2")
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
        return places

    def test_its_index_is_its_rank(
        self, tmp_path: Path, place: list[NodePlace], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:29500", "2") == 75
        options = place[0].options
        assert (options["node-rank"], options["rdzv-endpoint"], place[0].nodes) == ("0", "localhost:29500", 2)
        assert options["rdzv-id"] == "localhost-2"

    @pytest.mark.parametrize(
        ("before", "events", "code", "ends"),
        [
            ([], [{"event": "error", "lost": False}], 1, 70),
            (
                [],
                [{"event": "resume", "step": 2, "path": "checkpoints/step-2"}, {"event": "error", "lost": False}],
                1,
                70,
            ),
            ([], [{"event": "error", "lost": False}, {"event": "error", "lost": True}], 1, 70),
            ([], [{"event": "error", "lost": True}], 1, 1),
            ([], [{"event": "error", "lost": False}], 75, 75),
            ([{"event": "error", "lost": False}], [], 1, 1),
            ([{"event": "error", "lost": False}], [{"event": "resume", "step": 2, "path": "checkpoints/step-2"}], 1, 1),
        ],
        ids=[
            "own",
            "own, after others went",
            "own, by which others were lost",
            "lost",
            "asked to stop",
            "of an earlier start",
            "lost without a word",
        ],
    )
    def test_its_exit_code_says_whether_the_jobs_own_code_has_raised(
        self,
        tmp_path: Path,
        place: list[NodePlace],
        monkeypatch: pytest.MonkeyPatch,
        before: list[dict[str, Any]],
        events: list[dict[str, Any]],
        code: int,
        ends: int,
    ) -> None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        log = tmp_path / "run" / "events.jsonl"

        def note(told: list[dict[str, Any]]) -> None:
            error = {"rank": 1, "step": 3, "kind": "ValueError", "message": "rank 1 of 4 failed in step 3: of the job"}
            with EventLog(log) as written:
                for one in told:
                    given = {**(error if one["event"] == "error" else {}), **one}
                    written.write(given.pop("event"), **given)

        def be_agent(*_: object) -> int:
            note(events)
            return code

        note(before)
        monkeypatch.setattr(kubernetes_node, "be_agent", be_agent)
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:29500", "2") == ends

    def test_its_log_has_why_the_run_failed_though_another_pods_worker_says_it_a_little_later(
        self, tmp_path: Path, place: list[NodePlace], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """As this pod ends the others are removed, and with them what they have printed."""
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
        monkeypatch.setattr(kubernetes_node, "_LAST_WORD", 60.0)  # however late the thread below wakes
        monkeypatch.setattr(kubernetes_node, "_is_open", lambda _: True)
        log = tmp_path / "run" / "events.jsonl"

        def say() -> None:
            with EventLog(log) as written:
                written.write("error", rank=0, step=3, kind="ValueError", message="rank 0: of the job", lost=False)

        later = threading.Timer(0.3, say)

        def be_agent(*_: object) -> int:
            later.start()
            return 1

        monkeypatch.setattr(kubernetes_node, "be_agent", be_agent)
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:29500", "2") == 70
        later.join()
        assert capfd.readouterr().err.endswith(": rank 0: of the job\n")

    def test_where_pods_may_be_fewer_those_there_are_begin(
        self, tmp_path: Path, place: list[NodePlace], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:29500", "1:2", "60") == 75
        options = place[0].options
        assert (options["nnodes"], options["rdzv-backend"], place[0].nodes) == ("1:2", "c10d", 2)
        assert "is_host=1" in options["rdzv-conf"]
        assert "last_call_timeout=60" in options["rdzv-conf"]

    def test_it_waits_for_the_first(
        self, tmp_path: Path, place: list[NodePlace], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
        passed = count()
        clock = SimpleNamespace(monotonic=lambda: float(next(passed)), sleep=lambda _: None)
        monkeypatch.setattr(kubernetes_node, "time", clock)  # each look takes a second
        monkeypatch.setattr(kubernetes_node, "_PATIENCE", 20)
        monkeypatch.setattr(kubernetes_node, "_SAYS", 5)
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:1", "2") == 1
        assert not place
        said = capfd.readouterr().err
        assert "waits for pod 0, at localhost:1" in said
        assert "nobody is at localhost:1" in said
