"""The request for a training job of SageMaker, and where everything of it stands, there and in S3."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import RunSpec
from phalanx.errors import SpecError
from phalanx.launch.targets.code_pack import job_within
from phalanx.launch.targets.sagemaker_options import SageMakerRequest
from phalanx.launch.targets.target import Submission

ROOT = Path("/opt/ml")
"""Where SageMaker puts everything in a container, and takes it from."""

CODE_CHANNEL, DATA_CHANNEL, SHARED_CHANNEL = "code", "data", "shared"
"""Channels; each is a folder of ``input/data`` below ``ROOT``."""

CODE, RUN = "code.tar.gz", "run.toml"
"""Files of the code's channel."""

CHECKPOINTS = "checkpoints"
"""The folder below ``ROOT`` that SageMaker copies to S3, and from there where a job is started again."""

_LONGEST_NAME = 63
_NODE = "phalanx.launch.targets.sagemaker_node"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlaces:
    """Where a training job and its run stand.

    Attributes:
        name: of the training job, which no other has.
        base: URI of what is this job's own in S3: code and output.
        run: of the run folder, which the next job of the same run has, too: a URI of S3, or what ``--filesystem`` says,
            a ``#`` and the name of a folder there.
    """

    name: str
    base: str
    run: str

    @classmethod
    def of(cls, submission: Submission, request: SageMakerRequest, earlier: str) -> JobPlaces:
        """Of a new job, of a run that stands at ``earlier``; empty where it is new.

        Raises:
            SpecError: that run stands where this request does not lead.
        """
        unique = _unique(submission)
        base = f"{request.bucket}/{unique}"
        shared = _shared(request)
        run = earlier or (f"{shared}#{unique}" if shared else f"{base}/run")
        where = run.partition("#")[0]
        if where != shared if shared else not where.startswith("s3://"):
            given = f"{shared or 'none'}, of a run whose folder is {where}"
            fix = "another --run, which begins anew" if where.startswith("s3://") else f"--filesystem {where}"
            raise SpecError.of("--filesystem", given, "as it was: a run does not move", fix)
        return cls(name=unique, base=base, run=run)

    @property
    def run_folder(self) -> Path:
        """The run folder in the container, below ``ROOT``."""
        if self.run.startswith("s3://"):
            return Path(CHECKPOINTS)
        return Path("input", "data", SHARED_CHANNEL, self.run.rpartition("#")[2])

    def uri(self, name: str) -> str:
        """Of a file of the code's channel."""
        return f"{self.base}/{CODE_CHANNEL}/{name}"


def run_text(run: RunSpec, code: Path, places: JobPlaces) -> str:
    """The run file for the container: the job as it stands in ``code``, the run folder as it does below ``ROOT``."""
    return replace(run, job=job_within(run.job, code), folder=places.run_folder).to_toml()


def training_job(
    submission: Submission, request: SageMakerRequest, places: JobPlaces, digests: Mapping[str, str]
) -> dict[str, Any]:
    """The request of ``CreateTrainingJob``. ``digests``: file of the code's channel → SHA-256."""
    channels = [_channel(CODE_CHANNEL, f"{places.base}/{CODE_CHANNEL}/", "File")]
    if request.data:
        channels.append(_channel(DATA_CHANNEL, request.data, "FastFile"))
    if request.filesystem:
        kind, identity, path = request.filesystem
        source = {"FileSystemType": kind, "FileSystemId": identity, "DirectoryPath": path, "FileSystemAccessMode": "rw"}
        channels.append({"ChannelName": SHARED_CHANNEL, "DataSource": {"FileSystemDataSource": source}})
    asked: dict[str, Any] = {
        "TrainingJobName": places.name,
        "RoleArn": request.role,
        "AlgorithmSpecification": {
            "TrainingImage": request.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [submission.python, "-m", _NODE],
        },
        "HyperParameters": {"run": places.run, **{f"{name}-sha256": digest for name, digest in digests.items()}},
        "InputDataConfig": channels,
        "OutputDataConfig": {"S3OutputPath": f"{places.base}/output"},
        "ResourceConfig": {
            "InstanceType": request.instance,
            "InstanceCount": request.nodes,
            "VolumeSizeInGB": request.volume,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": request.time},
    }
    if places.run.startswith("s3://"):
        asked["CheckpointConfig"] = {"S3Uri": places.run, "LocalPath": str(ROOT / CHECKPOINTS)}
    if request.wait is not None:
        asked["EnableManagedSpotTraining"] = True
        asked["StoppingCondition"]["MaxWaitTimeInSeconds"] = request.wait
    if submission.run.restarts:  # after an error of SageMaker's own
        asked["RetryStrategy"] = {"MaximumRetryAttempts": min(30, submission.run.restarts)}
    if request.subnets:
        asked["VpcConfig"] = {"Subnets": [*request.subnets], "SecurityGroupIds": [*request.security_groups]}
    if request.environment:
        asked["Environment"] = dict(request.environment)
    if request.tags:
        asked["Tags"] = [{"Key": name, "Value": value} for name, value in request.tags.items()]
    return asked


def digest_of_text(text: str) -> str:
    """The SHA-256 of a text file."""
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(asked: Mapping[str, Any]) -> str:
    """A request as a file, which the AWS command line takes as well."""
    return json.dumps(asked, indent=1) + "\n"


def _unique(submission: Submission) -> str:
    """A name that no other training job of the account has: of the job, the time, and chance."""
    end = f"-{submission.token}"
    head = re.sub(r"[^a-zA-Z0-9]+", "-", submission.name).strip("-")[: _LONGEST_NAME - len(end)].strip("-")
    return f"{head or 'job'}{end}"


def _shared(request: SageMakerRequest) -> str:
    """What ``--filesystem`` says, in one way of writing; empty where there is none."""
    if not request.filesystem:
        return ""
    kind, identity, path = request.filesystem
    return f"{'fsx' if kind == 'FSxLustre' else 'efs'}:{identity}:{path}"


def _channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}
