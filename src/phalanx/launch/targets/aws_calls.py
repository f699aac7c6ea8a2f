"""Calls of AWS by ``boto3``, whose errors become ours, in AWS's own words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from phalanx.errors import MissingExtraError, RunError

_ANSWER = 20.0  # seconds to connect to AWS, and as many for an answer
_FIXES = {
    "ResourceLimitExceeded": "Service Quotas in the AWS console: the instance type 'for training job usage' (or spot)",
    "ExpiredToken": "aws sso login, or another way to credentials",
    "ExpiredTokenException": "aws sso login, or another way to credentials",
    "NoSuchBucket": "aws s3 mb, once; in the region of the job",
    "NoRegionError": "--region eu-west-1, or aws configure set region eu-west-1",
    "NoCredentialsError": "aws configure, or aws sso login",
}


@final
class AwsCalls:
    """Calls in one region, with the credentials of this machine."""

    def __init__(self, region: str = "") -> None:
        """``region``: "" for that of the AWS settings.

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
        """Return the answer of ``operation`` of ``service``; ``None`` for an error with a text of ``nothing``.

        Raises:
            RunError: AWS refuses it, or does not answer.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client(service), operation)(**given)
        except ClientError as error:
            if any(words in str(error) for words in nothing):
                return None
            told = error.response.get("Error", {})
            code, said = str(told.get("Code", "")), str(told.get("Message", error))
        except BotoCoreError as error:
            code, said = type(error).__name__, str(error)
        fix = _FIXES.get(code, "aws sts get-caller-identity, and what that identity may do")
        raise RunError(f"AWS refuses it: {code}: {(said.splitlines() or [''])[0]}\n    try: {fix}")

    def pages(self, service: str, operation: str, key: str, **given: Any) -> Iterator[dict[str, Any]]:
        """Yield the items of all pages of an operation; none if its resource does not exist."""
        while True:
            told = self.ask(service, operation, nothing=("ResourceNotFoundException",), **given) or {}
            yield from told.get(key, [])
            if not told.get("nextToken"):
                return
            given["nextToken"] = told["nextToken"]

    def _client(self, service: str) -> Any:
        from botocore.config import Config

        if service not in self._clients:
            config = Config(connect_timeout=_ANSWER, read_timeout=_ANSWER, retries={"total_max_attempts": 2})
            self._clients[service] = self._session.client(service, config=config)  # pyrefly: ignore[no-matching-overload]
        return self._clients[service]


def split_s3(uri: str) -> dict[str, str]:
    """Return bucket and key of ``s3://bucket/a/key`` as arguments of S3's operations."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}
