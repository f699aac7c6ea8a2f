"""Calls of AWS by ``boto3``, whose errors come as ours, in AWS's own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from phalanx.errors import MissingExtraError, RunError

_FIXES = {
    "ResourceLimitExceeded": "Service Quotas in the AWS console: the instance type 'for training job usage' (or spot)",
    "AccessDenied": "aws sts get-caller-identity, and what that identity may do",
    "AccessDeniedException": "aws sts get-caller-identity, and what that identity may do",
    "ExpiredToken": "aws sso login, or what gives you credentials",
    "ExpiredTokenException": "aws sso login, or what gives you credentials",
    "UnrecognizedClientException": "aws sts get-caller-identity",
    "NoSuchBucket": "aws s3 mb, once; in the region of the job",
    "NoRegionError": "--region eu-west-1, or aws configure set region eu-west-1",
    "NoCredentialsError": "aws configure, or aws sso login",
    "EndpointConnectionError": "--region, and whether this machine reaches AWS",
}

_NOTHING_THERE = ("NoSuchKey", "NoSuchBucket", "InvalidRange")  # the last of an object without a byte

_CAUSE = re.compile(r"An error occurred \((\w+)\) when calling the \w+ operation(?: \([^)]*\))?: (.*)")


@final
class AwsCalls:
    """Calls in one region, by the credentials that are set up here."""

    def __init__(self, region: str = "", patience: float | None = None) -> None:
        """``region``: as the AWS settings say where it is empty.

        ``patience``: seconds for AWS to be reached, and as many to answer, once; ``None``: as boto3 has it.

        Raises:
            MissingExtraError: boto3 is not installed.
        """
        try:
            import boto3
        except ImportError:
            raise MissingExtraError("boto3", "sagemaker") from None
        self._session = boto3.Session(region_name=region or None)
        self._clients: dict[str, Any] = {}
        self._patience = patience

    @property
    def region(self) -> str:
        return self._session.region_name or ""

    def ask(self, service: str, operation: str, *, nothing: Sequence[str] = (), **given: Any) -> dict[str, Any] | None:
        """What ``operation`` of ``service`` answers, ``describe_training_job`` of ``sagemaker``.

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

    def upload(self, path: Path, uri: str) -> None:
        """Copy a file to S3.

        Raises:
            RunError: AWS refuses it, or cannot be asked.
        """
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, key = split_s3(uri)
        try:
            self._client("s3").upload_file(str(path), bucket, key)
        except ClientError as error:
            told = error.response.get("Error", {})
            raise _refused(str(told.get("Code", "")), f"{uri}: {told.get('Message', error)}") from None
        except (BotoCoreError, Boto3Error) as error:
            said = _CAUSE.search(str(error))  # of a transfer, whose error names its cause in its text alone
            code, message = said.groups() if said else (type(error).__name__, str(error))
            raise _refused(code, f"{uri}: {message}") from None

    def tail(self, uri: str, nbytes: int) -> bytes:
        """The last so many bytes of an object in S3; empty where there is none.

        Raises:
            RunError: AWS refuses it, or cannot be asked.
        """
        from botocore.exceptions import BotoCoreError

        (bucket, key), last = split_s3(uri), f"bytes=-{nbytes}"
        told = self.ask("s3", "get_object", nothing=_NOTHING_THERE, Bucket=bucket, Key=key, Range=last)
        try:
            return told["Body"].read() if told else b""
        except BotoCoreError as error:
            raise _refused(type(error).__name__, f"{uri}: {error}") from None

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._session.client(service, config=self._config())  # pyrefly: ignore[no-matching-overload]
        return self._clients[service]

    def _config(self) -> Any:
        if self._patience is None:
            return None
        from botocore.config import Config

        once = {"total_max_attempts": 1}
        return Config(connect_timeout=self._patience, read_timeout=self._patience, retries=once)


def split_s3(uri: str) -> tuple[str, str]:
    """The bucket, and the key, of ``s3://bucket/a/key``."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def _refused(code: str, message: str) -> RunError:
    said = (message.splitlines() or [""])[0]
    return RunError(f"AWS refuses it: {code}: {said}\n    try: {_FIXES.get(code, 'aws sts get-caller-identity')}")
