"""Slow ranks: they are named while the run goes on, and shares that follow them change no result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from test_step_traffic import job_for

import phalanx as px
from longer import longer
from phalanx.config import Plan
from phalanx.data import audit, records
from phalanx.errors import RefusedError
from phalanx.events import read
from phalanx.events.schema import faults
from phalanx.launch import straggler_watch
from phalanx.launch.hang_report import RankStand
from phalanx.launch.hang_watch import WatchedRank
from phalanx.launch.rank_probe import TimeSpent
from phalanx.train import uneven_shares


class Clock:
    """Seconds of each process by itself, which pass as its model computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven_shares, "time", CLOCK)


class Slow(small.Net):
    """On every second rank a sample takes three times as long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and dist.is_initialized():
            CLOCK.now += len(x) * (0.003 if dist.get_rank() % 2 else 0.001)
        return super().forward(x)


def fit(plan: str, folder: Path, *, resume: bool = False, **how: object) -> px.Run:
    run = px.RunSpec(job="small", plan=Plan.parse(plan), folder=folder, forecast="none", resume=resume)
    return px.fit(small.job(**how), run=run)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("plan", "workers"), [("dp=2 shares=auto micro=4", 2), *longer(("dp=2 shares=auto", 0))])
def test_shares_follow_a_slow_rank_and_change_nothing(clock: None, tmp_path: Path, plan: str, workers: int) -> None:
    one = fit("single", tmp_path / "one", epochs=4)
    run = fit(plan, tmp_path / "run", model=Slow, epochs=4, workers=workers)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    first, *moved = run.events("shares")
    assert (first["step"], first["shares"], first["seconds"]) == (0, [16, 16], [])
    assert moved
    assert all(not faults(event) for event in moved)
    fast, slow = moved[-1]["shares"]
    assert (fast, slow) == (24, 8)
    # what the events say is what ranks then took
    last = max(records(tmp_path / "run" / "ledger").items())[0]
    full = [step for step in range(moved[-1]["step"], last) if (step + 1) % 4]
    for step in full:
        assert [len(record.ids) for record in records(tmp_path / "run" / "ledger")[step]] == [fast, slow]


def _claimed(folder: Path, *names: str) -> str:
    """The first of these that no other process has taken; nothing where all are."""
    for name in names:
        with suppress(FileExistsError):
            (folder / name).mkdir()
            return name
    return ""


@pytest.mark.parametrize("plan", ["dp=2 sync=diloco every=2 after=4", *longer("dp=2 sync=local every=3 fragments=3")])
def test_shares_follow_a_slow_replica_that_steps_by_itself(clock: None, tmp_path: Path, plan: str) -> None:
    class First(small.Net):
        """The first replica that computes is slow."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                if not hasattr(self, "pause"):
                    # the look before the run takes the first name, one of the replicas the second
                    self.pause = 0.003 if _claimed(tmp_path, "look", "slow") == "slow" else 0.001
                CLOCK.now += len(x) * self.pause
            return super().forward(x)

    run = fit(f"{plan} shares=auto", tmp_path / "run", model=First, epochs=4)
    moved = [event["shares"] for event in run.events("shares")][1:]
    assert moved
    assert sorted(moved[-1]) == [8, 24]
    ledger = tmp_path / "run" / "ledger"
    assert audit(ledger, length=small.LENGTH, batch=small.BATCH, drop_last=False) == []


def test_a_run_goes_on_with_even_shares(tmp_path: Path) -> None:
    one = fit("single", tmp_path / "one", epochs=3)
    fit("dp=2 shares=3,1", tmp_path / "run", steps=5, epochs=None)
    run = fit("dp=2 shares=auto", tmp_path / "run", resume=True, epochs=3)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    assert [event["shares"] for event in run.events("shares")][:2] == [[24, 8], [16, 16]]


def test_weights_that_leave_a_device_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="shares=100,1") as caught:
        fit("dp=2 shares=100,1", tmp_path / "run")
    assert "dp=2 shares=auto" in str(caught.value)


@pytest.mark.realtime("a probe of running workers finds which rank computes and which waits")
@pytest.mark.parametrize("plan", ["dp=2", *longer("fsdp=2")])
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
