"""A rank that others wait for is named in the events while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from test_step_traffic import job_for

import phalanx as px
from phalanx.config import Plan
from phalanx.events import read
from phalanx.launch import straggler_watch
from phalanx.launch.hang_report import RankStand
from phalanx.launch.hang_watch import WatchedRank
from phalanx.launch.rank_probe import TimeSpent


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2"])
def test_the_slow_rank_is_named_while_the_run_goes_on(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straggler_watch, "_PACE", 0.0)
    monkeypatch.setattr(straggler_watch.StragglerWatch.__init__, "__defaults__", _shorter())
    job = job_for(plan)

    def loss(output: Any, batch: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.3)
        return job.loss(output, batch)

    run = px.fit(
        replace(job, loss=loss, steps=24),
        run=px.RunSpec(job="slow", plan=Plan.parse(plan), folder=tmp_path / "run", forecast="none"),
    )
    events = list(run.events())
    found = [event for event in events if event["event"] == "straggler"]
    assert [event["rank"] for event in found] == [1]
    assert found[0]["factor"] >= straggler_watch.FACTOR
    assert found[0]["time"] < events[-1]["time"]
    paces = [event for event in events if event["event"] == "pace"]
    rank_0, rank_1 = paces[-1]["ranks"]
    assert rank_0[2] > rank_1[2]


def test_a_pace_is_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that are left, as others have ended or are just writing where they stand."""
    clock, there = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), {0, 1}
    monkeypatch.setattr(straggler_watch, "time", clock)

    def ranks() -> Mapping[int, WatchedRank]:
        found: dict[int, Any] = {}
        for rank in there:
            spent = TimeSpent(computes=int(5 * clock.now), waits=int(5 * clock.now), seconds=clock.now)
            told = SimpleNamespace(read=lambda rank=rank, spent=spent: (RankStand(rank=rank), spent))
            found[rank] = SimpleNamespace(step=int(clock.now), files=told)
        return found

    watch = straggler_watch.StragglerWatch(ranks, Plan(dp=2), tmp_path, _paced=0.0)
    for second in range(200):
        clock.now = float(second)
        if second in (60, 130):
            there.discard(0)
        elif second == 70:
            there.add(0)
        watch.look()
    paces = [event for event in read(tmp_path / "events.jsonl") if event["event"] == "pace"]
    # rank 0 is there again after 70 s, and was half a minute before; rank 1 is alone in all of the last one
    assert [[rank for rank, *_ in event["ranks"]] for event in paces] == [[0, 1], [1]]
    assert [event["step"] for event in paces] == [70, 160]


def _shorter() -> tuple[Any, ...]:
    before = straggler_watch.StragglerWatch.__init__.__defaults__ or ()
    return tuple(3.0 if one == straggler_watch.WINDOW else one for one in before)
