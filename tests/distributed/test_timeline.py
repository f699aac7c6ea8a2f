"""What a run says of when its pipeline did what: the schedule's actions, in its order, on one clock."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from small import fit, table
from torch import nn

from phalanx.events import faults
from phalanx.placement.schedules import Action, in_halves, needs, order
from phalanx.report.summary import summarise
from phalanx.train.timeline import on_one_clock, only_step


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("pp=2 micro=8 schedule=gpipe", [0, 1]),
        ("pp=2 dp=2 micro=4 schedule=1f1b", [0, 2]),
        ("pp=2 stages=2 micro=8 schedule=zero-bubble", [0, 1]),
        ("pp=2 stages=2 micro=7 schedule=interleaved", [0, 1]),  # five micro-batches: no multiple of the ranks
        ("pp=2 micro=12 schedule=dualpipev", [0, 1]),  # fewer than stages
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
    assert idle is not None
    assert 0.0 < idle < 1.0


class Wide(nn.Module):
    """Eight layers in which a weight's gradient takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(9, 384), nn.Linear(384, 5)
        self.layers = nn.ModuleList([nn.Linear(384, 384) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("text", "halves"),
    [
        ("pp=2 micro=64 schedule=zero-bubble", True),
        ("pp=2 micro=64 schedule=zbv", True),
        ("pp=2 fsdp=2 micro=64 zero=1 schedule=zbv", True),
        ("pp=2 fsdp=2 micro=64 zero=3 schedule=zbv", False),
        ("pp=2 micro=64 schedule=zbv recompute=full", False),
    ],
)
def test_backward_is_done_in_halves_where_forecasts_say_so(text: str, halves: bool, tmp_path: Path) -> None:
    """Where it is not, all of it is done with the inputs' half, and nothing is left for that of the weights."""
    run = fit(text, tmp_path / "run", model=Wide, data=partial(table, 768), batch=256, epochs=1)
    plan, took = run.plan, defaultdict[str, list[float]](list)
    for event in run.events("timeline"):
        for kind, stage, _, begin, end in event["actions"]:
            if stage:  # the first one's inputs get no gradient
                took[kind].append(end - begin)
    assert in_halves(plan.recompute, plan.zero, compiles=plan.compile) == halves
    inputs, weights = (median(took[kind]) for kind in "IW")  # a process that is held up for once counts for nothing
    assert (weights > 0.1 * (inputs + weights)) == halves, took


def test_plans_without_a_pipeline_have_none(tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", epochs=1)
    assert list(run.events("timeline")) == []
    assert summarise(run.folder).idle is None


def test_clocks_are_set_beside_each_other() -> None:
    heard: dict[int, Any] = {
        0: (7, 100.0, [("F", 0, 0, 100.5, 101.0)]),
        4: (7, 20.25, [("F", 1, 0, 21.0, 22.0)]),  # by a clock that is 80 s behind
    }
    assert on_one_clock(heard, [0.0] * 4 + [80.0] * 4) == [
        {"rank": 0, "step": 7, "actions": [["F", 0, 0, 0.5, 1.0]]},
        {"rank": 4, "step": 7, "actions": [["F", 1, 0, 1.0, 2.0]]},
    ]


@pytest.mark.parametrize(
    ("device", "first", "total", "only"),
    [("cpu", 0, 10, None), ("cuda", 0, 10, 9), ("cuda", 40, None, 45)],
)
def test_on_cuda_one_step_is_listened_to(device: str, first: int, total: int | None, only: int | None) -> None:
    assert only_step(device, first, total) == only
