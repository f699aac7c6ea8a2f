"""``--to sagemaker``: a training job of Amazon SageMaker, in an image of one's own, by its API alone (``boto3``).

The folder of the job goes to S3 as one file. The run folder is ``/opt/ml/checkpoints``, which SageMaker copies to S3
while the job trains, and back where it is started again; or it is on a file system that the instances share. What the
job does on each instance is in ``sagemaker_node.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.files import open_plain
from phalanx.hardware.catalog import find
from phalanx.launch.runfile import check_folder
from phalanx.launch.targets.aws_calls import AwsCalls, split_s3
from phalanx.launch.targets.code_pack import CodePack
from phalanx.launch.targets.handed_over import earlier_ticket
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, State, append
from phalanx.launch.targets.offer import Offer, misfit
from phalanx.launch.targets.option_checks import is_count
from phalanx.launch.targets.sagemaker_request import CODE, OPTIONS, RUN, TrainingJob
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

LOGS = "/aws/sagemaker/TrainingJobs"
"""The log group of all training jobs in CloudWatch."""

_REQUEST = "training-job.json"
_TAIL = 1 << 18  # bytes of a run's events that are looked at
_TRAINING = ("Training", "Uploading", "Stopping")  # secondary statuses of a job whose containers run
_OVER: dict[str, State] = {"Completed": "ended", "Failed": "failed", "Stopped": "stopped"}
_FORGOTTEN = ("Requested resource not found", "Could not find training job")
_NO_TYPE = ("InvalidInstanceType",)
_TOO_LATE = ("ValidationException",)  # of a stop, after its end
_OF_RANK = re.compile(r"\[rank (\d+)\] (.*)")  # as node_agent.py marks it


@final
class SageMakerTarget(QueueTarget):
    """SageMaker in the account that the AWS settings of this machine lead to."""

    name: ClassVar[str] = "sagemaker"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"  # of the image

    def prepare(self, submission: Submission) -> Prepared:
        job = TrainingJob.of(submission, _run_of(submission.run.folder))
        pack = CodePack.of(job.code, without=submission.run.folder)
        run = job.run_text(submission.run)
        digests = {CODE: pack.digest, RUN: hashlib.sha256(run.encode()).hexdigest()}
        job.asked["HyperParameters"] |= {f"{name}-sha256": digest for name, digest in digests.items()}
        file, region = submission.folder / _REQUEST, submission.options.get("region")
        words = ("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{file}")
        return Prepared(
            submission=submission,
            files={
                submission.folder / CODE_LIST: pack.to_text(),
                submission.runfile: run,
                file: json.dumps(job.asked, indent=1) + "\n",
            },
            commands=(
                ("aws", "s3", "cp", CODE, job.uri(CODE)),
                ("aws", "s3", "cp", str(submission.runfile), job.uri(RUN)),
                (*words, *(("--region", region) if region else ())),
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
        """As EC2 describes the instance type; ``None`` where it does not, or its GPU is not in the catalog."""
        instance, nodes = options.get("instance", ""), options.get("nodes", "1")
        if not instance:
            given, fix = "none", f"--instance {OPTIONS['instance'].example}"
            raise SpecError.of("--instance", given, OPTIONS["instance"].help, fix)
        if not is_count(nodes, 1):
            return None
        name = instance.removeprefix("ml.")
        calls = AwsCalls(options.get("region", ""))
        told = calls.ask("ec2", "describe_instance_types", nothing=_NO_TYPE, InstanceTypes=[name])
        return _offered(told["InstanceTypes"][0], instance, int(nodes)) if told and told["InstanceTypes"] else None

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            MissingExtraError: boto3 is not installed.
            RunError: AWS refuses it, or the code has changed meanwhile.
            SpecError: no region is set up.
        """
        submission = prepared.submission
        calls = AwsCalls(submission.options.get("region", ""))
        if not calls.region:
            allowed = f"{OPTIONS['region'].help}; they say none"
            raise SpecError.of("--region", "none", allowed, f"--region {OPTIONS['region'].example}")
        with suppress(RunError):  # who hands over a run need not be allowed to look
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
        """Whether AWS can be asked, and has the bucket; what else SageMaker refuses it says as it is handed a job."""
        options = prepared.submission.options
        try:
            calls = AwsCalls(options.get("region", ""))
            if not calls.region:
                return "no region is set up: --region, or aws configure set region"
            calls.ask("sts", "get_caller_identity")
            bucket = split_s3(options["bucket"])["Bucket"]
            with suppress(RunError):  # who hands over a run need not be allowed to look
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
        status, secondary = told["TrainingJobStatus"], told.get("SecondaryStatus", "")
        detail = told.get("FailureReason") or secondary
        running: State = "running" if secondary in _TRAINING else "waiting"
        return Standing(state=_OVER.get(status, running), detail=detail, events=events)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        calls = AwsCalls(ticket["region"])
        calls.ask("sagemaker", "stop_training_job", nothing=_TOO_LATE, TrainingJobName=ticket["job"])

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """Fetch what has been printed from CloudWatch; one file has all, each rank its own."""
        job, lines = ticket["job"], _printed(AwsCalls(ticket["region"]), ticket["job"])
        if rank is not None:
            found = (_OF_RANK.fullmatch(line) for line in lines)
            lines = [one[2] for one in found if one and int(one[1]) == rank]
        path = folder / FOLDER / (f"{job}.log" if rank is None else f"{job}.rank-{rank}.log")
        known = Counter[str]()
        with suppress(FileNotFoundError), os.fdopen(open_plain(path, os.O_RDONLY, below=2), newline="") as file:
            known.update(line.removesuffix("\n") for line in file)
        new = list[str]()
        for line in lines:  # whoever follows the file reads on where it ended: lines that come late go to its end
            known[line] -= 1
            new += [line] if known[line] < 0 else []
        if new:
            append(path, "".join(f"{line}\n" for line in new).encode())
        return path


def _offered(told: Mapping[str, Any], instance: str, nodes: int) -> Offer | None:
    """Return what so many instances of a type have, by how EC2 describes it."""
    cores, memory = told["VCpuInfo"]["DefaultVCpus"], told["MemoryInfo"]["SizeInMiB"] * 2**20
    gpus = told.get("GpuInfo", {}).get("Gpus", [])
    others = [one for one in gpus if one.get("Manufacturer") != "NVIDIA"]
    if others or "NeuronInfo" in told or "InferenceAcceleratorInfo" in told:
        given, allowed = f"{instance}, whose devices are no GPUs of NVIDIA", "a type with GPUs of NVIDIA, or none"
        raise SpecError.of("--instance", given, allowed, f"--instance {OPTIONS['instance'].example}")
    if not gpus:
        return Offer(nodes=nodes, devices=1, cores=cores, memory=memory, by=instance)
    size = round(gpus[0].get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024)
    kind = find(f"{gpus[0]['Name']}-{size}GB") or find(gpus[0]["Name"])
    return Offer(nodes=nodes, devices=gpus[0]["Count"], device=kind.device.name, by=instance) if kind else None


def _printed(calls: AwsCalls, job: str) -> list[str]:
    """Return all lines that the containers of a job have printed so far, by their time."""
    lines: list[tuple[int, str]] = []
    asked = {"logGroupName": LOGS, "logStreamNamePrefix": f"{job}/"}
    for stream in _pages(calls, "describe_log_streams", "logStreams", asked):
        of = {"logGroupName": LOGS, "logStreamNames": [stream["logStreamName"]]}
        events = _pages(calls, "filter_log_events", "events", of)
        lines += [(event["timestamp"], event["message"].rstrip("\n")) for event in events]
    return [text for _, text in sorted(lines, key=lambda line: line[0])]  # stable: of one host as they came


def _pages(calls: AwsCalls, operation: str, key: str, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    more: dict[str, Any] = {}
    while True:
        told = calls.ask("logs", operation, nothing=("ResourceNotFoundException",), **asked, **more) or {}
        yield from told.get(key, [])
        if not told.get("nextToken"):
            return
        more = {"nextToken": told["nextToken"]}


def _last_events(calls: AwsCalls, run: object) -> list[Mapping[str, Any]]:
    """Return the last events of a run whose folder is copied to S3; none of one elsewhere, or that may not be read."""
    found: list[Mapping[str, Any]] = []
    if not (isinstance(run, str) and run.startswith("s3://")):
        return found
    nothing = ("NoSuchKey", "NoSuchBucket", "InvalidRange")  # the last of an object without a byte
    with suppress(RunError):  # whoever may ask for a job need not read its bucket
        told = calls.ask("s3", "get_object", nothing=nothing, Range=f"bytes=-{_TAIL}", **split_s3(f"{run}/{EVENTS}"))
        for line in (told["Body"].read() if told else b"").splitlines():
            with suppress(ValueError):  # of the first there may be the end alone, of the last the beginning
                event = json.loads(line)
                found += [event] if isinstance(event, dict) and "event" in event else []
    return found


def _run_of(folder: Path) -> str:
    """Return where the run in ``folder`` stands by its last launch; empty where SageMaker has not had it."""
    return (earlier_ticket(folder, SageMakerTarget.name) or {"run": ""})["run"]


@contextmanager
def _sent(calls: AwsCalls, submission: Submission, asked: Mapping[str, Any]) -> Iterator[None]:
    """Copy the code and the run file to S3; they are removed there where it fails within."""
    source = asked["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    code = TrainingJob.of(submission, _run_of(submission.run.folder)).code
    begun: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
            path = Path(folder) / CODE
            if (
                CodePack.of(code, without=submission.run.folder).write(path)
                != asked["HyperParameters"][f"{CODE}-sha256"]
            ):
                what = f"{code} changed while it was handed over"
                raise RunError(f"{what}\n    try: once more, when nothing writes there")
            for file in (path, submission.runfile):
                begun.append(f"{source}{file.name}")
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
