"""``--to sagemaker``: a training job of Amazon SageMaker, in an image of one's own, by its API alone (``boto3``).

The folder of the job goes to S3 as one file. The run folder is ``/opt/ml/checkpoints``, which SageMaker copies to S3
while the job trains, and back where it is started again; or it is on a file system that the instances share. What the
job does on each instance is in ``sagemaker_node.py``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.launch.runfile import check_folder
from phalanx.launch.targets.aws_calls import AwsCalls, split_s3
from phalanx.launch.targets.code_pack import CodePack
from phalanx.launch.targets.handed_over import earlier_ticket
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, State
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.sagemaker_instances import instances_offered
from phalanx.launch.targets.sagemaker_job import CODE, RUN, JobPlaces, digest_of_text, run_text, to_json, training_job
from phalanx.launch.targets.sagemaker_logs import TrainingLogs
from phalanx.launch.targets.sagemaker_options import OPTIONS, SageMakerRequest
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

_REQUEST = "training-job.json"
_TAIL = 1 << 18  # bytes of a run's events that are looked at
_TRAINING = ("Training", "Uploading", "Stopping")  # secondary statuses of a job whose containers run
_OVER: dict[str, State] = {"Completed": "ended", "Failed": "failed", "Stopped": "stopped"}
_FORGOTTEN = ("Requested resource not found", "Could not find training job")
_TOO_LATE = ("ValidationException",)  # of a stop, after its end


@final
class SageMakerTarget(QueueTarget):
    """SageMaker in the account that the AWS settings of this machine lead to."""

    name: ClassVar[str] = "sagemaker"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"  # of the image

    def __init__(self, address: str) -> None:
        if address:
            allowed = "nothing after the colon: options say what, such as --instance"
            raise SpecError.of(where="--to", given=f"'sagemaker:{address}'", allowed=allowed, fix="--to sagemaker")

    def prepare(self, submission: Submission) -> Prepared:
        request = SageMakerRequest.of(submission)
        pack = CodePack.of(request.code, without=submission.run.folder)
        places = JobPlaces.of(submission, request, _run_of(submission.run.folder))
        run = run_text(submission.run, request.code, places)
        digests = {CODE: pack.digest, RUN: digest_of_text(run)}
        asked = training_job(submission, request, places, digests)
        file = submission.folder / _REQUEST
        region = ("--region", request.region) if request.region else ()
        words = ("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{file}")
        return Prepared(
            submission=submission,
            files={submission.folder / CODE_LIST: pack.to_text(), submission.runfile: run, file: to_json(asked)},
            commands=(
                ("aws", "s3", "cp", CODE, places.uri(CODE)),
                ("aws", "s3", "cp", str(submission.runfile), places.uri(RUN)),
                (*words, *region),
            ),
        )

    def refuse_folder(self, run: RunSpec, job: Job) -> None:
        """The folder here has but the ticket of a run that stands in S3, or on a file system there."""
        there, folder = _run_of(run.folder), run.folder
        check_folder(replace(run, resume="auto" if there and run.resume else False), job=job)
        if there and not run.resume:
            allowed = "a new folder, or --resume to go on"
            raise SpecError.of("run.folder", f"{folder}, whose run stands at {there}", allowed, "--resume")
        if run.resume is True and not there:
            given = f"--resume with {folder}, from which SageMaker was handed no run"
            raise SpecError.of("run.folder", given, "the folder of an earlier launch there", "--resume auto")

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        return instances_offered(options)

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            MissingExtraError: boto3 is not installed.
            RunError: AWS refuses it, or the code has changed meanwhile.
            SpecError: no region is set up.
        """
        submission = prepared.submission
        request = SageMakerRequest.of(submission)
        calls = AwsCalls(request.region)
        if not calls.region:
            allowed = f"{OPTIONS['region'].help}; they say none"
            raise SpecError.of("--region", "none", allowed, f"--region {OPTIONS['region'].example}")
        asked = json.loads(prepared.files[submission.folder / _REQUEST])
        with prepared.written(), _sent(calls, submission, request, asked):
            calls.ask("sagemaker", "create_training_job", **asked)
        return {"job": asked["TrainingJobName"], "region": calls.region, "run": asked["HyperParameters"]["run"]}

    def image(self, options: Mapping[str, str]) -> str:
        return options.get("image", "that --image names")

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str | None:
        """What is not there of what the launch names, as far as one may look; SageMaker cannot be asked the rest."""
        try:
            return what_is_missing(SageMakerRequest.of(prepared.submission), patience) or None
        except PhalanxError as error:
            return str(error).partition("\n")[0]

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        name, region = ticket["job"], ticket["region"]
        calls = AwsCalls(region)
        told = calls.ask("sagemaker", "describe_training_job", nothing=_FORGOTTEN, TrainingJobName=name)
        events = _last_events(calls, ticket.get("run"))
        if told is None:
            return Standing(state="unknown", detail="SageMaker has forgotten it", events=events)
        return replace(_standing(told), events=events)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        name, region = ticket["job"], ticket["region"]
        AwsCalls(region).ask("sagemaker", "stop_training_job", nothing=_TOO_LATE, TrainingJobName=name)

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        name, region = ticket["job"], ticket["region"]
        logs = TrainingLogs(AwsCalls(region), name, folder / FOLDER)
        logs.fetch()
        return logs.path(rank)


def _standing(told: Mapping[str, Any]) -> Standing:
    """As SageMaker describes the job."""
    status, secondary = told["TrainingJobStatus"], told.get("SecondaryStatus", "")
    last = (told.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", "")
    if status == "Failed":
        return Standing(state="failed", detail=told.get("FailureReason") or secondary)
    detail = f"{secondary}: {last}" if last else secondary
    if status in _OVER:
        return Standing(state=_OVER[status], detail=secondary if status == "Completed" else detail)
    return Standing(state="running" if secondary in _TRAINING else "waiting", detail=detail)


def _last_events(calls: AwsCalls, run: object) -> list[Mapping[str, Any]]:
    """The last events of a run whose folder is copied to S3; none of one elsewhere, or where it may not be read."""
    found: list[Mapping[str, Any]] = []
    if not (isinstance(run, str) and run.startswith("s3://")):
        return found
    with suppress(RunError):  # whoever may ask for a job need not read its bucket
        for line in calls.tail(f"{run}/{EVENTS}", _TAIL).splitlines():
            with suppress(ValueError):  # of the first there may be the end alone, of the last the beginning
                event = json.loads(line)
                found += [event] if isinstance(event, dict) and "event" in event else []
    return found


def _run_of(folder: Path) -> str:
    """Return where the run in ``folder`` stands by its last launch; empty where SageMaker has not had it."""
    return (earlier_ticket(folder, SageMakerTarget.name) or {"run": ""})["run"]


@contextmanager
def _sent(
    calls: AwsCalls, submission: Submission, request: SageMakerRequest, asked: Mapping[str, Any]
) -> Generator[None]:
    """Copy the code and the run file to S3; they are removed there where it fails within."""
    source = asked["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    begun: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
            path = Path(folder) / CODE
            digest = CodePack.of(request.code, without=submission.run.folder).write(path)
            if digest != asked["HyperParameters"][f"{CODE}-sha256"]:
                what = f"{request.code} changed while it was handed over"
                raise RunError(f"{what}\n    try: once more, when nothing writes there")
            for name, file in ((CODE, path), (RUN, submission.runfile)):
                begun.append(f"{source}{name}")
                calls.upload(file, f"{source}{name}")
        yield
    except BaseException as error:
        if not isinstance(error, PhalanxError):  # SageMaker may have taken it
            with suppress(RunError):
                name = asked["TrainingJobName"]
                calls.ask("sagemaker", "stop_training_job", nothing=_TOO_LATE, TrainingJobName=name)
        for uri in begun:
            bucket, key = split_s3(uri)
            with suppress(RunError):
                calls.ask("s3", "delete_object", Bucket=bucket, Key=key)
        raise


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
