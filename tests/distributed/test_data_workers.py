"""Data workers do not outlive the rank that started them, however it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from phalanx.config import Job
from phalanx.data import Lane, Loader
from phalanx.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(sys.platform != "linux", reason="a death signal from the parent is Linux's"),
]


class Stuck(Dataset[torch.Tensor]):
    """Gives a few samples at once; then reading one takes longer than the test."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 8:
            time.sleep(60)
        return torch.tensor([os.getpid()])


class Dying(Stuck):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def a_job() -> Job:
    unused: Any = print
    return Job(model=unused, data=unused, loss=unused, optimizer=unused, batch=4, epochs=1, workers=2, shuffle=False)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def train(write_end: int) -> None:
    """A rank that loads data until it is killed, and tells which processes load for it."""
    pids: set[int] = set()
    for step in Loader(Stuck(), a_job(), Lane(), micro=None):
        pids |= set(step.parts[0][0].batch.flatten().tolist())
        if step.step == 1:
            os.write(write_end, json.dumps(sorted(pids)).encode())


def test_a_killed_rank_leaves_no_workers() -> None:
    read_end, write_end = os.pipe()
    rank = os.fork()
    if rank == 0:
        try:
            train(write_end)
        finally:
            os._exit(0)
    try:
        workers = json.loads(os.read(read_end, 1000))
        assert len(workers) == 2
        assert all(map(is_alive, workers))
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    end = time.monotonic() + 20  # a busy machine takes its time to take a process down; left alone they sleep for 60 s
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_alive, workers))
    os.close(read_end)
    os.close(write_end)


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(DataError, match="a process that loads data ended") as caught:
        list(Loader(Dying(), a_job(), Lane(), micro=None))
    assert "workers=0" in str(caught.value)
