"""A part of the grid of jobs × plans; what is stored of the whole is what must come. `make cases` runs it."""

from __future__ import annotations

import pytest
from case_grid import Came, came, wrong
from case_table import CASES, EQUAL, PLANS, named, near, refused
from grid_store import Store
from run_cases import GRID, expected, shows

CELLS = [
    ("scheduler", "dp=2"),
    ("adapters", "fsdp=2"),
    ("encoder", "pp=2"),
    ("averaging", "fsdp=2 zero=1"),
    ("outputs", "pp=2 micro=4"),
    ("resampled", "dp=2"),
    ("running mean", "pp=2"),
    ("class weights", "tp=2"),
    ("contrastive", "dp=2"),
    ("masked", "fsdp=2"),
    ("adafactor", "fsdp=2"),
    ("sparse", "fsdp=2 zero=1"),
    ("bfloat16", "tp=2"),
    ("no such key", "pp=2"),
]


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_what_must_come(name: str, plan: str) -> None:
    assert not wrong(CASES[name].expected[plan], came(name, plan, steps=2))


@pytest.mark.parametrize("name", list(shows()))
def test_what_is_stored_is_what_must_come(name: str) -> None:
    store = Store.read(GRID.results)
    for plan in PLANS:
        found = store.found(name, plan)
        assert found is not None, plan
        assert not wrong(expected(name, plan), found), plan


@pytest.mark.parametrize(
    ("must", "found"),
    [
        (EQUAL, Came(outcome="unequal")),
        (EQUAL, Came(outcome="equal", before=("the loss couples samples",))),
        (EQUAL, Came(outcome="crashed")),
        (named("the loss"), Came(outcome="unequal", said="the loss couples samples")),
        (named("the loss"), Came(outcome="unequal", said="no known pattern", before=("the loss couples samples",))),
        (named("the loss"), Came(outcome="equal", before=("the loss couples samples",))),
        (near("Muon"), Came(outcome="unequal", said="no known pattern", before=("Muon computes",))),
        (near("Muon"), Came(outcome="equal")),
        (refused("no pairs", "plan.tp"), Came(outcome="stopped", said="no pairs", where=("plan.tp",))),
        (refused("no pairs", "plan.tp"), Came(outcome="refused", said="no pairs", where=("plan.pp",))),
        (refused("no pairs"), Came(outcome="refused", said="something else")),
        (refused("no pairs"), Came(outcome="hung")),
    ],
)
def test_what_must_not_come_is_told(must: object, found: Came) -> None:
    assert wrong(must, found)  # type: ignore[arg-type]
