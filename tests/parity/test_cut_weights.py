"""The weights that ``tp`` cuts are found twice, on the model and for a forecast of any plan: the two find the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models import MODELS, own_gpt
from torch import nn

import phalanx as px
from phalanx.config import Plan
from phalanx.config.model_costs import Profile
from phalanx.placement.ownership import Survey
from phalanx.placement.step_traffic import parameters_held
from phalanx.train.build_model import without_values
from phalanx.train.look_ahead import preview
from phalanx.train.traced_job import work_of


def with_words(count: int) -> px.Job:
    """A GPT whose table and head have so many rows."""
    job, ids = own_gpt(), torch.randint(0, count, (40, 12), generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        made: Any = job.model()
        made.token, made.head = nn.Embedding(count, 32), nn.Linear(32, count)
        return made

    return replace(job, model=model, data=lambda: px.Table(input_ids=ids, labels=ids))


JOBS = {name: job for name, job in MODELS.items() if name not in ("ConvNet", "MLP")}  # in which nothing pairs up
JOBS |= {f"{count} words": lambda count=count: with_words(count) for count in (30, 32, 47, 48, 63, 1000)}


@cache
def profile(name: str) -> Profile:
    return work_of(JOBS[name]()).profile


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_forecasts_cut_what_runs_cut(name: str, tp: int) -> None:
    plan, job = Plan.parse(f"tp={tp} device=cpu"), JOBS[name]()
    found: Survey = preview(without_values(job), plan)[0]
    held = sum(shard.parameter.elements for rank in range(tp) for shard in found.shards_of(rank))
    # a slice may be larger than another, all of them make one whole
    assert held == pytest.approx(tp * parameters_held(profile(name), plan, 0))
