"""What the pods of a launch on Kubernetes train, as processes of this machine; an API server by the real kubectl."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from launched import await_none_left, await_steps, by_hand, free_ports, steps_in, submission, until, write_job

import phalanx as px
from phalanx.config import Plan
from phalanx.data import audit
from phalanx.errors import RunError
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import kubernetes, kubernetes_manifest
from phalanx.launch.targets.kubernetes import KubernetesTarget
from phalanx.launch.targets.target import Standing, Submission

pytestmark = pytest.mark.timeout(300)
STEPS = 30


class Pods:
    """The pods of ``given``, each with what it prints in ``pod-INDEX.log``, by its index in ``running``."""

    def __init__(self, given: Submission) -> None:
        prepared = KubernetesTarget("").prepare(given)
        items = json.loads(prepared.files[given.folder / "kubernetes.json"])["items"]
        objects = {one["kind"]: one for one in items}
        self.folder, spec = given.run.folder.parent, objects["JobSet"]["spec"]
        job = spec["replicatedJobs"][0]
        self._pod, self.count = job["template"]["spec"]["template"], job["template"]["spec"]["completions"]
        name = objects["JobSet"]["metadata"]["name"]
        self._meeting = f"{name}-{job['name']}-0-0.{spec['network']['subdomain']}"
        self._configs = {objects["ConfigMap"]["metadata"]["name"]: objects["ConfigMap"]["data"]}
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, attempt: int = 0, count: int | None = None) -> None:
        """Start all that have a place, as the JobSet does for the first time and each time again."""
        (self._port,) = free_ports(1)
        for index in range(self.count if count is None else count):
            self.start_one(index, attempt)

    def start_one(self, index: int, attempt: int = 0) -> None:
        """Start the pod of that index."""
        (container,) = self._pod["spec"]["containers"]
        command = [sys.executable if word == "python" else word for word in container["command"]]
        volumes = {one["name"]: one for one in self._pod["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            if config := volumes[mount["name"]].get("configMap"):
                mounted = self.folder / "mounted"
                mounted.mkdir(exist_ok=True)
                for file, text in self._configs[config["name"]].items():
                    (mounted / file).write_text(text)
                command = [word.replace(mount["mountPath"], str(mounted)) for word in command]
        command = [f"127.0.0.1:{self._port}" if word.startswith(self._meeting) else word for word in command]
        given = {"JOB_COMPLETION_INDEX": str(index)}
        for one in container["env"]:
            given[one["name"]] = str(attempt) if "valueFrom" in one else one["value"]
        with self.log(index).open("ab") as out:
            self.running[index] = subprocess.Popen(
                command,
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=container.get("workingDir"),
            )

    def log(self, index: int) -> Path:
        return self.folder / f"pod-{index}.log"

    def end(self, index: int, number: int = signal.SIGTERM) -> None:
        """Ask a pod to go, or lose it with all that it runs."""
        process = self.running[index]
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def wait(self, seconds: float = 120) -> list[int]:
        """Wait for the ends of all; their exit codes, by index."""
        return [self.running[index].wait(seconds) for index in sorted(self.running)]

    def close(self) -> None:
        """End all that runs."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


Cluster = Callable[..., Pods]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Starts the pods of a run; on two pods without GPUs unless options say more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made: list[Pods] = []

    def start(plan: str = "dp=2", *, run: dict[str, Any] | None = None, **options: str) -> Pods:
        settings = {"grace": 20.0, "forecast": "none", **(run or {})}
        made.append(Pods(submission("kubernetes", tmp_path, plan, run=settings, gpus_per_node="0", **options)))
        made[-1].start()
        return made[-1]

    yield start
    for pods in made:
        pods.close()
        print(*(pods.log(index).read_text() for index in pods.running))  # for who reads why a test has failed
    await_none_left(tmp_path)


def is_what_one_device_trains(folder: Path, *, twice: bool = False) -> None:
    """The loss of every step, and each sample once; ``twice``: some steps were taken again."""
    run = px.load(folder)
    steps = [event["step"] for event in run.events("step")]
    assert sorted(set(steps)) == list(range(STEPS))
    assert twice or steps == list(range(STEPS)), "none was taken twice"
    assert run.losses == pytest.approx(by_hand(STEPS), rel=1e-4)
    assert audit(folder / "ledger", length=64, batch=16, drop_last=False) == []


@pytest.mark.parametrize(("plan", "count"), [("dp=2", 2), ("pp=2 tp=2", 2), ("server=1 dp=2", 3)])
def test_pods_train_what_one_device_does(cluster: Cluster, tmp_path: Path, plan: str, count: int) -> None:
    job = write_job(tmp_path, steps=STEPS)
    says = 'def job():\n    import os\n    if "RANK" in os.environ:\n        print("I am", os.environ["RANK"])\n'
    job.write_text(job.read_text().replace("def job():\n", says))
    pods = cluster(plan, nodes=str(count))
    assert pods.wait() == [0] * count
    is_what_one_device_trains(tmp_path / "run")
    each = Plan.parse(plan).processes // count
    for index in range(count):
        log = pods.log(index).read_text()
        assert "Traceback" not in log
        for rank in range(each * count):
            here = rank // each == index
            assert (f"[rank {rank}] I am {rank}\n" in log) is here, "the index of a pod is the rank of its node"
            assert f"I am {rank}\n" in (tmp_path / "run" / "launch" / f"rank-{rank}.log").read_text()


def test_a_pod_that_has_to_go_costs_no_step_and_one_that_is_lost_is_made_anew(cluster: Cluster, tmp_path: Path) -> None:
    """All pods end with one, and are started anew."""
    write_job(tmp_path, pause=0.5, steps=STEPS)
    pods, run = cluster(run={"checkpoint_every": 2}), tmp_path / "run"
    await_steps(run, 4)
    pods.end(1)
    assert 75 in pods.wait()
    (stopped,) = px.load(run).events("stopped")
    assert newest_step(run) == stopped["step"] == steps_in(run) < STEPS
    pods.start(attempt=1)
    await_steps(run, stopped["step"] + 3)
    pods.end(1, signal.SIGKILL)
    write_job(tmp_path, steps=STEPS)
    assert 70 not in pods.wait(), "no exception of the job's own code"
    pods.start(attempt=2)
    assert pods.wait() == [0, 0]
    assert len(list(px.load(run).events("resume"))) == 2
    is_what_one_device_trains(run, twice=True)


def test_a_node_less_and_a_node_more(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on with the pods that there are; the global batch is the same, and so are the losses."""
    monkeypatch.setattr(kubernetes_manifest, "_WAIT", 20)
    write_job(tmp_path, pause=0.2, steps=STEPS)
    pods = cluster(run={"devices": "1:2", "checkpoint_every": 2})
    run = tmp_path / "run"

    def worlds() -> list[int]:
        log = run / "events.jsonl"
        return [event["world_size"] for event in px.load(run).events("start")] if log.exists() else []

    until(lambda: worlds() == [2] and steps_in(run) > 4, 90, "it trains on two")
    write_job(tmp_path, pause=1.0, steps=STEPS)  # on one it goes on for longer than another pod takes to start
    pods.end(1, signal.SIGKILL)
    pods.end(0)  # all are made anew, and one has no place
    pods.wait()
    pods.start(attempt=1, count=1)
    until(lambda: worlds() == [2, 1], 120, "it goes on on one")
    before = steps_in(run)
    until(lambda: steps_in(run) > before + 2, 90, "it comes on")
    write_job(tmp_path, steps=STEPS)
    pods.start_one(1, attempt=1)
    until(lambda: worlds() == [2, 1, 2], 120, "it goes on on two")
    assert pods.wait()[0] == 0
    resizes = [(event["from"], event["to"]) for event in px.load(run).events("resize")]
    assert resizes == [(2, 1), (1, 2)]
    is_what_one_device_trains(run, twice=True)


def test_the_exit_code_of_an_exception_of_the_jobs_own_code_is_its_own(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("time.sleep(PAUSE)", "raise ValueError('no such loss')"))
    pods = cluster(run={"restarts": 0})
    assert 70 in pods.wait()
    assert any("no such loss" in pods.log(index).read_text() for index in range(2))


JOBSET = "jobset.x-k8s.io/v1alpha2"
KINDS = {
    "/api/v1": {"configmaps": "ConfigMap", "pods": "Pod", "pods/log": "Pod", "namespaces": "Namespace"},
    f"/apis/{JOBSET}": {"jobsets": "JobSet"},
}
OBJECT = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?")
VERBS = ["get", "list", "create", "delete", "patch", "update", "watch"]


class ApiServer(ThreadingHTTPServer):
    """``objects``: by namespace, plural and name. ``refused``: plural → why none is taken."""

    daemon_threads = True
    namespace = "vision"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.refused: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """What a kubeconfig holds."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_address[1]}"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "", "namespace": self.namespace}}],
            "current-context": "here",
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        if (told := described(url.path)) is not None:
            self.say(told)
        elif found := OBJECT.fullmatch(url.path):
            self.serve(found, parse_qs(url.query), body)
        else:
            self.refuse("the server could not find the requested resource")

    do_GET = do_POST = do_PATCH = do_DELETE = respond  # noqa: N815

    def serve(self, found: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        """Do what is asked of objects."""
        group, namespace, plural, name, log = found.groups()
        objects, key = self.server.objects, (namespace, plural, name)
        if self.command == "POST" and plural in self.server.refused:
            self.refuse(self.server.refused[plural], "Forbidden", 403)
        elif self.command == "POST":
            made = json.loads(body)
            made["metadata"].update(uid=str(uuid.uuid4()), namespace=namespace, resourceVersion="1")
            if "dryRun" not in query:
                objects[namespace, plural, made["metadata"]["name"]] = made
            self.say(made)
        elif not name:
            wanted = dict(one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if one)
            there = [one for where, one in objects.items() if where[:2] == (namespace, plural)]
            items = [one for one in there if wanted.items() <= one["metadata"].get("labels", {}).items()]
            version = group.removeprefix("/apis/").removeprefix("/api/")
            self.say({"kind": f"{KINDS[group][plural]}List", "apiVersion": version, "metadata": {}, "items": items})
        elif key not in objects:
            self.refuse(f'{plural} "{name}" not found')
        elif log:
            self.say(objects[key].get("log", ""))
        else:
            self.say(objects.pop(key) if self.command == "DELETE" else objects[key])

    def say(self, told: dict[str, Any] | str, code: int = 200) -> None:
        data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(told, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, message: str, reason: str = "NotFound", code: int = 404) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self.say({**status, "message": message}, code)


def described(path: str) -> dict[str, Any] | str | None:
    """What the server says of itself; ``None`` where it is asked for something else."""
    if path == "/version":
        return {"major": "1", "minor": "32", "gitVersion": "v1.32.4"}
    if path == "/openapi/v2":
        return ""  # an empty document of protobuf: nothing is known of any kind, and nothing is held against it
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": JOBSET, "version": JOBSET.partition("/")[2]}
        group = {"name": JOBSET.partition("/")[0], "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    if path in KINDS:
        resources = [
            {"name": plural, "singularName": "", "namespaced": plural != "namespaces", "kind": kind, "verbs": VERBS}
            for plural, kind in KINDS[path].items()
        ]
        version = path.removeprefix("/apis/").removeprefix("/api/")
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return None


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """A server, and ``folder/config`` that leads to it."""
    with ApiServer() as server:
        (folder / "config").write_text(json.dumps(server.settings()))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


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
        assert target.standing(ticket, folder) == Standing(state="running", detail="2 of 2 pods")
        printed = target.log(ticket, folder, None).read_text().splitlines()
        assert sorted(printed) == [f"[rank {rank}] of the pod" for rank in range(2)]  # kubectl asks pods side by side
        assert target.log(ticket, folder, 1).read_text() == "of the pod\n"
        target.stop(ticket, folder)
        assert {plural for _, plural, _ in server.objects} == {"pods"}
        assert target.standing(ticket, folder) == Standing(state="running", detail="pods still to end")
        server.objects.clear()
        assert target.standing(ticket, folder).state == "stopped"

    def test_what_is_refused_is_said_in_its_words_and_nothing_is_left(self, server: ApiServer, tmp_path: Path) -> None:
        server.refused["jobsets"] = "exceeded quota: gpus"
        target, given = KubernetesTarget(""), submission("kubernetes", tmp_path, "dp=4")
        assert "exceeded quota: gpus" in str(target.why_not(target.prepare(given)))
        with pytest.raises(RunError, match="exceeded quota: gpus"):
            target.submit(target.prepare(given))
        assert not given.run.folder.exists()
        assert not server.objects

    def test_a_launch_that_is_interrupted_leaves_nothing(
        self, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(options: object) -> None:
            assert len(server.objects) == 2
            raise KeyboardInterrupt

        monkeypatch.setattr(kubernetes, "_settings", interrupted)
        target, given = KubernetesTarget(""), submission("kubernetes", tmp_path, "dp=4")
        with pytest.raises(KeyboardInterrupt):
            target.submit(target.prepare(given))
        assert not server.objects
        assert not given.run.folder.exists()
