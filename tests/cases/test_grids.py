"""A part of the grids of jobs × plans, and what is stored of the whole; `make cases` and `make zoo` run all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_table import CASES, EQUAL, named, near, refused
from grid import Came, Store, came, wrong
from run_grid import GRIDS
from zoo_table import ZOO, kept

from law_rows import longer

OF_CASES = [
    ("encoder", "pp=2"),
    ("class weights", "tp=2"),
    ("contrastive", "dp=2"),
    ("sparse", "fsdp=2 zero=1"),
    *longer(
        ("recurrent", "dp=2"),
        ("adapters", "fsdp=2"),
        ("averaging", "fsdp=2 zero=1"),
        ("scheduler", "dp=2"),
        ("resampled", "dp=2"),
    ),
    *longer(("outputs", "pp=2 micro=4"), ("running mean", "pp=2"), ("masked", "fsdp=2"), ("bfloat16", "tp=2")),
]
OF_ZOO = [
    ("GAN", "dp=2 micro=4"),
    ("mixture", "dp=2 tp=2"),
    ("clip by group", "pp=2 micro=4"),
    *longer(("EMA", "fsdp=2"), ("T5", "dp=2"), ("shaken blocks", "pp=2"), ("shaken blocks", "dp=2 server=1")),
    *longer(("diffusers, UNet", "fsdp=2"), ("timm, ViT", "tp=2"), ("torchvision, ResNet", "dp=2")),
]


@pytest.mark.parametrize(("name", "plan"), OF_CASES)
def test_what_must_come_of_a_case(name: str, plan: str, tmp_path: Path) -> None:
    assert not wrong(CASES[name].expected[plan], came(name, CASES[name], plan, tmp_path, steps=2))


@pytest.mark.parametrize(("name", "plan"), OF_ZOO)
def test_what_must_come_of_a_job_in_the_zoo(name: str, plan: str, tmp_path: Path) -> None:
    if lacking := GRIDS["zoo"].lacking(name):
        pytest.skip(lacking)
    assert not wrong(ZOO[name].expected[plan], came(name, ZOO[name], plan, tmp_path))


@pytest.mark.parametrize("grid", GRIDS)
def test_what_is_stored_is_what_must_come(grid: str) -> None:
    store = Store.read(GRIDS[grid].results)
    assert [cell for cell in GRIDS[grid].cells if not GRIDS[grid].right(store, *cell)] == []


def test_what_must_not_come_is_told() -> None:
    for must, found in (
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
    ):
        assert wrong(must, found), (must, found)


def test_what_must_come_of_a_job_in_the_zoo_is_that_of_the_plan_or_of_its_key() -> None:
    one = kept(ZOO["EMA"].job, "", refused={"tp": "no two", "pp=2": "cut"}, named={"micro": "the loss"})
    for plan, must in (
        ("cp=2", refused("cp")),
        ("dp=2 tp=2", refused("no two")),
        ("pp=2", refused("cut")),
        ("pp=2 micro=4", named("the loss")),
        ("dp=2", EQUAL),
    ):
        assert one.expected[plan] == must, plan
