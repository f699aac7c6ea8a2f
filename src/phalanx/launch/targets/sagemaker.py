"""``--to sagemaker``: a training job of Amazon SageMaker in an image of the user's, by ``boto3``.

The folder of the job goes to S3 as one file. The run folder is ``/opt/ml/checkpoints``, which SageMaker copies to S3
while the job trains, and back for a restart; or it is on a file system that the instances share. ``--patch`` is merged
into the request of CreateTrainingJob. Each instance runs ``sagemaker_node.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, Problem, RunError, SpecError
from phalanx.hardware.catalog import find
from phalanx.launch.runfile import check_folder
from phalanx.launch.targets.aws_calls import AwsCalls, split_s3
from phalanx.launch.targets.code_pack import CODE_OPTION, CodePack, folder_and_problems, job_within
from phalanx.launch.targets.handed_over import earlier_ticket
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, State, append_new
from phalanx.launch.targets.offer import Offer, misfit
from phalanx.launch.targets.option_checks import (
    changing_devices,
    merged,
    read_options,
    secret_names,
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
    "nodes": Option(help="instances, each with an equal part of the plan's processes [1]", example="2", kind="count"),
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
_LONGEST_NAME = 63
_REQUEST = "training-job.json"
_TAIL = 1 << 18  # bytes of a run's events that are read
_TRAINING = ("Training", "Uploading", "Stopping")  # secondary statuses of a job whose containers run
_STATES: Mapping[str, State] = {"Completed": "ended", "Failed": "failed", "Stopped": "stopped"}
_FORGOTTEN = ("Requested resource not found", "Could not find training job")
_TOO_LATE = ("ValidationException",)  # of a stop after the end
_OF_RANK = re.compile(r"\[rank (\d+)\] (.*)")  # as node_agent.py marks it


@final
class SageMakerTarget(QueueTarget):
    """SageMaker in the account of this machine's AWS settings."""

    name: ClassVar[str] = "sagemaker"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"

    def prepare(self, submission: Submission) -> Prepared:
        run, region = submission.run, submission.options.get("region")
        code, asked = _request(submission)
        there, pack = asked["HyperParameters"]["run"], CodePack.of(code, without=run.folder)
        folder = Path(_CHECKPOINTS) if there.startswith("s3://") else Path("input", "data", there)
        text = replace(run, job=job_within(run.job, code), folder=folder).to_toml()
        digests = {CODE: pack.digest, RUN: hashlib.sha256(text.encode()).hexdigest()}
        asked["HyperParameters"] |= {f"{name}-sha256": digest for name, digest in digests.items()}
        file = submission.folder / _REQUEST
        words = ("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{file}")
        return Prepared(
            submission=submission,
            files={
                submission.folder / CODE_LIST: pack.to_text(),
                submission.runfile: text,
                file: json.dumps(asked, indent=1) + "\n",
            },
            commands=(
                ("aws", "s3", "cp", CODE, _channel(asked) + CODE),
                ("aws", "s3", "cp", str(submission.runfile), _channel(asked) + RUN),
                (*words, *(("--region", region) if region else ())),
            ),
        )

    def refuse_folder(self, run: RunSpec, job: Job) -> None:
        """Refuse to resume without an earlier run there, or to begin anew with one."""
        there, folder = _run_of(run.folder), run.folder
        check_folder(replace(run, resume="auto" if there and run.resume else False), job=job)
        if there and not run.resume:
            allowed = "a new folder, or --resume to go on"
            raise SpecError.of("run.folder", f"{folder}, whose run stands at {there}", allowed, "--resume")
        if run.resume is True and not there:
            given = f"--resume with {folder}, from which SageMaker was handed no run"
            raise SpecError.of("run.folder", given, "the folder of an earlier launch there", "--resume auto")

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        """Return the instances as EC2 describes them; ``None`` if it does not, or the catalog lacks their GPU."""
        values, problems = read_options(OPTIONS, options)
        if wrong := [one for one in problems if one.where == "--instance"]:
            raise SpecError(wrong)
        if any(one.where == "--nodes" for one in problems):
            return None
        instance, nodes = values["instance"], values.get("nodes", 1)
        names = [instance.removeprefix("ml.")]
        calls = AwsCalls(options.get("region", ""))
        told = calls.ask("ec2", "describe_instance_types", nothing=("InvalidInstanceType",), InstanceTypes=names)
        return _offered(told["InstanceTypes"][0], instance, nodes) if told and told["InstanceTypes"] else None

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            MissingExtraError: boto3 is not installed.
            RunError: AWS refuses it, or the code has changed meanwhile.
            SpecError: no region is set.
        """
        submission = prepared.submission
        calls = AwsCalls(submission.options.get("region", ""))
        if not calls.region:
            raise SpecError([wrong_option(OPTIONS, "region", "none", f"{OPTIONS['region'].help}; they say none")])
        with suppress(RunError):  # a launch may be allowed to a user who may not ask EC2
            offer = self.offer(submission.options)
            if offer and (problem := misfit(submission.run.plan, offer)):
                raise SpecError([problem])
        asked = json.loads(prepared.files[submission.folder / _REQUEST])
        with prepared.written(), _sent(calls, submission, asked):
            calls.ask("sagemaker", "create_training_job", **asked)
        return {"job": asked["TrainingJobName"], "region": calls.region, "run": asked["HyperParameters"]["run"]}

    def image(self, options: Mapping[str, str]) -> str:
        return options.get("image", "that --image names")

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str | None:
        """Return why AWS cannot be asked, or has no such bucket; SageMaker has no dry run for more."""
        options = prepared.submission.options
        try:
            calls = AwsCalls(options.get("region", ""))
            if not calls.region:
                return "no region is set up: --region, or aws configure set region"
            calls.ask("sts", "get_caller_identity")
            bucket = split_s3(options["bucket"])["Bucket"]
            with suppress(RunError):  # a launch may be allowed to a user who may not ask for the bucket
                if calls.ask("s3", "head_bucket", nothing=("(404)",), Bucket=bucket) is None:
                    return f"there is no bucket {bucket}"
        except PhalanxError as error:
            return str(error).partition("\n")[0]
        return None

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
        job, lines = ticket["job"], _printed(AwsCalls(ticket["region"]), ticket["job"])
        if rank is not None:
            found = (_OF_RANK.fullmatch(line) for line in lines)
            lines = [one[2] for one in found if one and int(one[1]) == rank]
        path = folder / FOLDER / (f"{job}.log" if rank is None else f"{job}.rank-{rank}.log")
        append_new(path, lines)
        return path


def _request(submission: Submission) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the code, and the request without the digests of the files.

    Raises:
        SpecError: with all problems of the options.
    """
    run, options = submission.run, submission.options
    code, problems = folder_and_problems(run.job, options.get("code"))
    values, wrong = read_options(OPTIONS, options)
    problems += wrong
    if not options.get("bucket", "s3://").startswith("s3://"):
        problems.append(wrong_option(OPTIONS, "bucket", repr(options["bucket"]), OPTIONS["bucket"].help))
    problems += changing_devices(run, "SageMaker")
    if run.grace > _STOP - _MARGIN:
        given = f"{run.grace:g} on SageMaker, which ends a container {_STOP} seconds after it has asked"
        fix = f"--grace {_STOP - _MARGIN}"
        problems.append(Problem(where="--grace", given=given, allowed=f"at most {_STOP - _MARGIN}", fix=fix))
    end = f"-{submission.token}"
    head = re.sub(r"[^a-zA-Z0-9]+", "-", submission.name).strip("-")[: _LONGEST_NAME - len(end)].strip("-")
    name = f"{head or 'job'}{end}"
    base = f"{values.get('bucket', '').rstrip('/')}/{name}"
    asked = merged(_own_request(submission, values, name, base), values.get("patch", {}))
    try:
        limit, nodes = int(asked["StoppingCondition"]["MaxRuntimeInSeconds"]), asked["ResourceConfig"]["InstanceCount"]
        channels, variables = [one["ChannelName"] for one in asked["InputDataConfig"]], [*asked.get("Environment", {})]
        problems += uneven_nodes(run.plan, nodes, "each")
    except (KeyError, TypeError, ValueError):
        given = f"{options['patch']}, with parts of another form"
        raise SpecError([wrong_option(OPTIONS, "patch", given, "what CreateTrainingJob takes")]) from None
    said = f"{options.get('time', f'{limit} seconds')}, of which the last {_STOP} seconds are kept to save"
    problems += [*too_short(run, limit, _STOP, said, _STOP - _MARGIN), *map(_secret, secret_names(variables))]
    if problems:
        raise SpecError(problems)
    shared = SHARED_CHANNEL in channels
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


def _secret(name: str) -> Problem:
    fix = "AWS Secrets Manager: boto3.client('secretsmanager').get_secret_value(...) in the job"
    allowed = "text that all may read who may describe the job; a secret the job reads itself, by its role"
    return wrong_option(OPTIONS, "patch", f"Environment with {name}, a secret by its name", allowed, fix)


def _check_place(run: RunSpec, there: str, nodes: int, *, shared: bool) -> None:
    """Refuse a run folder that not all instances have, or that has moved."""
    allowed = f"a --patch with a channel {SHARED_CHANNEL} of InputDataConfig on FSx or EFS, and VpcConfig"
    where, given, fix = "", "", "--patch shared.json, as the how-to page has it"
    if not shared and nodes > 1:
        where, given = "--nodes", f"{nodes}, without a file system for the run folder that all share"
    elif not shared and run.plan.server:
        where = "--plan"
        given = f"{run.plan}, with a run folder that is copied to a bucket, and the servers' secret in it"
    elif shared != there.startswith(f"{SHARED_CHANNEL}/"):
        where, allowed = "--patch", "as it was: a run does not move"
        given = f"{'a' if shared else 'no'} channel {SHARED_CHANNEL}, of a run whose folder is {there}"
        fix = "another --run, which begins anew"
    if where:
        raise SpecError.of(where, given, allowed, fix)


def _channel(asked: Mapping[str, Any]) -> str:
    return asked["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]


def _run_of(folder: Path) -> str:
    """Return the place of the run by its last launch; "" if SageMaker has not had it."""
    return (earlier_ticket(folder, SageMakerTarget.name) or {"run": ""})["run"]


def _offered(told: Mapping[str, Any], instance: str, nodes: int) -> Offer | None:
    cores, memory = told["VCpuInfo"]["DefaultVCpus"], told["MemoryInfo"]["SizeInMiB"] * 2**20
    gpus = told.get("GpuInfo", {}).get("Gpus", [])
    others = [one for one in gpus if one.get("Manufacturer") != "NVIDIA"]
    if others or "NeuronInfo" in told or "InferenceAcceleratorInfo" in told:
        given, allowed = f"{instance}, whose devices are no GPUs of NVIDIA", "a type with GPUs of NVIDIA, or none"
        raise SpecError([wrong_option(OPTIONS, "instance", given, allowed)])
    if not gpus:
        return Offer(nodes=nodes, devices=1, cores=cores, memory=memory, by=instance)
    size = round(gpus[0].get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024)
    kind = find(f"{gpus[0]['Name']}-{size}GB") or find(gpus[0]["Name"])
    return Offer(nodes=nodes, devices=gpus[0]["Count"], device=kind.device.name, by=instance) if kind else None


def _printed(calls: AwsCalls, job: str) -> list[str]:
    """Return all lines of a job's containers by their time; stable, so that each container's stay in order."""
    asked = {"logGroupName": LOGS, "logStreamNamePrefix": f"{job}/"}
    names = [one["logStreamName"] for one in calls.pages("logs", "describe_log_streams", "logStreams", **asked)]
    lines: list[tuple[int, str]] = []
    for name in names:
        events = calls.pages("logs", "filter_log_events", "events", logGroupName=LOGS, logStreamNames=[name])
        lines += [(event["timestamp"], event["message"].rstrip("\n")) for event in events]
    return [text for _, text in sorted(lines, key=lambda line: line[0])]


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


@contextmanager
def _sent(calls: AwsCalls, submission: Submission, asked: Mapping[str, Any]) -> Iterator[None]:
    """Copy the code and the run file to S3; remove them, and stop the job, if the block raises."""
    code, begun = _request(submission)[0], list[str]()
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
            path = Path(folder) / CODE
            digest = CodePack.of(code, without=submission.run.folder).write(path)
            if digest != asked["HyperParameters"][f"{CODE}-sha256"]:
                what = f"{code} changed while it was handed over"
                raise RunError(f"{what}\n    try: once more, when nothing writes there")
            for file in (path, submission.runfile):
                begun.append(f"{_channel(asked)}{file.name}")
                with file.open("rb") as body:
                    calls.ask("s3", "put_object", Body=body, **split_s3(begun[-1]))
        yield
    except BaseException as error:
        if not isinstance(error, PhalanxError):  # SageMaker may have taken it
            with suppress(RunError):
                name = asked["TrainingJobName"]
                calls.ask("sagemaker", "stop_training_job", nothing=_TOO_LATE, TrainingJobName=name)
        for uri in begun:
            with suppress(RunError):
                calls.ask("s3", "delete_object", **split_s3(uri))
        raise
