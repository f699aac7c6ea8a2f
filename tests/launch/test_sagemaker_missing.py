"""What a launch on SageMaker names and AWS has not is found before it is handed over; moto plays AWS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_sagemaker import REQUIRED, submission

from phalanx.errors import RunError
from phalanx.launch.targets import Submission
from phalanx.launch.targets.aws_calls import AwsCalls
from phalanx.launch.targets.sagemaker import SageMakerTarget

moto = pytest.importorskip("moto")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
DATA = "s3://bucket/images"


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that has all that ``REQUIRED`` names, and data."""
    settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    import boto3

    with moto.mock_aws():
        store = boto3.client("s3")
        store.create_bucket(Bucket="bucket")
        store.put_object(Bucket="bucket", Key="images/0.png", Body=b"0")
        boto3.client("iam").create_role(RoleName="train", AssumeRolePolicyDocument="{}")
        images = boto3.client("ecr", region_name="eu-west-1")
        images.create_repository(repositoryName="train")
        form = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {"schemaVersion": 2, "mediaType": form, "config": {"digest": "sha256:0"}, "layers": []}
        images.put_image(repositoryName="train", imageTag="1", imageManifest=json.dumps(manifest))
        yield


def asked(given: Submission) -> str | None:
    target = SageMakerTarget("")
    return target.why_not(target.prepare(given), 60.0)


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),  # whether it would take it, nobody can ask
        ({"image": "registry.example/train:1"}, None),
        ({"bucket": "s3://made-up/runs"}, "there is no bucket made-up"),
        ({"role": "arn:aws:iam::123456789012:role/made-up"}, "there is no role arn:aws:iam::123456789012:role/made-up"),
        ({"data": "s3://bucket/none"}, "there is nothing at s3://bucket/none"),
        ({"data": "s3://made-up/images"}, "there is nothing at s3://made-up/images"),
        ({"image": REQUIRED["image"].replace(":1", ":2")}, "there is no image"),
        ({"image": REQUIRED["image"].replace("/train", "/made-up")}, "there is no image"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, options: dict[str, str], words: str | None) -> None:
    given = submission(tmp_path, data=DATA)
    said = asked(replace(given, options={**given.options, **options}))
    assert said == words or (words and said and said.startswith(words))


@pytest.mark.usefixtures("account")
def test_who_may_not_look_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: AwsCalls, service: str, operation: str, own: Any = AwsCalls.ask, **given: Any) -> Any:
        if service == "sts":
            return own(self, service, operation, **given)
        raise RunError("AWS refuses it: AccessDenied: not authorized")

    monkeypatch.setattr(AwsCalls, "ask", ask)
    given = submission(tmp_path, data=DATA)
    made_up = {"bucket": "s3://made-up/runs", "role": "arn:aws:iam::123456789012:role/made-up"}
    assert asked(replace(given, options={**given.options, **made_up})) is None


def test_that_aws_cannot_be_asked_is_said_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    said = asked(submission(tmp_path))
    assert said
    assert "EndpointConnectionError" in said


@pytest.mark.usefixtures("account")
def test_no_region_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    said = asked(submission(tmp_path))
    assert said
    assert said.startswith("no region is set up")
