"""Uneven shares between real processes: they follow a slow rank, and nothing that is learnt changes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
import small
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.config import Plan
from phalanx.data import audit, records
from phalanx.errors import RefusedError
from phalanx.events.schema import faults


class Slow(small.Net):
    """On every second rank a sample takes three times as long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and dist.is_initialized():
            time.sleep(len(x) * (0.003 if dist.get_rank() % 2 else 0.001))
        return super().forward(x)


def fit(plan: str, folder: Path, *, resume: bool = False, **how: object) -> px.Run:
    run = px.RunSpec(job="small", plan=Plan.parse(plan), folder=folder, forecast="none", resume=resume)
    return px.fit(small.job(**how), run=run)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("plan", "workers"), [("dp=2 shares=auto", 0), ("dp=2 shares=auto micro=4", 2)])
def test_shares_follow_a_slow_rank_and_change_nothing(tmp_path: Path, plan: str, workers: int) -> None:
    one = fit("single", tmp_path / "one", epochs=4)
    run = fit(plan, tmp_path / "run", model=Slow, epochs=4, workers=workers)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    first, *moved = run.events("shares")
    assert (first["step"], first["shares"], first["seconds"]) == (0, [16, 16], [])
    assert moved
    assert all(not faults(event) for event in moved)
    fast, slow = moved[-1]["shares"]
    assert fast + slow == small.BATCH
    assert fast > slow
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


@pytest.mark.parametrize("plan", ["dp=2 sync=local every=3 fragments=3", "dp=2 sync=diloco every=2 after=4"])
def test_shares_follow_a_slow_replica_that_steps_by_itself(tmp_path: Path, plan: str) -> None:
    class First(small.Net):
        """The first replica that computes is slow."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                if not hasattr(self, "pause"):
                    # the look before the run takes the first name, one of the replicas the second
                    self.pause = 0.003 if _claimed(tmp_path, "look", "slow") == "slow" else 0.001
                time.sleep(len(x) * self.pause)
            return super().forward(x)

    run = fit(f"{plan} shares=auto", tmp_path / "run", model=First, epochs=4)
    moved = [event["shares"] for event in run.events("shares")][1:]
    assert moved
    assert sum(moved[-1]) == small.BATCH
    assert moved[-1][0] != moved[-1][1]
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
