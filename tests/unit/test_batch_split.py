"""How a global batch is cut is counted alike by what runs it, what prices it and what draws it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import Plan
from phalanx.forecast.layouts import Layouts
from phalanx.placement.batch_split import Lane, cuts, micro_batches
from phalanx.placement.collective_bytes import MeshSizes
from phalanx.report.show import planned

pytestmark = pytest.mark.quick


@given(
    batch=st.integers(1, 70),
    dp=st.integers(1, 5),
    fsdp=st.integers(1, 3),
    micro=st.one_of(st.none(), st.integers(1, 20)),
)
@settings(deadline=None)
def test_the_micro_batches_of_a_rank_are_counted_once(batch: int, dp: int, fsdp: int, micro: int | None) -> None:
    plan = Plan(pp=2, dp=dp, fsdp=fsdp, micro=micro)
    batch = max(batch, plan.replicas)
    found = {len(part) for rank in range(plan.world_size) for part in cuts(batch, Lane.of(plan, rank), micro)}
    drawn = planned(plan, batch, None)
    assert drawn is not None
    assert found == {drawn.micros}
    assert found == {MeshSizes.of(plan, batch).micros}
    assert found == set(Layouts.of([plan], batch, 16).micros.tolist())


def test_the_largest_share_is_what_counts() -> None:
    assert micro_batches(Plan.parse("dp=2 micro=4"), 9) == 2  # 5 samples, and 4
    assert micro_batches(Plan.parse("dp=2 micro=2 shares=3,1"), 8) == 3
