"""A rank that others wait for is named in the events while the run goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_step_traffic import job_for

import phalanx as px
from phalanx.config import Plan
from phalanx.launch import straggler_watch


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


def _shorter() -> tuple[Any, ...]:
    before = straggler_watch.StragglerWatch.__init__.__defaults__ or ()
    return tuple(3.0 if one == straggler_watch.WINDOW else one for one in before)
