"""The objects of a run on Kubernetes: a ConfigMap with its run file, and a JobSet whose pods read it.

Pods have stable names: pod 0 is ``NAME-node-0-0.NAME``, where all agents meet. A run that is started again has all of
its pods made anew: workers cannot go on without those that are gone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.kubernetes_options import NODE, RUN_FILE, PodRequest, held
from phalanx.launch.targets.option_checks import merged
from phalanx.launch.targets.target import Submission

JOBSETS = "jobsets.jobset.x-k8s.io"
"""What kubectl calls them, whatever else a cluster has of that name."""

RESTART = "RESTART_ATTEMPT"
"""The variable with how often the JobSet has been started again, of which the label below tells."""

MEETING_KEY = "PHALANX_MEETING_KEY"
"""The variable with the key, in hexadecimal, by which pods that come and go know each other: new in each launch."""

OWN_FAILURE = 70
"""Exit code of a pod where an exception of the job's own code, which would come again, has ended the run."""

OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_FAILED = f".* failed with exit code {OWN_FAILURE} matching .*"  # as a Job says which of its rules it has failed by
_PORT = 29500
_LONGEST = 30  # letters of a job's name: with what is added, names of pods stay below 63


def name_of(submission: Submission) -> str:
    """A name for the objects of this launch, which no other has."""
    stem = re.sub(r"[^a-z0-9]+", "-", submission.name.lower()).strip("-")[:_LONGEST].strip("-")
    return f"{stem if stem[:1].isalpha() else f'run-{stem}'.strip('-')}-{submission.token[-6:]}"


def config_name(name: str) -> str:
    """The name of the ConfigMap."""
    return f"{name}-run"


def manifests(submission: Submission, request: PodRequest, name: str) -> str:
    """All objects, as JSON, which is YAML."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_name(name), "labels": _labels(name)},
        "data": {RUN_FILE.name: submission.run.to_toml()},
    }
    objects = {"apiVersion": "v1", "kind": "List", "items": [config, _jobset(submission, request, name)]}
    return json.dumps(objects, indent=2) + "\n"


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "phalanx", "app.kubernetes.io/instance": name}


def _head(name: str, request: PodRequest) -> dict[str, Any]:
    queue = {_QUEUE_LABEL: request.queue} if request.queue else {}
    return {"name": name, "labels": {**_labels(name), **queue}}


def _jobset(submission: Submission, request: PodRequest, name: str) -> dict[str, Any]:
    job: dict[str, Any] = {
        "parallelism": request.nodes,
        "completions": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        # A pod that has to go, and one that has saved because another had to, are no failures of the run; what its own
        # code has raised is one that comes again. Which it was the JobSet tells by its message.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                _exit_rule(SAVED),
                _exit_rule(OWN_FAILURE),
            ]
        },
        "template": merged(
            {"metadata": {"labels": _labels(name)}, "spec": _pod(submission, request, name)}, request.patch
        ),
    }
    if request.deadline is not None:
        job["activeDeadlineSeconds"] = request.deadline
    if request.least < request.nodes:  # a pod that found no place keeps nothing open
        job["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": request.max_restarts,
            "rules": [
                {**_rule("own_failure", "FailJobSet", "PodFailurePolicy"), "onJobFailureMessagePatterns": [_FAILED]},
                _rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", "PodFailurePolicy"),
                _rule("time_is_over", "FailJobSet", "DeadlineExceeded"),
            ],
        },
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
    }
    if request.queue:
        spec["suspend"] = True  # until Kueue admits it
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _head(name, request), "spec": spec}


def _exit_rule(code: int) -> dict[str, Any]:
    return {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [code]}}


def _rule(name: str, action: str, reason: str) -> dict[str, Any]:
    return {"name": name, "action": action, "onJobFailureReasons": [reason]}


def _pod(submission: Submission, request: PodRequest, name: str) -> dict[str, Any]:
    gpus = {request.gpu_resource: str(request.gpus)} if request.gpus else {}
    asked = {} if request.gpus else {"cpu": str(request.cores)}
    claims = {claim: f"claim-{index}" for index, claim in enumerate(dict.fromkeys(request.volumes.values()))}
    container: dict[str, Any] = {
        "name": NODE,
        "image": request.image,
        "command": _command(submission, request, name),
        "env": _environment(request, submission.key),
        "resources": {"requests": {**asked, **gpus}, **({"limits": gpus} if gpus else {})},
        "volumeMounts": [
            {"name": "run", "mountPath": str(RUN_FILE.parent), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": claims[claim], "mountPath": path} for path, claim in request.volumes.items()),
        ],
    }
    here = Path.cwd()
    if held(here, list(request.volumes)):  # paths in the job's file may be told from there
        container["workingDir"] = str(here)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace,
        "containers": [container],
        "volumes": [
            {"name": "run", "configMap": {"name": config_name(name)}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *({"name": one, "persistentVolumeClaim": {"claimName": claim}} for claim, one in claims.items()),
        ],
    }


def _command(submission: Submission, request: PodRequest, name: str) -> list[str]:
    meeting = f"{name}-{NODE}-0-0.{name}:{_PORT}"
    module = "phalanx.launch.targets.kubernetes_node"
    elastic = request.least < request.nodes
    pods = [f"{request.least}:{request.nodes}", str(request.wait)] if elastic else [str(request.nodes)]
    return [submission.python, "-m", module, str(RUN_FILE), meeting, *pods]


def _environment(request: PodRequest, key: str) -> list[dict[str, Any]]:
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{_RESTART_LABEL}']"}}
    threads = {"OMP_NUM_THREADS": str(max(1, request.cores // request.workers))} if request.cores else {}
    own = {MEETING_KEY: key} if request.least < request.nodes else {}
    return [
        {"name": RESTART, "valueFrom": label},
        *({"name": name, "value": value} for name, value in {**threads, **own}.items()),
    ]
