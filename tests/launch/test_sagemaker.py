"""SageMaker as moto plays it: what is asked for and sent, what is missing there, and what is told of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched import shared, submission

from phalanx.config import Job, RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.launch.code_files import digest_of
from phalanx.launch.targets.handed_over import log_of, write_ticket
from phalanx.launch.targets.sagemaker import LOGS, AwsCalls, SageMakerTarget
from phalanx.launch.targets.target import Submission
from phalanx.report.run_standing import run_standing

moto = pytest.importorskip("moto")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


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


def spot(folder: Path) -> dict[str, str]:
    """Options for spot capacity, by a patch."""
    path = folder / "spot.toml"
    path.write_text("EnableManagedSpotTraining = true\nStoppingCondition.MaxWaitTimeInSeconds = 172800\n")
    return {"patch": str(path)}


def keys(client: Any) -> list[str]:
    return [one["Key"] for one in client.list_objects_v2(Bucket="bucket").get("Contents", [])]


def test_what_is_asked_for_is_of_the_form_that_sagemaker_has(tmp_path: Path) -> None:
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    more = {"Environment": {"FI_PROVIDER": "efa"}, "Tags": [{"Key": "team", "Value": "vision"}]}
    for options in ({}, {"time": "12h"}, {"nodes": "2", **shared(tmp_path, **more)}, spot(tmp_path)):
        asked = request(handed(tmp_path, **options))
        assert ParamValidator().validate(asked, shape).generate_report() == ""


def test_a_job_on_one_instance_has_its_run_folder_copied_to_the_bucket(tmp_path: Path) -> None:
    asked = request(handed(tmp_path, time="12h", **spot(tmp_path)))
    base = f"s3://bucket/phalanx/{asked['TrainingJobName']}"
    assert asked["CheckpointConfig"] == {"S3Uri": f"{base}/run", "LocalPath": "/opt/ml/checkpoints"}
    assert asked["StoppingCondition"] == {"MaxRuntimeInSeconds": 43_200, "MaxWaitTimeInSeconds": 172_800}
    assert asked["EnableManagedSpotTraining"] is True
    entry = ["python", "-m", "phalanx.launch.targets.sagemaker_node"]
    assert asked["AlgorithmSpecification"]["ContainerEntrypoint"] == entry
    (code,) = asked["InputDataConfig"]
    assert code["DataSource"]["S3DataSource"]["S3Uri"] == f"{base}/code/"


def test_a_job_on_several_has_it_on_the_file_system_that_they_share(tmp_path: Path) -> None:
    """What is merged in adds to lists, changes a part of an object, and takes the place of all else."""
    more = {"ResourceConfig": {"VolumeSizeInGB": 500}, "StoppingCondition": {"MaxRuntimeInSeconds": 7200}}
    given = handed(tmp_path, nodes="2", **shared(tmp_path, **more))
    asked = request(given)
    assert "CheckpointConfig" not in asked
    assert asked["VpcConfig"] == {"Subnets": ["subnet-0a"], "SecurityGroupIds": ["sg-0a"]}
    assert [channel["ChannelName"] for channel in asked["InputDataConfig"]] == ["code", "shared"]
    assert asked["ResourceConfig"] == {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2, "VolumeSizeInGB": 500}
    assert asked["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200}
    prepared = SageMakerTarget("").prepare(given)
    run = RunSpec.from_toml(prepared.files[given.runfile])
    name = json.loads(prepared.files[given.folder / "training-job.json"])["TrainingJobName"]
    assert run.folder == Path("input/data/shared", name)
    assert run.job == "train.py"


def test_a_run_is_handed_over_and_found_again(aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[dict[str, Any]](), AwsCalls.ask

    def keep(calls: AwsCalls, service: str, operation: str, **given: Any) -> Any:
        asked.extend([given] if operation == "create_training_job" else [])
        return ask(calls, service, operation, **given)

    monkeypatch.setattr(AwsCalls, "ask", keep)
    given, target = handed(tmp_path), SageMakerTarget("")
    ticket = target.submit(target.prepare(given))
    base = f"phalanx/{ticket['job']}"
    assert keys(aws) == [f"{base}/code/code.tar.gz", f"{base}/code/run.toml"]
    assert ticket == {"job": ticket["job"], "region": "us-east-1", "run": f"s3://bucket/{base}/run"}
    assert target.standing(ticket, given.run.folder).state == "ended"  # as moto has it: at once
    assert target.standing({**ticket, "job": "another"}, given.run.folder).state == "unknown"
    aws.download_file("bucket", f"{base}/code/code.tar.gz", str(tmp_path / "code.tar.gz"))
    (told,) = asked
    assert told["HyperParameters"]["code.tar.gz-sha256"] == digest_of(tmp_path / "code.tar.gz")
    assert told["HyperParameters"]["run.toml-sha256"] == digest_of(given.runfile)


def test_the_next_job_of_a_run_goes_on_where_the_last_has_saved(aws: Any, tmp_path: Path) -> None:
    given, target = handed(tmp_path), SageMakerTarget("")
    ticket = target.submit(target.prepare(given))
    write_ticket(given, "sagemaker", ticket)
    again = target.submit(target.prepare(handed(tmp_path)))
    assert again["job"] != ticket["job"]
    assert again["run"] == ticket["run"]
    with pytest.raises(SpecError, match="a run does not move"):
        target.prepare(handed(tmp_path, **shared(tmp_path)))


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

    def ask(self: AwsCalls, service: str, operation: str, own: Any = AwsCalls.ask, **given: Any) -> Any:
        if service == "s3":
            raise RunError("AWS refuses it: AccessDenied")
        return own(self, service, operation, **given)

    monkeypatch.setattr(AwsCalls, "ask", ask)
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
    logs.create_log_group(logGroupName=LOGS)
    streams = [f"{ticket['job']}/algo-{number}-1700000000" for number in (1, 2)]
    now = int(time.time() * 1000)

    def say(stream: str, *said: tuple[int, str]) -> None:
        events = [{"timestamp": now + at, "message": text} for at, text in said]
        logs.put_log_events(logGroupName=LOGS, logStreamName=stream, logEvents=events)

    for stream in streams:
        logs.create_log_stream(logGroupName=LOGS, logStreamName=stream)
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
    with pytest.raises(RunError, match=r"AWS refuses it: NoSuchBucket: .*\n +try: aws s3 mb"):
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
    with pytest.raises(SpecError, match="resume"):
        target.refuse_folder(replace(given.run, resume=True), job)
    target.refuse_folder(replace(given.run, resume="auto"), job)
    write_ticket(given, "sagemaker", target.submit(target.prepare(given)))
    target.refuse_folder(replace(given.run, resume=True), job)
    with pytest.raises(SpecError, match="whose run sagemaker has"):
        target.refuse_folder(replace(given.run, resume=False), job)


@pytest.mark.usefixtures("aws")
def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = SageMakerTarget("")

    def asked(**options: str) -> str | None:
        return target.why_not(target.prepare(handed(tmp_path, **options)))

    assert asked() is None  # whether it would take it, nobody can ask
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert "EndpointConnectionError" in (asked() or "")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert (asked() or "").startswith("--region: given none")
