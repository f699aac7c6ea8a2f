"""What the options of a launch on SageMaker say, and what is wrong in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from phalanx.config import RunSpec
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.code_pack import CODE_OPTION, folder_and_problems
from phalanx.launch.targets.offer import gpus_offered, misfit
from phalanx.launch.targets.option_checks import (
    TimeLimit,
    changing_devices,
    is_count,
    named_twice,
    secret_names,
    uneven_nodes,
    wrong_counts,
    wrong_option,
)
from phalanx.launch.targets.sagemaker_instances import gpus_of, instance_problems
from phalanx.launch.targets.target import Option, Submission
from phalanx.units import parse_duration

OPTIONS = {
    "instance": Option(help="instance type", example="ml.p5.48xlarge"),
    "image": Option(help="image with phalanx, in ECR", example="123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1"),
    "role": Option(help="role that the job has", example="arn:aws:iam::123456789012:role/train"),
    "bucket": Option(help="where code, run folder and output go", example="s3://my-bucket/phalanx"),
    "nodes": Option(help="instances, each with an equal part of the plan's processes; 1 where not given", example="2"),
    "time": Option(help="time limit, at which the run saves and stops; 24h where not given", example="12h"),
    "spot": Option(help="on spot capacity, for at most so long with all that it waits", example="48h"),
    "data": Option(help="folder of S3 that is read at /opt/ml/input/data/data", example="s3://my-bucket/images"),
    "filesystem": Option(
        help="shared by all instances, for the run folder; needed for several",
        example="fsx:fs-0123456789abcdef0:/fsx/runs",
    ),
    "subnets": Option(help="of a VPC, with commas", example="subnet-0a,subnet-0b", between=","),
    "security-groups": Option(help="of that VPC, with commas", example="sg-0a", between=","),
    "volume": Option(help="GiB of disk of each instance; 100 where not given", example="500"),
    "environment": Option(
        help="variables of the container, with commas; no secrets", example="FI_PROVIDER=efa", between=","
    ),
    "tags": Option(help="tags of the job, with commas", example="team=vision,cost=42", between=","),
    "region": Option(help="AWS region; as the AWS settings here say where not given", example="eu-west-1"),
    "code": CODE_OPTION,
}
_wrong = partial(wrong_option, OPTIONS)

_NEEDED = ("instance", "image", "role", "bucket")
_COUNTS = {"nodes": 1, "volume": 1}  # name → least
_DAY, _LONGEST = 86_400, 28 * 86_400  # seconds of a time limit: where none is given, and at most
_VOLUME = 100  # GiB where none is given
_STOP = 120  # seconds from SIGTERM to SIGKILL
_MARGIN = 15  # seconds of these that others than the save may take
_PATTERNS = {
    "image": r"\S{1,255}",
    "role": r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+",
    "bucket": r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.!*'()/-]*)?",
    "data": r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?",
    "filesystem": r"(fsx|efs):fs-[0-9a-f]{8,18}:/[\w./-]*",
    "subnets": r"subnet-[\w]+(,subnet-[\w]+){0,15}",
    "security-groups": r"sg-[\w]+(,sg-[\w]+){0,4}",
    "region": r"[a-z]{2,}(-[a-z]+)+-\d+",
    "environment": r"[A-Za-z_]\w*=[^,]*(,[A-Za-z_]\w*=[^,]*)*",
    "tags": r"[\w .:/=+@-]*[^,=]=[^,]*(,[^,=]+=[^,]*)*",
}
_PAIRS = ("environment", "tags")
_FILE_SYSTEMS = {"fsx": "FSxLustre", "efs": "EFS"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SageMakerRequest:
    """What a launch asks of SageMaker.

    Attributes:
        time: limit in seconds.
        wait: seconds that it may take with all waiting for spot capacity; ``None``: not on spot capacity.
        bucket: URI, without a slash at its end.
        data: URI; empty where none is given.
        filesystem: type as SageMaker names it, id, and path in it; ``None`` where there is none.
        subnets, security_groups: of a VPC; empty where there is none.
        volume: GiB.
        code: folder that is packed.
    """

    instance: str
    nodes: int
    image: str
    role: str
    bucket: str
    time: int
    wait: int | None
    data: str
    filesystem: tuple[str, str, str] | None
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]
    volume: int
    environment: Mapping[str, str]
    tags: Mapping[str, str]
    region: str
    code: Path

    @classmethod
    def of(cls, submission: Submission) -> SageMakerRequest:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        counts = {name: int(options[name]) for name, least in _COUNTS.items() if is_count(options.get(name, ""), least)}
        nodes = counts.get("nodes", 1)
        code, wrong = folder_and_problems(run.job, options.get("code"))
        time, wait, mistimed = _times(run, options)
        problems = [
            *_missing(options),
            *_wrong_words(options),
            *wrong_counts(OPTIONS, options, _COUNTS),
            *_secrets(options),
            *_twice(options),
            *wrong,
        ]
        problems += [*mistimed, *_misfits(run, nodes, options), *_unshared(run, nodes, options)]
        if problems:
            raise SpecError(problems)
        kind, _, rest = options.get("filesystem", "").partition(":")
        identity, _, path = rest.partition(":")
        return cls(
            instance=options["instance"],
            nodes=nodes,
            image=options["image"],
            role=options["role"],
            bucket=options["bucket"].rstrip("/"),
            time=time,
            wait=wait,
            data=options.get("data", ""),
            filesystem=(_FILE_SYSTEMS[kind], identity, path.rstrip("/") or "/") if kind else None,
            subnets=_listed(options.get("subnets")),
            security_groups=_listed(options.get("security-groups")),
            volume=counts.get("volume", _VOLUME),
            environment=_pairs(options.get("environment")),
            tags=_pairs(options.get("tags")),
            region=options.get("region", ""),
            code=code,
        )


def _missing(options: Mapping[str, str]) -> list[Problem]:
    return [
        _wrong(name, "none", f"{OPTIONS[name].help}: SageMaker has none that could be taken")
        for name in _NEEDED
        if name not in options
    ]


def _wrong_words(options: Mapping[str, str]) -> list[Problem]:
    return [
        _wrong(name, repr(options[name]), f"{OPTIONS[name].help}: {OPTIONS[name].example}")
        for name, pattern in _PATTERNS.items()
        if name in options and not re.fullmatch(pattern, options[name])
    ]


def _secrets(options: Mapping[str, str]) -> list[Problem]:
    """Variables that are called as secrets are: whoever may describe the job reads them."""
    allowed = "what all may read who may describe the job; a secret the job reads itself, by its role"
    fix = "AWS Secrets Manager: boto3.client('secretsmanager').get_secret_value(...) in the job"
    return [
        _wrong("environment", f"{name}, which is called as a secret is", allowed, fix)
        for name in secret_names(_pairs(options.get("environment")))
    ]


def _twice(options: Mapping[str, str]) -> list[Problem]:
    names = {name: [pair.partition("=")[0].strip() for pair in _listed(options.get(name))] for name in _PAIRS}
    return [problem for name, given in names.items() for problem in named_twice(OPTIONS, name, given)]


def _times(run: RunSpec, options: Mapping[str, str]) -> tuple[int, int | None, list[Problem]]:
    """The time limit, that with all waiting, and what is wrong with them."""
    problems: list[Problem] = []
    found: dict[str, int] = {}
    for name in ("time", "spot"):
        if name in options:
            try:
                found[name] = math.ceil(parse_duration(options[name]))
            except ValueError:
                allowed = f"{OPTIONS[name].help}: a time such as 30m, 12h or 2d"
                problems.append(_wrong(name, repr(options[name]), allowed))
    time, wait = found.get("time", _DAY), found.get("spot")
    said = f"{options.get('time', '24h')}, of which the last {_STOP} seconds are kept to save"
    limit = TimeLimit(seconds=None if problems else time, kept=_STOP, said=said, most_grace=_STOP - _MARGIN)
    if short := limit.problems(run):
        problems += short
    elif time > _LONGEST:
        problems.append(_wrong("time", options["time"], "at most 28d", "--time 12h"))
    elif wait is not None and wait < time:
        given = f"{options['spot']}, with a time limit of {options.get('time', '24h')}"
        allowed = "as much, or more: what it trains and what it waits together"
        problems.append(_wrong("spot", given, allowed, f"--spot {math.ceil(2 * time / 3600)}h"))
    elif wait is not None and wait > _LONGEST:
        problems.append(_wrong("spot", options["spot"], "at most 28d", "--spot 48h"))
    return time, wait, problems


def _misfits(run: RunSpec, nodes: int, options: Mapping[str, str]) -> list[Problem]:
    """What of the run cannot be laid on such instances, or not be stopped there."""
    plan, processes = run.plan, run.plan.processes
    problems = uneven_nodes(plan, nodes, "each")
    if not problems and "instance" in options:
        each = min(processes // nodes, plan.world_size) * plan.threads
        problems += instance_problems(options["instance"], 0 if on_host(plan.device) else each)
        if plan.device != "auto" and not on_host(plan.device) and gpus_of(options["instance"]) == 0:
            problems += [problem] if (problem := misfit(plan, gpus_offered(nodes, 0, options["instance"]))) else []
    problems += changing_devices(run, "SageMaker")
    if run.grace > _STOP - _MARGIN:
        given = f"{run.grace:g} on SageMaker, which ends a container {_STOP} seconds after it has asked"
        problems.append(_wrong("grace", given, f"at most {_STOP - _MARGIN}", f"--grace {_STOP - _MARGIN}"))
    return problems


def _unshared(run: RunSpec, nodes: int, options: Mapping[str, str]) -> list[Problem]:
    """Where a file system is missing that a run needs, or what leads to one."""
    problems: list[Problem] = []
    there = "filesystem" in options
    if nodes > 1 and not there:
        given = f"{nodes}, without a file system that all share"
        allowed = "with --filesystem: all ranks write into one run folder, and instances share no disk"
        problems.append(_wrong("nodes", given, allowed, _example("filesystem")))
    if run.plan.server and not there:
        given = f"{run.plan}, with a run folder that is copied to a bucket"
        allowed = "with --filesystem: what keeps strangers from servers stands in the run folder"
        problems.append(Problem(where="--plan", given=given, allowed=allowed, fix=_example("filesystem")))
    vpc = [name for name in ("subnets", "security-groups") if name in options]
    if len(vpc) < 2 and (there or vpc):
        given = "a file system, which is reached in a VPC only" if there else f"--{vpc[0]} alone"
        lacks = next(name for name in ("subnets", "security-groups") if name not in vpc)
        problems.append(_wrong(lacks, f"none, with {given}", "--subnets and --security-groups together"))
    return problems


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _pairs(text: str | None) -> dict[str, str]:
    return {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in _listed(text))}


def _example(name: str) -> str:
    return f"--{name} {OPTIONS[name].example}"
