"""Law: n steps under P, a save, n more under Q are 2n steps on one device; `make resumed` measures all pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from resumed_law import BOUND, JOBS, ROWS, bound, difference, on_one_device, resumed, saved

import phalanx as px
from longer import longer

_one_device = cache(lambda name: on_one_device(JOBS[name]))
SHORT = ("single", "threads=2", "fsdp=3 zero=2 micro=2", "dp=2 fsdp=2", "pp=2 micro=2", "dp=2 shares=3,1", "ep=2")
SHORT += ("dp=2 server=2", "dp=2 sync=local", "dp=2 sync=diloco outer=sgd")
# Each plan goes on from what the one before it has saved.
PAIRS = [(job, plans[at - 1], plan) for job, plans in ROWS.items() for at, plan in enumerate(plans)]


@pytest.mark.parametrize(
    ("job", "first", "then"),
    [*(pair for pair in PAIRS if pair[2] in SHORT), *longer(*(pair for pair in PAIRS if pair[2] not in SHORT))],
)
def test_a_run_goes_on_under_another_plan_as_on_one_device(job: str, first: str, then: str, tmp_path: Path) -> None:
    run = saved(JOBS[job], first, tmp_path / "first")
    last = resumed(JOBS[job], then, run, tmp_path / "then")
    assert difference(last, _one_device(job)) <= bound(first, then)


def _begins_anew(*_: object) -> None:
    """In place of what brings the optimizer's state back."""


@pytest.mark.parametrize("fault", ["no optimizer state", "samples out of turn"])
def test_a_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GPT, AdamW"
    run = saved(JOBS[name], "single", tmp_path / "first")
    job = JOBS[name]
    if fault == "no optimizer state":
        monkeypatch.setattr("phalanx.checkpoint.restore_optimizer", _begins_anew, raising=False)
    else:
        data = job.data()
        job = replace(job, data=lambda: px.Table(**{key: column.flip(0) for key, column in data.columns.items()}))
    assert difference(resumed(job, "single", run, tmp_path / "then"), _one_device(name)) > 1000 * BOUND
