"""Parameter servers: what runs with them compute and write, and that any plan goes on with what they saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import Together
from small import LENGTH, fit, table
from torch import nn

import phalanx as px
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.errors import RefusedError, SpecError, WorkerError
from phalanx.events import faults
from phalanx.report.summary import summarise

DRAWS = {"evaluate": lambda: table(20, seed=1), "clip": 1.0, "schedule": lambda step: 0.9**step}


def seen_once(folder: str, epochs: int) -> bool:
    """Whether the ledger has every sample once an epoch."""
    ids = np.concatenate([ids for _, ids in read_ledger(Path(folder) / "ledger").values()])
    return bool((np.bincount(ids, minlength=LENGTH) == epochs).all())


@pytest.mark.parametrize("plan", ["dp=3 server=2 micro=5", *longer("dp=2 server=1")])
def test_without_staleness_it_is_one_devices_run(plan: str) -> None:
    how: dict[str, Any] = {**DRAWS, "metrics": lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])}}
    alone, served = fit("single", "alone", **how), fit(plan, "served", **how)
    assert served.losses == pytest.approx(alone.losses, rel=1e-5)
    there, here = alone.evaluation, served.evaluation
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)
    assert here["metrics"] == there["metrics"]
    assert seen_once("served", 2)
    assert [fault for event in served.events() for fault in faults(event)] == []
    assert {rank for event in served.events("update") for rank in event["staleness"]} == {0}
    rates = [(one["lr"], two["lr"]) for one, two in zip(alone.events("step"), served.events("step"), strict=True)]
    assert all(one == two for one, two in rates)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 server=2 staleness=3",
        "dp=3 server=1 staleness=unbounded",
        *longer("dp=2 server=1 compress=topk:0.2", "dp=2 server=2 staleness=1 compress=int8"),
    ],
)
def test_every_sample_counts_once_and_staleness_stays_within_its_bound(plan: str, tmp_path: Path) -> None:
    workers = Together(tmp_path / "workers", px.Plan.parse(plan).dp)

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> px.Loss:
        if torch.is_grad_enabled():
            workers.meet_first()  # with its first piece in hand each waits until all have one
        return px.cross_entropy(output, batch["y"])

    run = fit(plan, "run", epochs=3, loss=loss)
    assert len(run.losses) == 12
    assert all(math.isfinite(loss) for loss in run.losses)
    assert seen_once("run", 3)
    updates = list(run.events("update"))
    assert [event["version"] for event in updates] == list(range(1, 13))
    assert max(one for event in updates for one in event["staleness"]) <= (run.plan.staleness or 0)
    assert [fault for event in run.events() for fault in faults(event)] == []
    summary = summarise(run.folder)
    assert sum(summary.serving.staleness.values()) == sum(summary.serving.pieces.values())
    pieces, rates = summary.serving.pieces, summary.serving.rates
    assert sorted(pieces) == list(range(run.plan.dp))
    assert all(pieces.values())
    assert sorted(rates) == list(range(run.plan.dp))


def test_backup_workers_are_left_out_and_what_is_in_is_divided_by_its_count() -> None:
    run = fit("dp=3 server=1 backup=1", "run")
    steps, updates = list(run.events("step")), list(run.events("update"))
    assert sum(event["dropped"] for event in updates) > 0
    assert all(len(event["staleness"]) >= 2 for event in updates)
    assert all(event["count"] == event["samples"] for event in steps)
    ids = [len(ids) for _, ids in read_ledger(Path("run/ledger")).values()]
    assert ids == [event["samples"] for event in steps]


def test_any_plan_goes_on_with_what_another_saved() -> None:
    whole = fit("single", "whole", epochs=3)
    for epochs, plan in enumerate(("dp=2 server=2", "fsdp=2", "dp=2 server=2 staleness=0"), start=1):
        run = fit(plan, "run", epochs=epochs, resume=epochs > 1)
    assert run.losses == pytest.approx(whole.losses, rel=1e-5)
    assert [event["step"] for event in run.events("resume")] == [4, 8]
    assert seen_once("run", 3)


def test_an_optimizer_of_whole_tensors_holds_them_whole() -> None:
    how: dict[str, Any] = {"optimizer": lambda params: px.LAMB(params, lr=1e-2)}
    assert fit("dp=2 server=2", "served", **how).losses == pytest.approx(fit("single", "alone", **how).losses, rel=1e-5)


class Normed(nn.Module):
    """A part that is used in some steps only, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.rare = nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.head(self.rare(hidden) if len(x) < 8 else hidden)


def test_running_statistics_and_parameters_without_gradient_are_those_of_replicas() -> None:
    how: dict[str, Any] = {"model": Normed, "unused": "allow", "evaluate": lambda: table(20, seed=1)}
    replicas, served = fit("dp=2", "replicas", **how), fit("dp=2 server=1", "served", **how)
    assert served.losses == pytest.approx(replicas.losses, rel=1e-5)
    there, here = replicas.evaluation, served.evaluation
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)
    with pytest.raises(WorkerError, match="rare"):
        fit("dp=2 server=1", "refused", model=Normed)


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    with pytest.raises(WorkerError, match="loss of step 0 is nan"):
        fit("dp=2 server=1", "run", loss=lambda output, batch: px.cross_entropy(output, batch["y"]).sum * math.nan)


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("dp=2 server=6", {"model": lambda: nn.Linear(9, 5, bias=False)}, "server=6.*at most 5"),
        ("dp=2 server=9", {"optimizer": lambda params: px.LAMB(params)}, "at most 8"),
        ("dp=2 server=1 precision=fp16", {}, "precision=bf16"),
    ],
)
def test_what_servers_cannot_do_is_refused_before_any_process(plan: str, how: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        fit(plan, "run", **how)
    assert not Path("run").exists()


def test_a_stream_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(table())

    with pytest.raises(SpecError, match="map-style"):
        fit("dp=2 server=1", "run", data=Stream)
