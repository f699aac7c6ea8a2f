"""A job in a file, with losses by plain PyTorch; launches of it, hosts and queues of tests; what is left running."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.launch.check import CheckTime, TargetHost, run_here
from phalanx.launch.targets.hosts_file import HostEntry, HostsFile, refuse_size
from phalanx.launch.targets.offer import Offer, gpus_of_node
from phalanx.launch.targets.target import AttachedTarget, Option, Prepared, QueueTarget, Standing, Submission

JOB = """
import time

import torch
from torch import nn

import phalanx as px

PAUSE, STEPS = 0.0, 6  # seconds in each micro-batch's loss; optimizer steps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model():
    torch.manual_seed(0)
    return Net()


def loss(output, batch):
    time.sleep(PAUSE)
    return px.cross_entropy(output, batch["y"])


def job():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return px.Job(
        model=model,
        data=lambda: px.Table(x=x, y=x[:, :4].argmax(1)),
        shuffle=False,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=16,
        steps=STEPS,
    )
"""


def by_hand(steps: int) -> list[float]:
    """The loss of each step, by plain PyTorch on one device.

    At this rate rounding does not grow: fp32 is within 6e-7 of fp64 in 100 steps. At 0.5 it is 4e-4 away, and another
    order of additions, or another processor's kernels, as far.
    """
    scope: dict[str, Any] = {"__name__": "train"}
    exec(JOB, scope)
    model = scope["model"]()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    y, losses = x[:, :4].argmax(1), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        part = slice(16 * (step % 4), 16 * (step % 4) + 16)
        value = nn.functional.cross_entropy(model(x[part]), y[part])
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return losses


def write_job(folder: Path, *, pause: float = 0.0, steps: int = 6) -> Path:
    """The job's file; ``pause``: seconds that each micro-batch takes."""
    path = folder / "train.py"
    path.write_text(JOB.replace("PAUSE, STEPS = 0.0, 6", f"PAUSE, STEPS = {pause}, {steps}"))
    return path


# target → options that a launch there needs; HERE: the folder of the job
NEEDED: dict[str, dict[str, str]] = {
    "slurm": {"nodes": "2"},
    "kubernetes": {"image": "registry/train:1", "nodes": "2", "volume": "data:HERE"},
    "ray": {},
    "sagemaker": {
        "instance": "ml.g5.12xlarge",
        "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
        "role": "arn:aws:iam::123456789012:role/train",
        "bucket": "s3://bucket/phalanx",
    },
    "sky": {"nodes": "2", "shared": "HERE/shared", "setup": "true"},
}
_FSX = {"FileSystemType": "FSxLustre", "FileSystemId": "fs-0123456789abcdef0", "DirectoryPath": "/fsx/runs"}
_SHARED = {
    "InputDataConfig": [
        {"ChannelName": "shared", "DataSource": {"FileSystemDataSource": {**_FSX, "FileSystemAccessMode": "rw"}}}
    ],
    "VpcConfig": {"Subnets": ["subnet-0a"], "SecurityGroupIds": ["sg-0a"]},
}


def shared(folder: Path, **more: Any) -> dict[str, str]:
    """Options for several instances of SageMaker: a file in ``folder`` that is merged into the request."""
    path = folder / "shared.json"
    path.write_text(json.dumps({**_SHARED, **more}))
    return {"patch": str(path)}


def submission(
    target: str, folder: Path, plan: str = "dp=2", *, run: Mapping[str, Any] | None = None, **options: str
) -> Submission:
    """A run of ``folder/train.py``; ``options``: beside those that are needed, or "" in place of one."""
    named = {**NEEDED.get(target, {}), **{name.replace("_", "-"): value for name, value in options.items()}}
    given = {name: value.replace("HERE", str(folder)) for name, value in named.items() if value}
    settings: dict[str, Any] = {"plan": Plan.parse(plan), "grace": 10.0, "resume": "auto", **(run or {})}
    spec = RunSpec(**{"job": str(folder / "train.py"), "folder": folder / "run", **settings})
    return Submission(run=spec, name="digits", python=sys.executable, options=given)


class StandIn(TargetHost):
    """A host that is a process of this machine: with variables of its own, and what stands before its Python.

    ``asked``: the names of those that were asked, in turn.
    """

    asked: ClassVar[list[str]] = []

    def __init__(self, name: str, *, before: Sequence[str] = (), address: str = "", **variables: str) -> None:
        self.name, self.address, self.processes = name, address or "127.0.0.1", 1
        self.before, self.variables = list(before), variables

    def run(self, arguments: Sequence[str], text: str, limit: CheckTime) -> str:
        self.asked.append(self.name)
        words = [f"{name}={value}" for name, value in self.variables.items()]
        return run_here([*self.before, "env", *words, sys.executable, *arguments], text, limit)


class StandIns(AttachedTarget):
    name = "stand-ins"
    options: ClassVar[Mapping[str, Option]] = {}
    made: ClassVar[list[TargetHost]] = []
    sized: ClassVar[bool] = False  # whether a plan for other devices is refused

    def __init__(self, address: str) -> None: ...

    def hosts(self) -> Sequence[TargetHost]:
        return self.made

    def prepare(self, submission: Submission) -> Prepared:
        if self.sized:
            entries = tuple(HostEntry(name=one.name, devices=one.processes, address=one.address) for one in self.made)
            refuse_size(submission.run, HostsFile(hosts=entries))
        return Prepared(submission=submission, files={}, commands=())

    def follow(self, prepared: Prepared, threads: int | None, watch: Any, begun: Any) -> None:
        raise RunError("the run would begin now")


class Queue(QueueTarget):
    """A queue that offers, and says of a run, what a test sets."""

    name = "queue"
    options: ClassVar[Mapping[str, Option]] = {"nodes": Option(help="How many.", example="2")}
    offered: ClassVar[Offer | None] = None
    words: ClassVar[str | None] = ""
    asked: ClassVar[list[Prepared]] = []
    taken: ClassVar[list[Submission]] = []

    def __init__(self, address: str) -> None: ...

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        return self.offered

    def prepare(self, submission: Submission) -> Prepared:
        there = self.offered
        if there and (problems := gpus_of_node(submission.run.plan, there.nodes, there.devices)[1]):
            raise SpecError(problems)
        return Prepared(submission=submission, files={submission.runfile: submission.run.to_toml()}, commands=())

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str | None:
        self.asked.append(prepared)
        return self.words

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        prepared.write()
        self.taken.append(prepared.submission)
        return {"number": 1}

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        return Standing(state="ended")

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        raise NotImplementedError

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        return folder / "log"


def phalanx(*words: str, **how: Any) -> subprocess.Popen[str]:
    """The command, begun; its output is text to be read. ``end_all`` ends those that a failed test leaves."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    _begun.append(process := subprocess.Popen([sys.executable, "-m", "phalanx", *words], **given))
    return process


_begun: list[subprocess.Popen[str]] = []


def end_all() -> None:
    while _begun:
        process = _begun.pop()
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


@pytest.fixture(autouse=True)
def commands_end(_nothing_left: None) -> Iterator[None]:
    """In files that import it: no command outlives its test."""
    yield
    end_all()


def steps_in(folder: Path) -> int:
    log = folder / "events.jsonl"
    return log.read_text().count('"event": "step"') if log.exists() else 0


def await_steps(folder: Path, count: int, process: subprocess.Popen[str] | None = None, patience: float = 120) -> None:
    def reached() -> bool:
        assert process is None or process.poll() is None, process.communicate()
        return steps_in(folder) >= count

    until(reached, patience, f"{count} steps")


def until(reached: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free, out of those that are given only to who asks for one of them."""
    found, any_of = set[int](), random.SystemRandom()
    while len(found) < count:
        port = any_of.randrange(25_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return sorted(found)


def working_in(folder: Path) -> list[str]:
    """Command lines of processes that name ``folder``, or work for a launch, this process aside."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = os.readlink(entry / "cwd")
        except OSError:
            continue
        begun = "phalanx worker" in words or "targets.ssh_node" in words
        if begun and "ssh -T" not in words and cwd.startswith(str(folder)):
            found.append(f"{entry.name}: {words[:100]}")
    return found


def await_none_left(folder: Path, patience: float = 60) -> None:
    """Wait until no worker or agent works in ``folder``."""
    until(lambda: not working_in(folder), patience, "no worker and no agent is left")
