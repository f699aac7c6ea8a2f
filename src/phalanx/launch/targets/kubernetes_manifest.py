"""The objects of a run on Kubernetes: a ConfigMap with its run file, and a JobSet of pods that read it.

``--patch`` is merged into the pod, for all that Phalanx does not need to know itself. Pods have stable names: pod 0, in
which agents meet, is ``NAME-node-0-0.NAME``. A restart makes all pods anew.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from phalanx.config import Plan, RunSpec
from phalanx.config.elastic import resized
from phalanx.device_kinds import on_host, pod_resource
from phalanx.errors import Problem, SpecError
from phalanx.launch.jobfile import Reference
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.offer import Offer, misfit
from phalanx.launch.targets.option_checks import (
    SAVE_MARGIN,
    merged,
    read_options,
    secret_names,
    too_short,
    uneven_nodes,
    wrong_option,
)
from phalanx.launch.targets.target import Option, Submission

OPTIONS = {
    "image": Option(help="image with phalanx and what the job imports", example="registry/train:1", needed=True),
    "nodes": Option(help="pods, each with an equal part of the plan's processes [1]", example="4", kind="count"),
    "volume": Option(help="claims and where pods have them, with commas", example="data:/data,runs:/runs", between=","),
    "namespace": Option(help="namespace; the context's where not given", example="vision"),
    "context": Option(help="context of kubectl's settings; the current one where not given", example="cluster-a"),
    "gpus-per-node": Option(
        help="GPUs of each pod; one a device of the plan, 0: none", example="8", kind="count", least=0
    ),
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

MEETING_KEY = "PHALANX_MEETING_KEY"
"""Variable with the key of this launch, by which pods of a changing number know each other."""

OWN_FAILURE = 70
"""Exit code of a pod if an exception of the job's own code, which a restart would repeat, has ended the run."""

_FAILED = f".* failed with exit code {OWN_FAILURE} matching .*"  # a Job's message about its failure rule
_PORT = 29500
_WAIT = 60  # seconds that the fewest pods wait for others
_LONGEST = 30  # letters of a job's name: names of pods stay below 63


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRequest:
    """The pods of a launch, and their parts.

    Attributes:
        values: options, as ``read_options`` returns them.
        least: smallest number of pods; ``nodes`` unless that may change.
        gpus: of each pod; ``resource``: their name in the cluster.
        cores: of each pod; 0: all.
        volumes: mount path → claim.
    """

    values: Mapping[str, Any]
    nodes: int
    least: int
    gpus: int
    resource: str
    cores: int
    workers: int
    volumes: Mapping[str, str]

    @classmethod
    def of(cls, submission: Submission) -> Self:
        """Read the options of a launch.

        Raises:
            SpecError: with all problems in them.
        """
        run, options = submission.run, submission.options
        values, problems = read_options(OPTIONS, options)
        nodes, count, patch = values.get("nodes", 1), values.get("gpus-per-node"), values.get("patch", {})
        plan, volumes = _largest(run), [word.partition(":") for word in values.get("volume", "").split(",") if word]
        said = f"{options.get('time', '')}, with a grace of {run.grace:g} seconds"
        problems += too_short(run, values.get("time"), run.grace, said)
        problems += [*uneven_nodes(plan, nodes, "each pod"), *_inelastic(run, nodes, "queue" in values)]
        problems += [*_wrong_volumes(run, volumes), *_own_variables(patch)]
        offer = Offer(nodes=nodes, devices=count or 0, device="GPU" if count else "", by="--gpus-per-node")
        if count is not None and (problem := misfit(plan, offer)):
            problems.append(problem)
        gpus = (0 if on_host(plan.device) else max(1, plan.devices // nodes)) if count is None else count
        resource = pod_resource("auto" if on_host(plan.device) else plan.device)
        if gpus and not resource:
            fix = "--gpus-per-node 0, and the resource in the limits of --patch"
            allowed = "devices whose resource is known here"
            problems.append(Problem(where="--gpus-per-node", given=f"none, for {plan}", allowed=allowed, fix=fix))
        if problems:
            raise SpecError(problems)
        workers, cores = plan.processes // nodes, asked_cores(patch)
        return cls(
            values=values,
            nodes=nodes,
            least=_fewest(run, nodes),
            gpus=gpus,
            resource=resource,
            cores=cores or (0 if gpus else workers * plan.threads),
            workers=workers,
            volumes={path.rstrip("/") or "/": claim for claim, _, path in volumes},
        )


def on_most(run: RunSpec) -> RunSpec:
    """Return ``run`` with its plan on the largest number of devices it may have."""
    return run.resized_to(_largest(run)) if run.device_range else run


def _largest(run: RunSpec) -> Plan:
    return (resized(run.plan, run.device_range.most) if run.device_range else None) or run.plan


def _fewest(run: RunSpec, nodes: int) -> int:
    within = run.device_range
    return -(-within.least * nodes // within.most) if within else nodes


def _inelastic(run: RunSpec, nodes: int, queued: bool) -> list[Problem]:
    """Return a problem if the run has a range of devices that no smaller number of whole pods can have."""
    within = run.device_range
    if within is None or (within.most % nodes and resized(run.plan, within.most)):  # a problem of --nodes
        return []
    each = max(1, within.most // nodes)
    sizes = [within.most, *(pods * each for pods in range(_fewest(run, nodes), nodes))]
    given = f"{run.devices} in {nodes} pods of {each} devices, with plan {run.plan}"
    if queued:
        given, allowed = f"{run.devices}, with --queue, which admits all pods or none", "a number that does not change"
    elif bad := [size for size in sizes if resized(run.plan, size) is None]:
        given, allowed = f"{given}, which cannot be on {bad[0]}", "a range whose numbers of pods the plan can be on"
    elif len(sizes) == 1:
        allowed = "a range that fewer pods can have, each whole"
    else:
        return []
    return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}")]


def part_of(value: Any, *names: str) -> Any:
    """Return the value below nested keys; {} if it is missing."""
    for name in names:
        value = value.get(name, {}) if isinstance(value, dict) else {}
    return value


def _container(patch: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = part_of(patch, "spec", "containers")
    return next((one for one in containers if isinstance(one, dict) and one.get("name") == NODE), {})


def asked_cores(patch: Mapping[str, Any]) -> int:
    """Return the whole cores that a patch asks for; 0 if none."""
    cpu = str(part_of(_container(patch), "resources", "requests", "cpu"))
    found = re.fullmatch(r"([0-9]{1,9})(m?)", cpu)
    return int(found[1]) // (1000 if found[2] else 1) if found else 0


def _own_variables(patch: Mapping[str, Any]) -> list[Problem]:
    env = [one for one in part_of(_container(patch), "env") if isinstance(one, dict)]
    names = [str(one.get("name")) for one in env if "value" in one]
    allowed = "text that all may read who may see the job; envFrom or valueFrom names a secret"
    secret = [(f"env with {name}, a secret by its name", allowed) for name in secret_names(names)]
    own = [(f"env with {name}", "variables that a pod does not have itself") for name in names if name == RESTART]
    return [wrong_option(OPTIONS, "patch", given, allowed) for given, allowed in [*secret, *own]]


def _wrong_volumes(run: RunSpec, volumes: list[tuple[str, str, str]]) -> list[Problem]:
    """Return problems of claims and their places, or of files that workers need and no volume holds."""
    places = [PurePosixPath(path) for _, _, path in volumes]
    taken = [*places, RUN_FILE.parent, PurePosixPath("/dev/shm")]
    wrong = [
        f"{claim}{colon}{path}"
        for claim, colon, path in volumes
        if not claim or not path.startswith("/") or taken.count(PurePosixPath(path)) > 1
    ]
    if wrong:
        allowed = "CLAIM:/PATH, several with commas, each at a path of its own"
        return [wrong_option(OPTIONS, "volume", ", ".join(map(repr, wrong)), allowed)]
    problems: list[Problem] = []
    file = Reference.parse(run.job).file
    module = "; a job that is installed in the image and here is named as a module: package.train"
    for what, path in {"the run folder": run.folder, "the job's file": file}.items():
        if path is not None and not _holds(places, path):
            given = f"{', '.join(map(str, places)) or 'none'}, where {what} {path} is not"
            allowed = f"a volume that holds {what} at the same path{module if path == file else ''}"
            problems.append(wrong_option(OPTIONS, "volume", given, allowed, f"--volume CLAIM:{path.parent}"))
    return problems


def _holds(places: list[PurePosixPath], path: Path) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def config_name(name: str) -> str:
    """Return the name of the ConfigMap of the JobSet ``name``."""
    return f"{name}-run"


def manifests(submission: Submission) -> str:
    """Return all objects of a launch as JSON, which is YAML.

    Raises:
        SpecError: with all problems of the options.
    """
    request = PodRequest.of(submission)
    stem = re.sub(r"[^a-z0-9]+", "-", submission.name.lower()).strip("-")[:_LONGEST].strip("-")
    name = f"{stem if stem[:1].isalpha() else f'run-{stem}'.strip('-')}-{submission.token[-6:]}"
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
    gpus = {request.resource: str(request.gpus)} if request.gpus else {}
    elastic = request.least < request.nodes
    meeting = f"{name}-{NODE}-0-0.{name}:{_PORT}"
    pods = [f"{request.least}:{request.nodes}", str(_WAIT)] if elastic else [str(request.nodes)]
    threads = {"OMP_NUM_THREADS": str(max(1, request.cores // request.workers))} if request.cores else {}
    own = {**threads, **({MEETING_KEY: submission.key} if elastic else {})}
    label = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
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
            *({"name": variable, "value": value} for variable, value in own.items()),
        ],
        "resources": {"requests": gpus, "limits": gpus} if gpus else {"requests": {"cpu": str(request.cores)}},
        "volumeMounts": [
            {"name": volume, "mountPath": path, **({"readOnly": True} if volume == "run" else {})}
            for path, volume in mounts.items()
        ],
    }
    if _holds([PurePosixPath(path) for path in request.volumes], Path.cwd()):  # paths of the job may begin there
        container["workingDir"] = str(Path.cwd())
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(submission.run.grace) + SAVE_MARGIN,
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
    }
