"""A part of the zoo; what is stored of the whole is what must come. `make zoo` runs it."""

from __future__ import annotations

import pytest
from case_grid import Came
from grid_store import Store
from run_zoo import GRID, work
from zoo_libraries import needs
from zoo_table import PLANS, ZOO, Kept, wrong

CELLS = [
    ("EMA", "fsdp=2"),
    ("GAN", "dp=2 micro=4"),
    ("T5", "dp=2"),
    ("clip by group", "pp=2 micro=4"),
    ("mixture", "dp=2 tp=2"),
    ("shaken blocks", "pp=2"),
    ("shaken blocks", "dp=2 server=1"),
    ("diffusers, UNet", "fsdp=2"),
    ("timm, ViT", "tp=2"),
    ("torchvision, ResNet", "dp=2"),
]


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_what_must_come(name: str, plan: str) -> None:
    if lacking := needs(*ZOO[name].needs):
        pytest.skip(lacking)
    assert not wrong(ZOO[name], plan, work(name, plan, GRID.results.parent))


@pytest.mark.parametrize("name", list(ZOO))
def test_what_is_stored_is_what_must_come(name: str) -> None:
    store = Store.read(GRID.results)
    for plan in PLANS:
        found = store.found(name, plan)
        assert found is not None, plan
        assert not wrong(ZOO[name], plan, found), plan


@pytest.mark.parametrize(
    ("refused", "named", "found"),
    [
        ({}, {}, Came(outcome="unequal")),
        ({}, {}, Came(outcome="refused", said="cp")),
        ({}, {}, Came(outcome="hung")),
        ({"tp": "no two"}, {}, Came(outcome="equal")),
        ({"tp": "no two"}, {}, Came(outcome="refused", said="something else")),
        ({"tp=2": "no two"}, {}, Came(outcome="crashed", said="no two")),
        ({}, {"tp": "the loss"}, Came(outcome="unequal", said="the loss couples")),
        ({}, {"tp": "the loss"}, Came(outcome="equal", before=("the loss couples",))),
    ],
)
def test_what_must_not_come_is_told(refused: dict[str, str], named: dict[str, str], found: Came) -> None:
    kept = Kept(job=ZOO["EMA"].job, shows="", refused=refused, named=named)
    assert wrong(kept, "tp=2", found)
