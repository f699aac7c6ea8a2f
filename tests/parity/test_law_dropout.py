"""The law with dropout on, its masks drawn by sample and layer: every plan kind drops what the plain loop drops."""

from __future__ import annotations

from functools import cache

import pytest
from dropping import DROPPING
from table import BAR, DROPOUT_MORE, DROPOUT_SHORT, DROPOUT_STEPS

from longer import longer
from phalanx.config import Plan
from phalanx.verify import OneDevice, ReferenceRun


@cache
def one_device(model: str) -> OneDevice:
    return OneDevice.run(DROPPING[model](), DROPOUT_STEPS, ReferenceRun(dropout=True))


ROWS, MORE = (
    [(model, plan) for model, plans in table.items() for plan in plans] for table in (DROPOUT_SHORT, DROPOUT_MORE)
)


@pytest.mark.parametrize(("model", "plan"), [*ROWS, *longer(*MORE)])
def test_a_plan_drops_what_one_device_drops(model: str, plan: str) -> None:
    one = one_device(model)
    assert one.reference == "a plain PyTorch loop"
    proof = one.prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert max(proof.largest["loss"], proof.largest["gradient"]) <= BAR


@pytest.mark.parametrize("model", ["own GPT", "HF GPT-2"])
def test_dropout_is_on(model: str) -> None:
    off = OneDevice.run(DROPPING[model](), 1)
    assert off._record.losses[0] != pytest.approx(one_device(model)._record.losses[0], rel=1e-5)
