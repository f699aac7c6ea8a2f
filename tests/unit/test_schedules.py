"""Pipeline schedules: the order that runs is torch's, is what is priced and drawn, and a new one takes three files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.config.fields import STAGES
from phalanx.config.plan import Schedule
from phalanx.forecast.pipeline import PipelineTimes, duration
from phalanx.parallel.pipeline.messages import messages
from phalanx.placement.schedules import (
    SCHEDULES,
    Action,
    Order,
    StuckError,
    bubble,
    forwards,
    holders,
    in_halves,
    needs,
    order,
    timed,
    work,
)
from phalanx.report.show import planned

CASES: list[tuple[Schedule, int]] = [*((name, STAGES[name]) for name in SCHEDULES), ("interleaved", 3)]
"""Every schedule, and how many stages a rank of it has."""
TORCHS: dict[Schedule, Any] = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zero-bubble": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
    "dualpipev": torchs.ScheduleDualPipeV,
}


def counts(ranks: int) -> range:
    """Micro-batches that a law is looked at with."""
    return range(1, 4 * ranks + 2)


class Stage:
    """What torch's schedules ask of a stage to lay out their order."""

    submod = None

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.stage_index_to_group_rank: dict[int, int] = {}


def torchs_order(schedule: Schedule, ranks: int, each: int, micros: int) -> list[list[tuple[str, int, int]]]:
    """What torch's own class lays out.

    Raises:
        ValueError: if it does not take so many micro-batches.
    """
    stages = [Stage(index, ranks, ranks * each) for index in range(each)]
    made = TORCHS[schedule](stages[0] if each == 1 else stages, micros, loss_fn=lambda output, target: output)
    laid = made._get_pipeline_order() if each == 1 else made.pipeline_order
    return [list(flat(laid[rank])) for rank in range(ranks)]


def flat(actions: Any) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is not None and action.sub_actions:
            yield from flat(action.sub_actions)
        elif action is not None and action.computation_type.value in ("F", "B", "I", "W"):
            yield action.computation_type.value, action.stage_index, action.microbatch_index


@in_one_test(("schedule", "each"), [case for case in CASES if case[0] in TORCHS])
def test_orders_are_torchs(schedule: Schedule, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *given, **named: None)
    compared = 0
    for ranks in range(1, 9):
        for micros in counts(ranks):
            try:
                wanted = torchs_order(schedule, ranks, each, micros)
            except ValueError:
                continue
            compared += 1
            found = [list(map(tuple, actions)) for actions in order(schedule, ranks, each, micros).ranks]
            if schedule == "1f1b":  # torch numbers the last rank's forwards from one
                assert [kind for kind, *_ in wanted[-1]] == [kind for kind, *_ in found[-1]]
                wanted[-1] = found[-1]
            assert found == wanted, (schedule, ranks, each, micros)
    assert compared >= 80


@in_one_test(("schedule", "each"), CASES)
def test_any_number_of_micro_batches_runs_and_none_is_lost(schedule: Schedule, each: int) -> None:
    for ranks in range(1, 6):
        for micros in counts(ranks):
            laid = order(schedule, ranks, each, micros)
            actions = laid.links.action
            forwards = {(stage, micro) for stage in range(ranks * each) for micro in range(micros)}
            assert len(actions) == len(set(actions)) == sum(map(len, laid.ranks))
            assert {action[1:] for action in actions if action.kind == "F"} == forwards
            assert sorted(action[1:] for action in actions if action.kind in "BI") == sorted(forwards)
            assert {a[1:] for a in actions if a.kind == "W"} == {a[1:] for a in actions if a.kind == "I"}


@in_one_test(("schedule", "each"), CASES)
def test_no_forecast_is_below_what_its_busiest_rank_and_its_longest_way_take(schedule: Schedule, each: int) -> None:
    draw = random.Random(5)
    for ranks in (1, 2, 3, 5):
        for micros in counts(ranks):
            forward, inputs, weights = (tuple(draw.uniform(0.5, 2.0) for _ in range(ranks)) for _ in range(3))
            found = duration(made := pipeline(schedule, ranks, each, micros, forward, inputs, weights))
            assert found >= micros * max(map(sum, zip(forward, inputs, weights, strict=True))) - 1e-9
            assert found >= sum(forward) + sum(inputs) - inputs[0] / each - 1e-9  # of one micro-batch, to and fro
            assert found == pytest.approx(longest_way(order(schedule, ranks, each, micros), made)), (ranks, micros)


def pipeline(
    schedule: Schedule, ranks: int, each: int, micros: int, forward: Any, inputs: Any, weights: Any, halves: bool = True
) -> PipelineTimes:
    times = {"forward": forward, "inputs": inputs, "weights": weights}
    return PipelineTimes(schedule=schedule, ranks=ranks, chunks=each, micros=micros, halves=halves, **times)


def longest_way(laid: Order, made: PipelineTimes) -> float:
    """The end of the last action, found from the graph of what waits for what: another way than the forecast's."""
    stages, backward = len(laid.rank_of), {}
    for actions in laid.ranks:
        backward |= {("B", *action[1:]): action for action in actions if action.kind in "BI"}
    graph: dict[Action, list[Action]] = {}
    for actions in laid.ranks:
        for at, action in enumerate(actions):
            graph[action] = [backward.get(tuple(one), one) for one in needs(action, stages)] + list(actions[:at][-1:])
    ends: dict[Action, float] = {}
    for action in TopologicalSorter(graph).static_order():
        rank = laid.rank_of[action.stage]
        parts = {"F": made.forward[rank], "I": made.inputs[rank], "W": made.weights[rank]}
        parts["B"] = parts["I"] + parts["W"]
        if action.stage == 0:  # whose inputs get no gradient
            parts |= {"I": 0.0, "W": parts["B"]}
        ends[action] = max((ends[one] for one in graph[action]), default=0.0) + parts[action.kind] / made.chunks
    return max(ends.values())


@in_one_test("text", ["", " recompute=full", " fsdp=2 zero=3"])
@in_one_test(("schedule", "each"), CASES)
def test_what_runs_is_drawn_and_priced(schedule: Schedule, each: int, text: str) -> None:
    stages = f" stages={each}" if schedule == "interleaved" else ""
    for ranks in (2, 3, 4):
        for micros in (1, ranks, ranks + 1, 2 * ranks + 3):
            plan = Plan.parse(f"pp={ranks} schedule={schedule}{stages} micro=1{text}")
            run = order(plan.schedule, plan.pp, plan.stages, micros)
            drawn = planned(plan, micros * plan.replicas, None)
            assert drawn is not None
            for rank, actions in enumerate(run.ranks):
                shown = [one for one in drawn.timeline.actions if one.rank == rank]
                assert sorted(one.action for one in shown) == sorted(actions)
                ends = {one.action: one.end for one in shown}
                assert [ends[action] for action in actions] == sorted(ends.values())
            one = work(plan, Action("F", 0, 0)) * each
            half = work(plan, Action("B", 0, 0)) * each / 2
            priced = pipeline(
                schedule,
                ranks,
                each,
                micros,
                (one,) * ranks,
                (half,) * ranks,
                (half,) * ranks,
                in_halves(plan.recompute, plan.zero),
            )
            assert duration(priced) == pytest.approx(drawn.timeline.length)


def test_an_order_with_two_actions_exchanged_is_stuck_and_says_where() -> None:
    for schedule, each in CASES:
        laid = order(schedule, 3, each, 4)
        last = list(laid.ranks[-1])
        last.insert(0, last.pop(next(at for at, action in enumerate(last) if action.kind != "F")))
        with pytest.raises(StuckError, match=r"rank 2 waits with [BI]0 of stage \d for F0 of stage \d of rank"):
            _ = Order(ranks=(*laid.ranks[:-1], tuple(last)), rank_of=holders(schedule, 3, 3 * each)).links


def most_held(order: Order, rank: int, stages: int) -> float:
    """Micro-batches, of the whole rank, between forward and the end of backward, counted along the order."""
    held = most = 0
    for action in order.ranks[rank]:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most / stages


@pytest.mark.quick
@in_one_test(("schedule", "stages"), [*CASES, ("interleaved", 1), ("interleaved", 4), ("zero-bubble", 1)])
def test_what_is_in_flight_is_counted_in_the_order(schedule: Schedule, stages: int) -> None:
    for ranks in range(2, 9):
        for micros in counts(ranks):
            made = order(schedule, ranks, stages, micros)
            held = [most_held(made, rank, stages) for rank in range(ranks)]
            said = [SCHEDULES[schedule].in_flight(rank, ranks, stages, micros, 1.0) for rank in range(ranks)]
            assert said == pytest.approx(held), (ranks, micros)


@in_one_test(("schedule", "each"), CASES)
def test_both_ends_know_the_same_messages_in_the_same_order(schedule: Schedule, each: int) -> None:
    for found, ranks in ((made(schedule, ranks, each, 5), ranks) for made in (order, forwards) for ranks in (2, 3)):
        assert len(timed(found)) == sum(map(len, found.ranks))
        lines = [messages(found, rank) for rank in range(ranks)]
        for rank, line in enumerate(lines):
            for other, here in line.items():
                assert [(message, not mine) for message, mine in here] == lines[other][rank]


def test_idle_shares_are_those_of_the_papers() -> None:
    ranks, micros = 4, 8
    for schedule in ("gpipe", "1f1b"):
        assert bubble(order(schedule, ranks, 1, micros)) == pytest.approx((ranks - 1) / (micros + ranks - 1))
    assert bubble(order("interleaved", ranks, 2, micros)) == pytest.approx((ranks - 1) / (2 * micros + ranks - 1))
    assert bubble(order("zbv", ranks, 2, micros)) <= bubble(order("zero-bubble", ranks, 2, micros)) < 0.1
