"""What grows with real processes, 1 to 64 of them on this machine: meeting, groups, connections, a small run."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx as px
from phalanx.comm import Mesh, Place, alike, default_process_group, meet
from phalanx.config import Plan
from phalanx.launch.addresses import LOOPBACK, listen_at
from phalanx.launch.reaper import fork

PROCESSES = (1, 8, 64)
_LATE = "TORCH_GLOO_LAZY_INIT"  # what Phalanx sets for more than 256 ranks
_PATIENCE = 300.0  # seconds that ranks wait for each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What is measured with processes, in words; ``law`` as it is written, its ``power`` as a number.

    ``above``: why what was measured grows faster; empty where it does not.
    """

    name: str
    what: str
    where: str
    law: str
    power: float
    above: str = ""


MEASURED: tuple[Measured, ...] = (
    Measured(
        name="meet",
        what="seconds until all have met at the store",
        where="all together",
        law="O(n)",
        power=1.0,
        above="processes are begun one after the other, the first waits for the last, and that for cores which those "
        "that wait keep busy",
    ),
    Measured(
        name="group", what="seconds to make the default group (gloo)", where="all together", law="O(n²)", power=2.0
    ),
    Measured(
        name="late group",
        what="the same, connected when they first talk, as of more than 256 ranks",
        where="all together",
        law="O(n)",
        power=1.0,
    ),
    Measured(
        name="axes", what="seconds to make groups of two and of n / 2", where="all together", law="O(n²)", power=2.0
    ),
    Measured(name="sockets", what="connections of the default group (gloo)", where="each rank", law="O(n)", power=1.0),
    Measured(
        name="late sockets",
        what="the same, connected when they first talk",
        where="each rank",
        law="O(log n)",
        power=0.2,
    ),
    Measured(name="keys", what="keys in the store, all groups made", where="one place", law="O(n)", power=1.0),
    Measured(
        name="alike", what="seconds to find that all have the same", where="all together", law="O(n log n)", power=1.2
    ),
    Measured(name="resident", what="MiB that a rank has for itself", where="each rank", law="O(n)", power=1.0),
    Measured(name="start", what="seconds from `px.fit` to its first step", where="all together", law="O(n)", power=1.0),
    Measured(name="events", what="bytes of the event log of 8 steps", where="one place", law="O(n)", power=1.0),
    Measured(name="ledger", what="files of the ledger", where="all together", law="O(n)", power=1.0),
)


def measure(processes: int) -> dict[str, float]:
    """Every one of ``MEASURED``, by name, with so many processes."""
    found = dict(meeting(processes))
    os.environ[_LATE] = "1"
    found |= {f"late {name}": value for name, value in meeting(processes).items()}
    del os.environ[_LATE]
    return found | dict(small_run(processes))


def meeting(processes: int) -> Mapping[str, float]:
    """The largest of what each rank measures as they meet and make their groups."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    every = [_forked(lambda rank=rank: _rank(rank, processes, port)) for rank in range(processes)]
    reports = [_report_of(pid, pipe) for pid, pipe in every]
    return {name: max(report[name] for report in reports) for name in reports[0]}


def _forked(action: Callable[[], Any]) -> tuple[int, int]:
    reads, writes = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.close(reads)
            os.write(writes, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    return pid, reads


def _report_of(pid: int, pipe: int) -> dict[str, float]:
    with os.fdopen(pipe) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def _rank(rank: int, world: int, port: int) -> dict[str, float]:
    torch.set_num_threads(1)
    listen_at(LOOPBACK)
    found: dict[str, float] = {}
    place = Place(
        rank=rank,
        world_size=world,
        local_rank=rank,
        store="env://",
        meeting=f"{LOOPBACK}:{port}",
        timeout=_PATIENCE,
    )
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        found[name] = now - began
        began = now

    store = meet(place)
    lap("meet")
    before = _sockets()
    with default_process_group(place, torch.device("cpu")):
        lap("group")
        found["sockets"] = _sockets() - before
        began = time.perf_counter()
        if world > 1:
            mesh = Mesh(Plan(dp=world // 2, tp=2), rank)
            mesh.group("tp")
            mesh.group("dp")
        lap("axes")
        alike(rank // world)
        lap("alike")
        if world > 1:
            dist.barrier()
        found["keys"] = store.num_keys()
        found["resident"] = _own_memory()
        if world > 1:
            dist.barrier()
    return found


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def _own_memory() -> float:
    """MiB that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    values = dict(line.split(":", 1) for line in lines)
    return sum(int(values[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) / 1024


def _samples(count: int) -> px.Table:
    generator = torch.Generator().manual_seed(0)
    return px.Table(
        input=torch.randn(count, 8, generator=generator), label=torch.randint(0, 4, (count,), generator=generator)
    )


def small_run(processes: int) -> Mapping[str, float]:
    """A run of 8 steps of 128 samples in so many processes."""
    job = px.Job(
        model=lambda: nn.Linear(8, 4),
        data=lambda: _samples(1024),
        inputs=lambda batch: batch["input"],
        loss=lambda output, batch: px.cross_entropy(output, batch["label"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=128,
        steps=8,
    )
    with TemporaryDirectory() as name:
        began = time.time()
        run = px.fit(
            job, Plan(dp=processes), folder=Path(name) / "run", watch=False, forecast="none", timeout=_PATIENCE
        )
        first = next(run.events("step"))
        return {
            "start": first["time"] - began,
            "events": (run.folder / "events.jsonl").stat().st_size,
            "ledger": sum(1 for _ in (run.folder / "ledger").iterdir()),
        }


def raise_limits() -> None:
    """As many open files as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


if __name__ == "__main__":
    raise_limits()
    print(json.dumps(measure(int(sys.argv[1]))))
