"""What grows with ranks grows as it is said to: counted in worlds of 1,024 and 16,384 ranks that are not there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import scale
import scale_costs
from in_one_test import in_one_test
from scale_costs import Cost, spent
from scale_laws import LAWS, SLACK, WORLDS, Law, broken, exponent
from scale_processes import MEASURED, PROCESSES

SMALL = WORLDS[:2]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_nothing_grows_faster_than_its_law(law: Law) -> None:
    assert broken(law, SMALL, [law.cost(world) for world in SMALL]) == []


def test_no_law_is_above_the_bar_without_a_reason() -> None:
    """n log n in total, n in one place: what each rank takes is a part of the total."""
    allowed = {"each rank": 0.0, "one place": 1.0, "all together": 1.0}
    assert [law.name for law in LAWS if law.power > allowed[law.where] and not law.above] == []
    assert [law.name for law in LAWS if law.power <= allowed[law.where] and law.above] == []


@in_one_test("law", LAWS)
def test_what_grows_with_another_power_is_found(law: Law) -> None:
    faster = law.power + 0.5
    costs = [Cost(operations=int(1000 * (world / 1024) ** faster)) for world in SMALL]
    (said,) = broken(law, SMALL, costs)
    assert law.name in said
    assert broken(replace(law, power=faster), SMALL, costs) == []


def test_the_ledger_of_many_ranks_is_as_many_files_as_hosts() -> None:
    assert [scale_costs.ledger_files(world).count for world in SMALL] == [1024, 16384 // 8]


def test_operations_and_bytes_are_counted() -> None:
    from phalanx.placement.batch_split import spans

    each = [spent(lambda parts=parts: list(spans(1 << 20, parts))) for parts in SMALL]  # the shares of all parts
    for unit in ("operations", "bytes"):
        assert exponent(SMALL, [getattr(cost, unit) for cost in each]) == pytest.approx(1.0, abs=0.25)


def test_every_law_was_measured_and_is_on_the_page() -> None:
    store = json.loads(scale.RESULTS.read_text())
    assert store["laws"].keys() == {law.name for law in LAWS}
    for law in LAWS:
        costs = [Cost(**cost) for cost in store["laws"][law.name]]
        assert broken(law, WORLDS, costs) == []
    assert scale.page(scale.PAGE.read_text(), store) == scale.PAGE.read_text(), "try: python tools/scale.py --render"


def test_what_was_measured_with_processes_grows_no_faster_than_its_law_or_says_why() -> None:
    store = json.loads(scale.RESULTS.read_text())["processes"]
    counts = [count for count in PROCESSES if str(count) in store][1:]
    for one in MEASURED:
        power = exponent(counts, [1e6 * store[str(count)][one.name] for count in counts])
        assert (power > one.power + SLACK) == bool(one.above), (one.name, power)
