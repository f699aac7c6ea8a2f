"""What is worked out beside a run: the process that does it, the devices it is for, the plan where none is given."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.config import Plan
from phalanx.hardware import cluster, cores, memory_bytes
from phalanx.launch.side_process import SideProcess
from phalanx.preflight import choose_plan, cluster_for, machine_forecast
from phalanx.preflight import plan_choice as choices
from phalanx.preflight.run_forecast import problem
from phalanx.report.comparison import memory_beside, step_beside, under_forecast

SECONDS = dict.fromkeys(
    ("products", "attention", "memory", "recompute", "launches", "exchange", "pipeline", "replicas", "update", "rest"),
    0.0,
)
HELD = {"parameters": 100, "gradients": 100, "optimizer": 200, "buffers": 0, "activations": 300}


def job(width: int, batch: int = 64, depth: int = 1) -> px.Job:
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

    def test_one_that_dies_is_done(self) -> None:
        with SideProcess(lambda say: os._exit(1)) as side:
            assert side.next(10) is None
            assert side.done


class TestDevices:
    def test_processes_share_cores_and_memory(self) -> None:
        one, four = (cluster_for(Plan(dp=count, device="cpu")).groups[0] for count in (1, 4))
        assert (one.per_node, four.per_node) == (1, 4)
        assert one.device.memory == memory_bytes()
        assert four.device.memory == memory_bytes() // 4
        assert four.device.peak["fp32"] <= one.device.peak["fp32"] * cores() / 4 + 1

    def test_a_run_on_fewer_cores_is_forecast_to_take_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_forecast, "cores", lambda: 8)
        one, all_of_them = (
            machine_forecast.forecast_of(job(512), Plan(device="cpu"), threads)["forecast"]["step"]
            for threads in (1, 8)
        )
        assert one > 2 * all_of_them

    def test_threads_each_count(self) -> None:
        plan = Plan(device="cpu")
        few, more = (cluster_for(plan, threads).groups[0].device.peak["fp32"] for threads in (1, 64))
        assert more == pytest.approx(few * cores())


class TestChoice:
    @pytest.fixture
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr("phalanx.preflight.machine_forecast.this_machine", lambda: cluster("4xA100-40GB"))

    def test_one_process_where_there_is_no_gpu(self) -> None:
        found = choose_plan(job(4))
        assert (found.plan, found.source, found.why) == (Plan(), "default", "")

    def test_plain_replicas_where_nothing_gains_much(self, gpus: None) -> None:
        found = choose_plan(job(8192, batch=32_768))
        assert found.plan == Plan(dp=4), found
        assert found.source == "default"

    def test_a_model_too_large_for_replicas_is_sharded(self, gpus: None) -> None:
        found = choose_plan(job(20_000, depth=9))  # one layer of as much could not even be gathered
        assert found.source == "planner"
        assert found.plan.zero or found.plan.tp * found.plan.pp > 1, found
        assert "fits, unlike dp=4" in found.why

    def test_planning_that_takes_long_or_fails_leaves_replicas(
        self, gpus: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choices, "_best", lambda *_: 1 / 0)
        failed = choose_plan(job(4))
        assert failed.plan == Plan(dp=4)
        assert "ZeroDivisionError" in failed.why
        monkeypatch.setattr(choices, "PATIENCE", 0.05)
        monkeypatch.setattr(choices, "_best", lambda *_: time.sleep(60))
        assert "dp=4 is taken" in choose_plan(job(4)).why


class TestBeside:
    def test_passes_hold_what_goes_on_within_them(self) -> None:
        seconds = {**SECONDS, "products": 2.0, "replicas": 1.0, "update": 0.5}
        rows = {
            row.part: row
            for row in step_beside({"seconds": seconds, "step": 3.5}, {"whole": 7.0, "passes": 6.0, "update": 0.5})
        }
        assert (rows["whole"].ratio, rows["passes"].ratio, rows["update"].ratio) == (0.5, 0.5, 1.0)
        assert rows["computing"].forecast == 2.0
        assert rows["computing"].measured is None
        assert "pipeline" not in rows

    def test_the_part_that_was_missed_by_most(self) -> None:
        parts = {
            "parameters": 100.0,
            "gradients": 100.0,
            "optimizer": 150.0,
            "activations": 200.0,
            "communication": 50.0,
        }
        rows = memory_beside({"plan": "single", "parts": parts}, [HELD, {**HELD, "activations": 400}])
        worst = under_forecast(rows)
        assert worst is not None
        assert (worst.part, worst.forecast, worst.measured) == ("activations", 200.0, 400.0)
        assert (
            under_forecast(
                memory_beside({"plan": "single", "parts": {**parts, "optimizer": 900, "activations": 900}}, [HELD])
            )
            is None
        )

    def test_gathered_parameters_count_as_parameters(self) -> None:
        parts = {"parameters": 50.0, "gradients": 50.0, "optimizer": 100.0, "activations": 300.0, "gathered": 50.0}
        rows = memory_beside({"plan": "fsdp=2", "parts": parts}, [HELD])
        assert next(row.ratio for row in rows if row.part == "parameters") == 1.0


def test_a_refusal_says_how_much_of_what_and_what_would_fit() -> None:
    found = {
        "plan": "single",
        "devices": 1,
        "reserved": 3.0 * 2**30,
        "room": 2.0 * 2**30,
        "memory": {"activations": 2.0 * 2**30},
    }
    said = str(problem(found, '--plan "micro=8"'))
    assert "3.0 GiB" in said
    assert "2.0 GiB of it activations" in said
    assert "1,073,741,824 bytes more" in said
    assert said.endswith('try: plan="micro=8"')
    assert str(problem(found, "")).endswith('try: forecast="anyway"')
