"""What the options of ``--to kubernetes`` ask of a cluster, and what of it cannot be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from phalanx.config import RunSpec
from phalanx.config.elastic import resized
from phalanx.device_kinds import on_host, pod_resource
from phalanx.errors import Problem, SpecError
from phalanx.launch.jobfile import Reference
from phalanx.launch.targets.offer import gpus_offered, misfit
from phalanx.launch.targets.option_checks import (
    SAVE_MARGIN,
    TimeLimit,
    named_twice,
    secret_names,
    uneven_nodes,
    wrong_counts,
    wrong_option,
)
from phalanx.launch.targets.target import Option, Submission
from phalanx.units import parse_duration

OPTIONS = {
    "image": Option(help="container image with phalanx and what the job imports", example="registry/train:1"),
    "nodes": Option(help="pods, each with an equal part of the plan's processes; 1 where not given", example="4"),
    "wait": Option(
        help="with -n 2:8, how long pods that are there wait for the others; 1m where not given", example="5m"
    ),
    "volume": Option(help="claims and where pods have them, with commas", example="data:/data,runs:/runs", between=","),
    "namespace": Option(help="namespace; the context's where not given", example="vision"),
    "context": Option(help="context of kubectl's settings; the current one where not given", example="cluster-a"),
    "gpus-per-node": Option(help="GPUs of each pod; one a device of the plan, 0: none", example="8"),
    "gpu-resource": Option(help="what the cluster calls them; nvidia.com/gpu where not given", example="amd.com/gpu"),
    "cpu": Option(help="cores of each pod; without GPUs one a worker where not given", example="32"),
    "memory": Option(help="memory of each pod", example="256Gi"),
    "shm": Option(help="most that /dev/shm may hold, of that memory; all of it where not given", example="16Gi"),
    "queue": Option(help="local queue of Kueue, which then says when the run begins", example="team-a"),
    "toleration": Option(
        help="taints that nodes may have, with commas", example="nvidia.com/gpu:NoSchedule", between=","
    ),
    "node-selector": Option(help="labels that nodes must have, with commas", example="pool=a100", between=","),
    "service-account": Option(help="service account of the pods", example="trainer"),
    "image-pull-secret": Option(help="secrets by which the image is pulled, with commas", example="ecr", between=","),
    "environment": Option(
        help="variables of the pods, with commas; no secrets", example="OMP_NUM_THREADS=8,FI_PROVIDER=efa", between=","
    ),
    "env-from-secret": Option(
        help="secrets whose entries pods have as variables, with commas", example="wandb", between=","
    ),
    "max-restarts": Option(help="new starts after a lost pod; --restarts where not given", example="5"),
    "time": Option(help="time after which a start saves and stops, in m, h or d", example="12h"),
}
_wrong = partial(wrong_option, OPTIONS)

RUN_FILE = PurePosixPath("/etc/phalanx/run.toml")
"""Where a pod has what its workers read."""

_WAIT = 60  # seconds
_COUNTS = {"nodes": 1, "gpus-per-node": 0, "max-restarts": 0}  # name → least
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1123
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_QUALIFIED = rf"({_SUBDOMAIN}/)?{_VALUE}"
_QUANTITY = r"(?=.*[1-9])[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_EFFECTS = "NoSchedule|PreferNoSchedule|NoExecute"
_NAME_OF_IT = "a name of lower-case letters, digits and dashes (RFC 1123)"
_AMOUNT = "an amount such as 500m, 32, 256Gi"

# option → what one of its words may be, as a pattern and in words
_FORMS = {
    "image": (r"[\w.:@/-]*\w", "an image, without spaces"),
    "namespace": (_LABEL, _NAME_OF_IT),
    "context": (r"[^\s-]\S*", "a name that kubectl config get-contexts shows"),
    "gpu-resource": (_QUALIFIED, "a resource such as nvidia.com/gpu"),
    "cpu": (_QUANTITY, _AMOUNT),
    "memory": (_QUANTITY, _AMOUNT),
    "shm": (_QUANTITY, _AMOUNT),
    "queue": (_LABEL, _NAME_OF_IT),
    "service-account": (_SUBDOMAIN, _NAME_OF_IT),
    "volume": (rf"{_SUBDOMAIN}:/[^:,\s]+", "CLAIM:/PATH, several with commas; a claim's name is as RFC 1123 says"),
    "toleration": (
        rf"{_QUALIFIED}(={_VALUE})?(:({_EFFECTS}))?",
        f"KEY, KEY=VALUE or KEY:EFFECT, where EFFECT is one of {_EFFECTS.replace('|', ', ')}",
    ),
    "node-selector": (rf"{_QUALIFIED}={_VALUE}", "LABEL=VALUE, several with commas"),
    "env-from-secret": (_SUBDOMAIN, f"names of secrets, never what is in them: each {_NAME_OF_IT}"),
    "image-pull-secret": (_SUBDOMAIN, f"names of secrets, never what is in them: each {_NAME_OF_IT}"),
    "environment": (r"[A-Za-z_]\w*=[^,]*", "NAME=VALUE, several with commas"),
}
_SEVERAL = [name for name, option in OPTIONS.items() if option.between]
_OWN = ("RESTART_ATTEMPT", "JOB_COMPLETION_INDEX")  # variables by which pods know their place


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRequest:
    """What a run asks of a cluster.

    Attributes:
        nodes: pods, the most where their number may change.
        least: the fewest pods that the run goes on with.
        wait: seconds that these wait for the others.
        workers: of each pod.
        gpus: of each pod; 0: none are asked for.
        volumes: where pods have it → claim.
        tolerations, node_selector: as a pod has them.
        environment: of the pods, beside what this package sets itself.
        secrets, pull_secrets: by their names; the latter are for the image.
        max_restarts: new starts that count, of a jobset.
        deadline: seconds; ``None``: there is none.
        grace: seconds between SIGTERM and SIGKILL.
        threads: of each worker; 0: as many as its part of the cores that there are.
    """

    image: str
    nodes: int
    least: int
    wait: int
    workers: int
    gpus: int
    gpu_resource: str
    cpu: str
    memory: str
    shm: str
    volumes: Mapping[str, str]
    queue: str
    tolerations: tuple[Mapping[str, str], ...]
    node_selector: Mapping[str, str]
    service_account: str
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    pull_secrets: tuple[str, ...]
    max_restarts: int
    deadline: int | None
    grace: int
    threads: int

    @classmethod
    def of(cls, submission: Submission) -> PodRequest:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        problems = [*_misshapen(options), *wrong_counts(OPTIONS, options, _COUNTS), *_secrets(options)]
        for name in ("environment", "node-selector"):
            problems += named_twice(OPTIONS, name, [left for left, _ in _pairs(options, name, "=")])
        wrong = {problem.where for problem in problems}
        counts = {name: int(options[name]) for name in _COUNTS if name in options and f"--{name}" not in wrong}
        volumes = [] if "--volume" in wrong else _pairs(options, "volume", ":")
        nodes = counts.get("nodes", 1)
        deadline, late = _seconds(options, "time")
        wait, wrong_wait = _seconds(options, "wait")
        said = f"{options.get('time', '')}, with a grace of {run.grace:g} seconds"
        problems += [*late, *TimeLimit(seconds=deadline, kept=run.grace, said=said).problems(run), *wrong_wait]
        problems += _misfits(run, nodes, counts.get("gpus-per-node"))
        problems += _nameless(options, run, counts.get("gpus-per-node"))
        problems += _inelastic(options, run, nodes)
        problems += [] if "--volume" in wrong else [*_bad_places(volumes), *_outside(run, volumes)]
        if problems:
            raise SpecError(problems)
        plan = on_most(run).plan
        gpus = counts.get("gpus-per-node", 0 if on_host(plan.device) else max(1, plan.devices // nodes))
        workers = plan.processes // nodes
        cpu = options.get("cpu", "" if gpus else f"{workers * plan.threads}")
        tolerations = tuple(_toleration(word) for word in _words(options, "toleration"))
        return cls(
            image=options["image"],
            nodes=nodes,
            least=_fewest(run, nodes),
            wait=wait or _WAIT,
            workers=workers,
            gpus=gpus,
            gpu_resource=options.get("gpu-resource", pod_resource(plan.device)),
            cpu=cpu,
            memory=options.get("memory", ""),
            shm=options.get("shm", ""),
            volumes={path: claim for claim, path in volumes},
            queue=options.get("queue", ""),
            tolerations=tolerations,
            node_selector=dict(_pairs(options, "node-selector", "=")),
            service_account=options.get("service-account", ""),
            environment=dict(_pairs(options, "environment", "=")),
            secrets=tuple(_words(options, "env-from-secret")),
            pull_secrets=tuple(_words(options, "image-pull-secret")),
            max_restarts=counts.get("max-restarts", run.restarts),
            deadline=deadline,
            grace=math.ceil(run.grace) + SAVE_MARGIN,
            threads=max(1, int(_cores(cpu)) // workers) if cpu else 0,
        )


def _words(options: Mapping[str, str], name: str) -> list[str]:
    text = options.get(name)
    if text is None:
        return []
    return text.split(",") if name in _SEVERAL else [text]


def _pairs(options: Mapping[str, str], name: str, between: str) -> list[tuple[str, str]]:
    parts = [word.partition(between) for word in _words(options, name)]
    return [(left, right.rstrip("/") or "/") if name == "volume" else (left, right) for left, _, right in parts]


def _toleration(word: str) -> dict[str, str]:
    rest, _, effect = word.partition(":")
    key, equals, value = rest.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return {**found, "effect": effect} if effect else found


def _cores(amount: str) -> float:
    return float(amount[:-1]) / 1000 if amount.endswith("m") else float(re.sub(r"[A-Za-z]+$", "", amount))


def _misshapen(options: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    if "image" not in options:
        problems.append(_wrong("image", "none", "an image that has phalanx, and what the job imports"))
    for name, (pattern, allowed) in _FORMS.items():
        bad = [word for word in _words(options, name) if not re.fullmatch(pattern, word) or len(word) > 500]
        if bad:
            problems.append(_wrong(name, ", ".join(map(repr, bad)), allowed))
    return problems


def _seconds(options: Mapping[str, str], name: str) -> tuple[int | None, list[Problem]]:
    """The time that an option says, in seconds, and what is wrong with it."""
    text = options.get(name)
    if text is None:
        return None, []
    try:
        return math.ceil(parse_duration(text)), []
    except ValueError:
        return None, [_wrong(name, repr(text), "a time such as 30m, 12h, 2d")]


def _secrets(options: Mapping[str, str]) -> list[Problem]:
    """Variables that nobody may set here: those called as secrets are, and those by which pods know their place."""
    names = [name for name, _ in _pairs(options, "environment", "=")]
    allowed = "what all may read who may see the job; --env-from-secret names a secret that has it"
    fix = f"--env-from-secret {OPTIONS['env-from-secret'].example}"
    called = [
        _wrong("environment", f"{name}, which is called as a secret is", allowed, fix) for name in secret_names(names)
    ]
    own = [
        _wrong("environment", name, "variables that the cluster does not set itself") for name in _OWN if name in names
    ]
    return [*called, *own]


def _misfits(run: RunSpec, nodes: int, gpus: int | None) -> list[Problem]:
    """What of the run cannot be laid on so many pods; ``gpus``: of each, where that is said."""
    plan = on_most(run).plan
    problems = uneven_nodes(plan, nodes, "each pod")
    if gpus is not None and (problem := misfit(plan, gpus_offered(nodes, gpus, "--gpus-per-node"))):
        problems.append(problem)
    return problems


def _nameless(options: Mapping[str, str], run: RunSpec, gpus: int | None) -> list[Problem]:
    """Devices that pods would be asked to have, and that nobody knows the cluster's name of."""
    plan = run.plan
    if "gpu-resource" in options or gpus == 0 or on_host(plan.device) or pod_resource(plan.device):
        return []
    allowed = "what the cluster calls such devices: kubectl describe nodes shows it"
    return [_wrong("gpu-resource", f"none, for {plan}", allowed)]


def on_most(run: RunSpec) -> RunSpec:
    """``run`` under its plan on the most devices that it may have."""
    within = run.device_range
    plan = resized(run.plan, within.most) if within else None
    return run.resized_to(plan) if plan else run


def _fewest(run: RunSpec, nodes: int) -> int:
    """How many pods are needed for the fewest devices that the run may have."""
    within = run.device_range
    return -(-within.least * nodes // within.most) if within else nodes


def _inelastic(options: Mapping[str, str], run: RunSpec, nodes: int) -> list[Problem]:
    """What keeps a run, where it is to, from going on with fewer pods than it has; each pod is whole."""
    within = run.device_range
    if within is None:
        if "wait" in options:
            given, allowed = (
                f"{options['wait']}, of a run that has all of its pods",
                "only together with a range of devices",
            )
            return [_wrong("wait", given, allowed, f"-n {max(1, run.plan.devices // 2)}:{run.plan.devices}")]
        return []
    if "queue" in options:
        given = f"{run.devices}, with --queue {options['queue']}, which admits all of its pods or none"
        allowed = "a number of devices that does not change"
        return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {within.most}")]
    if resized(run.plan, within.most) is None:
        given, allowed = f"{run.devices}, with plan {run.plan}", "a range whose most the plan can be on"
        return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}")]
    if within.most % nodes:
        return []  # said of --nodes
    each, fewest = within.most // nodes, _fewest(run, nodes)
    wrong = [pods for pods in range(fewest, nodes) if resized(run.plan, pods * each) is None]
    if fewest < nodes and not wrong:
        return []
    given = f"{run.devices} in {nodes} pods of {each} devices"
    if wrong:
        given += f": {wrong[0]} of them cannot be {run.plan}"
    fix = f"-n {each}:{within.most}" if nodes > 1 and not wrong else f"-n {within.most}"
    return [Problem(where="-n", given=given, allowed="a range that fewer pods can have, each whole", fix=fix)]


def _bad_places(volumes: list[tuple[str, str]]) -> list[Problem]:
    """Places of volumes that are taken."""
    problems: list[Problem] = []
    places = [PurePosixPath(path) for _, path in volumes]
    for index, place in enumerate(places):
        own = (RUN_FILE.parent, PurePosixPath("/dev/shm"))
        if str(place) == "/" or ".." in place.parts or any(place == one or place in one.parents for one in own):
            problems.append(_wrong("volume", str(place), f"a folder that does not hold {own[0]} or {own[1]}"))
        elif place in places[:index]:
            problems.append(_wrong("volume", f"{place} twice", "one claim a place"))
    return problems


def _outside(run: RunSpec, volumes: list[tuple[str, str]]) -> list[Problem]:
    """What workers read and write that no volume holds: a container's own files go with it."""
    problems: list[Problem] = []
    file = Reference.parse(run.job).file
    needed = {"the run folder": run.folder, "the job's file": file}
    for what, path in needed.items():
        if path is not None and not held(path, [place for _, place in volumes]):
            where = path.parent
            given = f"{', '.join(place for _, place in volumes) or 'none'}, where {what} {path} is not"
            allowed = f"a volume that holds {what} at the same path" + (
                "; a job that is installed in the image and here is named as a module: package.train"
                if path == file
                else ""
            )
            problems.append(_wrong("volume", given, allowed, f"--volume CLAIM:{where}"))
    return problems


def held(path: Path, places: list[str]) -> bool:
    """Whether one of the places, which are folders, holds ``path``."""
    return any(PurePosixPath(path).is_relative_to(place) for place in places)
