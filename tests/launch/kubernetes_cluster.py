"""A stand-in for a Kubernetes cluster with JobSet, ``with kubernetes_cluster(folder) as cluster``, and an API server.

Its ``kubectl`` is a program in ``cluster.tools``, for PATH; it reads and writes objects as files. A thread of this
process does what the controllers of a cluster do with a JobSet, by the same rules, and each pod is a process of this
machine. The names of a pod become loopback, a ConfigMap that it mounts a folder. A lock on a file keeps kubectl and
the controllers apart. The API server, ``with api_server(folder) as server``, is for the real kubectl: it keeps a few
kinds of objects in memory, and nothing acts on them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from launched import free_ports

JOBSETS, PODS, CONFIGS = "jobsets.jobset.x-k8s.io", "pods", "configmaps"
WORKLOADS = "workloads.kueue.x-k8s.io"
NO_PLACE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
KUBECTL = r'''
import fcntl, json, os, sys, time, uuid
from pathlib import Path

HERE = Path({here!r})
PLURALS = {{"ConfigMap": "configmaps", "JobSet": "jobsets.jobset.x-k8s.io"}}


def fail(text):
    sys.exit(print(text, file=sys.stderr) or 1)


def take(words, *names):
    """The value of an option, which leaves the words."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            del words[index]
            return value if equals else words.pop(index)


def objects(kind):
    if kind not in ("pods", "workloads.kueue.x-k8s.io", *PLURALS.values()):
        fail(f'error: the server doesn\'t have a resource type "{{kind}}"')
    return [json.loads(path.read_text()) for path in sorted((HERE / kind).glob("*.json"))]


def selected(found, selector):
    wanted = dict(part.split("=") for part in selector.split(",")) if selector else {{}}
    return [one for one in found if wanted.items() <= one["metadata"].get("labels", {{}}).items()]


def read(name):
    told = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    return told["items"] if told["kind"] == "List" else [told]


def apply(words):
    dry, items = take(words, "--dry-run"), read(take(words, "--filename", "-f"))
    for one in items:
        kind, name = one["kind"], one["metadata"]["name"]
        if kind not in PLURALS:
            fail(f'resource mapping not found for name: "{{name}}" namespace: "" from "STDIN": no matches for kind '
                 f'"{{kind}}" in version "{{one["apiVersion"]}}"\nensure CRDs are installed first')
        if kind == "JobSet" and (HERE / "refuse").exists():
            fail((HERE / "refuse").read_text())
        path = HERE / PLURALS[kind] / f"{{name}}.json"
        if path.exists() and json.loads(path.read_text()).get("spec") != one.get("spec"):
            fail(f'The {{kind}} "{{name}}" is invalid: spec: Invalid value: field is immutable')
        one["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ"))
        if dry != "server":
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(one))
            partial.rename(path)
        print(f"{{PLURALS[kind]}}/{{name}} created")


def get(words):
    selector, lenient = take(words, "--selector", "-l"), "--ignore-not-found" in words
    assert take(words, "--output", "-o") == "json"
    kind, *names = [word for word in words if not word.startswith("-")]
    found = objects(kind)
    if not names:
        print(json.dumps({{"apiVersion": "v1", "kind": "List", "items": selected(found, selector)}}))
        return
    found = [one for one in found if one["metadata"]["name"] == names[0]]
    if found:
        print(json.dumps(found[0]))
    elif not lenient:
        fail(f'Error from server (NotFound): {{kind}} "{{names[0]}}" not found')


def delete(words):
    file = take(words, "--filename", "-f")
    named = [(PLURALS[one["kind"]], one["metadata"]["name"]) for one in read(file)] if file else []
    named += [tuple(word.split("/")) for word in words if not word.startswith("-")]
    for kind, name in named:
        objects(kind)
        (HERE / kind / f"{{name}}.json").unlink(missing_ok=True)


def logs(words):
    selector = take(words, "--selector", "-l")
    most, container = int(take(words, "--max-log-requests")), take(words, "--container", "-c")
    assert "--prefix" in words
    found = selected(objects("pods"), selector)
    if len(found) > most:
        fail(f"error: you are attempting to follow {{len(found)}} log streams")
    for pod in found:
        assert container in [one["name"] for one in pod["spec"]["containers"]]
        path = HERE / "logs" / pod["metadata"]["name"]
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            sys.stdout.write(f"[pod/{{pod['metadata']['name']}}/{{container}}] {{line}}")


words = sys.argv[1:]
with (HERE / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\n")
context, namespace = take(words, "--context"), take(words, "--namespace")
if context not in (None, "stand-in"):
    fail(f'error: context "{{context}}" does not exist')
if words == ["config", "current-context"]:
    print("stand-in")
elif words[:2] == ["config", "view"]:
    print(os.environ.get("STAND_IN_NAMESPACE", ""), end="")
else:
    with (HERE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        {{"apply": apply, "get": get, "delete": delete, "logs": logs}}[words[0]](words[1:])
'''


@dataclass
class RunningPod:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]
    disrupted: bool = False
    asked: float = 0.0


@dataclass
class JobSetState:
    """What the controllers know of one JobSet beside its object."""

    restarts: int = 0
    counted: int = 0
    reason: str = ""
    message: str = ""
    port: int = 0
    pods: dict[int, RunningPod] = field(default_factory=dict)
    pending: dict[int, dict[str, Any]] = field(default_factory=dict)


class Cluster:
    """The cluster. ``places``: how many pods of a job have one, by their index; ``None``: all have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tools = folder, folder / "bin"
        self.places: int | None = None
        for name in (JOBSETS, PODS, CONFIGS, WORKLOADS, "logs", "mounts", "bin"):
            (folder / name).mkdir(parents=True)
        program = self.tools / "kubectl"
        program.write_text(f"#!{sys.executable} -IS\n{KUBECTL.format(here=str(folder))}")
        program.chmod(0o755)
        self._states: dict[str, JobSetState] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._control, daemon=True)
        self._thread.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, its controllers do nothing: as this process is forked."""
        with self._lock:
            yield

    def refuse(self, text: str) -> None:
        """From now on the cluster takes no JobSet, and says so."""
        (self.folder / "refuse").write_text(text)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / kind).glob("*.json"))]

    def seen(self) -> str:
        """How each JobSet stands, and the end of what each pod has printed."""
        told = [f"{one['metadata']['name']}: {one.get('status')}" for one in self.objects(JOBSETS)]
        for log in sorted((self.folder / "logs").iterdir(), key=lambda path: path.stat().st_mtime):
            told.append(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(told)

    def calls(self) -> list[list[str]]:
        """What kubectl was asked."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def restarts(self) -> tuple[int, int]:
        """How often all pods of the one JobSet were made anew, and how often that counted."""
        (jobset,) = self.objects(JOBSETS)
        status = jobset.get("status", {})
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    def pod(self, index: int) -> RunningPod:
        """The pod of that index of the one JobSet there is."""
        with self._lock:
            (state,) = self._states.values()
            return state.pods[index]

    def kill(self, index: int) -> None:
        """Its machine is lost, and where there are places for some only, its place as well."""
        if self.places is not None:
            self.places -= 1
        os.kill(self.pod(index).process.pid, signal.SIGKILL)

    def preempt(self, index: int) -> None:
        """It has to go."""
        pod = self.pod(index)
        pod.disrupted = True
        os.kill(pod.process.pid, signal.SIGTERM)

    def admit(self, name: str, *, suspend: bool) -> None:
        """As Kueue does."""
        with self._alone():
            self._change(name, lambda one: one["spec"].update(suspend=suspend))

    def queue(self, uid: str, message: str) -> None:
        """Kueue knows the JobSet, and says why it waits."""
        waits = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
        owned = {"name": "one", "ownerReferences": [{"uid": uid}]}
        _write(self.folder / WORKLOADS / "one.json", {"metadata": owned, "status": {"conditions": [waits]}})

    def close(self) -> None:
        """End all that runs."""
        self._over.set()
        self._thread.join()
        for state in self._states.values():
            for pod in state.pods.values():
                with suppress(ProcessLookupError):
                    os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, no other thread and no kubectl reads or changes objects."""
        with self._lock, (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _control(self) -> None:
        while not self._over.wait(0.05):
            try:
                with self._alone():
                    self._look()
            except BaseException as error:
                self.error = error
                raise

    def _look(self) -> None:
        there = {one["metadata"]["name"]: one for one in self.objects(JOBSETS)}
        for name in [name for name in self._states if name not in there]:
            if self._ended(self._states[name]):
                del self._states[name]
                for path in [*(self.folder / PODS).glob(f"{name}-*"), *(self.folder / "logs").glob(f"{name}-*")]:
                    path.unlink()
        for name, jobset in there.items():
            if not any(one["status"] == "True" for one in _finished(jobset)):
                self._reconcile(name, jobset, self._states.setdefault(name, JobSetState()))

    def _reconcile(self, name: str, jobset: dict[str, Any], state: JobSetState) -> None:
        spec = jobset["spec"]
        job = spec["replicatedJobs"][0]["template"]["spec"]
        if spec.get("suspend"):
            if self._ended(state):
                self._tell(name, state, {"Suspended": ("SuspendedJobs", "jobset is suspended")})
            return
        if not state.pods and not state.pending:
            self._make_pods(name, job, state)
            self._tell(name, state, {})
            return
        for index in sorted(state.pending):
            if (self.places is None or index < self.places) and self._mountable(state.pending[index]):
                self._bind(name, index, state)
        codes = {index: pod.process.poll() for index, pod in state.pods.items()}
        for index, code in codes.items():
            if code is not None:
                self._phase(state.pods[index].name, code)
        if "successPolicy" in job and codes.get(0) == 0:
            assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
            if self._gone(state):
                self._forget_pending(state)
                self._tell(name, state, {"Completed": ("AllJobsCompleted", "jobset completed successfully")})
            return
        if not state.reason and any(codes.values()):
            state.reason, state.message = self._reason(job, state, codes)
        if state.reason:
            self._failed(name, spec, state)
        elif not state.pending and all(code == 0 for code in codes.values()):
            self._tell(name, state, {"Completed": ("AllJobsCompleted", "jobset completed successfully")})

    def _reason(self, job: dict[str, Any], state: JobSetState, codes: dict[int, int | None]) -> tuple[str, str]:
        """Why the Job has failed, and in which words: of the first of its pods that one of its rules is for."""
        for index, code in codes.items():
            pod = state.pods[index]
            for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
                values = rule.get("onExitCodes", {}).get("values", [])
                conditions = [one["type"] for one in rule.get("onPodConditions", [])]
                disrupted = pod.disrupted and "DisruptionTarget" in conditions
                if code and (code in values or disrupted):
                    assert rule["action"] == "FailJob"
                    what = (
                        f"Pod default/{pod.name} has condition DisruptionTarget"
                        if disrupted
                        else f"Container node for pod default/{pod.name} failed with exit code {code}"
                    )
                    return "PodFailurePolicy", f"{what} matching FailJob rule at index {number}"
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"

    def _failed(self, name: str, spec: dict[str, Any], state: JobSetState) -> None:
        if not self._gone(state):
            return
        policy, reason, message = spec["failurePolicy"], state.reason, state.message
        state.reason = ""
        rules = [rule for rule in policy["rules"] if _is_for(rule, reason, message)]
        action = rules[0]["action"] if rules else "RestartJobSet"
        if action == "FailJobSet":
            said = ("FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action")
            self._fail(name, state, said)
        elif action == "RestartJobSet" and state.counted >= policy["maxRestarts"]:
            self._fail(name, state, ("ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"))
        else:
            self._ended(state)
            state.counted += action == "RestartJobSet"
            state.restarts += 1
            self._tell(name, state, {})

    def _fail(self, name: str, state: JobSetState, said: tuple[str, str]) -> None:
        """The JobSet is over; of its pods those stay that have ended by themselves."""
        self._forget_pending(state)
        for pod in state.pods.values():
            if pod.asked:
                (self.folder / PODS / f"{pod.name}.json").unlink(missing_ok=True)
            else:
                self._phase(pod.name, pod.process.returncode)
        self._tell(name, state, {"Failed": said})

    def _gone(self, state: JobSetState) -> bool:
        """Ask all pods to go; whether they have."""
        for pod in state.pods.values():
            if pod.process.poll() is None and not pod.asked:
                pod.asked = time.monotonic()
                os.kill(pod.process.pid, signal.SIGTERM)
            elif pod.process.poll() is None and time.monotonic() - pod.asked > 60:
                os.kill(pod.process.pid, signal.SIGKILL)
        return all(pod.process.poll() is not None for pod in state.pods.values())

    def _ended(self, state: JobSetState) -> bool:
        """As before, and then nothing is left of them."""
        if not self._gone(state):
            return False
        self._forget_pending(state)
        for pod in state.pods.values():
            (self.folder / PODS / f"{pod.name}.json").unlink(missing_ok=True)
        state.pods.clear()
        return True

    def _forget_pending(self, state: JobSetState) -> None:
        for pod in state.pending.values():
            (self.folder / PODS / f"{pod['metadata']['name']}.json").unlink(missing_ok=True)
        state.pending.clear()

    def _make_pods(self, name: str, job: dict[str, Any], state: JobSetState) -> None:
        (state.port,) = free_ports(1)
        for index in range(job["completions"]):
            pod_name = f"{name}-node-0-{index}-{state.restarts}"
            waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_PLACE}
            labels = {
                **job["template"]["metadata"]["labels"],
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/restart-attempt": str(state.restarts),
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod_name, "labels": labels},
                "spec": dict(job["template"]["spec"]),
                "status": {"phase": "Pending", "conditions": [waiting]},
            }
            _write(self.folder / PODS / f"{pod_name}.json", pod)
            state.pending[index] = pod

    def _mountable(self, pod: dict[str, Any]) -> bool:
        """Whether what it mounts is there, which a node waits for: of a job that is taken away it may be gone first."""
        names = [one["configMap"]["name"] for one in pod["spec"]["volumes"] if "configMap" in one]
        return all((self.folder / CONFIGS / f"{name}.json").exists() for name in names)

    def _bind(self, name: str, index: int, state: JobSetState) -> None:
        """A pod has found a place."""
        pod = state.pending.pop(index)
        pod["spec"]["nodeName"] = f"n{index}"
        pod["status"] = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
        pod_name = pod["metadata"]["name"]
        _write(self.folder / PODS / f"{pod_name}.json", pod)
        state.pods[index] = RunningPod(pod_name, self._start(name, pod, index, state.port))

    def _start(self, name: str, pod: dict[str, Any], index: int, port: int) -> subprocess.Popen[bytes]:
        spec, labels = pod["spec"], pod["metadata"]["labels"]
        (container,) = spec["containers"]
        command = list(container["command"])
        command[0] = sys.executable if command[0] == "python" else command[0]
        by_name = {one["name"]: one for one in spec["volumes"]}
        for mount in container["volumeMounts"]:
            if config := by_name[mount["name"]].get("configMap"):
                folder = self.folder / "mounts" / pod["metadata"]["name"]
                folder.mkdir(exist_ok=True)
                told = json.loads((self.folder / CONFIGS / f"{config['name']}.json").read_text())
                for file, text in told["data"].items():
                    (folder / file).write_text(text)
                command = [word.replace(mount["mountPath"], str(folder)) for word in command]
        meeting = f"{name}-node-0-0.{spec.get('subdomain', name)}:29500"
        command = [f"127.0.0.1:{port}" if word == meeting else word for word in command]
        given = {"JOB_COMPLETION_INDEX": str(index)}
        for one in container["env"]:
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            given[one["name"]] = labels[path.split("'")[1]] if path else one["value"]
        output = (self.folder / "logs" / pod["metadata"]["name"]).open("wb")
        with output:
            return subprocess.Popen(
                command,
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=container.get("workingDir"),
            )

    def _phase(self, name: str, code: int) -> None:
        """The process of a pod has ended."""
        path, phase = self.folder / PODS / f"{name}.json", "Failed" if code else "Succeeded"
        pod = json.loads(path.read_text())
        if pod["status"]["phase"] != phase:
            ended = {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
            _write(path, {**pod, "status": {"phase": phase, "containerStatuses": [{"state": ended}]}})

    def _tell(self, name: str, state: JobSetState, conditions: dict[str, tuple[str, str]]) -> None:
        told = [
            {"type": kind, "status": "True", "reason": reason, "message": message}
            for kind, (reason, message) in conditions.items()
        ]
        status = {"conditions": told, "restarts": state.restarts, "restartsCountTowardsMax": state.counted}
        self._change(name, lambda one: one.update(status=status))

    def _change(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.folder / JOBSETS / f"{name}.json"
        one = json.loads(path.read_text())
        change(one)
        _write(path, one)


@contextmanager
def kubernetes_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()
        assert cluster.error is None


def _is_for(rule: dict[str, Any], reason: str, message: str) -> bool:
    """Whether a rule of a JobSet is for a Job that has failed so."""
    patterns = rule.get("onJobFailureMessagePatterns", [])
    return reason in rule["onJobFailureReasons"] and (not patterns or any(re.search(one, message) for one in patterns))


def _finished(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    told = jobset.get("status", {}).get("conditions", [])
    return [one for one in told if one["type"] in ("Completed", "Failed")]


def _write(path: Path, told: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(told))
    partial.rename(path)


JOBSET = "jobset.x-k8s.io/v1alpha2"
KINDS = {
    "/api/v1": {"configmaps": "ConfigMap", "pods": "Pod", "pods/log": "Pod", "namespaces": "Namespace"},
    f"/apis/{JOBSET}": {"jobsets": "JobSet"},
}
OBJECT = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?")
VERBS = ["get", "list", "create", "delete", "patch", "update", "watch"]


class ApiServer(ThreadingHTTPServer):
    """``objects``: by namespace, plural and name. ``namespace``: of the settings."""

    daemon_threads = True
    namespace = "vision"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}

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
        if self.command == "POST":
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

    def refuse(self, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.say({**status, "message": message}, 404)


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
