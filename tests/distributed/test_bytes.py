"""Plans send what the papers say their techniques send, and nothing beside it: counted, byte by byte."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import job
from torch import nn

from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.config.sync import BUCKET_BYTES
from phalanx.launch import launch
from phalanx.train.assembly import build

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from bytes_sent import dense, measured
from counting import Sent
from textbook import terms

SMALL = 500  # bytes of the numbers that every step adds up over ranks: loss, count, norm


def known(place: Place, report: Any) -> dict[str, float]:
    """Programs of which everybody knows what they send."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with default_process_group(place, torch.device("cpu")):
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        x = torch.ones(2, 64)
        replica = DistributedDataParallel(nn.Linear(64, 64, bias=False))
        sharded = fully_shard(nn.Linear(64, 64, bias=False), reshard_after_forward=True)
        for name, module in (("ddp", replica), ("fsdp", sharded)):
            for _ in range(3):  # DDP makes its buckets anew after the first step
                with Sent() as sent:
                    module(x).sum().backward()
            found[name] = sent.total
        with Sent() as sent:
            going, coming = ([2, 3], [2, 2]) if place.rank == 0 else ([2, 2], [3, 2])
            dist.all_to_all_single(torch.empty(sum(coming)), torch.ones(sum(going)), coming, going)
        found["exchange"] = sent.total
        with Sent() as sent:
            if place.rank == 0:
                dist.send(torch.ones(10), 1)
            else:
                dist.recv(torch.ones(10), 0)
        found["message"] = sent.total
    return found


def test_counter_sees_what_known_programs_send() -> None:
    first, second = launch(known, 2)
    weights = 64 * 64 * 4
    assert first["ddp"] == second["ddp"] == weights  # 2 (n - 1) / n
    assert first["fsdp"] == second["fsdp"] == 3 * weights / 2  # gathered twice, scattered once
    assert (first["exchange"], second["exchange"]) == (3 * 4, 2 * 4)
    assert (first["message"], second["message"]) == (40, 0)


@pytest.mark.parametrize(
    "text",
    [
        "dp=2",
        "fsdp=2",
        "tp=2",
        "pp=2 micro=2",
        "cp=2",
        "cp=2 attention=alltoall",
        "fsdp=2 tp=2",
        "fsdp=2 cp=2",
    ],
)
def test_plans_send_what_the_papers_say(text: str) -> None:
    job, model = dense(layers=2, width=32, context=16, batch=4)
    plan = Plan.parse(text)
    due = sum(term.size for term in terms(plan, model, job.batch))
    assert due <= sum(measured(job, plan).values()) <= due + SMALL


class Heavy(nn.Module):
    """Seven layers of 4.8 MiB, of which five fill a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(9, 1120, bias=False), nn.Linear(1120, 5, bias=False)
        self.layers = nn.ModuleList([nn.Linear(1120, 1120, bias=False) for _ in range(7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def scattered(place: Place, report: Any) -> list[tuple[int, int]]:
    """Bytes of each message in which a step scatters gradients, and how many there are."""
    torch.set_num_threads(1)
    with default_process_group(place, torch.device("cpu")):
        assembly = build(job(model=Heavy, batch=4), Plan.parse("fsdp=2 zero=1"), place, torch.device("cpu"))
        with Sent() as sent:
            assembly.step(next(iter(assembly.loader)))
    return [(size, times) for (kind, _, size), times in sent.exchanges.items() if kind == "reduce_scatter"]


def test_gradients_go_in_buckets_as_large_as_forecasts_have_them() -> None:
    found, _ = launch(scattered, 2)
    whole = 4 * sum(tensor.numel() for tensor in Heavy().parameters())
    assert sum(size * times for size, times in found) == pytest.approx(whole, rel=0.001)  # rows of five are padded
    layer = 4 * 1120 * 1120
    full = BUCKET_BYTES // layer * layer  # as ``forecast.memory`` has them
    assert max(found)[0] == pytest.approx(full, rel=0.01)
    assert max(found)[0] <= BUCKET_BYTES
    assert sum(times for _, times in found) == 2
