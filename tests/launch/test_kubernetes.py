"""What a launch on Kubernetes hands over, by the published schemas; how it stands; what a pod does. No cluster."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from launched import submission
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

import phalanx as px
from law_rows import in_one_test
from phalanx.config import RunSpec
from phalanx.events.log import EventLog
from phalanx.launch.targets import kubernetes, kubernetes_node
from phalanx.launch.targets.kubernetes import KubernetesTarget, standing_of
from phalanx.launch.targets.kubernetes_manifest import MEETING_KEY
from phalanx.launch.targets.kubernetes_node import SignedBackend
from phalanx.launch.targets.node_agent import NodePlace

pytestmark = pytest.mark.timeout(60)
FULL = {
    "nodes": "2",
    "volume": "data:/data,data:/runs",
    "queue": "team-a",
    "time": "12h",
    "namespace": "vision",
    "context": "stand-in",
}


def test_a_state_that_no_pod_of_the_run_has_signed_is_not_read() -> None:
    plain = C10dRendezvousBackend(HashStore(), "run")
    first, second = (SignedBackend(plain, "run", bytes(32)) for _ in range(2))
    found = first.set_state(b"state")
    assert found
    assert second.get_state() == (b"state", found[1])
    others = [SignedBackend(plain, "run", b"1" * 32), SignedBackend(plain, "another run", bytes(32)), plain]
    for other in others:
        _, token = plain.get_state() or (b"", None)
        other.set_state(b"a pickle", token)
        with pytest.raises(RendezvousStateError, match="not written by a node of this run"):
            first.get_state()


def handed(folder: Path = Path("/data"), **given: Any) -> dict[str, dict[str, Any]]:
    asked = submission("kubernetes", folder, **{"plan": "dp=4", **given})
    prepared = KubernetesTarget("").prepare(asked)
    return {one["kind"]: one for one in json.loads(prepared.files[asked.folder / "kubernetes.json"])["items"]}


def full(**options: str) -> dict[str, dict[str, Any]]:
    return handed(**{**FULL, **options})


def pod_of(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def unknown_fields(model: Any, value: dict[str, Any], where: str = "") -> list[str]:
    """Fields that no model of the published API has: the models themselves take what they do not know."""
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    found = [f"{where}.{name}" for name in value if name not in fields]
    for name in value.keys() & fields.keys():
        for kind in models_in(fields[name]):
            parts = value[name] if isinstance(value[name], list) else [value[name]]
            found += [
                one for part in parts if isinstance(part, dict) for one in unknown_fields(kind, part, f"{where}.{name}")
            ]
    return found


def models_in(annotation: Any) -> list[Any]:
    if hasattr(annotation, "model_fields"):
        return [annotation]
    if get_origin(annotation) in (list, Union, UnionType):
        return [one for part in get_args(annotation) for one in models_in(part)]
    return []


def test_objects_are_those_of_the_published_schemas() -> None:
    """The models of the Kubeflow project, made from the published APIs, and the schemas of Kubernetes."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for objects in (full(), handed(), handed(run={"devices": "1:4"})):
        jobset = objects["JobSet"]
        models.JobsetV1alpha2JobSet.from_dict(jobset)
        assert unknown_fields(models.JobsetV1alpha2JobSet, jobset) == []
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        head = {"metadata": {"name": "one"}}
        for one in (
            objects["ConfigMap"],
            {"apiVersion": "batch/v1", "kind": "Job", **head, "spec": job},
            {"apiVersion": "v1", "kind": "Pod", **head, "spec": job["template"]["spec"]},
        ):
            kubernetes_validate.validate(one, "1.32", strict=True)
        pod_of(jobset)["containers"][0]["imagePullPolitics"] = "Always"
        found = unknown_fields(models.JobsetV1alpha2JobSet, jobset)
        assert [one.rpartition(".")[2] for one in found] == ["imagePullPolitics"], "an unknown field is found"


class TestManifests:
    def test_pods_meet_at_the_stable_name_of_the_first(self) -> None:
        jobset = full()["JobSet"]
        name, job = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
        assert name.startswith("digits-")
        command = pod_of(jobset)["containers"][0]["command"]
        assert command[-2:] == [f"{name}-{job['name']}-0-0.{jobset['spec']['network']['subdomain']}:29500", "2"]
        assert job["template"]["spec"]["completionMode"] == "Indexed"
        assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == 2

    def test_two_launches_have_two_names_which_a_pods_name_may_hold(self) -> None:
        names = set[str]()
        for name in ("Digits", "Digits", "9" * 80, "ä/_", "a" + "-" * 40 + "b"):
            prepared = KubernetesTarget("").prepare(replace(submission("kubernetes", Path("/data")), name=name))
            (text,) = [text for path, text in prepared.files.items() if path.name == "kubernetes.json"]
            names.add(found := json.loads(text)["items"][-1]["metadata"]["name"])
            assert len(f"{found}-node-0-9999") <= 63
            assert found[0].isalpha()
            assert found.replace("-", "").isalnum()
        assert len(names) == 5

    def test_workers_read_the_run_file_of_the_config_map(self) -> None:
        objects = full()
        pod, config = pod_of(objects["JobSet"]), objects["ConfigMap"]
        (container,) = pod["containers"]
        run = RunSpec.from_toml(config["data"]["run.toml"])
        assert (run.resume, str(run.plan)) == ("auto", "dp=4")
        volumes = {one["name"]: one for one in pod["volumes"]}
        places = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert places["/etc/phalanx"]["configMap"]["name"] == config["metadata"]["name"]
        assert places["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        claims = [places[path]["persistentVolumeClaim"]["claimName"] for path in ("/data", "/runs")]
        assert claims == ["data", "data"]
        assert len(volumes) == 3, "a claim that is there twice is one volume"

    def test_a_pod_that_has_to_go_does_not_count_and_the_end_of_its_time_is_the_end(self) -> None:
        jobset = full()["JobSet"]
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (0, 12 * 3600)
        disruption, *ended = job["podFailurePolicy"]["rules"]
        assert disruption["onPodConditions"][0]["type"] == "DisruptionTarget"
        assert [rule["onExitCodes"]["values"] for rule in ended] == [[75], [70]]
        raised, *rules = jobset["spec"]["failurePolicy"]["rules"]
        assert (raised["action"], raised["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        actions = {rule["onJobFailureReasons"][0]: rule["action"] for rule in rules}
        assert actions == {"PodFailurePolicy": "RestartJobSetAndIgnoreMaxRestarts", "DeadlineExceeded": "FailJobSet"}
        assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
        assert pod_of(jobset)["restartPolicy"] == "Never"
        (pattern,) = raised["onJobFailureMessagePatterns"]
        words = (
            "Container node for pod vision/digits-node-0-70-x failed with exit code {} matching FailJob rule at index 2"
        )
        assert [code for code in (1, 7, 70, 75, 700, 137) if re.search(pattern, words.format(code))] == [70]
        for grace in (10.0, 29.5, 600.0):
            pod = pod_of(handed(run={"grace": grace})["JobSet"])
            assert pod["terminationGracePeriodSeconds"] > grace + 5

    def test_devices_are_called_as_their_maker_does_and_without_any_each_worker_has_a_core(self) -> None:
        def resources(**given: Any) -> dict[str, Any]:
            (container,) = pod_of(handed(**given)["JobSet"])["containers"]
            return container["resources"]

        for device, name in (("auto", "nvidia.com/gpu"), ("cuda", "nvidia.com/gpu"), ("tpu", "google.com/tpu")):
            assert resources(plan=f"dp=4 device={device}")["limits"] == {name: "2"}
        assert resources(gpus_per_node="0") == resources(plan="dp=4 device=cpu") == {"requests": {"cpu": "2"}}

    def test_fewer_pods_go_on_where_the_number_of_devices_may_change(self) -> None:
        jobset = handed(plan="dp=8", nodes="4", run={"devices": "3:8"})["JobSet"]
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = pod_of(jobset)["containers"]
        assert container["command"][-2:] == ["2:4", "60"], "3 devices are 2 pods of 2"
        assert job["completions"] == job["parallelism"] == 4
        assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        assert "successPolicy" not in full()["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]

    def test_kueue_lets_it_begin(self) -> None:
        jobset = full()["JobSet"]
        assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        assert jobset["spec"]["suspend"] is True
        assert "suspend" not in handed()["JobSet"]["spec"]

    def test_a_folder_of_a_volume_is_where_workers_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert pod_of(handed(tmp_path)["JobSet"])["containers"][0]["workingDir"] == str(tmp_path)
        assert "workingDir" not in pod_of(handed()["JobSet"])["containers"][0]


def condition(kind: str, reason: str = "Why", message: str = "in its words") -> dict[str, Any]:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def pod(
    phase: str = "Running", waiting: tuple[str, str] | None = None, scheduled: str = "", code: int | None = None
) -> dict[str, Any]:
    status: dict[str, Any] = {"phase": phase}
    if code is not None:
        status["containerStatuses"] = [{"state": {}}, {"state": {"terminated": {"exitCode": code}}}]
    if waiting:
        status["containerStatuses"] = [{"state": {"waiting": {"reason": waiting[0], "message": waiting[1]}}}]
    if scheduled:
        status["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduled}
        ]
    return {"status": status, "spec": {"nodeName": "n1"}}


PULL = pod("Pending", waiting=("ImagePullBackOff", 'Back-off pulling image "registry/train:1"'))
FULL_NODES = pod("Pending", scheduled="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")


STOPPED = condition("Failed", "FailJobSetFailurePolicyAction")


@in_one_test(
    ("conditions", "pods", "outcome", "state", "said"),
    [
        ([], [], "", "waiting", "0 of 2 pods: not made yet (2)"),
        ([], [FULL_NODES, FULL_NODES], "", "waiting", "Insufficient nvidia.com/gpu. (2)"),
        ([], [pod(), FULL_NODES], "", "waiting", "1 of 2 pods: Unschedulable"),
        ([], [pod(), PULL], "", "waiting", 'ImagePullBackOff: Back-off pulling image "registry/train:1" (1)'),
        (
            [],
            [pod("Pending", waiting=("ContainerCreating", ""))],
            "",
            "waiting",
            "ContainerCreating (1); not made yet (1)",
        ),
        ([], [pod(), pod(), pod("Failed")], "", "running", "2 of 2 pods"),
        ([condition("Suspended")], [], "", "waiting", "Why: in its words"),
        ([condition("Suspended")], [pod()], "", "running", "pods still to end"),
        ([condition("Completed")], [pod("Succeeded")] * 2, "ended", "ended", "Why: in its words"),
        ([condition("Complete")], [], "", "ended", ""),
        ([condition("Failed")], [pod("Failed")], "failed", "failed", "Why: in its words"),
        ([condition("Failed")], [pod("Failed")], "stopped", "failed", "Why: in its words"),
        ([STOPPED], [], "stopped", "stopped", "in its words"),
        ([STOPPED], [], "", "stopped", "in its words"),
        ([STOPPED], [], "unknown", "failed", "in its words"),
        ([STOPPED], [pod("Failed", code=75)], "", "stopped", "in its words"),
        ([STOPPED], [pod("Failed", code=70)], "", "failed", "own code: Fail"),
        ([condition("Failed", "DeadlineExceeded")], [pod()], "", "running", "pods still to end: DeadlineExceeded"),
    ],
)
def test_how_it_stands(
    conditions: list[dict[str, Any]], pods: list[dict[str, Any]], outcome: Any, state: str, said: str
) -> None:
    job = {"spec": {}, "status": {"conditions": conditions}}
    found = standing_of(job, pods, nodes=(2, 2), outcome=outcome, asked=False)
    assert found.state == state
    assert said in found.detail


@in_one_test(
    ("pods", "outcome", "asked", "state"),
    [
        ([], "", False, "unknown"),
        ([], "unknown", False, "unknown"),
        ([], "", True, "stopped"),
        ([], "unknown", True, "stopped"),
        ([], "stopped", False, "stopped"),
        ([], "ended", True, "ended"),
        ([], "failed", True, "failed"),
        ([pod()], "", True, "running"),
        ([pod("Succeeded")], "ended", False, "ended"),
    ],
)
def test_how_a_run_stands_that_is_forgotten(pods: list[dict[str, Any]], outcome: Any, asked: bool, state: str) -> None:
    assert standing_of(None, pods, nodes=(2, 2), outcome=outcome, asked=asked).state == state


def test_fewer_pods_run_where_the_run_may_have_fewer() -> None:
    found = standing_of({"spec": {}}, [pod(), FULL_NODES], nodes=(1, 2), outcome="", asked=False)
    assert found.state == "running"
    assert found.detail.startswith("1 of 2 pods: Unschedulable: 0/3 nodes are available")


def test_earlier_starts_are_counted_and_a_queue_is_named() -> None:
    job: dict[str, Any] = {"spec": {}, "status": {"restarts": 2}}
    assert standing_of(job, [pod()], nodes=(1, 1), outcome="", asked=False).detail.endswith("after 2 earlier starts")
    labels = {"kueue.x-k8s.io/queue-name": "team-a"}
    waiting = {"metadata": {"labels": labels}, "spec": {"suspend": True}}
    assert "in queue team-a" in standing_of(waiting, [], nodes=(1, 1), outcome="", asked=False).detail


def test_the_log_has_each_line_once_and_a_rank_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["[rank 10] one", "[rank 1] one", "a pod"]
    monkeypatch.setattr(kubernetes, "_ask", lambda told, *words, **how: "".join(f"{line}\n" for line in lines))
    target, ticket = KubernetesTarget(""), {"jobset": "digits", "nodes": 2}
    assert target.log(ticket, tmp_path, None).read_text().splitlines() == lines
    lines[:1] = ["[rank 1] zero"]  # another pod is first, and one has gone
    assert target.log(ticket, tmp_path, None).read_text() == "[rank 10] one\n[rank 1] one\na pod\n[rank 1] zero\n"
    assert target.log(ticket, tmp_path, 1).read_text() == "zero\none\n"
    (tmp_path / "launch" / "rank-1.log").write_text("of the volume\n")
    assert target.log(ticket, tmp_path, 1).read_text() == "of the volume\n"


OWN = {"event": "error", "lost": False}
GOES_ON = {"event": "resume", "step": 2, "path": "checkpoints/step-2"}


class TestNode:
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
            ([], [OWN], 1, 70),
            ([], [GOES_ON, OWN], 1, 70),
            ([], [OWN, {"event": "error", "lost": True}], 1, 70),
            ([], [{"event": "error", "lost": True}], 1, 1),
            ([], [OWN], 75, 75),
            ([OWN], [], 1, 1),
            ([OWN], [GOES_ON], 1, 1),
        ],
        ids=["own", "others went", "others lost by it", "lost", "asked to stop", "earlier start", "without a word"],
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
        monkeypatch.setattr(kubernetes_node, "answers", lambda _: True)
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
        monkeypatch.setenv(MEETING_KEY, "00" * 32)
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:29500", "1:2", "60") == 75
        options = place[0].options
        assert (options["nnodes"], options["rdzv-backend"], place[0].nodes) == ("1:2", "phalanx-signed", 2)
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
        assert kubernetes_node.main(tmp_path / "run.toml", "localhost:1", "2") == 1
        assert not place
        said = capfd.readouterr().err
        assert "waits for pod 0, at localhost:1" in said
        assert "nobody is at localhost:1" in said
