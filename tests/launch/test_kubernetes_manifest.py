"""What a launch on Kubernetes hands over, by the published schemas; how it stands, by what a cluster says. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from kubernetes_api import ApiServer, api_server
from kubernetes_cluster import JOBSETS, PODS, Cluster, kubernetes_cluster

from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.files import replace_text
from phalanx.launch.targets import Standing, Submission, find_target
from phalanx.launch.targets.kubectl import Kubectl
from phalanx.launch.targets.kubernetes import KubernetesTarget
from phalanx.launch.targets.kubernetes_log import take_in
from phalanx.launch.targets.kubernetes_standing import standing_of

pytestmark = pytest.mark.timeout(60)
FULL = {
    "nodes": "2",
    "volume": "data:/data,data:/runs",
    "toleration": "nvidia.com/gpu:NoSchedule,team=vision,spot",
    "node_selector": "pool=a100,zone=b",
    "service_account": "trainer",
    "queue": "team-a",
    "env_from_secret": "wandb,s3",
    "environment": "NCCL_DEBUG=INFO,FI_PROVIDER=efa",
    "image_pull_secret": "ecr",
    "time": "12h",
    "shm": "16Gi",
    "memory": "64Gi",
    "cpu": "16",
    "max_restarts": "5",
    "namespace": "vision",
    "context": "stand-in",
}
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


def submission(folder: Path, *, run: dict[str, Any] | None = None, **options: str) -> Submission:
    """A run on two pods that have ``folder``, unless ``options`` say otherwise."""
    settings = {"plan": Plan.parse("dp=4"), "grace": 10.0, "resume": "auto", **(run or {})}
    spec = RunSpec(**{"job": str(folder / "train.py"), "folder": folder / "run", **settings})
    given = {"image": "registry/train:1", "nodes": "2", "volume": f"data:{folder}", **options}
    named = {name.replace("_", "-"): value for name, value in given.items() if value}
    return Submission(run=spec, name="Digits_1", python="python", options=named)


def handed(given: Submission) -> dict[str, dict[str, Any]]:
    """The objects by their kinds."""
    prepared = KubernetesTarget("").prepare(given)
    return {one["kind"]: one for one in json.loads(prepared.files[given.folder / "kubernetes.json"])["items"]}


def full(**options: str) -> dict[str, dict[str, Any]]:
    return handed(submission(Path("/data"), **{**FULL, **options}))


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


class TestSchemas:
    """Held against the models of the Kubeflow project, made from the published APIs, and the schemas of Kubernetes."""

    def test_a_jobset_is_one(self) -> None:
        models = pytest.importorskip("kubeflow_trainer_api.models")
        for jobset in (full()["JobSet"], handed(submission(Path("/data")))["JobSet"]):
            models.JobsetV1alpha2JobSet.from_dict(jobset)
            assert unknown_fields(models.JobsetV1alpha2JobSet, jobset) == []
            pod_of(jobset)["containers"][0]["imagePullPolitics"] = "Always"
            found = unknown_fields(models.JobsetV1alpha2JobSet, jobset)
            assert [one.rpartition(".")[2] for one in found] == ["imagePullPolitics"], "an unknown field is found"

    def test_a_jobset_whose_pods_may_be_fewer_is_one(self) -> None:
        models = pytest.importorskip("kubeflow_trainer_api.models")
        jobset = handed(submission(Path("/data"), run={"devices": "1:4"}))["JobSet"]
        models.JobsetV1alpha2JobSet.from_dict(jobset)
        assert unknown_fields(models.JobsetV1alpha2JobSet, jobset) == []

    def test_a_trainjob_is_one(self) -> None:
        models = pytest.importorskip("kubeflow_trainer_api.models")
        given = {**FULL, "kind": "trainjob", "env_from_secret": "", "max_restarts": ""}
        for trainjob in (
            handed(submission(Path("/data"), **given))["TrainJob"],
            handed(submission(Path("/data"), kind="trainjob"))["TrainJob"],
        ):
            models.TrainerV1alpha1TrainJob.from_dict(trainjob)
            assert unknown_fields(models.TrainerV1alpha1TrainJob, trainjob) == []

    @pytest.mark.parametrize("options", [FULL, {}], ids=["full", "plain"])
    def test_what_is_of_kubernetes_itself_is_valid(self, options: dict[str, str]) -> None:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        objects = handed(submission(Path("/data"), **options))
        job = objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        head = {"metadata": {"name": "one"}}
        for one in (
            objects["ConfigMap"],
            {"apiVersion": "batch/v1", "kind": "Job", **head, "spec": job},
            {"apiVersion": "v1", "kind": "Pod", **head, "spec": job["template"]["spec"]},
        ):
            kubernetes_validate.validate(one, "1.32", strict=True)


class TestManifests:
    def test_pods_meet_at_the_stable_name_of_the_first(self) -> None:
        jobset = full()["JobSet"]
        name, job = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
        assert name.startswith("digits-1-")
        command = pod_of(jobset)["containers"][0]["command"]
        assert command[-2:] == [f"{name}-{job['name']}-0-0.{jobset['spec']['network']['subdomain']}:29500", "2"]
        assert job["template"]["spec"]["completionMode"] == "Indexed"
        assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == 2

    def test_two_launches_have_two_names_which_a_pods_name_may_hold(self) -> None:
        names = set[str]()
        for name in ("Digits", "Digits", "9" * 80, "ä/_", "a" + "-" * 40 + "b"):
            given = submission(Path("/data"))
            renamed = Submission(run=given.run, name=name, python="python", options=given.options)
            names.add(found := handed(renamed)["JobSet"]["metadata"]["name"])
            assert len(f"{found}-node-0-9999") <= 63
            assert found[0].isalpha()
            assert found.replace("-", "").isalnum()
            assert "--" not in found or "a" in name
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
        assert places["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
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
        assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 5
        assert pod_of(jobset)["restartPolicy"] == "Never"
        (pattern,) = raised["onJobFailureMessagePatterns"]
        words = (
            "Container node for pod vision/digits-node-0-70-x failed with exit code {} matching FailJob rule at index 2"
        )
        assert [code for code in (1, 7, 70, 75, 700, 137) if re.search(pattern, words.format(code))] == [70]
        for grace in (10.0, 29.5, 600.0):
            pod = pod_of(handed(submission(Path("/data"), run={"grace": grace}))["JobSet"])
            assert pod["terminationGracePeriodSeconds"] > grace + 5

    def test_what_is_asked_for(self) -> None:
        pod = pod_of(full(gpu_resource="amd.com/gpu")["JobSet"])
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"memory": "64Gi", "amd.com/gpu": "2"}
        assert container["resources"]["requests"] == {"cpu": "16", "memory": "64Gi", "amd.com/gpu": "2"}
        assert {"name": "OMP_NUM_THREADS", "value": "8"} in container["env"]
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "vision"},
            {"key": "spot", "operator": "Exists"},
        ]
        assert pod["nodeSelector"] == {"pool": "a100", "zone": "b"}
        assert pod["serviceAccountName"] == "trainer"

    @pytest.mark.parametrize(
        ("device", "resource"), [("auto", "nvidia.com/gpu"), ("cuda", "nvidia.com/gpu"), ("tpu", "google.com/tpu")]
    )
    def test_devices_are_called_as_their_maker_does(self, device: str, resource: str) -> None:
        given = submission(Path("/data"), run={"plan": Plan.parse(f"dp=4 device={device}")})
        (container,) = pod_of(handed(given)["JobSet"])["containers"]
        assert container["resources"]["limits"] == {resource: "2"}

    def test_devices_that_nobody_knows_the_name_of_are_to_be_named(self) -> None:
        run = {"plan": Plan.parse("dp=4 device=xpu")}
        with pytest.raises(SpecError) as caught:
            handed(submission(Path("/data"), run=run))
        (problem,) = caught.value.problems
        assert problem.where == "--gpu-resource"
        given = submission(Path("/data"), run=run, gpu_resource="gpu.intel.com/i915")
        (container,) = pod_of(handed(given)["JobSet"])["containers"]
        assert container["resources"]["limits"] == {"gpu.intel.com/i915": "2"}

    def test_without_gpus_each_worker_has_a_core(self) -> None:
        for given in (
            submission(Path("/data"), gpus_per_node="0"),
            submission(Path("/data"), run={"plan": Plan.parse("dp=4 device=cpu")}),
        ):
            (container,) = pod_of(handed(given)["JobSet"])["containers"]
            assert container["resources"] == {"requests": {"cpu": "2"}}

    def test_fewer_pods_go_on_where_the_number_of_devices_may_change(self) -> None:
        given = submission(Path("/data"), nodes="4", run={"plan": Plan.parse("dp=8"), "devices": "3:8"}, wait="5m")
        jobset = handed(given)["JobSet"]
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = pod_of(jobset)["containers"]
        assert container["command"][-2:] == ["2:4", "300"], "3 devices are 2 pods of 2"
        assert job["completions"] == job["parallelism"] == 4
        assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        assert "successPolicy" not in full()["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]

    def test_kueue_lets_it_begin(self) -> None:
        jobset = full()["JobSet"]
        assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        assert jobset["spec"]["suspend"] is True
        assert "suspend" not in handed(submission(Path("/data")))["JobSet"]["spec"]

    def test_secrets_are_named_and_nothing_of_them_is_read(self) -> None:
        (container,) = pod_of(full()["JobSet"])["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "s3"}}]

    def test_a_trainjob_leaves_the_rest_to_its_runtime(self) -> None:
        spec = handed(submission(Path("/data"), kind="trainjob", runtime="torch-a100"))["TrainJob"]["spec"]
        assert spec["runtimeRef"] == {"name": "torch-a100"}
        assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 2)

    def test_a_job_of_the_image_is_named_as_a_module(self) -> None:
        handed(submission(Path("/data"), run={"job": "package.train:job"}))

    def test_a_folder_of_a_volume_is_where_workers_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert pod_of(handed(submission(tmp_path))["JobSet"])["containers"][0]["workingDir"] == str(tmp_path)
        assert "workingDir" not in pod_of(handed(submission(Path("/data")))["JobSet"])["containers"][0]

    def test_what_is_shown_is_what_is_handed_over(self) -> None:
        given = submission(Path("/data"), **FULL)
        prepared = KubernetesTarget("").prepare(given)
        command = "$ kubectl --context stand-in --namespace vision apply --filename /data/run/launch/kubernetes.json"
        assert prepared.shown().endswith(command)
        assert all(text.rstrip() in prepared.shown() for text in prepared.files.values())


@pytest.mark.parametrize(
    ("options", "where", "given"),
    [
        ({"image": ""}, "--image", "none"),
        ({"image": "a b"}, "--image", "'a b'"),
        ({"nodes": "3"}, "--nodes", "4 processes"),
        ({"nodes": "0"}, "--nodes", "'0'"),
        ({"gpus_per_node": "-1"}, "--gpus-per-node", "'-1'"),
        ({"max_restarts": "many"}, "--max-restarts", "'many'"),
        ({"kind": "pytorchjob"}, "--kind", "'pytorchjob'"),
        ({"runtime": "torch"}, "--runtime", "torch"),
        ({"namespace": "Vision"}, "--namespace", "'Vision'"),
        ({"namespace": "a" * 64}, "--namespace", "aaaa"),
        ({"context": "--token=x"}, "--context", "--token"),
        ({"volume": "data"}, "--volume", "'data'"),
        ({"volume": "Data_1:/data"}, "--volume", "'Data_1:/data'"),
        ({"volume": "data:/data,data:/"}, "--volume", "/"),
        ({"volume": "data:/data,shm:/dev"}, "--volume", "/dev"),
        ({"volume": "data:/data,b:/data/"}, "--volume", "twice"),
        ({"cpu": "two"}, "--cpu", "'two'"),
        ({"memory": "64GB"}, "--memory", "'64GB'"),
        ({"shm": "0"}, "--shm", "'0'"),
        ({"gpu_resource": "nvidia gpu"}, "--gpu-resource", "'nvidia gpu'"),
        ({"queue": "team_a"}, "--queue", "'team_a'"),
        ({"toleration": "spot:Never"}, "--toleration", "'spot:Never'"),
        ({"node_selector": "pool"}, "--node-selector", "'pool'"),
        ({"service_account": "A"}, "--service-account", "'A'"),
        ({"env_from_secret": "KEY=hunter2"}, "--env-from-secret", "KEY"),
        ({"time": "soon"}, "--time", "'soon'"),
        ({"wait": "5m"}, "--wait", "has all of its pods"),
        ({"time": "5s"}, "--time", "grace of 10"),
        ({"kind": "trainjob", "env_from_secret": "wandb"}, "--env-from-secret", "trainjob"),
        ({"kind": "trainjob", "max_restarts": "2"}, "--max-restarts", "trainjob"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, str], where: str, given: str) -> None:
    with pytest.raises(SpecError) as caught:
        KubernetesTarget("").prepare(submission(Path("/data"), **options))
    (problem,) = caught.value.problems
    assert problem.where == where
    assert given in problem.given
    assert problem.fix


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"queue": "team-a"}, "--queue team-a, which admits all of its pods or none"),
        ({"kind": "trainjob"}, "--kind trainjob, which has as many pods as it says"),
    ],
)
def test_what_has_all_of_its_pods_or_none_is_named(options: dict[str, str], given: str) -> None:
    with pytest.raises(SpecError) as caught:
        KubernetesTarget("").prepare(submission(Path("/data"), run={"devices": "1:4"}, **options))
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == ("-n", "-n 4")
    assert given in problem.given


@pytest.mark.parametrize(
    ("run", "volume", "where", "given"),
    [
        ({"devices": "3:4"}, "data:/data", "-n", "3:4 in 2 pods of 2 devices"),
        ({"devices": "2:6", "plan": Plan.parse("dp=2 tp=2")}, "data:/data", "-n", "1 of them cannot be dp=2 tp=2"),
        ({"devices": "2:5", "plan": Plan.parse("dp=2 tp=2")}, "data:/data", "-n", "2:5, with plan dp=2 tp=2"),
        ({"folder": Path("/scratch/run")}, "data:/data", "--volume", "the run folder /scratch/run"),
        ({"folder": Path("/database/run")}, "data:/data", "--volume", "the run folder /database/run"),
        ({"job": "/home/me/train.py"}, "data:/data", "--volume", "the job's file /home/me/train.py"),
    ],
)
def test_a_run_that_no_pod_could_have_is_refused(run: dict[str, Any], volume: str, where: str, given: str) -> None:
    with pytest.raises(SpecError) as caught:
        KubernetesTarget("").prepare(submission(Path("/data"), run=run, volume=volume))
    (problem,) = caught.value.problems
    assert problem.where == where
    assert given in problem.given


def test_all_that_is_wrong_is_said_at_once() -> None:
    given = submission(Path("/data"), image="", nodes="x", time="y", volume="")
    with pytest.raises(SpecError) as caught:
        KubernetesTarget("").prepare(given)
    wheres = [problem.where for problem in caught.value.problems]
    assert wheres == ["--image", "--nodes", "--time", "--volume", "--volume"]
    with pytest.raises(SpecError, match="nothing after the colon"):
        find_target("kubernetes:gpu")


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


@pytest.mark.parametrize(
    ("conditions", "pods", "last", "state", "said"),
    [
        ([], [], "", "waiting", "no pod yet"),
        ([], [FULL_NODES, FULL_NODES], "", "waiting", "Insufficient nvidia.com/gpu. (2 pods)"),
        ([], [pod(), FULL_NODES], "", "waiting", "1 of 2 pods running: Unschedulable"),
        ([], [pod(), PULL], "", "waiting", 'ImagePullBackOff: Back-off pulling image "registry/train:1" (1 pod)'),
        ([], [pod("Pending", waiting=("ContainerCreating", ""))], "", "waiting", "ContainerCreating (1 pod); 1 not"),
        ([], [pod(), pod()], "", "running", "2 pods on n1"),
        ([], [pod(), pod(), pod("Failed")], "", "running", "2 pods on n1"),
        ([condition("Suspended")], [], "", "waiting", "Why: in its words"),
        ([condition("Suspended")], [pod()], "", "running", "1 pod still to end"),
        ([condition("Completed")], [pod("Succeeded")] * 2, "end", "ended", "Why: in its words"),
        ([condition("Complete")], [], "", "ended", ""),
        ([condition("Failed")], [pod("Failed")], "error", "failed", "Why: in its words"),
        ([condition("Failed")], [pod("Failed")], "", "failed", "Why: in its words"),
        ([condition("Failed")], [pod("Failed")], "stopped", "failed", "Why: in its words"),
        ([condition("Failed", "FailJobSetFailurePolicyAction")], [], "stopped", "stopped", "in its words"),
        ([condition("Failed", "FailJobSetFailurePolicyAction")], [], "", "stopped", "in its words"),
        ([condition("Failed", "FailJobSetFailurePolicyAction")], [], "resume", "failed", "in its words"),
        (
            [condition("Failed", "FailJobSetFailurePolicyAction")],
            [pod("Failed", code=75)],
            "",
            "stopped",
            "in its words",
        ),
        (
            [condition("Failed", "FailJobSetFailurePolicyAction")],
            [pod("Failed", code=70)],
            "",
            "failed",
            "own code: Fail",
        ),
        ([condition("Failed", "DeadlineExceeded")], [pod()], "", "running", "1 pod still to end: DeadlineExceeded"),
    ],
)
def test_how_it_stands(
    conditions: list[dict[str, Any]], pods: list[dict[str, Any]], last: str, state: str, said: str
) -> None:
    job = {"spec": {}, "status": {"conditions": conditions}}
    found = standing_of(job, pods, nodes=(2, 2), last=last, asked=False)
    assert found.state == state
    assert said in found.detail


@pytest.mark.parametrize(
    ("pods", "last", "asked", "state"),
    [
        ([], "", False, "unknown"),
        ([], "resume", False, "unknown"),
        ([], "", True, "stopped"),
        ([], "resume", True, "stopped"),
        ([], "stopped", False, "stopped"),
        ([], "end", True, "ended"),
        ([], "error", True, "failed"),
        ([pod()], "", True, "running"),
        ([pod("Succeeded")], "end", False, "ended"),
    ],
)
def test_how_a_run_stands_that_is_forgotten(pods: list[dict[str, Any]], last: str, asked: bool, state: str) -> None:
    assert standing_of(None, pods, nodes=(2, 2), last=last, asked=asked).state == state


def test_fewer_pods_run_where_the_run_may_have_fewer() -> None:
    found = standing_of({"spec": {}}, [pod(), FULL_NODES], nodes=(1, 2), last="", asked=False)
    assert found.state == "running"
    assert found.detail.startswith("1 of 2 pods on n1: Unschedulable: 0/3 nodes are available")


def test_earlier_starts_are_counted_and_a_queue_is_named() -> None:
    job: dict[str, Any] = {"spec": {}, "status": {"restarts": 2}}
    assert standing_of(job, [pod()], nodes=(1, 1), last="", asked=False).detail.endswith("after 2 earlier starts")
    labels = {"kueue.x-k8s.io/queue-name": "team-a"}
    waiting = {"metadata": {"labels": labels}, "spec": {"suspend": True}}
    assert (
        standing_of(waiting, [], nodes=(1, 1), last="", asked=False).detail == "Suspended: waits for the queue team-a"
    )
    told = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "insufficient unused quota"}
    queued = {"status": {"conditions": [told]}}
    found = standing_of(waiting, [], nodes=(1, 1), last="", asked=False, queued=queued)
    assert found.detail == "Pending: insufficient unused quota"


def until(what: Callable[[], Any], patience: float = 90) -> None:
    end = time.monotonic() + patience
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with kubernetes_cluster(tmp_path / "cluster") as up:
        monkeypatch.setenv("PATH", f"{up.tools}{os.pathsep}{os.environ['PATH']}")
        yield up


class Handed:
    """A run that was handed over, of pods that have no torch."""

    def __init__(self, folder: Path, **options: str) -> None:
        program = folder / "pod"
        program.write_text(POD.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        given = submission(folder, **options)
        given = Submission(run=given.run, name="digits", python=str(program), options=given.options)
        self.target, self.folder = KubernetesTarget(""), given.run.folder
        self.ticket = self.target.submit(self.target.prepare(given))

    @property
    def standing(self) -> Standing:
        return self.target.standing(self.ticket, self.folder)

    def wait(self, state: str) -> Standing:
        until(lambda: self.standing.state == state)
        return self.standing

    def said(self, rank: int | None = None) -> str:
        path = self.target.log(self.ticket, self.folder, rank)
        return path.read_text() if path.exists() else ""

    def crash(self, code: int) -> None:
        """Have pod 1 end with that exit code, which stands there whole from the moment that it can be seen."""
        replace_text(self.folder / "crash", str(code))

    def begun(self, start: int = 0) -> None:
        until(lambda: all(f"[rank {rank}] of 2, start {start}" in self.said() for rank in range(2)))


class TestStandIn:
    """The rules of the manifests, as a cluster's controllers follow them."""

    def test_a_run_ends(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, cpu="6", namespace="vision")
        run.begun()
        assert run.standing == Standing(state="running", detail="2 pods on n0, n1")
        assert run.ticket["context"] == "stand-in"
        assert run.said(1) == "of 2, start 0, with 3\n"
        assert all(call[:2] == ["--context", "stand-in"] for call in cluster.calls() if call[-1] == "json")
        assert all("vision" in call for call in cluster.calls() if call[-1] == "json")
        (run.folder / "finish").touch()
        assert run.wait("ended").detail == "AllJobsCompleted: jobset completed successfully"
        run.target.stop(run.ticket, run.folder)
        assert len(cluster.objects(JOBSETS)) == 1, "of a run that has ended nothing is taken away"

    def test_a_pod_that_has_to_go_restarts_all_and_does_not_count(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, max_restarts="0")
        run.begun()
        cluster.preempt(1)
        run.begun(start=1)
        assert run.wait("running").detail.endswith("after 1 earlier starts")
        (run.folder / "finish").touch()
        run.wait("ended")

    def test_a_pod_that_is_lost_counts(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, max_restarts="1")
        run.begun()
        cluster.kill(1)
        run.begun(start=1)
        run.crash(1)
        (run.folder / "events.jsonl").unlink(missing_ok=True)
        run.wait("failed")
        assert "max number of restarts" in run.standing.detail

    def test_what_the_jobs_own_code_has_raised_is_not_started_again(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, max_restarts="3")
        run.begun()
        run.crash(70)
        found = run.wait("failed")
        assert found.detail.startswith("an exception of the job's own code: FailJobSetFailurePolicyAction")
        assert cluster.restarts() == (0, 0)
        assert run.said(0) == "of 2, start 0, with 1\n"

    def test_the_end_of_its_time_is_the_end(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, time="12h")
        run.begun()
        cluster.expire(run.ticket["jobset"])
        assert "FailJobSetFailurePolicyAction" in run.wait("stopped").detail

    def test_a_run_that_is_asked_to_stop_saves_and_is_gone(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path)
        run.begun()
        run.target.stop(run.ticket, run.folder)
        run.wait("stopped")
        assert '"stopped"' in (run.folder / "events.jsonl").read_text()
        assert cluster.objects(JOBSETS) == cluster.objects(PODS) == cluster.objects("configmaps") == []
        again = Handed(tmp_path)
        assert again.ticket["jobset"] != run.ticket["jobset"]
        (again.folder / "events.jsonl").unlink()
        again.wait("running")
        (again.folder / "finish").touch()
        again.wait("ended")

    def test_a_run_that_waits_says_for_what(self, cluster: Cluster, tmp_path: Path) -> None:
        cluster.places = 0
        run = Handed(tmp_path)
        until(lambda: "Insufficient nvidia.com/gpu. (2 pods)" in run.standing.detail)
        assert run.standing.state == "waiting"
        run.target.stop(run.ticket, run.folder)
        run.wait("stopped")

    def test_kueue_suspends_and_admits(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, queue="team-a")
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

    def test_what_is_refused_is_said_in_its_words_and_nothing_is_left(self, cluster: Cluster, tmp_path: Path) -> None:
        cluster.refuse("Warning: an old API\nError from server (Forbidden): exceeded quota: gpus")
        target, given = KubernetesTarget(""), submission(tmp_path)
        assert target.why_not(target.prepare(given)) == "Error from server (Forbidden): exceeded quota: gpus"
        with pytest.raises(RunError, match="exceeded quota: gpus"):
            target.submit(target.prepare(given))
        assert not given.run.folder.exists()
        assert cluster.objects("configmaps") == []

    def test_a_cluster_without_the_kind_is_told_of(self, cluster: Cluster, tmp_path: Path) -> None:
        target, given = KubernetesTarget(""), submission(tmp_path, kind="trainjob")
        with pytest.raises(RunError, match=r'no matches for kind "TrainJob".*[\s\S]*try: .*JobSet is installed'):
            target.submit(target.prepare(given))

    def test_what_would_be_refused_is_asked_without_handing_it_over(self, cluster: Cluster, tmp_path: Path) -> None:
        target = KubernetesTarget("")
        assert target.why_not(target.prepare(submission(tmp_path))) == ""
        assert cluster.objects(JOBSETS) == []
        wrong = submission(tmp_path, context="nowhere")
        assert "does not exist" in target.why_not(target.prepare(wrong))

    def test_a_launch_that_is_interrupted_leaves_nothing(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(kubectl: Kubectl) -> Kubectl:
            assert len(cluster.objects(JOBSETS)) == 1
            raise KeyboardInterrupt

        monkeypatch.setattr(Kubectl, "settled", interrupted)
        target, given = KubernetesTarget(""), submission(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            target.submit(target.prepare(given))
        assert cluster.objects(JOBSETS) == cluster.objects("configmaps") == []
        assert not given.run.folder.exists()

    def test_what_pods_say_is_only_ever_added_to(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path, max_restarts="1")
        run.begun()
        before = run.said()
        cluster.kill(1)
        run.begun(start=1)
        assert run.said() == run.said()
        assert run.said().startswith(before)
        assert run.said(1) == "of 2, start 0, with 1\nof 2, start 1, with 1\n"
        (run.folder / "finish").touch()
        run.wait("ended")

    def test_later_the_same_cluster_is_asked(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAND_IN_NAMESPACE", "vision")
        run = Handed(tmp_path)
        assert (run.ticket["context"], run.ticket["namespace"]) == ("stand-in", "vision")
        monkeypatch.setenv("STAND_IN_NAMESPACE", "speech")
        run.wait("running")
        asked = [call for call in cluster.calls() if call[-1] == "json"]
        assert asked
        assert all(call[:4] == ["--context", "stand-in", "--namespace", "vision"] for call in asked)

    def test_what_the_volume_has_goes_before_what_pods_say(self, cluster: Cluster, tmp_path: Path) -> None:
        run = Handed(tmp_path)
        run.begun()
        for rank in range(2):
            (run.folder / "launch" / f"rank-{rank}.log").write_text(f"of rank {rank}\n")
        assert run.said(1) == "of rank 1\n"
        run.target.stop(run.ticket, run.folder)
        run.wait("stopped")
        (run.folder / "launch" / "output.log").unlink()
        assert run.said() == "of rank 0\nof rank 1\n", "of pods that are gone the volume tells"


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
        target, given = KubernetesTarget(""), submission(tmp_path)
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

    def test_a_cluster_without_the_kind_is_told_of(self, server: ApiServer, tmp_path: Path) -> None:
        target, given = KubernetesTarget(""), submission(tmp_path, kind="trainjob")
        with pytest.raises(RunError, match=r'no matches for kind "TrainJob"[\s\S]*try: .*JobSet is installed'):
            target.submit(target.prepare(given))
        assert not server.objects
        assert not given.run.folder.exists()


def test_lines_stand_by_the_name_of_their_pod_in_whatever_order_pods_are_given(tmp_path: Path) -> None:
    printed = {f"pod-{number}": [f"[rank {number}] of the pod\n"] for number in (10, 1, 0, 2)}
    path = take_in(tmp_path, None, lambda: printed)
    assert path.read_text().splitlines() == [f"[rank {number}] of the pod" for number in (0, 1, 2, 10)]


def test_what_ranks_have_left_stands_in_their_order(tmp_path: Path) -> None:
    for rank in range(11):
        (tmp_path / f"rank-{rank}.log").write_text(f"of rank {rank}\n")
    assert take_in(tmp_path, None, dict).read_text().splitlines() == [f"of rank {rank}" for rank in range(11)]


def test_a_machine_without_kubectl_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    target, given = KubernetesTarget(""), submission(tmp_path)
    prepared = target.prepare(given)
    with pytest.raises(RunError, match="kubectl is not on this machine"):
        target.submit(prepared)
    assert not given.run.folder.exists()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"jobset": "one"},
        {"jobset": "one", "trainjob": "two", "nodes": 2},
        *({"jobset": name, "nodes": 2} for name in (7, "", "--all", "a/b", None)),
        *({"jobset": "one", "nodes": nodes} for nodes in ("2", 0, 1.5, True)),
        {"jobset": "one", "nodes": 2, "least": 0},
        {"jobset": "one", "nodes": 2, "context": "--token=x"},
        {"jobset": "one", "nodes": 2, "namespace": "a b"},
    ],
    ids=json.dumps,
)
def test_a_damaged_ticket_is_one_error_that_says_how_to_get_rid_of_it(tmp_path: Path, told: dict[str, Any]) -> None:
    target, ticket = KubernetesTarget(""), tmp_path / "launch" / "ticket.json"
    for ask in (target.standing, target.stop, lambda *given: target.log(*given, None)):
        with pytest.raises(SpecError, match="which is damaged") as caught:
            ask(told, tmp_path)
        (problem,) = caught.value.problems
        assert problem.fix == f"rm {ticket}"


def test_nothing_of_torch_is_needed_to_hand_a_run_over() -> None:
    code = "import sys, phalanx.launch.targets.kubernetes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
