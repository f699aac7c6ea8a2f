"""A job in a file, with losses by plain PyTorch, and what a command has left running."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(4)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def by_hand(steps: int) -> list[float]:
    """The loss of each step, by plain PyTorch on one device.

    At this rate rounding does not grow: fp32 is within 6e-7 of fp64 in 100 steps. At 0.5 it is 4e-4 away, and another
    order of additions, or another processor's kernels, as far.
    """
    torch.manual_seed(0)
    model = _Net()
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


def phalanx(*words: str, **how: Any) -> subprocess.Popen[str]:
    """The command, begun; its output is text to be read. ``end_all`` ends those that a failed test leaves."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    _begun.append(process := subprocess.Popen([sys.executable, "-m", "phalanx", *words], **given))
    return process


_begun: list[subprocess.Popen[str]] = []


def end_all() -> None:
    """End every command that was begun and goes on."""
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
    """Steps that the log of a run has."""
    log = folder / "events.jsonl"
    return log.read_text().count('"event": "step"') if log.exists() else 0


def await_steps(folder: Path, count: int, process: subprocess.Popen[str] | None = None, patience: float = 120) -> None:
    """Wait until the run has come so far."""
    until = time.monotonic() + patience
    while steps_in(folder) < count:
        assert time.monotonic() < until, f"{steps_in(folder)} steps after {patience} s"
        assert process is None or process.poll() is None, process.communicate()
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
        worker, agent = "phalanx worker" in words, "phalanx-host" in words and "ssh -T" not in words
        if (worker and cwd.startswith(str(folder))) or (agent and words.rstrip().endswith(str(folder))):
            found.append(f"{entry.name}: {words[:100]}")
    return found


def await_none_left(folder: Path, patience: float = 60) -> None:
    """Wait until no worker or agent works in ``folder``."""
    until = time.monotonic() + patience
    while left := working_in(folder):
        assert time.monotonic() < until, left
        time.sleep(0.1)
