"""A part of the grids of jobs × plans, and what is stored of the whole; `make cases` and `make zoo` run all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from case_table import CASES, EQUAL, named, near, refused
from grid import Came, Grid, Store, came, wrong
from run_cases import GRID

from longer import longer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
import run_zoo
import zoo_table
from zoo_libraries import needs
from zoo_table import ZOO, Kept

OF_CASES = [
    ("encoder", "pp=2"),
    ("class weights", "tp=2"),
    ("contrastive", "dp=2"),
    ("sparse", "fsdp=2 zero=1"),
    *longer(("adapters", "fsdp=2"), ("averaging", "fsdp=2 zero=1"), ("scheduler", "dp=2"), ("resampled", "dp=2")),
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
def test_what_must_come_of_a_case(name: str, plan: str) -> None:
    assert not wrong(CASES[name].expected[plan], came(name, plan, steps=2))


@pytest.mark.parametrize(("name", "plan"), OF_ZOO)
def test_what_must_come_of_a_job_in_the_zoo(name: str, plan: str, tmp_path: Path) -> None:
    if lacking := needs(*ZOO[name].needs):
        pytest.skip(lacking)
    assert not zoo_table.wrong(ZOO[name], plan, run_zoo.work(name, plan, tmp_path))


@pytest.mark.parametrize("grid", [GRID, run_zoo.GRID], ids=["cases", "zoo"])
def test_what_is_stored_is_what_must_come(grid: Grid) -> None:
    store = Store.read(grid.results)
    cells = [(name, plan) for name in grid.names for plan in grid.plans]
    assert [cell for cell in cells if (one := store.found(*cell)) is None or grid.judge(cell, one)] == []


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


def test_what_must_not_come_of_the_zoo_is_told() -> None:
    for refusals, causes, found in (
        ({}, {}, Came(outcome="unequal")),
        ({}, {}, Came(outcome="refused", said="cp")),
        ({"tp": "no two"}, {}, Came(outcome="equal")),
        ({"tp": "no two"}, {}, Came(outcome="refused", said="something else")),
        ({"tp=2": "no two"}, {}, Came(outcome="crashed", said="no two")),
        ({}, {"tp": "the loss"}, Came(outcome="unequal", said="the loss couples")),
        ({}, {"tp": "the loss"}, Came(outcome="equal", before=("the loss couples",))),
    ):
        kept = Kept(job=ZOO["EMA"].job, shows="", refused=refusals, named=causes)
        assert zoo_table.wrong(kept, "tp=2", found), found
