"""One timeout holds for every process group that a run has, those that torch makes by itself included."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_step_traffic import job_for

from phalanx.comm import Place, default_process_group, place_within
from phalanx.config import Plan
from phalanx.launch import launch
from phalanx.train.assembly import build

SECONDS = 77.0


def timeouts(group: Any) -> list[float]:
    backend = group._get_backend(torch.device("cpu"))
    return [backend.options._timeout / timedelta(seconds=1)] if hasattr(backend, "options") else []


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("dp=2", 1),
        ("dp=2 compress=fp16", 2),
        ("dp=2 sync=local", 1),
        ("dp=2 fsdp=2", 3),
        ("fsdp=2 tp=2 recompute=full", 3),
        ("pp=2 fsdp=2 micro=2", 3),
        ("fsdp=2 cp=2", 3),
    ],
)
def test_every_group_has_the_timeout_of_the_run(text: str, groups: int) -> None:
    plan = Plan.parse(text)

    def work(place: Place, report: Callable[[int], None]) -> list[float]:
        torch.set_num_threads(1)
        cpu = torch.device("cpu")
        with default_process_group(place_within(plan, place), cpu):
            assembly = build(job_for(text), plan, place, cpu)
            assembly.step(next(iter(assembly.loader)))
            found = [one for group in dist.distributed_c10d._world.pg_map for one in timeouts(group)]
            if assembly.local_sgd:
                found += timeouts(assembly.local_sgd.across.group)
        return found

    for found in launch(work, plan.world_size, timeout=SECONDS):
        assert len(found) >= groups
        assert set(found) == {SECONDS}
