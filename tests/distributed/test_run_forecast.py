"""A run's forecast: made beside it, stored, shown beside what was measured; a plan that will not fit is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch._dynamo  # tracing needs it: what is loaded here need not be loaded beside each run

import phalanx as px
from phalanx.config import Cluster, Plan, RunSpec
from phalanx.errors import RefusedError, WorkerError
from phalanx.events import faults
from phalanx.preflight import machine_forecast, run_forecast
from phalanx.preflight.machine_forecast import forecast_here
from phalanx.report.comparison import COMPUTING, LATE, beside_table, stored
from phalanx.report.summary import summarise

ROOM = 2**20


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs wait for their forecast."""
    monkeypatch.setattr(run_forecast, "PATIENCE", 1000.0)


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with 1 MiB."""
    found = machine_forecast.cluster_for

    def with_little_room(plan: Plan, threads: int | None = None) -> Cluster:
        cluster = found(plan, threads)
        group = cluster.groups[0]
        return replace(cluster, groups=(replace(group, device=replace(group.device, memory=ROOM, kept=0)),))

    monkeypatch.setattr("phalanx.preflight.machine_forecast.cluster_for", with_little_room)
    monkeypatch.setattr("phalanx.preflight.machine_forecast._LIGHT", 0.0)  # a run so short would else be over before


@pytest.mark.parametrize("text", ["single", "dp=2", "fsdp=2 zero=3", "pp=2 micro=8"])
def test_forecast_is_stored_and_set_beside_the_measurement(text: str, patient: None, tmp_path: Path) -> None:
    run = px.fit(small.job(), text, folder=tmp_path / "run")
    found = stored(run.folder)
    assert found is not None
    assert found["forecast"]["fits"]
    notes = [str(one) for one in beside_table(summarise(run.folder)) if str(one).startswith("note: ")]
    assert len(notes) == len(found["forecast"]["notes"]) > 0
    *_, brief = beside_table(summarise(run.folder), brief=True)
    assert re.match(rf"{len(notes)} notes? on what the forecast leaves out: phalanx show ", str(brief))
    rows = {(row.what, row.part): row for row in summarise(run.folder).beside}
    assert all(rows["step", part].measured for part in ("whole", "passes", "update"))
    parameters, optimizer = rows["memory", "parameters"], rows["memory", "optimizer"]
    if "zero=3" in text:
        # A forecast shares evenly; rank 0 has 5 of 9 rows of each layer and 3 of the head's 5: 1.2 times at most.
        shard, tensors = 3 * 5 * (9 + 1) + 3 * (9 + 1), 8
        assert optimizer.measured == 2 * 4 * shard + 4 * tensors
        assert 1 / 1.2 <= parameters.ratio <= 1
        assert optimizer.forecast == 2 * 4 * sum(tensor.numel() for tensor in small.Net().parameters()) / 2
    else:
        assert parameters.forecast == parameters.measured
        tensors = (optimizer.measured - optimizer.forecast) / 4  # Adam's count of steps, 4 bytes a tensor, is left out
        assert tensors == (4 if text.startswith("pp") else 8)
    assert (("step", "pipeline") in rows) == text.startswith("pp")
    assert [fault for event in run.events() for fault in faults(event)] == []


def test_forecast_stands_in_the_log_of_a_run_that_lasts(
    patient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_forecast, "_LIGHT", 0.0)  # else it lasts long enough only where other cores are idle

    class Slow(small.Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import time

            time.sleep(0.05)
            return super().forward(x)

    run = px.fit(small.job(model=Slow, epochs=None, steps=30), folder=tmp_path / "run")
    (event,) = run.events("forecast")
    assert event["memory"]["optimizer"] > 0
    assert faults(event) == []
    assert next(run.events())["event"] == "start"


def test_a_plan_that_does_not_fit_is_refused_or_tried_anyway(cramped: None, patient: None, tmp_path: Path) -> None:
    wide = small.job(model=lambda: torch.nn.Sequential(torch.nn.Linear(9, 40_000), torch.nn.Linear(40_000, 5)))
    wide = replace(wide, inputs=lambda batch: batch["x"])
    folder = tmp_path / "run"
    with pytest.raises(RefusedError, match=r"forecast to need .* bytes more than the 1\.0 MiB") as caught:
        px.fit(wide, "single", folder=folder)
    (problem,) = caught.value.problems
    parts = "parameters|gradients|optimizer|activations|working|communication|reserve"
    assert re.search(rf"of it ({parts})\)", problem.given)
    run = px.fit(wide, run=RunSpec(job="wide", plan=Plan(), folder=tmp_path / "other", forecast="anyway"))
    found = stored(run.folder)
    assert found is not None
    assert not found["forecast"]["fits"]


def test_a_model_that_cannot_be_traced_trains_without_a_forecast(patient: None, tmp_path: Path) -> None:
    class Counting(small.Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if float(x.sum()) < 1e9 else 2.0)

    run = px.fit(small.job(model=Counting), folder=tmp_path / "run")
    found = stored(run.folder)
    assert found is not None
    assert "forecast" not in found
    assert len(found["missing"].splitlines()) == 1
    assert summarise(run.folder).finished


def test_a_run_that_is_over_before_has_none_and_show_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_forecast, "PATIENCE", 0.0)
    monkeypatch.setattr(run_forecast, "send_forecast", lambda *_: __import__("time").sleep(60))
    monkeypatch.setattr(run_forecast, "_LONGEST", 0.0)
    run = px.fit(small.job(), folder=tmp_path / "run")
    assert stored(run.folder) == {"missing": LATE}
    assert forecast_here(small.job(), run.plan)["forecast"]["samples"] == small.BATCH


def test_no_forecast_where_none_is_asked_for(tmp_path: Path) -> None:
    run = px.fit(small.job(), run=RunSpec(job="small", plan=Plan(), folder=tmp_path / "run", forecast="none"))
    assert stored(run.folder) is None


def _greedy(after: int) -> Callable[[Any, Any], Any]:
    """A loss that asks for a petabyte in a later call."""
    calls = [0]

    def loss(output: torch.Tensor, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            torch.empty(10**15)
        return px.cross_entropy(output, batch["y"])

    return loss


@pytest.mark.parametrize(("after", "forecast"), [(1, 1e3), (3, 1e9)])
def test_memory_that_runs_out_names_what_was_forecast_too_small(after: int, forecast: float, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    parts = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "communication"), forecast)
    told = {"plan": "single", "reserved": forecast, "room": 1e10, "parts": {**parts, "activations": 1e9}}
    told |= {"step": 1.0, "seconds": dict.fromkeys((*COMPUTING, "update", "rest"), 0.1)}
    (folder / "forecast.json").write_text(json.dumps({"forecast": told}))
    run = RunSpec(job="small", plan=Plan(), folder=folder, forecast="none")
    with pytest.raises(WorkerError, match="allocate memory") as caught:
        px.fit(small.job(loss=_greedy(after)), run=run)
    (note,) = caught.value.__notes__
    if forecast < 1e4:
        assert re.search(r"too small was its part for optimizer: 1000 B, where rank 0 held [\d.]+ KiB", note), note
    else:
        assert "no part had grown beyond it" in note
