"""The objects of a run on Kubernetes: a ConfigMap with its run file, and a JobSet of pods that read it.

``--patch`` is merged into the pod, for all that Phalanx does not need to know itself. Pods have stable names: pod 0, in
which agents meet, is ``NAME-node-0-0.NAME``. A restart makes all pods anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from phalanx.config import RunSpec
from phalanx.config.elastic import resized
from phalanx.device_kinds import on_host, pod_resource
from phalanx.errors import Problem, SpecError
from phalanx.launch.jobfile import Reference
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.offer import gpus_of_node
from phalanx.launch.targets.option_checks import (
    NODE_OPTIONS,
    SAVE_MARGIN,
    merged,
    read_options,
    too_short,
    uneven_nodes,
    wrong_option,
)
from phalanx.launch.targets.target import Option, Submission

OPTIONS = {
    "image": Option(help="image with phalanx and what the job imports", example="registry/train:1", needed=True),
    **NODE_OPTIONS,
    "volume": Option(help="claims and where pods have them, with commas", example="data:/data,runs:/runs", between=","),
    "namespace": Option(help="namespace; the context's where not given", example="vision"),
    "context": Option(help="context of kubectl's settings; the current one where not given", example="cluster-a"),
    "queue": Option(help="local queue of Kueue, which then says when the run begins", example="team-a"),
    "time": Option(help="time after which a start saves and stops, in m, h or d", example="12h", kind="time"),
    "patch": Option(
        help="JSON or TOML file with a part of a pod, merged into each: cores, memory, labels",
        example="pod.json",
        kind="file",
        through="--patch pod.json",
    ),
}

JOBSETS = "jobsets.jobset.x-k8s.io"
OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
RUN_FILE = PurePosixPath("/etc/phalanx/run.toml")
"""Path of the run file in a pod."""

NODE = "node"
"""Name of the replicated job, and of the container."""

RESTART = "RESTART_ATTEMPT"
"""Variable with the number of the JobSet's restarts."""

CORES = "PHALANX_CORES"
"""Variable with the cores that a pod asks for; 0: none."""

MEETING_KEY = "PHALANX_MEETING_KEY"
"""Variable with the key of this launch, by which pods of a changing number know each other."""

OWN_FAILURE = 70
"""Exit code of a pod if an exception of the job's own code, which a restart would repeat, has ended the run."""

_FAILED = f".* failed with exit code {OWN_FAILURE} matching .*"  # a Job's message about its failure rule
_PORT = 29500
_WAIT = 60  # seconds that the fewest pods wait for others


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRequest:
    """The pods of a launch, and their parts.

    Attributes:
        values: options, as ``read_options`` returns them.
        least: smallest number of pods; ``nodes`` unless that may change.
        resources: of each pod: GPUs, or cores.
        volumes: mount path → claim.
    """

    values: Mapping[str, Any]
    nodes: int
    least: int
    resources: Mapping[str, Any]
    volumes: Mapping[str, str]

    @classmethod
    def of(cls, submission: Submission) -> Self:
        """Read the options of a launch.

        Raises:
            SpecError: with all problems in them.
        """
        run, options, within = submission.run, submission.options, submission.run.device_range
        values, problems = read_options(OPTIONS, options)
        nodes, plan = values.get("nodes", 1), on_most(run).plan
        volumes = {path.rstrip("/"): claim for claim, _, path in _parted(values.get("volume", ""))}
        least = -(-within.least * nodes // within.most) if within else nodes
        said = f"{options.get('time', '')}, with a grace of {run.grace:g} seconds"
        gpus, few = gpus_of_node(plan, nodes, values.get("gpus-per-node"))
        problems += [*too_short(run, values.get("time"), run.grace, said), *uneven_nodes(plan, nodes), *few]
        problems += [*_wrong_range(run, least, nodes, "queue" in values), *_wrong_volumes(run, options)]
        name = pod_resource("auto" if on_host(plan.device) else plan.device)
        if gpus and not name:
            fix = "--gpus-per-node 0, and the resource in the limits of --patch"
            allowed = "devices whose resource is known here"
            problems.append(Problem(where="--gpus-per-node", given=f"none, for {plan}", allowed=allowed, fix=fix))
        if problems:
            raise SpecError(problems)
        asked = {name: str(gpus)} if gpus else {"cpu": str(plan.processes // nodes * plan.threads)}
        resources = {"requests": asked, **({"limits": asked} if gpus else {})}
        return cls(values=values, nodes=nodes, least=least, resources=resources, volumes=volumes)


def on_most(run: RunSpec) -> RunSpec:
    """Return ``run`` with its plan on the largest number of devices it may have."""
    plan = resized(run.plan, run.device_range.most) if run.device_range else None
    return run.resized_to(plan) if plan else run


def _wrong_range(run: RunSpec, least: int, nodes: int, queued: bool) -> list[Problem]:
    """Return a problem if the run has a range of devices that no smaller number of whole pods can have."""
    if (within := run.device_range) is None:
        return []
    sizes = [within.most // nodes * pods for pods in range(least, nodes + 1)]
    if len(sizes) > 1 and not queued and within.most in sizes and all(resized(run.plan, size) for size in sizes):
        return []
    given = f"{run.devices} in {nodes} pods, with plan {run.plan}{' and with --queue' if queued else ''}"
    allowed = "a range of whole equal pods that each suit the plan, and no queue, which admits all pods or none"
    return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}")]


def part_of(value: Any, *names: str) -> Any:
    """Return the value below nested keys; {} if it is missing."""
    for name in names:
        value = value.get(name, {}) if isinstance(value, dict) else {}
    return value


def _parted(volume: str) -> list[tuple[str, str, str]]:
    return [word.partition(":") for word in volume.split(",") if word]


def _wrong_volumes(run: RunSpec, options: Mapping[str, str]) -> list[Problem]:
    """Return problems of claims and their places, or of files that workers need and no volume holds."""
    volumes, file = _parted(options.get("volume", "")), Reference.parse(run.job).file
    places = [path for _, _, path in volumes]
    if wrong := [":".join((claim, path)) for claim, _, path in volumes if not claim or not path.startswith("/")]:
        return [wrong_option(OPTIONS, "volume", ", ".join(map(repr, wrong)), "CLAIM:/PATH, several with commas")]
    problems: list[Problem] = []
    module = "; a job that is installed in the image and here is named as a module: package.train"
    for what, path in {"the run folder": run.folder, "the job's file": file}.items():
        if path is not None and not any(path.is_relative_to(place) for place in places):
            given = f"{', '.join(places) or 'none'}, where {what} {path} is not"
            allowed = f"a volume that holds {what} at the same path{module if path == file else ''}"
            problems.append(wrong_option(OPTIONS, "volume", given, allowed, f"--volume CLAIM:{path.parent}"))
    return problems


def config_name(name: str) -> str:
    """Return the name of the ConfigMap of the JobSet ``name``."""
    return f"{name}-run"


def manifests(submission: Submission) -> str:
    """Return all objects of a launch as JSON, which is YAML.

    Raises:
        SpecError: with all problems of the options.
    """
    request, name = PodRequest.of(submission), submission.job_name
    labels = {"app.kubernetes.io/managed-by": "phalanx", "app.kubernetes.io/instance": name}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_name(name), "labels": labels},
        "data": {RUN_FILE.name: submission.run.to_toml()},
    }
    pod = {"metadata": {"labels": labels}, "spec": _pod(submission, request, name)}
    jobset = _jobset(submission, request, name, merged(pod, request.values.get("patch", {})))
    jobset["metadata"]["labels"] |= labels
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [config, jobset]}, indent=2) + "\n"


def _jobset(submission: Submission, request: PodRequest, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    # A pod that has to go, and one that has saved because another had to, are no failures of the run; an exception of
    # its own code would come again. The Job's message tells the JobSet the rule that matched.
    exits = [{"containerName": NODE, "operator": "In", "values": [code]} for code in (SAVED, OWN_FAILURE)]
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        *({"action": "FailJob", "onExitCodes": one} for one in exits),
    ]
    job: dict[str, Any] = {
        "parallelism": request.nodes,
        "completions": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }
    if "time" in request.values:
        job["activeDeadlineSeconds"] = request.values["time"]
    if request.least < request.nodes:  # a pod that found no place keeps nothing open
        job["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    raised = {**_rule("own_failure", "FailJobSet", "PodFailurePolicy"), "onJobFailureMessagePatterns": [_FAILED]}
    preempted = _rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", "PodFailurePolicy")
    over = _rule("time_is_over", "FailJobSet", "DeadlineExceeded")
    queue = request.values.get("queue")
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": submission.run.restarts, "rules": [raised, preempted, over]},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
            **({"suspend": True} if queue else {}),  # until Kueue admits it
        },
    }


def _rule(name: str, action: str, reason: str) -> dict[str, Any]:
    return {"name": name, "action": action, "onJobFailureReasons": [reason]}


def _pod(submission: Submission, request: PodRequest, name: str) -> dict[str, Any]:
    elastic = request.least < request.nodes
    meeting = f"{name}-{NODE}-0-0.{name}:{_PORT}"
    pods = [f"{request.least}:{request.nodes}", str(_WAIT)] if elastic else [str(request.nodes)]
    label = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
    asked = {"resourceFieldRef": {"containerName": NODE, "resource": "requests.cpu"}}
    claims = {claim: f"claim-{index}" for index, claim in enumerate(dict.fromkeys(request.volumes.values()))}
    mounts = {str(RUN_FILE.parent): "run", "/dev/shm": "shm"}
    mounts |= {path: claims[claim] for path, claim in request.volumes.items()}
    volumes: dict[str, Any] = {
        "run": {"configMap": {"name": config_name(name)}},
        "shm": {"emptyDir": {"medium": "Memory"}},
    }
    volumes |= {one: {"persistentVolumeClaim": {"claimName": claim}} for claim, one in claims.items()}
    module = "phalanx.launch.targets.kubernetes_node"
    container: dict[str, Any] = {
        "name": NODE,
        "image": request.values["image"],
        "command": [submission.python, "-m", module, str(RUN_FILE), meeting, *pods],
        "env": [
            {"name": RESTART, "valueFrom": label},
            {"name": CORES, "valueFrom": asked},
            *([{"name": MEETING_KEY, "value": submission.key}] if elastic else []),
        ],
        "resources": request.resources,
        "volumeMounts": [
            {"name": volume, "mountPath": path, **({"readOnly": True} if volume == "run" else {})}
            for path, volume in mounts.items()
        ],
    }
    if any(Path.cwd().is_relative_to(path) for path in request.volumes):  # paths of the job may begin there
        container["workingDir"] = str(Path.cwd())
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(submission.run.grace) + SAVE_MARGIN,
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
    }
