"""What the options of ``--to kubernetes`` ask of a cluster, and what of it cannot be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from phalanx.config import RunSpec
from phalanx.config.elastic import resized
from phalanx.device_kinds import on_host, pod_resource
from phalanx.errors import Problem, SpecError
from phalanx.launch.jobfile import Reference
from phalanx.launch.targets.offer import gpus_offered, misfit
from phalanx.launch.targets.option_checks import (
    SAVE_MARGIN,
    TimeLimit,
    read_patch,
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
    "queue": Option(help="local queue of Kueue, which then says when the run begins", example="team-a"),
    "time": Option(help="time after which a start saves and stops, in m, h or d", example="12h"),
    "patch": Option(help="JSON file with a part of a pod, merged into each: cores, memory, labels", example="pod.json"),
}
_wrong = partial(wrong_option, OPTIONS)

RUN_FILE = PurePosixPath("/etc/phalanx/run.toml")
"""Where a pod has what its workers read."""

NODE = "node"
"""The replicated job, and the container."""

_WAIT = 60  # seconds
_COUNTS = {"nodes": 1, "gpus-per-node": 0}  # name → least
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
        gpu_resource: what the cluster calls them.
        cores: of each pod; 0: as many as there are.
        volumes: where pods have it → claim.
        patch: part of a pod, merged into each.
        max_restarts: new starts that count, of a jobset.
        deadline: seconds; ``None``: there is none.
        grace: seconds between SIGTERM and SIGKILL.
    """

    image: str
    nodes: int
    least: int
    wait: int
    workers: int
    gpus: int
    gpu_resource: str
    cores: int
    volumes: Mapping[str, str]
    queue: str
    patch: Mapping[str, Any]
    max_restarts: int
    deadline: int | None
    grace: int

    @classmethod
    def of(cls, submission: Submission) -> PodRequest:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        lacks_image = _wrong("image", "none", "an image that has phalanx, and what the job imports")
        problems = [*([] if "image" in options else [lacks_image]), *wrong_counts(OPTIONS, options, _COUNTS)]
        wrong = {problem.where for problem in problems}
        counts = {name: int(options[name]) for name in _COUNTS if name in options and f"--{name}" not in wrong}
        nodes, told_gpus = counts.get("nodes", 1), counts.get("gpus-per-node")
        volumes, misplaced = _volumes(options)
        patch, misread = read_patch(OPTIONS, options)
        deadline, late = _seconds(options, "time")
        wait, wrong_wait = _seconds(options, "wait")
        said = f"{options.get('time', '')}, with a grace of {run.grace:g} seconds"
        problems += [*late, *TimeLimit(seconds=deadline, kept=run.grace, said=said).problems(run), *wrong_wait]
        problems += [*_misfits(run, nodes, told_gpus), *_inelastic(options, run, nodes)]
        problems += [*misread, *_own_variables(patch)]
        problems += misplaced or [*_bad_places(volumes), *_outside(run, volumes)]
        plan = on_most(run).plan
        gpus = (0 if on_host(plan.device) else max(1, plan.devices // nodes)) if told_gpus is None else told_gpus
        resource = pod_resource("auto" if on_host(plan.device) else plan.device)
        if gpus and not resource:
            fix = "--gpus-per-node 0, and the resource in the limits of --patch"
            allowed = "devices whose resource is known here"
            problems.append(Problem(where="--gpus-per-node", given=f"none, for {plan}", allowed=allowed, fix=fix))
        if problems:
            raise SpecError(problems)
        workers = plan.processes // nodes
        return cls(
            image=options["image"],
            nodes=nodes,
            least=_fewest(run, nodes),
            wait=wait or _WAIT,
            workers=workers,
            gpus=gpus,
            gpu_resource=resource,
            cores=asked_cores(patch) or (0 if gpus else workers * plan.threads),
            volumes={path: claim for claim, path in volumes},
            queue=options.get("queue", ""),
            patch=patch,
            max_restarts=run.restarts,
            deadline=deadline,
            grace=math.ceil(run.grace) + SAVE_MARGIN,
        )


def part_of(value: Any, *names: str) -> Any:
    """Return what stands in nested objects below these names; an empty object where that is none."""
    for name in names:
        value = value.get(name, {}) if isinstance(value, dict) else {}
    return value


def _container(patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a patch says of the container that trains; empty where it says nothing."""
    containers = part_of(patch, "spec", "containers")
    return next((one for one in containers if isinstance(one, dict) and one.get("name") == NODE), {})


def asked_cores(patch: Mapping[str, Any]) -> int:
    """Return the whole cores that a patch asks for the container that trains; 0 where it asks for none."""
    cpu = str(part_of(_container(patch), "resources", "requests", "cpu"))
    found = re.fullmatch(r"([0-9]{1,9})(m?)", cpu)
    return int(found[1]) // (1000 if found[2] else 1) if found else 0


def _volumes(options: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Return claims and their places, and what is wrong with them."""
    words = [word.partition(":") for word in options.get("volume", "").split(",") if word]
    wrong = [f"{claim}{colon}{path}" for claim, colon, path in words if not claim or not path.startswith("/")]
    if wrong:
        return [], [_wrong("volume", ", ".join(map(repr, wrong)), "CLAIM:/PATH, several with commas")]
    return [(claim, path.rstrip("/") or "/") for claim, _, path in words], []


def _seconds(options: Mapping[str, str], name: str) -> tuple[int | None, list[Problem]]:
    """The time that an option says, in seconds, and what is wrong with it."""
    text = options.get(name)
    if text is None:
        return None, []
    try:
        return math.ceil(parse_duration(text)), []
    except ValueError:
        return None, [_wrong(name, repr(text), "a time such as 30m, 12h, 2d")]


def _own_variables(patch: Mapping[str, Any]) -> list[Problem]:
    """Variables that nobody may set: those called as secrets are, and those by which pods know their place."""
    given = [one for one in part_of(_container(patch), "env") if isinstance(one, dict)]
    names = [str(one.get("name")) for one in given if "value" in one]
    allowed = "what all may read who may see the job; envFrom or valueFrom names a secret that has it"
    called = [_wrong("patch", f"env with {name}, a secret by its name", allowed) for name in secret_names(names)]
    own = [_wrong("patch", f"env with {name}", "variables that a pod does not have of itself") for name in _OWN]
    return [*called, *(problem for name, problem in zip(_OWN, own, strict=True) if name in names)]


def _misfits(run: RunSpec, nodes: int, gpus: int | None) -> list[Problem]:
    """What of the run cannot be laid on so many pods; ``gpus``: of each, where that is said."""
    plan = on_most(run).plan
    problems = uneven_nodes(plan, nodes, "each pod")
    if gpus is not None and (problem := misfit(plan, gpus_offered(nodes, gpus, "--gpus-per-node"))):
        problems.append(problem)
    return problems


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
