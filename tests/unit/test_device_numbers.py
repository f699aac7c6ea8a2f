"""The devices of a run: plans on other numbers of them, changes of their number, and forecasts for them."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.cli.settings import Given, settle
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.elastic import DeviceRange, plans_of, resized
from phalanx.errors import RefusedError, SpecError
from phalanx.hardware import cluster
from phalanx.launch.failure import Failure
from phalanx.launch.restarts import ElasticSize, Restarts, fitted
from phalanx.launch.side_process import SideProcess
from phalanx.preflight import choose_plan
from phalanx.preflight import plan_choice as choices

NO = None
RESIZED = [
    ("dp=4", ["single", "dp=2", "dp=3", "dp=4", "dp=5", "dp=6"]),
    ("single", ["single", "dp=2", "dp=3", "dp=4", "dp=5", "dp=6"]),
    ("dp=2 fsdp=2", ["single", "fsdp=2", "fsdp=3", "dp=2 fsdp=2", "fsdp=5", "dp=3 fsdp=2"]),
    ("fsdp=4 zero=2", ["single", "fsdp=2 zero=2", "fsdp=3 zero=2", "fsdp=4 zero=2", "fsdp=5 zero=2", "fsdp=6 zero=2"]),
    ("pp=2 dp=2", [NO, "pp=2", NO, "dp=2 pp=2", NO, "dp=3 pp=2"]),
    ("tp=3 sequence=true", [NO, NO, "tp=3 sequence=true", NO, NO, "dp=2 tp=3 sequence=true"]),
    ("fsdp=2 ep=2", [NO, "ep=2", NO, "fsdp=2 ep=2", NO, "fsdp=3 ep=2"]),
    ("threads=4", ["single", "threads=2", "threads=3", "threads=4", "threads=5", "threads=6"]),
    ("dp=2 compress=bf16", ["single", *(f"dp={size} compress=bf16" for size in range(2, 7))]),
    ("dp=2 shares=auto", ["single", *(f"dp={size} shares=auto" for size in range(2, 7))]),
    (
        "fsdp=2 offload=parameters",
        [NO, *(f"{how} offload=parameters" for how in ("fsdp=2", "fsdp=3", "dp=2 fsdp=2", "fsdp=5", "dp=3 fsdp=2"))],
    ),
]


@pytest.mark.quick
def test_a_plan_on_one_to_six_devices() -> None:
    for plan, there in RESIZED:
        asked = Plan.parse(plan)
        found = [resized(asked, size) for size in range(1, 7)]
        assert found == [None if text is None else Plan.parse(text) for text in there], plan
        assert all(one is None or one.devices == size for size, one in enumerate(found, 1)), plan
        assert resized(asked, asked.devices) == asked, plan


@pytest.mark.quick
def test_a_forward_pass_holds_no_more_samples_on_fewer_devices() -> None:
    plans = {size: str(plan) for size, plan in plans_of(Plan(dp=2), DeviceRange(1, 4), 30).items()}
    assert plans == {1: "micro=8", 2: "dp=2 micro=8", 3: "dp=3 micro=8", 4: "dp=4"}
    given = plans_of(Plan(dp=4, micro=3), DeviceRange(1, 4), 30)
    assert {plan.micro for plan in given.values()} == {3}
    assert list(plans_of(Plan(dp=4), DeviceRange(1, 4), 2)) == [1, 2]  # a sample for each replica


@pytest.mark.quick
def test_what_is_no_range_is_refused() -> None:
    bad: list[Any] = ["4:1", "0:2", "1:", "1", "a:b", "1:2:3", "1:99999999", "", 4, "1.5:2"]
    for text in bad:
        with pytest.raises(SpecError, match="LEAST:MOST"):
            DeviceRange.parse(text, "-n")
        with pytest.raises(SpecError, match=r"run\.devices"):
            RunSpec(job="a", plan=Plan(), folder=Path("a"), devices=text)
    with pytest.raises(SpecError, match="-n: given 4:1"):
        Given(job="toy.py", plan=None, devices="4:1", folder=Path("a"), resume=False, values={})


FIXED_SIZES: list[tuple[str, dict[str, Any], str]] = [
    ("pp=8", {}, "a multiple of 8"),
    ("dp=2 server=1", {}, "workers of servers may come and go"),
    ("dp=2 shares=3,1", {}, "shares=auto finds it out"),
    ("dp=2 sync=local every=4", {}, "it would learn something else"),
]


@pytest.mark.quick
def test_a_run_that_cannot_change_its_size_says_why() -> None:
    for plan, how, why in FIXED_SIZES:
        with pytest.raises(SpecError, match=why):
            RunSpec(job="a", plan=Plan.parse(plan), folder=Path("a"), **{"devices": "1:4", **how})


def elastic(plan: str = "dp=4", devices: str = "1:4", **how: Any) -> RunSpec:
    return RunSpec(job="a", plan=Plan.parse(plan), folder=Path("a"), devices=devices, **how)


def job(**changes: Any) -> Job:
    given: dict[str, Any] = dict.fromkeys(("model", "data", "loss", "optimizer"), print)
    return Job(**{**given, "batch": 64, "epochs": 3, "name": "toy", **changes})


@pytest.mark.quick
def test_the_run_file_keeps_the_plan_that_was_asked_for() -> None:
    run = elastic("dp=2 fsdp=2")
    smaller = run.resized_to(Plan()).resized_to(Plan(fsdp=2))
    assert (smaller.plan, smaller.asked_plan) == (Plan(fsdp=2), run.plan)
    assert RunSpec.from_toml(smaller.to_toml()) == run
    with pytest.raises(SpecError, match="asked_plan"):
        RunSpec.from_toml(run.to_toml() + 'asked_plan = "dp=2"\n')


@pytest.mark.quick
class TestCommandLine:
    def given(self, **changes: Any) -> Given:
        none: dict[str, Any] = {"plan": None, "devices": None, "folder": Path("a"), "resume": False, "values": {}}
        return Given(**{**none, "job": "toy.py", **changes})

    def test_a_range_alone_is_replicas(self) -> None:
        run, settings = settle(self.given(devices="1:4"), None, job())
        assert (run.plan, run.devices) == (Plan(dp=4), "1:4")
        assert ("devices", "1:4", "argument") in {(one.name, one.value, one.source) for one in settings}

    @pytest.mark.parametrize(
        ("changes", "plan", "devices"),
        [
            ({}, Plan(dp=4), "1:4"),
            ({"devices": 2}, Plan(dp=2), None),
            ({"plan": Plan(dp=3)}, Plan(dp=3), None),
            ({"devices": "1:2"}, Plan(dp=2), "1:2"),
        ],
    )
    def test_on_resume(self, changes: Any, plan: Plan, devices: str | None) -> None:
        run, _ = settle(self.given(resume=True, **changes), elastic(), job())
        assert (run.plan, run.devices) == (plan, devices)


@pytest.mark.quick
class TestWorkersThatAreThere:
    def test_the_plan_is_resized_to_them_and_others_are_refused(self) -> None:
        for world, plan in ((1, "micro=16"), (3, "dp=3 micro=16"), (4, "dp=4")):
            run = fitted(elastic(), world, job())
            assert (run.plan, run.asked_plan) == (Plan.parse(plan), Plan(dp=4))
        for plan, world in (("dp=4", 1), ("dp=4", 5), ("pp=2", 3)):
            with pytest.raises(RefusedError, match=f"given {world}; allowed: 2"):
                fitted(elastic(plan, "2:4"), world, job())


def size(there: float | Callable[[], float] = math.inf) -> ElasticSize:
    plans = plans_of(Plan(dp=4), DeviceRange(1, 4), 64)
    return ElasticSize(plans, there=lambda: there() if callable(there) else there)


@pytest.mark.quick
class TestSize:
    def test_it_begins_with_the_most_there_are(self) -> None:
        assert [size(there).devices for there in (math.inf, 9, 3, 1, 0)] == [4, 4, 3, 1, 1]

    def test_it_shrinks_down_to_the_least(self) -> None:
        one = size()
        assert [one.shrink("why") and one.devices for _ in range(4)] == [3, 2, 1, False]

    def test_it_takes_no_more_than_there_are(self) -> None:
        there = [4]
        one = size(lambda: there[0])
        there[0] = 2
        assert one.lacks_devices()
        assert one.shrink("gone")
        assert (one.devices, one.cause) == (2, "gone")


def failure(step: int | None, **how: Any) -> Failure:
    given = {
        "rank": 1,
        "kind": "signal 9",
        "message": "SIGKILL",
        "traceback": "",
        "time": 0.0,
        "signal": signal.SIGKILL,
    }
    return Failure(step=step, **given | how)


@pytest.mark.quick
class TestRestarts:
    def test_the_same_again_is_a_reason_for_fewer(self, tmp_path: Path) -> None:
        restarts = Restarts(9, tmp_path, size())
        found = list[int]()
        while restarts.allow(failure(5)):
            assert restarts.size
            found.append(restarts.size.devices)
        assert found == [4, 3, 3, 2, 2, 1, 1]

    def test_fewer_devices_are_a_reason_whatever_failed(self, tmp_path: Path) -> None:
        there = [4]
        restarts = Restarts(3, tmp_path, size(lambda: there[0]))
        broken = failure(5, signal=0, kind="AcceleratorError")
        assert not restarts.allow(broken)
        there[0] = 2
        assert restarts.allow(broken)
        assert restarts.size
        assert (restarts.size.devices, restarts.count) == (2, 1)


def wide(width: int, batch: int = 64, depth: int = 1) -> px.Job:
    return px.Job(
        model=lambda: nn.Sequential(
            nn.Linear(8, width),
            nn.ReLU(),
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)),
            nn.Linear(width, 2),
        ),
        data=lambda: px.Table(x=torch.zeros(64, 8), y=torch.zeros(64, dtype=torch.long)),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(params),
        batch=batch,
        steps=2,
    )


class TestSideProcess:
    def test_tells_line_by_line_and_is_done(self) -> None:
        def work(say: Callable[[dict[str, int]], None]) -> None:
            print("heard by nobody")
            say({"one": 1})
            say({"two": 2})

        with SideProcess(work) as side:
            assert side.next(10) == {"one": 1}
            assert side.next(10) == {"two": 2}
            assert side.next(10) is None
            assert side.done

    def test_ends_with_its_block_whatever_it_does(self) -> None:
        with SideProcess(lambda say: (say({"pid": os.getpid()}), time.sleep(60))[1]) as side:
            pid = (side.next(10) or {})["pid"]
            assert side.next(0.01) is None
            assert not side.done
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class TestChoice:
    @pytest.fixture
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr("phalanx.preflight.machine_forecast.this_machine", lambda: cluster("4xA100-40GB"))

    def test_one_process_where_there_is_no_gpu(self) -> None:
        found = choose_plan(wide(4))
        assert (found.plan, found.source, found.why) == (Plan(), "default", "")

    def test_plain_replicas_where_nothing_gains_much(self, gpus: None) -> None:
        found = choose_plan(wide(8192, batch=32_768))
        assert found.plan == Plan(dp=4), found
        assert found.source == "default"

    def test_a_model_too_large_for_replicas_is_sharded(self, gpus: None) -> None:
        found = choose_plan(wide(20_000, depth=9))  # one layer of as much could not even be gathered
        assert found.source == "planner"
        assert found.plan.zero or found.plan.tp * found.plan.pp > 1, found
        assert "fits, unlike dp=4" in found.why

    def test_planning_that_takes_long_or_fails_leaves_replicas(
        self, gpus: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choices, "_best", lambda *_: 1 / 0)
        failed = choose_plan(wide(4))
        assert failed.plan == Plan(dp=4)
        assert "ZeroDivisionError" in failed.why
        monkeypatch.setattr(choices, "PATIENCE", 0.05)
        monkeypatch.setattr(choices, "_best", lambda *_: time.sleep(60))
        assert "dp=4 is taken" in choose_plan(wide(4)).why
