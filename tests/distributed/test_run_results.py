"""Results of a run: its forecast beside what was measured, tables of its events, its waits and its timeline."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
import torch._dynamo  # tracing needs it: what is loaded here need not be loaded beside each run
from click.testing import CliRunner
from rich.console import Console
from small import LENGTH, fit, job, table
from torch.utils.data import Dataset

import phalanx as px
from law_rows import longer
from phalanx.cli import main
from phalanx.config import Cluster, Plan, RunSpec
from phalanx.data import Lane, Loader, loader
from phalanx.errors import RefusedError, WorkerError
from phalanx.events import faults
from phalanx.placement.schedules import Action, needs, order
from phalanx.preflight import machine_forecast, run_forecast
from phalanx.report.comparison import COMPUTING, beside_table, runs_beside, stored
from phalanx.report.progress import StepPace, step_text
from phalanx.report.summary import summarise
from phalanx.report.tables import summary_table
from phalanx.train.timeline import on_one_clock

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


@pytest.mark.parametrize("text", ["pp=2 micro=8", *longer("fsdp=2 zero=3", "single", "dp=2")])
def test_forecast_is_stored_and_set_beside_the_measurement(text: str, patient: None, tmp_path: Path) -> None:
    run = px.fit(small.job(), text, folder=tmp_path / "run")
    found = stored(run.folder)
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


def test_runs_beside_each_other(tmp_path: Path) -> None:
    def run(plan: str, rate: float, **how: Any) -> Path:
        job = small.job(optimizer=lambda params: torch.optim.SGD(params, lr=rate))
        return px.fit(job, plan, folder=tmp_path / f"run-{len(list(tmp_path.iterdir()))}", **how).folder

    first, same, other = run("single", 0.1), run("single micro=4", 0.1), run("single", 0.2, keep=7)
    told = runs_beside([first, same])
    assert (told["settings"], told["differ_from"]) == ({}, None)
    assert [one["plan"] for one in told["rows"]] == ["single", "micro=4"]
    told = json.loads(CliRunner().invoke(main, ["compare", str(first), str(other), "--json"]).stdout)
    assert (told["settings"], told["differ_from"]) == ({"keep": [2, 7]}, 1)
    assert "losses differ from step 2 on" in CliRunner().invoke(main, ["compare", str(first), str(other)]).stdout
    log = other / "events.jsonl"
    log.write_text(re.sub(r'("event": "step".*?"loss": )[^,}]+', r"\1null", log.read_text()))
    assert runs_beside([first, other])["differ_from"] == 0
    assert runs_beside([other, other])["differ_from"] is None


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
    with pytest.raises(RefusedError, match=r"1\.0 MiB") as caught:
        px.fit(wide, "single", folder=folder)
    (problem,) = caught.value.problems
    parts = "parameters|gradients|optimizer|activations|working|communication|reserve"
    assert re.search(rf"of it ({parts})\)", problem.given)
    run = px.fit(wide, run=RunSpec(job="wide", plan=Plan(), folder=tmp_path / "other", forecast="anyway"))
    found = stored(run.folder)
    assert not found["forecast"]["fits"]


def test_a_model_that_cannot_be_traced_trains_without_a_forecast(patient: None, tmp_path: Path) -> None:
    class Counting(small.Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if float(x.sum()) < 1e9 else 2.0)

    run = px.fit(small.job(model=Counting), folder=tmp_path / "run")
    found = stored(run.folder)
    assert "forecast" not in found
    assert len(found["missing"].splitlines()) == 1
    assert summarise(run.folder).finished


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


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 server=1", *longer("single")])
def test_a_table_has_each_step_once_as_it_went_the_last_time(plan: str, tmp_path: Path) -> None:
    # checkpoints of servers are taken as updates come in, so that a run with some is not gone on with here
    how: dict[str, Any] = {"evaluate": lambda: table(40, seed=1), "evaluate_every": 2, "best": px.Best("loss")}
    run = fit(plan, tmp_path / "run", checkpoint_every=2, **(how if "server" not in plan else {}))
    log = run.folder / "events.jsonl"
    written = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [one for one in written if one["event"] == "step"]
    again = {**steps[1], "loss": 1234.0}
    with log.open("a") as file:
        file.write(json.dumps(again) + "\n")

    losses = run.metrics()["loss"]
    assert losses.index.name == "step"
    assert list(losses.index) == [one["step"] for one in steps]
    assert list(losses) == [1234.0 if one["step"] == 1 else one["loss"] for one in steps]
    assert not run.running
    if "server" in plan:
        assert run.best is None
        assert run.evaluations() == []
        assert run.metrics("evaluate").empty
        return
    evaluations = [one for one in written if one["event"] == "evaluate"]
    assert len(evaluations) > 2
    assert run.evaluations() == evaluations
    assert run.best == min(evaluations, key=lambda one: one["loss"])
    shown = run.metrics("evaluate")
    assert list(shown["loss"]) == [one["loss"] for one in evaluations]
    assert list(run.metrics("checkpoint").index)[-1] == len(steps)


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


def summary_of(folder: Path) -> str:
    text = StringIO()
    Console(width=300, file=text).print(summary_table(summarise(folder)))
    return text.getvalue()


@pytest.mark.realtime("samples take time to read, and a run says so")
@pytest.mark.parametrize("plan", ["dp=2", *longer("single", "fsdp=2")])
def test_slow_data_are_told_of(plan: str, tmp_path: Path) -> None:
    folder = fit(plan, tmp_path / "run", data=Slow).folder
    steps, parts = steps_of(folder), 1 if plan == "single" else 2
    for event in steps:
        assert SECONDS * (event["samples"] // parts) <= event["waited"] <= event["seconds"]
    summary = summarise(folder)
    assert 0.2 < summary.waited <= 1
    assert f"{summary.waited:.0%} of rank 0's time (workers=2" in summary_of(folder)
    pace = StepPace()
    for event in steps:
        pace.add(event)
    assert "waiting for data" in step_text(steps[-1], pace, None)


def test_time_between_batches_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter(Loader((made := job()).data(), made, Lane(), micro=None))
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(loader, "time", clock)
    for _ in range(3):
        assert next(read).waited == 0.0
        clock.now += 10.0  # of the step, which is none of the wait


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("pp=2 stages=2 micro=8 schedule=zero-bubble", [0, 1]),
        ("pp=2 stages=2 micro=7 schedule=interleaved", [0, 1]),
        *longer(("pp=2 dp=2 micro=4 schedule=1f1b", [0, 2]), ("pp=2 micro=12 schedule=dualpipev", [0, 1])),
    ],
)
def test_actions_come_in_the_order_of_the_schedule(text: str, ranks: list[int], tmp_path: Path) -> None:
    run = fit(text, tmp_path / "run", epochs=1)
    timelines = list(run.events("timeline"))
    assert [fault for event in timelines for fault in faults(event)] == []
    assert [event["rank"] for event in timelines] == ranks
    steps = [event["step"] for event in run.events("step")]
    assert {event["step"] for event in timelines} == {steps[-1]}
    plan = run.plan
    micros = 1 + max(micro for event in timelines for _, _, micro, _, _ in event["actions"])
    laid = order(plan.schedule, plan.pp, plan.stages, micros)
    done: dict[Action, float] = {}
    for place, event in enumerate(timelines):
        actions = event["actions"]
        assert [Action(*action[:3]) for action in actions] == list(laid.ranks[place])
        moments = [moment for action in actions for moment in action[3:]]
        assert moments == sorted(moments)  # nothing ends before it begins, nor begins before what came before it ended
        assert moments[0] >= 0.0
        done |= {Action(*action[:3]): action[4] for action in actions}
    done |= {Action("B", stage, micro): end for (kind, stage, micro), end in done.items() if kind == "I"}
    begun = {Action(*action[:3]): action[3] for event in timelines for action in event["actions"]}
    for action, begin in begun.items():
        for before in needs(action, len(laid.rank_of)):
            assert done[before] <= begin, f"{action} began before {before} ended"
    idle = summarise(run.folder).idle
    assert 0.0 < idle < 1.0


def test_clocks_are_set_beside_each_other() -> None:
    heard: dict[int, Any] = {
        0: (7, 100.0, [("F", 0, 0, 100.5, 101.0)]),
        4: (7, 20.25, [("F", 1, 0, 21.0, 22.0)]),  # by a clock that is 80 s behind
    }
    assert on_one_clock(heard, [0.0] * 4 + [80.0] * 4) == [
        {"rank": 0, "step": 7, "actions": [["F", 0, 0, 0.5, 1.0]]},
        {"rank": 4, "step": 7, "actions": [["F", 1, 0, 1.0, 2.0]]},
    ]
