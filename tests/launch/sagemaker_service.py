"""SageMaker on this machine: moto's servers keep jobs, objects and logs; containers, which they leave out, are here.

Each container is a process with a folder in place of ``/opt/ml``, on a host of its own where a job has several.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import boto3
from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import AWSValidationException
from moto.sagemaker.models import sagemaker_backends

import phalanx as px
from phalanx.launch.reaper import fork
from phalanx.launch.targets.aws_calls import split_s3
from phalanx.launch.targets.sagemaker_logs import GROUP
from phalanx.launch.worker_process import die_with

ACCOUNT, REGION = "123456789012", "us-east-1"
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEXAMPLETOKEN",
    "AWS_DEFAULT_REGION": REGION,
}
"""Variables by which this machine has credentials; none of their secrets may be found anywhere else."""


@final
class Service:
    """Runs the containers of jobs in ``folder``, ``make_hosts(2)`` giving the hosts of those that have several."""

    def __init__(self, folder: Path, make_hosts: Callable[[int], px.Hosts]) -> None:
        self._folder, self._make_hosts = folder, make_hosts
        self._hosts: dict[int, px.Hosts] = {}
        self._running: dict[str, Containers] = {}

    def start(self, job: str) -> Containers:
        """Start the containers of a job that was handed over; once more where its capacity had been taken back."""
        count = boto3.client("sagemaker").describe_training_job(TrainingJobName=job)["ResourceConfig"]["InstanceCount"]
        if count > 1 and count not in self._hosts:
            self._hosts[count] = self._make_hosts(count)
        self.stands(job, "InProgress", "Training")
        self._running[job] = Containers(job, self._folder, self._hosts.get(count), self.stands)
        return self._running[job]

    def stands(self, job: str, status: str, secondary: str = "", reason: str = "") -> None:
        """Say so of a job from now on."""
        there = sagemaker_backends[ACCOUNT][REGION].training_jobs[job]
        there.training_job_status, there.secondary_status = status, secondary or status
        there.secondary_status_transitions = [{"Status": secondary or status, "StatusMessage": ""}]
        if reason:
            there.failure_reason = reason

    def stop_training_job(self, response: Any) -> ActionResult:
        """The operation that moto lacks: ``response`` is its answer under way."""
        job = response._get_param("TrainingJobName")
        status = sagemaker_backends[ACCOUNT][REGION].training_jobs[job].training_job_status
        if status != "InProgress":
            said = f"The request was rejected because the training job is in status {status}."
            raise AWSValidationException(said)
        self.stands(job, "Stopping")
        self._running[job].stop()
        return ActionResult({})

    def close(self) -> None:
        """End every container, by force."""
        for running in self._running.values():
            running.close()


@final
class Containers:
    """The containers of one start of a job, each with a root ``algo-N`` in ``folder``."""

    def __init__(self, job: str, folder: Path, hosts: px.Hosts | None, stands: Callable[..., None]) -> None:
        self.job, self._folder, self._hosts, self._stands = job, folder, hosts, stands
        self._asked: dict[str, Any] = boto3.client("sagemaker").describe_training_job(TrainingJobName=job)
        self._names = [hosts.address(number) for number in range(hosts.count)] if hosts else ["algo-1"]
        self.roots = [folder / f"algo-{number + 1}" for number in range(len(self._names))]
        self._stopped = False
        self._began, self._told = int(time.time()), [0] * len(self.roots)
        for name, root in zip(self._names, self.roots, strict=True):
            self._set_up(name, root)
        self._pids = [self._started(number) for number in range(len(self.roots))]

    @property
    def run(self) -> Path:
        """The run folder, as this machine sees it."""
        run = self._asked["HyperParameters"]["run"]
        return self.roots[0] / "checkpoints" if run.startswith("s3://") else self._shared / run.partition("#")[2]

    def signal(self, number: int = signal.SIGTERM) -> None:
        """To the first process of each, as SageMaker sends it."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_in_turn(self) -> None:
        """As it may come to them: to each as the one before has ended."""
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        """Have them save, for the job to be over."""
        self._stopped = True
        self.signal()

    def wait(self, seconds: float = 180, *, taken_back: bool = False) -> list[int]:
        """Wait for their end, and do what SageMaker does then. Returns the exit codes.

        ``taken_back``: it was the capacity's, and the job waits for more.
        """
        codes = self._exit_codes(seconds)
        self.copy_run()
        self.copy_logs()
        if taken_back:
            self._stands(self.job, "InProgress", "Interrupted")
        elif self._stopped:
            self._stands(self.job, "Stopped")
        elif set(codes) == {0}:
            self._stands(self.job, "Completed")
        else:
            reason = next(filter(None, map(self.failure, range(len(codes)))), "")
            self._stands(self.job, "Failed", reason=f"AlgorithmError: {reason}, exit code: {max(codes)}")
        return codes

    def copy_run(self) -> None:
        """Files below ``checkpoints`` to S3: no empty folders, links and modes."""
        if "CheckpointConfig" in self._asked:
            bucket, key = split_s3(self._asked["CheckpointConfig"]["S3Uri"])
            client = boto3.client("s3")
            for path in sorted(self.run.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    with suppress(FileNotFoundError):  # the run goes on, and removes what it has no use for
                        where = f"{key}/{path.relative_to(self.run)}"
                        client.put_object(Bucket=bucket, Key=where, Body=path.read_bytes())

    def copy_logs(self) -> None:
        """What was printed since the last time, to CloudWatch: a stream for each container."""
        client = boto3.client("logs")
        with suppress(client.exceptions.ResourceAlreadyExistsException):
            client.create_log_group(logGroupName=GROUP)
        for number, root in enumerate(self.roots):
            stream = f"{self.job}/algo-{number + 1}-{self._began}"
            with suppress(client.exceptions.ResourceAlreadyExistsException):
                client.create_log_stream(logGroupName=GROUP, logStreamName=stream)
            text = root.with_suffix(".out").read_text(errors="replace")
            new, self._told[number] = text[self._told[number] :], len(text)
            now = int(time.time() * 1000)
            if lines := [line for line in new.splitlines() if line]:
                said = [{"timestamp": now, "message": line} for line in lines]
                client.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=said)

    def said(self) -> str:
        """What they have printed."""
        return "\n".join(root.with_suffix(".out").read_text(errors="replace") for root in self.roots)

    def failure(self, number: int = 0) -> str:
        """What a container has left as its reason to fail."""
        path = self.roots[number] / "output" / "failure"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """End them all, by force."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids = []

    @property
    def _shared(self) -> Path:
        return self._folder / "shared"

    def _exit_codes(self, seconds: float) -> list[int]:
        until, codes = time.monotonic() + seconds, dict[int, int]()
        while len(codes) < len(self._pids):
            for pid in self._pids:
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)
        pids, self._pids = self._pids, []
        return [codes[pid] for pid in pids]

    def _set_up(self, name: str, root: Path) -> None:
        """Leave below the root of a new machine what SageMaker copies there."""
        shutil.rmtree(root, ignore_errors=True)
        config, data = root / "input" / "config", root / "input" / "data"
        config.mkdir(parents=True)
        (config / "hyperparameters.json").write_text(json.dumps(self._asked["HyperParameters"]))
        place = {"current_host": name, "hosts": self._names, "network_interface_name": "net0"}
        (config / "resourceconfig.json").write_text(json.dumps(place))
        for channel in self._asked["InputDataConfig"]:
            source, there = channel["DataSource"], data / channel["ChannelName"]
            if "S3DataSource" in source:
                _copy_from(source["S3DataSource"]["S3Uri"].rstrip("/"), there)
            else:
                self._shared.mkdir(exist_ok=True)
                data.mkdir(exist_ok=True)
                there.symlink_to(self._shared)
        if "CheckpointConfig" in self._asked:
            (root / "checkpoints").mkdir()
            _copy_from(self._asked["CheckpointConfig"]["S3Uri"], root / "checkpoints")

    def _started(self, number: int) -> int:
        launcher, root = os.getpid(), self.roots[number]
        words = [*self._asked["AlgorithmSpecification"]["ContainerEntrypoint"], str(root)]
        out = os.open(root.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        pid = fork()
        if pid == 0:
            try:
                die_with(launcher)
                if self._hosts:
                    self._hosts.enter(number * self._hosts.per_host)
                os.setsid()
                os.dup2(out, 1)
                os.dup2(out, 2)
                here = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
                path = f"{Path(sys.executable).parent}{os.pathsep}{here.get('PATH', '')}"
                os.execvpe(words[0], words, {**here, "PATH": path, "OMP_NUM_THREADS": "1"})
            finally:
                os._exit(1)
        os.close(out)
        return pid


def _copy_from(uri: str, folder: Path) -> None:
    bucket, key = split_s3(uri)
    client = boto3.client("s3")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{key}/"):
        for one in page.get("Contents", []):
            path = folder / one["Key"].removeprefix(f"{key}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=bucket, Key=one["Key"])["Body"].read())
