"""What a look at the model refuses before a plan runs is what running it refuses; what it accepts, trains."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx as px
from phalanx.config import Plan
from phalanx.demo.jobs import gpt
from phalanx.errors import Problem, RefusedError
from phalanx.train.look_ahead import refusals


def job() -> px.Job:
    return gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=1)


def of_fit(text: str, folder: Path) -> list[Problem]:
    try:
        px.fit(job(), text, folder=folder)
    except RefusedError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "text", ["tp=3", "tp=5", "cp=5", "cp=3 attention=alltoall", "ep=2", "pp=7", "pp=2 split=nonsense", "dp=9"]
)
def test_what_a_look_says_is_what_fit_does(text: str, tmp_path: Path) -> None:
    assert of_fit(text, tmp_path / "run") == refusals(job(), Plan.parse(text))
