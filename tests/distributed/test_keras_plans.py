"""Keras models under every plan: what Keras' own ``fit`` gives on one device, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from keras_models import MODELS, NORMALISED, apart, data, furthest, made, one_device

import phalanx as px
from longer import longer
from phalanx.errors import SpecError

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

PLANS = (
    "dp=2",
    "dp=2 micro=2",
    "fsdp=2",
    "fsdp=2 zero=2",
    "fsdp=2 zero=1",
    "tp=2",
    "pp=2",
    "pp=2 micro=2 schedule=1f1b",
    "cp=2",
    "dp=2 tp=2",
    "fsdp=2 recompute=full",
    "dp=2 server=1",
)
REFUSED = {
    **{(model, "cp=2"): "attend" for model in MODELS if model != "gpt"},
    **{(model, "cp=2"): "plan.cp" for model in NORMALISED},
    **{(model, plan): "no two layers" for model in ("conv", "shared layer") for plan in ("tp=2", "dp=2 tp=2")},
    **{(model, plan): "plan.micro" for model in NORMALISED for plan in PLANS if "micro" in plan},
    **{(model, "dp=2 server=1"): "plan.server" for model in NORMALISED},
}
"""(model, plan) → a word of the reason."""
QUICK = (
    *(("mlp", plan) for plan in PLANS if plan not in ("dp=2", "fsdp=2 zero=2", "pp=2")),
    ("mlp", "threads=2"),
    *(("gpt", plan) for plan in ("fsdp=2", "tp=2", "pp=2", "cp=2", "fsdp=2 recompute=full")),
    ("conv", "dp=2"),
    ("conv", "pp=2"),
    ("residual", "pp=2 micro=2 schedule=1f1b"),
    ("lstm", "fsdp=2"),
    ("two inputs", "pp=2"),
    ("shared layer", "fsdp=2"),
)


def job_of(model: str) -> px.Job:
    more: dict[str, Any] = {"batch_statistics": "global"} if model in NORMALISED else {}
    return px.from_keras(made(model), data=data(model), batch=8, epochs=1, shuffle=False, **more)


@pytest.mark.parametrize(
    ("model", "plan"),
    [*QUICK, *longer(*((model, plan) for model in MODELS for plan in PLANS if (model, plan) not in QUICK))],
)
def test_a_plan_gives_what_fit_gives(model: str, plan: str) -> None:
    losses, expected = one_device(model)
    if reason := REFUSED.get((model, plan)):
        with pytest.raises(SpecError, match=reason):
            px.fit(job_of(model), plan)
        return
    run = px.fit(job_of(model), plan)
    assert apart(run.losses, losses) < 2e-5
    assert furthest(px.to_keras(run), expected) < 1e-4
