"""``--to sagemaker``: a training job of Amazon SageMaker in an image of the user's, by ``boto3``.

The folder of the job goes to S3 as one file. The run folder is ``/opt/ml/checkpoints``, which SageMaker copies to S3
while the job trains, and back for a restart; or it is on a file system that the instances share. ``--patch`` is merged
into the request of CreateTrainingJob. Each instance runs ``sagemaker_node.py``.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import MissingExtraError, PhalanxError, Problem, RunError, SpecError
from phalanx.launch.targets.code_pack import CODE_OPTION, CodePack, folder_and_problems, job_within
from phalanx.launch.targets.handed_over import earlier_ticket
from phalanx.launch.targets.launch_folder import CODE_LIST, State, fetched_log
from phalanx.launch.targets.offer import gpus_of_node
from phalanx.launch.targets.option_checks import (
    NODE_OPTIONS,
    changing_devices,
    merged,
    read_options,
    too_short,
    uneven_nodes,
    wrong_option,
)
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

OPTIONS = {
    "instance": Option(help="instance type", example="ml.p5.48xlarge", needed=True),
    "image": Option(
        help="image with phalanx, in ECR", example="123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1", needed=True
    ),
    "role": Option(help="role that the job has", example="arn:aws:iam::123456789012:role/train", needed=True),
    "bucket": Option(
        help="where code, run folder and output go, s3://...", example="s3://my-bucket/phalanx", needed=True
    ),
    **NODE_OPTIONS,
    "time": Option(help="time limit, at which the run saves and stops [24h]", example="12h", kind="time"),
    "patch": Option(
        help="JSON or TOML file with more of CreateTrainingJob, merged into the request: spot capacity, disks, a VPC",
        example="more.json",
        kind="file",
        through="--patch more.json",
    ),
    "region": Option(help="AWS region; as the AWS settings here say where not given", example="eu-west-1"),
    "code": CODE_OPTION,
}

ROOT = Path("/opt/ml")
"""Folder of SageMaker's files in a container."""

CODE_CHANNEL, SHARED_CHANNEL = "code", "shared"
"""Channels; each is a folder of ``input/data`` below ``ROOT``."""

CODE, RUN = "code.tar.gz", "run.toml"
"""Files of the code's channel."""

LOGS = "/aws/sagemaker/TrainingJobs"
"""Log group of all training jobs in CloudWatch."""

_CHECKPOINTS = "checkpoints"  # folder below ROOT that SageMaker copies to S3, and back
_DAY, _VOLUME = 86_400, 100  # default seconds and GiB
_STOP, _MARGIN = 120, 15  # seconds from SIGTERM to SIGKILL, and those of them for other work than the save
_REQUEST = "training-job.json"
_TAIL = 1 << 18  # bytes of a run's events that are read
_TRAINING = ("Training", "Uploading", "Stopping")  # secondary statuses of a job whose containers run
_STATES: Mapping[str, State] = {"Completed": "ended", "Failed": "failed", "Stopped": "stopped"}
_FORGOTTEN = ("Requested resource not found", "Could not find training job")
_TOO_LATE = ("ValidationException",)  # of a stop after the end


_ANSWER = 20.0  # seconds to connect to AWS, and as many for an answer
_FIXES = {
    "ResourceLimitExceeded": "Service Quotas in the AWS console: the instance type 'for training job usage' (or spot)",
    "NoSuchBucket": "aws s3 mb, once; in the region of the job",
    "NoRegionError": "--region eu-west-1, or aws configure set region eu-west-1",
}


@final
class SageMakerTarget(QueueTarget):
    """SageMaker in the account of this machine's AWS settings."""

    name: ClassVar[str] = "sagemaker"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"

    def prepare(self, submission: Submission) -> Prepared:
        run, region = submission.run, submission.options.get("region")
        code, asked = _request(submission)
        there, listed = asked["HyperParameters"]["run"], CodePack.of(code, without=run.folder).to_text()
        folder = Path(_CHECKPOINTS) if there.startswith("s3://") else Path("input", "data", there)
        text = replace(run, job=job_within(run.job, code), folder=folder).to_toml()
        asked["HyperParameters"][f"{RUN}-sha256"] = hashlib.sha256(text.encode()).hexdigest()
        file, request = submission.folder / _REQUEST, json.dumps(asked, indent=1) + "\n"
        words = ("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{file}")
        return Prepared(
            submission=submission,
            files={submission.folder / CODE_LIST: listed, submission.runfile: text, file: request},
            commands=(
                ("aws", "s3", "cp", CODE, _channel(asked) + CODE),
                ("aws", "s3", "cp", str(submission.runfile), _channel(asked) + RUN),
                (*words, *(("--region", region) if region else ())),
            ),
            notes=(f"HyperParameters gets {CODE}-sha256 once the code is packed",),
        )

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            MissingExtraError: boto3 is not installed.
            RunError: AWS refuses it, or the code changes meanwhile.
            SpecError: no region is set.
        """
        submission = prepared.submission
        calls, code = _calls(submission), _request(submission)[0]
        asked = json.loads(prepared.files[submission.folder / _REQUEST])
        name, begun = asked["TrainingJobName"], list[str]()
        with prepared.written(), tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
            path = Path(folder) / CODE
            asked["HyperParameters"][f"{CODE}-sha256"] = CodePack.of(code, without=submission.run.folder).write(path)
            try:
                for file in (path, submission.runfile):
                    begun.append(f"{_channel(asked)}{file.name}")
                    with file.open("rb") as body:
                        calls.ask("s3", "put_object", Body=body, **split_s3(begun[-1]))
                calls.ask("sagemaker", "create_training_job", **asked)
            except BaseException as error:
                if not isinstance(error, PhalanxError):  # SageMaker may have taken it
                    with suppress(RunError):
                        calls.ask("sagemaker", "stop_training_job", nothing=_TOO_LATE, TrainingJobName=name)
                for uri in begun:
                    with suppress(RunError):
                        calls.ask("s3", "delete_object", **split_s3(uri))
                raise
        return {"job": name, "region": calls.region, "run": asked["HyperParameters"]["run"]}

    def image(self, options: Mapping[str, str]) -> str:
        return options.get("image", "that --image names")

    def try_out(self, prepared: Prepared, patience: float) -> bool:
        """Ask if AWS answers; SageMaker has no dry run for more."""
        _calls(prepared.submission).ask("sts", "get_caller_identity")
        return False

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        calls = AwsCalls(ticket["region"])
        told = calls.ask("sagemaker", "describe_training_job", nothing=_FORGOTTEN, TrainingJobName=ticket["job"])
        events = _last_events(calls, ticket.get("run"))
        if told is None:
            return Standing(state="unknown", detail="SageMaker has forgotten it", events=events)
        secondary = told.get("SecondaryStatus", "")
        state = _STATES.get(told["TrainingJobStatus"], "running" if secondary in _TRAINING else "waiting")
        return Standing(state=state, detail=told.get("FailureReason") or secondary, events=events)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        calls = AwsCalls(ticket["region"])
        calls.ask("sagemaker", "stop_training_job", nothing=_TOO_LATE, TrainingJobName=ticket["job"])

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """Fetch the output from CloudWatch into one file, or that of a rank into its own."""
        calls, job = AwsCalls(ticket["region"]), ticket["job"]
        asked, events = {"logGroupName": LOGS, "logStreamNamePrefix": f"{job}/"}, list[Mapping[str, Any]]()
        while told := calls.ask("logs", "filter_log_events", nothing=("ResourceNotFoundException",), **asked):
            events += told["events"]
            if not told.get("nextToken"):
                break
            asked["nextToken"] = told["nextToken"]
        events.sort(key=lambda event: event["timestamp"])  # stable, so that each container's stay in order
        return fetched_log(folder, job, [event["message"].rstrip("\n") for event in events], rank)


def _calls(submission: Submission) -> AwsCalls:
    calls = AwsCalls(submission.options.get("region", ""))
    if not calls.region:
        raise SpecError([wrong_option(OPTIONS, "region", "none", f"{OPTIONS['region'].help}; they say none")])
    return calls


def _request(submission: Submission) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the code, and the request without the digests of the files.

    Raises:
        SpecError: with all problems of the options.
    """
    run, options = submission.run, submission.options
    code, problems = folder_and_problems(run.job, options.get("code"))
    values, wrong = read_options(OPTIONS, options)
    problems += [*wrong, *changing_devices(run, "SageMaker")]
    if not options.get("bucket", "s3://").startswith("s3://"):
        problems.append(wrong_option(OPTIONS, "bucket", repr(options["bucket"]), OPTIONS["bucket"].help))
    if run.grace > _STOP - _MARGIN:
        given = f"{run.grace:g} on SageMaker, which ends a container {_STOP} seconds after it has asked"
        fix = f"--grace {_STOP - _MARGIN}"
        problems.append(Problem(where="--grace", given=given, allowed=f"at most {_STOP - _MARGIN}", fix=fix))
    name = submission.job_name
    base = f"{values.get('bucket', '').rstrip('/')}/{name}"
    asked = merged(_own_request(submission, values, name, base), values.get("patch", {}))
    try:
        limit, nodes = int(asked["StoppingCondition"]["MaxRuntimeInSeconds"]), asked["ResourceConfig"]["InstanceCount"]
        shared = SHARED_CHANNEL in [one["ChannelName"] for one in asked["InputDataConfig"]]
        problems += [*uneven_nodes(run.plan, nodes), *gpus_of_node(run.plan, nodes, values.get("gpus-per-node"))[1]]
    except (KeyError, TypeError, ValueError):
        given = f"{options['patch']}, with parts of another form"
        raise SpecError([wrong_option(OPTIONS, "patch", given, "what CreateTrainingJob takes")]) from None
    said = f"{options.get('time', f'{limit} seconds')}, of which the last {_STOP} seconds are kept to save"
    problems += too_short(run, limit, _STOP, said, _STOP - _MARGIN)
    if problems:
        raise SpecError(problems)
    there = _run_of(run.folder) or (f"{SHARED_CHANNEL}/{name}" if shared else f"{base}/run")
    _check_place(run, there, nodes, shared=shared)
    if not shared:
        asked["CheckpointConfig"] = {"S3Uri": there, "LocalPath": str(ROOT / _CHECKPOINTS)}
    asked["HyperParameters"] = {"run": there}
    return code, asked


def _own_request(submission: Submission, values: Mapping[str, Any], name: str, base: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": f"{base}/{CODE_CHANNEL}/", "S3DataDistributionType": "FullyReplicated"}
    retries = min(30, submission.run.restarts)  # after an error of SageMaker's own
    return {
        "TrainingJobName": name,
        "RoleArn": values.get("role"),
        "AlgorithmSpecification": {
            "TrainingImage": values.get("image"),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [submission.python, "-m", "phalanx.launch.targets.sagemaker_node"],
        },
        "InputDataConfig": [{"ChannelName": CODE_CHANNEL, "DataSource": {"S3DataSource": source}, "InputMode": "File"}],
        "OutputDataConfig": {"S3OutputPath": f"{base}/output"},
        "ResourceConfig": {
            "InstanceType": values.get("instance"),
            "InstanceCount": values.get("nodes", 1),
            "VolumeSizeInGB": _VOLUME,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": values.get("time", _DAY)},
        **({"RetryStrategy": {"MaximumRetryAttempts": retries}} if retries else {}),
    }


def _check_place(run: RunSpec, there: str, nodes: int, *, shared: bool) -> None:
    """Refuse a run folder that not all instances have, or that has moved."""
    allowed = f"a --patch with a channel {SHARED_CHANNEL} of InputDataConfig on FSx or EFS, and VpcConfig"
    fix = "--patch shared.json, as the how-to page has it"
    if not shared and nodes > 1:
        raise SpecError.of("--nodes", f"{nodes}, without a file system for the run folder that all share", allowed, fix)
    if not shared and run.plan.server:
        given = f"{run.plan}, with a run folder that is copied to a bucket, and the servers' secret in it"
        raise SpecError.of("--plan", given, allowed, fix)
    if shared != there.startswith(f"{SHARED_CHANNEL}/"):
        given = f"{'a' if shared else 'no'} channel {SHARED_CHANNEL}, of a run whose folder is {there}"
        raise SpecError.of("--patch", given, "as it was: a run does not move", "another --run, which begins anew")


def _channel(asked: Mapping[str, Any]) -> str:
    return asked["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]


def _run_of(folder: Path) -> str:
    """Return the place of the run by its last launch; "" if SageMaker has not had it."""
    return (earlier_ticket(folder, SageMakerTarget.name) or {"run": ""})["run"]


def _last_events(calls: AwsCalls, run: object) -> list[Mapping[str, Any]]:
    """Return the last events of a run folder in S3; none if it is elsewhere, or may not be read."""
    found: list[Mapping[str, Any]] = []
    if not (isinstance(run, str) and run.startswith("s3://")):
        return found
    nothing = ("NoSuchKey", "NoSuchBucket", "InvalidRange")  # the last: an empty object
    with suppress(RunError):
        told = calls.ask("s3", "get_object", nothing=nothing, Range=f"bytes=-{_TAIL}", **split_s3(f"{run}/{EVENTS}"))
        for line in (told["Body"].read() if told else b"").splitlines():
            with suppress(ValueError):  # the first and the last may be cut
                event = json.loads(line)
                found += [event] if isinstance(event, dict) and "event" in event else []
    return found


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
        self.region = self._session.region_name or ""

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
        fix = _FIXES.get(code, "aws sts get-caller-identity, and what that identity may do; aws sso login")
        raise RunError(f"AWS refuses it: {code}: {(said.splitlines() or [''])[0]}\n    try: {fix}")

    def _client(self, service: str) -> Any:
        from botocore.config import Config

        config = Config(connect_timeout=_ANSWER, read_timeout=_ANSWER, retries={"total_max_attempts": 2})
        return self._session.client(service, config=config)  # pyrefly: ignore[no-matching-overload]


def split_s3(uri: str) -> dict[str, str]:
    """Return bucket and key of ``s3://bucket/a/key`` as arguments of S3's operations."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}
