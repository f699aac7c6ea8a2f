"""Launches on a stand-in of Kubernetes, whose pods are processes, and on an API server by the real kubectl."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import JOBSETS, PODS, ApiServer, Cluster, api_server, kubernetes_cluster
from launched import (
    await_none_left,
    await_steps,
    by_hand,
    steps_in,
    submission,
    until,
    write_job,
)

import phalanx as px
from phalanx.cli import main
from phalanx.config import Plan
from phalanx.data import audit
from phalanx.errors import RunError
from phalanx.files import replace_text
from phalanx.launch.reaper import fork
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import Standing, write_ticket
from phalanx.launch.targets.kubectl import Kubectl
from phalanx.launch.targets.kubernetes import KubernetesTarget

pytestmark = pytest.mark.timeout(300)
STEPS = 30


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with kubernetes_cluster(tmp_path / "cluster") as up:
        monkeypatch.setenv("PATH", f"{up.tools}{os.pathsep}{os.environ['PATH']}")
        yield up
        print(up.seen())  # for who reads why a test has failed
    await_none_left(tmp_path)


@pytest.fixture
def cluster(stand_in: Cluster) -> Cluster:
    """The same, for tests that ``make engines`` runs but for the first."""
    return stand_in


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
        settings = {"grace": 20.0, "forecast": "none", **(run or {})}
        given = submission("kubernetes", folder, plan, run=settings, gpus_per_node="0", **options)
        self.target, self.folder = KubernetesTarget(""), given.run.folder
        self.ticket = self.target.submit(self.target.prepare(given))
        write_ticket(given, "kubernetes", self.ticket)

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


# A pod without torch: it says who it is, writes what a run writes, and saves when it is asked to.
POD = """#!{python} -S
import json, os, signal, sys, time, tomllib
from pathlib import Path

_, module, runfile, meeting, nodes = sys.argv[1:]
folder, index = Path(tomllib.loads(Path(runfile).read_text())["folder"]), os.environ["JOB_COMPLETION_INDEX"]
(folder / "launch").mkdir(parents=True, exist_ok=True)


def note(word, **more):
    if index == "0":
        with (folder / "events.jsonl").open("a") as log:
            log.write(json.dumps(dict(event=word, time=1.0, step=3, **more)) + "\\n")


def leave(number, frame):
    note("stopped", signal="SIGTERM")
    os._exit(75)


signal.signal(signal.SIGTERM, leave)
start, threads = os.environ["RESTART_ATTEMPT"], os.environ.get("OMP_NUM_THREADS")
print(f"[rank {{index}}] of {{nodes}}, start {{start}}, with {{threads}}", flush=True)
while not (folder / "finish").exists():
    time.sleep(0.02)
    if (folder / "crash").exists() and index == "1":
        sys.exit(int((folder / "crash").read_text()))
note("end", samples=48, seconds=1.0, loss=0.5)
"""


class Pods:
    """A run that was handed over, of pods that have no torch."""

    def __init__(self, folder: Path, **options: str) -> None:
        program = folder / "pod"
        program.write_text(POD.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        given = replace(submission("kubernetes", folder, "dp=4", **options), python=str(program))
        self.target, self.folder = KubernetesTarget(""), given.run.folder
        self.ticket = self.target.submit(self.target.prepare(given))

    @property
    def standing(self) -> Standing:
        return self.target.standing(self.ticket, self.folder)

    def wait(self, state: str) -> Standing:
        until(lambda: self.standing.state == state, 90, f"it is {state}")
        return self.standing

    def said(self, rank: int | None = None) -> str:
        path = self.target.log(self.ticket, self.folder, rank)
        return path.read_text() if path.exists() else ""

    def crash(self, code: int) -> None:
        """Have pod 1 end with that exit code, which stands there whole from the moment that it can be seen."""
        replace_text(self.folder / "crash", str(code))

    def begun(self, start: int = 0) -> None:
        until(lambda: all(f"[rank {rank}] of 2, start {start}" in self.said() for rank in range(2)), 90, "both print")


class TestStandIn:
    """The rules of the manifests, as a cluster's controllers follow them."""

    def test_a_run_ends(self, stand_in: Cluster, tmp_path: Path) -> None:
        run = Pods(tmp_path, cpu="6", namespace="vision")
        run.begun()
        assert run.standing == Standing(state="running", detail="2 pods on n0, n1")
        assert run.ticket["context"] == "stand-in"
        assert run.said(1) == "of 2, start 0, with 3\n"
        assert all(call[:2] == ["--context", "stand-in"] for call in stand_in.calls() if call[-1] == "json")
        assert all("vision" in call for call in stand_in.calls() if call[-1] == "json")
        (run.folder / "finish").touch()
        assert run.wait("ended").detail == "AllJobsCompleted: jobset completed successfully"
        run.target.stop(run.ticket, run.folder)
        assert len(stand_in.objects(JOBSETS)) == 1, "of a run that has ended nothing is taken away"

    def test_what_the_jobs_own_code_has_raised_is_not_started_again(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Pods(tmp_path, max_restarts="3")
        run.begun()
        run.crash(70)
        found = run.wait("failed")
        assert found.detail.startswith("an exception of the job's own code: FailJobSetFailurePolicyAction")
        assert cluster.restarts() == (0, 0)
        assert run.said(0) == "of 2, start 0, with 1\n"

    def test_kueue_suspends_and_admits(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Pods(tmp_path, queue="team-a")
        assert run.wait("waiting").detail.startswith("Suspended")
        uid = cluster.objects(JOBSETS)[0]["metadata"]["uid"]
        cluster.queue(uid, "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu")
        assert run.standing.detail == "Pending: couldn't assign flavors: insufficient unused quota for nvidia.com/gpu"
        cluster.admit(run.ticket["jobset"], suspend=False)
        run.begun()
        cluster.admit(run.ticket["jobset"], suspend=True)
        run.wait("waiting")
        assert '"stopped"' in (run.folder / "events.jsonl").read_text()
        cluster.admit(run.ticket["jobset"], suspend=False)
        run.wait("running")

    def test_what_is_refused_is_said_in_its_words_and_nothing_is_left(self, stand_in: Cluster, tmp_path: Path) -> None:
        stand_in.refuse("Warning: an old API\nError from server (Forbidden): exceeded quota: gpus")
        target, given = KubernetesTarget(""), submission("kubernetes", tmp_path, "dp=4")
        assert target.why_not(target.prepare(given)) == "Error from server (Forbidden): exceeded quota: gpus"
        with pytest.raises(RunError, match="exceeded quota: gpus"):
            target.submit(target.prepare(given))
        assert not given.run.folder.exists()
        assert stand_in.objects("configmaps") == []

    def test_a_launch_that_is_interrupted_leaves_nothing(
        self, stand_in: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(kubectl: Kubectl) -> Kubectl:
            assert len(stand_in.objects(JOBSETS)) == 1
            raise KeyboardInterrupt

        monkeypatch.setattr(Kubectl, "settled", interrupted)
        target, given = KubernetesTarget(""), submission("kubernetes", tmp_path, "dp=4")
        with pytest.raises(KeyboardInterrupt):
            target.submit(target.prepare(given))
        assert stand_in.objects(JOBSETS) == stand_in.objects("configmaps") == []
        assert not given.run.folder.exists()


class TestKubectl:
    """The real one, where it is installed, with settings of the test's own."""

    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
        if not shutil.which("kubectl"):
            pytest.skip("kubectl is not installed")
        for name, value in {"HOME": "", "KUBECONFIG": "config", "KUBECACHEDIR": "cache"}.items():
            monkeypatch.setenv(name, str(tmp_path / value))
        with api_server(tmp_path) as up:
            yield up

    def test_a_run_is_handed_over_found_and_stopped(self, server: ApiServer, tmp_path: Path) -> None:
        target, given = KubernetesTarget(""), submission("kubernetes", tmp_path, "dp=4")
        assert target.why_not(target.prepare(given)) == ""
        assert not server.objects
        ticket, folder = target.submit(target.prepare(given)), given.run.folder
        name = ticket["jobset"]
        assert ticket == {"jobset": name, "context": "here", "namespace": "vision", "nodes": 2}
        assert set(server.objects) == {("vision", "jobsets", name), ("vision", "configmaps", f"{name}-run")}
        for rank in range(2):
            labels = {"jobset.sigs.k8s.io/jobset-name": name}
            server.objects["vision", "pods", f"pod-{rank}"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"pod-{rank}", "namespace": "vision", "labels": labels},
                "spec": {"nodeName": "n1", "containers": [{"name": "node"}]},
                "status": {"phase": "Running"},
                "log": f"[rank {rank}] of the pod\n",
            }
        assert target.standing(ticket, folder) == Standing(state="running", detail="2 pods on n1")
        assert target.log(ticket, folder, None).read_text() == "[rank 0] of the pod\n[rank 1] of the pod\n"
        assert target.log(ticket, folder, 1).read_text() == "of the pod\n"
        target.stop(ticket, folder)
        assert {plural for _, plural, _ in server.objects} == {"pods"}
        assert target.standing(ticket, folder) == Standing(state="running", detail="2 pods still to end")
        server.objects.clear()
        assert target.standing(ticket, folder).state == "stopped"
