"""What a launch asks of SageMaker: its options, and the request of ``CreateTrainingJob`` that they come to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from phalanx.config import RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.code_pack import CODE_OPTION, folder_and_problems, job_within
from phalanx.launch.targets.option_checks import (
    TimeLimit,
    changing_devices,
    merged,
    read_patch,
    secret_names,
    uneven_nodes,
    wrong_counts,
    wrong_option,
)
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
    "patch": Option(help="JSON file with more of CreateTrainingJob, merged into the request", example="more.json"),
    "region": Option(help="AWS region; as the AWS settings here say where not given", example="eu-west-1"),
    "code": CODE_OPTION,
}
_wrong = partial(wrong_option, OPTIONS)

ROOT = Path("/opt/ml")
"""Where SageMaker puts everything in a container, and takes it from."""

CODE_CHANNEL, SHARED_CHANNEL = "code", "shared"
"""Channels; each is a folder of ``input/data`` below ``ROOT``."""

CODE, RUN = "code.tar.gz", "run.toml"
"""Files of the code's channel."""

CHECKPOINTS = "checkpoints"
"""The folder below ``ROOT`` that SageMaker copies to S3, and from there where a job is started again."""

_NEEDED = ("instance", "image", "role", "bucket")
_DAY, _VOLUME = 86_400, 100  # seconds and GiB where none are given
_STOP, _MARGIN = 120, 15  # seconds from SIGTERM to SIGKILL, and those of them that others than the save may take
_LONGEST_NAME = 63
_NODE = "phalanx.launch.targets.sagemaker_node"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A training job of SageMaker.

    Attributes:
        name: which no other job has.
        base: URI of what is this job's own in S3: code and output.
        run: where the run folder is, of which the next job of the same run takes up: a URI of S3, or ``shared`` and the
            name of a folder in the channel that all instances share.
        code: folder that is packed.
        asked: the request, without the digests of what is sent.
    """

    name: str
    base: str
    run: str
    code: Path
    asked: dict[str, Any]

    @classmethod
    def of(cls, submission: Submission, earlier: str) -> Self:
        """Build the job of a run that was at ``earlier``; empty where the run is new.

        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        code, problems = folder_and_problems(run.job, options.get("code"))
        problems += [_wrong(name, "none", OPTIONS[name].help) for name in _NEEDED if not options.get(name)]
        if not options.get("bucket", "s3://").startswith("s3://"):
            problems.append(_wrong("bucket", repr(options["bucket"]), OPTIONS["bucket"].help))
        problems += wrong_counts(OPTIONS, options, {"nodes": 1}) or uneven_nodes(
            run.plan, int(options.get("nodes", 1)), "each"
        )
        times, mistimed = _times(run, options)
        patch, misread = _patch(options)
        problems += [*mistimed, *misread, *changing_devices(run, "SageMaker")]
        if run.grace > _STOP - _MARGIN:
            given = f"{run.grace:g} on SageMaker, which ends a container {_STOP} seconds after it has asked"
            fix = f"--grace {_STOP - _MARGIN}"
            problems.append(Problem(where="--grace", given=given, allowed=f"at most {_STOP - _MARGIN}", fix=fix))
        if problems:
            raise SpecError(problems)
        name = _name(submission)
        base = f"{options['bucket'].rstrip('/')}/{name}"
        asked = merged(_request(submission, base, name, times), patch)
        shared = any(channel["ChannelName"] == SHARED_CHANNEL for channel in asked["InputDataConfig"])
        job = cls(
            name=name,
            base=base,
            run=earlier or (f"{SHARED_CHANNEL}/{name}" if shared else f"{base}/run"),
            code=code,
            asked=asked,
        )
        job._check_place(run, shared=shared)
        if not shared:
            asked["CheckpointConfig"] = {"S3Uri": job.run, "LocalPath": str(ROOT / CHECKPOINTS)}
        asked["HyperParameters"] = {"run": job.run}
        return job

    def _check_place(self, run: RunSpec, *, shared: bool) -> None:
        """Refuse a run folder that not all instances have, or that is not where it was."""
        nodes = self.asked["ResourceConfig"]["InstanceCount"]
        allowed = f"a --patch with a channel {SHARED_CHANNEL} of InputDataConfig on FSx or EFS, and VpcConfig"
        fix = "--patch shared.json, as the how-to page has it"
        if not shared and nodes > 1:
            given = f"{nodes}, without a file system for the run folder that all share"
            raise SpecError.of("--nodes", given, allowed, fix)
        if not shared and run.plan.server:
            given = f"{run.plan}, with a run folder that is copied to a bucket, and the servers' secret in it"
            raise SpecError.of("--plan", given, allowed, fix)
        if shared != self.run.startswith(f"{SHARED_CHANNEL}/"):
            given = f"{'a' if shared else 'no'} channel {SHARED_CHANNEL}, of a run whose folder is {self.run}"
            raise SpecError.of("--patch", given, "as it was: a run does not move", "another --run, which begins anew")

    @property
    def run_folder(self) -> Path:
        """The run folder in the container, below ``ROOT``."""
        return Path(CHECKPOINTS) if self.run.startswith("s3://") else Path("input", "data", self.run)

    def uri(self, name: str) -> str:
        """Return where a file of the code's channel is in S3."""
        return f"{self.base}/{CODE_CHANNEL}/{name}"

    def run_text(self, run: RunSpec) -> str:
        """Return the run file for the container, with the job as it is in its code."""
        return replace(run, job=job_within(run.job, self.code), folder=self.run_folder).to_toml()


def _request(submission: Submission, base: str, name: str, times: tuple[int, int | None]) -> dict[str, Any]:
    options, (limit, wait) = submission.options, times
    source = {"S3DataType": "S3Prefix", "S3Uri": f"{base}/{CODE_CHANNEL}/", "S3DataDistributionType": "FullyReplicated"}
    asked: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": options["role"],
        "AlgorithmSpecification": {
            "TrainingImage": options["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [submission.python, "-m", _NODE],
        },
        "InputDataConfig": [{"ChannelName": CODE_CHANNEL, "DataSource": {"S3DataSource": source}, "InputMode": "File"}],
        "OutputDataConfig": {"S3OutputPath": f"{base}/output"},
        "ResourceConfig": {
            "InstanceType": options["instance"],
            "InstanceCount": int(options.get("nodes", 1)),
            "VolumeSizeInGB": _VOLUME,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": limit},
    }
    if wait is not None:
        asked["EnableManagedSpotTraining"] = True
        asked["StoppingCondition"]["MaxWaitTimeInSeconds"] = wait
    if submission.run.restarts:  # after an error of SageMaker's own
        asked["RetryStrategy"] = {"MaximumRetryAttempts": min(30, submission.run.restarts)}
    return asked


def _times(run: RunSpec, options: Mapping[str, str]) -> tuple[tuple[int, int | None], list[Problem]]:
    """Return the time limit, that with all waiting, and what is wrong with them."""
    problems: list[Problem] = []
    found: dict[str, int] = {}
    for name in ("time", "spot"):
        if name in options:
            try:
                found[name] = math.ceil(parse_duration(options[name]))
            except ValueError:
                problems.append(_wrong(name, repr(options[name]), "a time such as 30m, 12h or 2d"))
    limit, wait = found.get("time", _DAY), found.get("spot")
    said = f"{options.get('time', '24h')}, of which the last {_STOP} seconds are kept to save"
    problems += TimeLimit(
        seconds=None if problems else limit, kept=_STOP, said=said, most_grace=_STOP - _MARGIN
    ).problems(run)
    if wait is not None and wait < limit:
        given = f"{options['spot']}, with a time limit of {options.get('time', '24h')}"
        allowed, fix = "as much, or more: what it trains and what it waits", f"--spot {math.ceil(2 * limit / 3600)}h"
        problems.append(_wrong("spot", given, allowed, fix))
    return (limit, wait), problems


def _patch(options: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Read what is merged into the request. Returns it, and what is wrong with it."""
    found, problems = read_patch(OPTIONS, options)
    channels, variables = found.get("InputDataConfig", []), found.get("Environment", {})
    named = isinstance(channels, list) and all(isinstance(one, dict) and "ChannelName" in one for one in channels)
    if not named or not isinstance(variables, dict):
        given = f"{options['patch']}, with another InputDataConfig or Environment"
        return {}, [_wrong("patch", given, "what CreateTrainingJob takes")]
    fix = "AWS Secrets Manager: boto3.client('secretsmanager').get_secret_value(...) in the job"
    allowed = "what all may read who may describe the job; a secret the job reads itself, by its role"
    names = secret_names(variables)
    secret = [_wrong("patch", f"Environment with {name}, a secret by its name", allowed, fix) for name in names]
    return found, [*problems, *secret]


def _name(submission: Submission) -> str:
    """Return a name that no other training job of the account has: of the job, the time, and chance."""
    end = f"-{submission.token}"
    head = re.sub(r"[^a-zA-Z0-9]+", "-", submission.name).strip("-")[: _LONGEST_NAME - len(end)].strip("-")
    return f"{head or 'job'}{end}"
