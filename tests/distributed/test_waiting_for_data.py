"""A run whose data are the slow part says so, and what to do; one whose data are there does not."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from rich.console import Console
from small import LENGTH, fit, table
from torch.utils.data import Dataset

import phalanx as px
from phalanx.events import faults
from phalanx.report.progress import StepPace, step_text, waited_share
from phalanx.report.summary import summarise
from phalanx.report.tables import summary_table

SECONDS = 0.004  # that a sample takes to read


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(SECONDS)
        return table()[index]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert not [fault for event in events for fault in faults(event)]
    return [event for event in events if event["event"] == "step"]


def told(folder: Path) -> str:
    text = StringIO()
    Console(width=300, file=text).print(summary_table(summarise(folder)))
    return text.getvalue()


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2"])
def test_slow_data_are_told_of(plan: str, tmp_path: Path) -> None:
    folder = fit(plan, tmp_path / "run", data=Slow).folder
    steps, parts = steps_of(folder), 1 if plan == "single" else 2
    for event in steps:
        assert SECONDS * (event["samples"] // parts) <= event["waited"] <= event["seconds"]
    summary = summarise(folder)
    assert summary.waited is not None
    assert 0.2 < summary.waited <= 1
    assert f"{summary.waited:.0%} of rank 0's time (workers=2 in the job" in told(folder)
    pace = StepPace()
    for event in steps:
        pace.add(event)
    assert "waiting for data" in step_text(steps[-1], pace, None)


def test_data_that_are_there_are_not(tmp_path: Path) -> None:
    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> px.Loss:
        time.sleep(10 * SECONDS)  # a step that takes longer than reading what is there, on a busy machine, too
        return px.cross_entropy(output, batch["y"])

    folders = [fit("single", tmp_path / name, loss=loss).folder for name in ("one", "two", "three")]
    for folder in folders:
        assert (summarise(folder).waited or 0.0) < 0.5
        assert median(event["waited"] / event["samples"] for event in steps_of(folder)) < SECONDS / 2
    for events in zip(*map(steps_of, folders), strict=True):
        # a process that is held up as it takes what is there is so in another step of the next run
        assert min(event["waited"] for event in events) < SECONDS * events[0]["samples"] / 2


def test_workers_there_are_told_of(tmp_path: Path) -> None:
    folder = fit("single", tmp_path / "run", data=Slow, workers=1).folder
    assert "workers=3 in the job loads ahead in processes of their own; there is 1" in told(folder)


def test_with_servers_and_in_logs_of_before_it_is_not_known(tmp_path: Path) -> None:
    folder = fit("dp=2 server=1", tmp_path / "run", epochs=1).folder
    assert {event["waited"] for event in steps_of(folder)} == {None}
    assert summarise(folder).waited is None
    assert waited_share([{"seconds": 1.0}]) is None
