"""What a launch on SageMaker names, and AWS has not: found before anything is handed over, by calls that only read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from phalanx.errors import RunError
from phalanx.launch.targets.aws_calls import AwsCalls, split_s3
from phalanx.launch.targets.sagemaker_options import SageMakerRequest

_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com[.a-z]*/([^:@]+)(?::([^@]+))?(?:@(.+))?")
_CALLS = 6  # at most, each of which takes its share of the time


def what_is_missing(request: SageMakerRequest, patience: float) -> str:
    """The first thing of ``request`` that is not there; empty where all is, or one may not look.

    ``patience``: seconds that it may take.

    Raises:
        MissingExtraError: boto3 is not installed.
        RunError: AWS cannot be asked, or does not believe this machine's credentials.
    """
    calls = AwsCalls(request.region, patience / 2 / _CALLS)
    if not calls.region:
        return "no region is set up: --region, or aws configure set region"
    calls.ask("sts", "get_caller_identity")
    return next(_missing(calls, request, patience / 2 / _CALLS), "")


def _missing(calls: AwsCalls, request: SageMakerRequest, patience: float) -> Iterator[str]:
    bucket, _ = split_s3(request.bucket)
    if _lacks(calls, "s3", "head_bucket", ("(404)",), Bucket=bucket):
        yield f"there is no bucket {bucket}"
    role = request.role.rpartition("/")[2]
    if _lacks(calls, "iam", "get_role", ("NoSuchEntity",), RoleName=role):
        yield f"there is no role {request.role}"
    if request.data and _holds_nothing(calls, request.data):
        yield f"there is nothing at {request.data}"
    if ecr := _ECR.fullmatch(request.image):
        account, region, name, tag, digest = ecr.groups()
        image = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
        nothing = ("RepositoryNotFoundException", "ImageNotFoundException")
        there = AwsCalls(region, patience)
        named: dict[str, Any] = {"registryId": account, "repositoryName": name, "imageIds": [image]}
        if _lacks(there, "ecr", "describe_images", nothing, **named):
            yield f"there is no image {request.image}"


def _lacks(calls: AwsCalls, service: str, operation: str, nothing: Sequence[str], **given: Any) -> bool:
    """Whether AWS answers that there is no such thing; who hands over a run need not be allowed to look."""
    with suppress(RunError):
        return calls.ask(service, operation, nothing=nothing, **given) is None
    return False


def _holds_nothing(calls: AwsCalls, uri: str) -> bool:
    bucket, key = split_s3(uri)
    with suppress(RunError):
        told = calls.ask("s3", "list_objects_v2", nothing=("NoSuchBucket",), Bucket=bucket, Prefix=key, MaxKeys=1)
        return not (told and told.get("KeyCount"))
    return False
