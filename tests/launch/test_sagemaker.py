"""SageMaker as moto plays it: what is asked for and sent, what is missing there, and what is told of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched import NEEDED, SHARED, submission

from phalanx.config import Job, RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.launch.code_files import digest_of
from phalanx.launch.targets import Submission, log_of, write_ticket
from phalanx.launch.targets.aws_calls import AwsCalls
from phalanx.launch.targets.sagemaker import SageMakerTarget
from phalanx.launch.targets.sagemaker_instances import gpus_of
from phalanx.launch.targets.sagemaker_logs import GROUP
from phalanx.report.run_standing import run_standing

moto = pytest.importorskip("moto")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
REQUIRED = NEEDED["sagemaker"]


def handed(folder: Path, **given: Any) -> Submission:
    (folder / "train.py").write_text("def job(): ...\n")
    return replace(submission("sagemaker", folder, **given), name="digits of mine", python=SageMakerTarget.python)


def request(given: Submission) -> dict[str, Any]:
    return json.loads(SageMakerTarget("").prepare(given).files[given.folder / "training-job.json"])


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    with moto.mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        yield client


def keys(client: Any) -> list[str]:
    return [one["Key"] for one in client.list_objects_v2(Bucket="bucket").get("Contents", [])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": "2", **SHARED},
        {"spot": "48h", "time": "12h", "data": "s3://bucket/images", "volume": "500", "region": "eu-west-1"},
        {"environment": "FI_PROVIDER=efa,NCCL_DEBUG=INFO", "tags": "team=vision,cost center=42"},
    ],
)
def test_what_is_asked_for_is_of_the_form_that_sagemaker_has(tmp_path: Path, options: dict[str, str]) -> None:
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("sagemaker")
    asked = request(handed(tmp_path, **options))
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert ParamValidator().validate(asked, shape).generate_report() == ""
    assert shape is not None
    instances = shape.members["ResourceConfig"].members["InstanceType"].metadata["enum"]
    assert asked["ResourceConfig"]["InstanceType"] in instances


def test_a_job_on_one_instance_has_its_run_folder_copied_to_the_bucket(tmp_path: Path) -> None:
    asked = request(handed(tmp_path, spot="48h", time="12h", environment="FI_PROVIDER=efa", tags="team=vision"))
    base = f"s3://bucket/phalanx/{asked['TrainingJobName']}"
    assert asked["CheckpointConfig"] == {"S3Uri": f"{base}/run", "LocalPath": "/opt/ml/checkpoints"}
    assert asked["StoppingCondition"] == {"MaxRuntimeInSeconds": 43_200, "MaxWaitTimeInSeconds": 172_800}
    assert asked["EnableManagedSpotTraining"] is True
    assert asked["Environment"] == {"FI_PROVIDER": "efa"}
    assert asked["Tags"] == [{"Key": "team", "Value": "vision"}]
    entry = ["python", "-m", "phalanx.launch.targets.sagemaker_node"]
    assert asked["AlgorithmSpecification"]["ContainerEntrypoint"] == entry
    (code,) = asked["InputDataConfig"]
    assert code["DataSource"]["S3DataSource"]["S3Uri"] == f"{base}/code/"


def test_a_job_on_several_has_it_on_the_file_system_that_they_share(tmp_path: Path) -> None:
    given = handed(tmp_path, nodes="2", **SHARED)
    asked = request(given)
    assert "CheckpointConfig" not in asked
    assert asked["VpcConfig"] == {"Subnets": ["subnet-0a"], "SecurityGroupIds": ["sg-0a"]}
    source = asked["InputDataConfig"][-1]["DataSource"]["FileSystemDataSource"]
    assert source["FileSystemAccessMode"] == "rw"
    assert source["DirectoryPath"] == "/fsx/runs"
    prepared = SageMakerTarget("").prepare(given)
    run = RunSpec.from_toml(prepared.files[given.runfile])
    name = json.loads(prepared.files[given.folder / "training-job.json"])["TrainingJobName"]
    assert run.folder == Path("input/data/shared", name)
    assert run.job == "train.py"


def test_a_run_is_handed_over_and_found_again(aws: Any, tmp_path: Path) -> None:
    given, target = handed(tmp_path), SageMakerTarget("")
    ticket = target.submit(target.prepare(given))
    base = f"phalanx/{ticket['job']}"
    assert keys(aws) == [f"{base}/code/code.tar.gz", f"{base}/code/run.toml"]
    assert ticket == {"job": ticket["job"], "region": "us-east-1", "run": f"s3://bucket/{base}/run"}
    assert target.standing(ticket, given.run.folder).state == "ended"  # as moto has it: at once
    assert target.standing({**ticket, "job": "another"}, given.run.folder).state == "unknown"
    aws.download_file("bucket", f"{base}/code/code.tar.gz", str(tmp_path / "code.tar.gz"))
    assert request_digest(given) == digest_of(tmp_path / "code.tar.gz")


def request_digest(given: Submission) -> str:
    return json.loads((given.folder / "training-job.json").read_text())["HyperParameters"]["code.tar.gz-sha256"]


def test_the_next_job_of_a_run_goes_on_where_the_last_has_saved(aws: Any, tmp_path: Path) -> None:
    given, target = handed(tmp_path), SageMakerTarget("")
    ticket = target.submit(target.prepare(given))
    write_ticket(given, "sagemaker", ticket)
    again = target.submit(target.prepare(handed(tmp_path)))
    assert again["job"] != ticket["job"]
    assert again["run"] == ticket["run"]
    with pytest.raises(SpecError, match="a run does not move"):
        target.prepare(handed(tmp_path, **SHARED))


TICKET = {"job": "digits-1", "region": "us-east-1", "run": "s3://bucket/digits-1/run"}


def test_the_last_step_is_that_of_the_events_in_the_bucket(aws: Any, tmp_path: Path) -> None:
    given, target = handed(tmp_path), SageMakerTarget("")
    ticket = target.submit(target.prepare(given))
    write_ticket(given, "sagemaker", ticket)
    assert run_standing(given.run.folder).step is None
    key = f"phalanx/{ticket['job']}/run/events.jsonl"
    events = [{"event": "step", "step": step, "loss": step / 8, "note": "x" * 64} for step in range(4000)]
    saved = {"event": "checkpoint", "step": 4000, "path": "/opt/ml/checkpoints/checkpoints/step-4000"}
    lines = [json.dumps(event) for event in (*events, saved)]
    for body, step, checkpoint in (
        ("", None, ""),
        (f"{lines[0]}\n", 0, ""),
        ("\n".join(lines) + "\n", 3999, "step-4000"),
        ("\n".join([*lines, lines[5][:20]]), 3999, "step-4000"),  # copied as it was written
    ):
        aws.put_object(Bucket="bucket", Key=key, Body=body.encode())
        found = run_standing(given.run.folder)
        assert (found.step, found.checkpoint) == (step, checkpoint)
        assert found.loss == (None if step is None else step / 8)


def test_whoever_may_not_read_the_bucket_is_told_how_the_job_stands(
    aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, target = handed(tmp_path), SageMakerTarget("")
    ticket = target.submit(target.prepare(given))

    def denied(*_: Any) -> bytes:
        raise RunError("AWS refuses it: AccessDenied")

    monkeypatch.setattr(AwsCalls, "tail", denied)
    standing = target.standing(ticket, given.run.folder)
    assert standing.state in ("running", "ended")  # as moto has it
    assert not standing.events


def test_a_run_is_stopped_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(AwsCalls, "ask", lambda self, service, operation, **given: asked.append((operation, given)))
    SageMakerTarget("").stop(TICKET, tmp_path)
    ((operation, given),) = asked
    assert (operation, given["TrainingJobName"]) == ("stop_training_job", "digits-1")


def test_a_stop_that_comes_too_late_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from botocore.exceptions import ClientError

    class Late:
        def stop_training_job(self, **_: str) -> None:
            said = {"Code": "ValidationException", "Message": "the training job is in status Completed"}
            raise ClientError({"Error": said}, "StopTrainingJob")

    monkeypatch.setattr(AwsCalls, "_client", lambda *_: Late())
    SageMakerTarget("").stop(TICKET, tmp_path)
    with pytest.raises(RunError, match="AWS refuses it: ValidationException: the training job is in status"):
        AwsCalls("us-east-1").ask("sagemaker", "stop_training_job", TrainingJobName="digits-1")


def test_logs_are_fetched_as_they_are_asked_for(aws: Any, tmp_path: Path) -> None:
    import boto3

    given, target = handed(tmp_path), SageMakerTarget("")
    folder = given.run.folder
    ticket = target.submit(target.prepare(given))
    write_ticket(given, "sagemaker", ticket)
    assert not log_of(folder, None).exists(), "nothing was printed yet"
    logs = boto3.client("logs")
    logs.create_log_group(logGroupName=GROUP)
    streams = [f"{ticket['job']}/algo-{number}-1700000000" for number in (1, 2)]
    now = int(time.time() * 1000)

    def say(stream: str, *said: tuple[int, str]) -> None:
        events = [{"timestamp": now + at, "message": text} for at, text in said]
        logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=events)

    for stream in streams:
        logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
    say(streams[0], (0, "[rank 0] one"), (20, "[rank 0] three"))
    say(streams[1], (10, "[rank 1] two"))
    assert log_of(folder, None).read_text() == "[rank 0] one\n[rank 1] two\n[rank 0] three\n"
    assert log_of(folder, 1).read_text() == "two\n"
    say(streams[1], (30, "algo-2: rank 1 ended with 1"), (40, "[rank 1] four"))
    assert log_of(folder, 1).read_text() == "two\nfour\n"
    assert log_of(folder, None).read_text().count("\n") == 5, "nothing comes twice"


def test_a_refusal_leaves_nothing(aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = SageMakerTarget("")
    given = handed(tmp_path, bucket="s3://nowhere")
    with pytest.raises(RunError, match=r"AWS refuses it: NoSuchBucket: s3://nowhere/.*\n +try: aws s3 mb"):
        target.submit(target.prepare(given))
    assert not given.run.folder.exists()
    given, ask = handed(tmp_path), AwsCalls.ask

    def full(calls: AwsCalls, service: str, operation: str, **how: Any) -> Any:
        if operation == "create_training_job":
            raise RunError("AWS refuses it: ResourceLimitExceeded")
        return ask(calls, service, operation, **how)

    monkeypatch.setattr(AwsCalls, "ask", full)
    with pytest.raises(RunError, match="ResourceLimitExceeded"):
        target.submit(target.prepare(given))
    assert keys(aws) == []
    assert not given.run.folder.exists()


def test_what_is_cut_short_while_sagemaker_answers_is_stopped_and_taken_back(
    aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, target, ask, stopped = handed(tmp_path), SageMakerTarget(""), AwsCalls.ask, list[str]()

    def cut_short(calls: AwsCalls, service: str, operation: str, **how: Any) -> Any:
        if operation == "create_training_job":
            raise KeyboardInterrupt
        if operation == "stop_training_job":
            return stopped.append(how["TrainingJobName"])
        return ask(calls, service, operation, **how)

    monkeypatch.setattr(AwsCalls, "ask", cut_short)
    prepared = target.prepare(given)
    with pytest.raises(KeyboardInterrupt):
        target.submit(prepared)
    assert stopped == [json.loads(prepared.files[given.folder / "training-job.json"])["TrainingJobName"]]
    assert keys(aws) == []
    assert not given.run.folder.exists()


def test_a_folder_whose_run_stands_there_needs_resume_and_resume_needs_one(aws: Any, tmp_path: Path) -> None:
    given, target, job = handed(tmp_path), SageMakerTarget(""), Job.__new__(Job)
    with pytest.raises(SpecError, match="from which SageMaker was handed no run"):
        target.refuse_folder(replace(given.run, resume=True), job)
    target.refuse_folder(replace(given.run, resume="auto"), job)
    write_ticket(given, "sagemaker", target.submit(target.prepare(given)))
    target.refuse_folder(replace(given.run, resume=True), job)
    with pytest.raises(SpecError, match="whose run stands at s3://bucket/phalanx/digits-of-mine-"):
        target.refuse_folder(replace(given.run, resume=False), job)


def test_every_instance_in_the_table_is_one_of_sagemakers() -> None:
    import botocore.session

    names = ("ml.p5.48xlarge", "ml.g6e.12xlarge", "ml.m5.large", "ml.c7i-flex.xlarge", "ml.p9.xlarge")
    assert [gpus_of(name) for name in names] == [8, 4, 0, 0, None]

    model = botocore.session.get_session().get_service_model("sagemaker")
    known = model.shape_for("TrainingInstanceType").metadata["enum"]
    listed = [one for one in known if gpus_of(one)]
    families = {one.split(".")[1] for one in listed}
    assert len(listed) > 40
    assert [one for one in known if one.split(".")[1] in families and not gpus_of(one)] == []


DATA = "s3://bucket/images"


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    given = handed(tmp_path, data=DATA)
    said = asked(replace(given, options={**given.options, **options}))
    assert said == words or (words and said and said.startswith(words))


@pytest.mark.usefixtures("account")
def test_who_may_not_look_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: AwsCalls, service: str, operation: str, own: Any = AwsCalls.ask, **given: Any) -> Any:
        if service == "sts":
            return own(self, service, operation, **given)
        raise RunError("AWS refuses it: AccessDenied: not authorized")

    monkeypatch.setattr(AwsCalls, "ask", ask)
    given = handed(tmp_path, data=DATA)
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
    said = asked(handed(tmp_path))
    assert said
    assert "EndpointConnectionError" in said


@pytest.mark.usefixtures("account")
def test_no_region_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    said = asked(handed(tmp_path))
    assert said
    assert said.startswith("no region is set up")
