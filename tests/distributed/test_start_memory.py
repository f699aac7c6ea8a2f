"""A rank's memory from its first line to the end of its second step is what was forecast."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import phalanx as px
from phalanx.preflight import forecast_here

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from start_memory import MIB, Peaks, job, peaks

WIDTH, BLOCKS, RANKS = 1024, 12, 4  # 48 MiB, 4 a block
BLOCK = 4 * (WIDTH + 1) * WIDTH
SMALL = 3 * MIB  # what is no parameter: records of blocks, holes in the heap


def most(plan: str) -> Peaks:
    """On any rank, beyond what the same plan needs with next to no model."""
    base, found = peaks(job(16, 2), plan), peaks(job(WIDTH, BLOCKS), plan)
    return Peaks(
        start=max(one.start for one in found) - min(one.start for one in base),
        whole=max(one.whole for one in found) - min(one.whole for one in base),
        private=0,
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_needs_what_was_forecast_from_its_first_line_on(zero: int) -> None:
    plan = f"fsdp={RANKS} zero={zero}"
    forecast = forecast_here(job(WIDTH, BLOCKS), px.Plan.parse(f"{plan} device=cpu"))["forecast"]
    held = BLOCKS * BLOCK / (RANKS if zero == 3 else 1)
    assert forecast["parts"]["parameters"] == held
    assert forecast["start"] == held + (BLOCK if zero == 3 else 0)
    found = most(plan)
    assert held - SMALL <= found.start <= forecast["start"] + SMALL
    assert 0.8 * forecast["allocated"] <= found.whole <= 1.1 * forecast["allocated"] + SMALL
