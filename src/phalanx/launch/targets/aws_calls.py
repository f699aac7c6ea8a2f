"""Calls of AWS by ``boto3``, whose errors come as ours, in AWS's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from phalanx.errors import MissingExtraError, RunError

_FIXES = {
    "ResourceLimitExceeded": "Service Quotas in the AWS console: the instance type 'for training job usage' (or spot)",
    "ExpiredToken": "aws sso login, or what gives you credentials",
    "ExpiredTokenException": "aws sso login, or what gives you credentials",
    "NoSuchBucket": "aws s3 mb, once; in the region of the job",
    "NoRegionError": "--region eu-west-1, or aws configure set region eu-west-1",
    "NoCredentialsError": "aws configure, or aws sso login",
    "EndpointConnectionError": "--region, and whether this machine reaches AWS",
}
_ANSWER = 20.0  # seconds for AWS to be reached, and as many to answer


@final
class AwsCalls:
    """Calls in one region, by the credentials that are set up here."""

    def __init__(self, region: str = "") -> None:
        """``region``: as the AWS settings say where it is empty.

        Raises:
            MissingExtraError: boto3 is not installed.
        """
        try:
            import boto3
        except ImportError:
            raise MissingExtraError("boto3", "sagemaker") from None
        self._session = boto3.Session(region_name=region or None)
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        return self._session.region_name or ""

    def ask(self, service: str, operation: str, *, nothing: Sequence[str] = (), **given: Any) -> dict[str, Any] | None:
        """Return what ``operation`` of ``service`` answers, ``describe_training_job`` of ``sagemaker``.

        ``nothing``: where AWS refuses with one of these in its words, the answer is ``None``.

        Raises:
            RunError: AWS refuses it, or cannot be asked.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client(service), operation)(**given)
        except ClientError as error:
            if any(words in str(error) for words in nothing):
                return None
            told = error.response.get("Error", {})
            raise _refused(str(told.get("Code", "")), str(told.get("Message", error))) from None
        except BotoCoreError as error:
            raise _refused(type(error).__name__, str(error)) from None

    def _client(self, service: str) -> Any:
        from botocore.config import Config

        if service not in self._clients:
            config = Config(connect_timeout=_ANSWER, read_timeout=_ANSWER, retries={"total_max_attempts": 2})
            self._clients[service] = self._session.client(service, config=config)  # pyrefly: ignore[no-matching-overload]
        return self._clients[service]


def split_s3(uri: str) -> dict[str, str]:
    """Return the arguments that name the object ``s3://bucket/a/key`` in calls of S3."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


def _refused(code: str, message: str) -> RunError:
    said = (message.splitlines() or [""])[0]
    fix = _FIXES.get(code, "aws sts get-caller-identity, and what that identity may do")
    return RunError(f"AWS refuses it: {code}: {said}\n    try: {fix}")
