"""Replicas that step by themselves: averaging, the outer step, evaluation, checkpoints, faults."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Net, Normal, fit, job, table
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.comm import Place, default_process_group, place_within
from phalanx.config import Plan
from phalanx.config.sync import within
from phalanx.errors import WorkerError
from phalanx.events import faults
from phalanx.launch.local import launch
from phalanx.report.summary import summarise
from phalanx.train.assembly import Assembly, build

CPU = torch.device("cpu")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def short(steps: int, **how: Any) -> dict[str, Any]:
    return {"epochs": None, "steps": steps, **how}


def looked(plan: str, steps: Collection[int], look: Callable[[Assembly], Any], **how: Any) -> list[list[Any]]:
    """What ``look`` finds after each of these numbers of a job's eight steps: for each rank, in the order of steps."""
    chosen = Plan.parse(plan)

    def work(place: Place, report: Any) -> list[Any]:
        torch.set_num_threads(1)
        found: list[Any] = []
        with default_process_group(place_within(chosen, place), CPU):
            assembly = build(job(**short(8, **how)), chosen, place, CPU)
            for batch in assembly.loader:
                assembly.step(batch)
                if batch.step + 1 in steps:
                    found.append(look(assembly))
                if batch.step + 1 == max(steps):
                    return found
        raise AssertionError("no such step")

    return launch(work, chosen.world_size)


def stepped(plan: str, steps: int, look: Callable[[Assembly], Any], **how: Any) -> list[Any]:
    """What ``look`` finds on each rank after so many of a job's eight steps."""
    return [found for (found,) in looked(plan, [steps], look, **how)]


def values(assembly: Assembly) -> dict[str, list[float]]:
    return {name: tensor.detach().flatten().tolist() for name, tensor in assembly.layout.parameters.items()}


def syncs(run: px.Run) -> list[int]:
    return [event["step"] for event in run.events("sync")]


class TestPlaces:
    def test_ranks_of_a_replica_are_a_world_and_counterparts_another(self) -> None:
        plan = Plan.parse("pp=2 dp=3 tp=2 sync=local every=4")
        places = [place_within(plan, Place(rank=rank, world_size=12)) for rank in range(12)]
        assert within(plan) == Plan.parse("pp=2 tp=2")
        for replica in range(3):
            mine = [place for place in places if place.group == f"/{replica}"]
            assert [place.rank for place in mine] == [0, 1, 2, 3]
            assert {place.world_size for place in mine} == {4}
            assert {place.workers_here for place in mine} == {12}


class TestAveraging:
    def test_replicas_part_and_come_together_with_the_same_bits(self) -> None:
        (one, later), (two, later_two), (three, later_three) = looked("dp=3 sync=local every=4", (4, 5), values)
        assert one == two == three
        assert later != later_two != later_three

    def test_every_replica_weighs_what_its_losses_counted(self) -> None:
        """A share of 12 samples and one of 4: with plain SGD one averaged step is that of the whole batch."""
        how: dict[str, Any] = {"optimizer": sgd, "batch": 16}
        (alone,) = stepped("single", 3, values, **how)
        for found in stepped("dp=2 shares=3,1 sync=diloco outer=sgd every=1", 3, values, **how):
            for name, expected in alone.items():
                assert found[name] == pytest.approx(expected, abs=1e-6)

    def test_a_replica_without_a_sample_in_a_short_last_batch_waits(self, tmp_path: Path) -> None:
        # 33 samples in batches of 32: the second replica has none of the last one
        run = fit("dp=2 sync=local every=2", tmp_path / "run", data=lambda: table(33), epochs=2)
        assert len(run.losses) == 4
        assert all(math.isfinite(event["loss"]) for event in run.events("sync"))

    def test_the_first_steps_are_those_of_one_device(self, tmp_path: Path) -> None:
        how = short(6, clip=0.5)
        alone = fit("single", tmp_path / "one", **how).losses
        run = fit("dp=2 sync=diloco every=2 after=4", tmp_path / "two", **how)
        assert run.losses[:4] == pytest.approx(alone[:4], rel=1e-6)
        assert run.losses[4] != pytest.approx(alone[4], rel=1e-6)  # of its own share
        assert syncs(run) == [6]

    def test_running_statistics_are_averaged(self) -> None:
        def statistics(assembly: Assembly) -> list[list[float]]:
            found = dict(assembly.layout.module.named_buffers())
            return [found["last.running_mean"].tolist(), found["last.running_var"].tolist()]

        apart = stepped("dp=2 sync=local every=8", 3, statistics, model=Normal, drop_last=True)
        one, two = stepped("dp=2 sync=local every=3", 3, statistics, model=Normal, drop_last=True)
        assert one == two
        for mean, (left, right) in zip(one, zip(*apart, strict=True), strict=True):
            assert left != right
            halves = [(a + b) / 2 for a, b in zip(left, right, strict=True)]
            assert mean == pytest.approx(halves, rel=1e-6)

    @pytest.mark.parametrize("codec", ["topk:0.2", *longer("fp16", "bf16", "int8")])
    def test_less_is_sent_and_the_last_averaging_is_whole(self, codec: str, tmp_path: Path) -> None:
        run = fit(f"dp=2 sync=local every=3 compress={codec}", tmp_path / "run", **short(7))
        whole = fit("dp=2 sync=local every=3", tmp_path / "whole", **short(7))
        sent, full = ([event["bytes"] for event in one.events("sync")] for one in (run, whole))
        assert sent[0] < 0.6 * full[0]
        assert [event["whole"] for event in run.events("sync")] == full
        assert sent[-1] == full[-1]
        assert run.losses == pytest.approx(whole.losses, rel=2e-2)


class TestOuterStep:
    def test_two_outer_steps_by_hand(self) -> None:
        """One weight, replicas that move it by -1 and -3 an inner step: worked out in the comments."""

        class Scalar(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.zeros(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.w * x

        data = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([3.0])}]
        how: dict[str, Any] = {
            "model": Scalar,
            "data": lambda: data,
            "inputs": lambda batch: batch["x"],
            "loss": lambda output, batch: output.sum() / len(output),
            "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
            "batch": 2,
            "shuffle": False,
        }

        def weight(assembly: Assembly) -> float:
            return assembly.layout.parameters["w"].item()

        # Inner steps: gradient x, so that after two of them the replicas are at -2 and -6, on the average 4 lower.
        # Outer: momentum m = 4, w = 0 - 0.5 (4 + 0.5 * 4) = -3. Two steps later 4 lower again:
        # m = 0.5 * 4 + 4 = 6, w = -3 - 0.5 (4 + 0.5 * 6) = -6.5.
        plan = "dp=2 sync=diloco every=2 outer_lr=0.5 outer_momentum=0.5"
        assert looked(plan, (2, 3, 4), weight, **how) == [[-3.0, -4.0, -6.5], [-3.0, -6.0, -6.5]]
        # Without momentum: w = -0.5 * 4 = -2, then -4. As local averages: -4, then -8.
        assert stepped("dp=2 sync=diloco every=2 outer=sgd outer_lr=0.5", 4, weight, **how) == [-4.0, -4.0]
        assert stepped("dp=2 sync=local every=2", 4, weight, **how) == [-8.0, -8.0]


class TestEvaluation:
    @pytest.mark.parametrize("plan", ["dp=2 sync=local every=4", *longer("dp=2 fsdp=2 sync=local every=4")])
    def test_it_is_of_the_average_and_changes_nothing(self, plan: str, tmp_path: Path) -> None:
        how = short(7, evaluate=lambda: table(35, seed=1))
        looked = fit(plan, tmp_path / "looked", **how, evaluate_every=1)
        not_looked = fit(plan, tmp_path / "not", **how)
        assert looked.losses == not_looked.losses
        evaluations = list(looked.events("evaluate"))
        assert [one["samples"] for one in evaluations] == [35] * 7
        ended = fit(plan, tmp_path / "ended", **{**how, "steps": 3})
        for run, step, tolerance in ((not_looked, 7, 1e-12), (ended, 3, 1e-6)):
            assert evaluations[step - 1]["loss"] == pytest.approx(run.evaluation["loss"], rel=tolerance)


class TestCheckpoints:
    @pytest.mark.parametrize(
        "plan",
        ["dp=2 sync=diloco every=4 after=2", *longer("dp=2 fsdp=2 sync=local every=3 compress=int8")],
    )
    def test_a_resumed_run_is_the_uninterrupted_one(self, plan: str, tmp_path: Path) -> None:
        how = {"model": Normal, "drop_last": True} if "fsdp" not in plan else {}
        whole = fit(plan, tmp_path / "whole", checkpoint_every=5, **short(10, **how))
        fit(plan, tmp_path / "half", **short(5, **how))
        half = fit(plan, tmp_path / "half", resume=True, checkpoint_every=5, **short(10, **how))
        assert half.losses == whole.losses
        assert [one["loss"] for one in half.events("sync")][-2:] == [one["loss"] for one in whole.events("sync")][-2:]

    def test_replicas_begin_from_the_checkpoint_of_another_plan(self, tmp_path: Path) -> None:
        fit("single", tmp_path / "run", **short(3))
        run = fit("dp=2 sync=diloco every=2", tmp_path / "run", resume=True, **short(7))
        assert syncs(run) == [4, 6, 7]

    def test_the_outer_momentum_goes_on_under_other_shards(self, tmp_path: Path) -> None:
        """Plain SGD inside: sharded or not, two replicas take the same steps; any plan goes on from what they save."""
        how = {"optimizer": sgd, "evaluate": lambda: table(35, seed=1)}
        first = fit("dp=2 sync=diloco every=2", tmp_path / "same", **short(4, **how)).folder
        shutil.copytree(first, tmp_path / "other")
        one = fit("dp=2 sync=diloco every=2", tmp_path / "same", resume=True, **short(8, **how))
        two = fit("dp=2 fsdp=2 sync=diloco every=2", tmp_path / "other", resume=True, **short(8, **how))
        assert [list(run.events("sync"))[-1]["loss"] for run in (two, one)] == [
            pytest.approx(list(one.events("sync"))[-1]["loss"], rel=1e-6)
        ] * 2
        again = fit("single", tmp_path / "other", resume=True, **short(8, **how))  # no step is left: it evaluates
        assert again.evaluation["loss"] == pytest.approx(two.evaluation["loss"], rel=1e-6)


class TestRuns:
    def test_events_tell_of_averagings(self, tmp_path: Path) -> None:
        run = fit("dp=2 sync=local every=3", tmp_path / "run", **short(6))
        events = list(run.events())
        assert [fault for event in events for fault in faults(event)] == []
        elements = sum(tensor.numel() for tensor in Net().parameters())
        found = list(run.events("sync"))
        alone = fit("single", tmp_path / "one", **short(1)).losses
        each = fit("dp=2 sync=local every=1", tmp_path / "two", **short(1))
        assert [event["loss"] for event in each.events("sync")] == pytest.approx(alone, rel=1e-6)  # of all replicas
        assert each.losses != pytest.approx(alone, rel=1e-6)
        assert [event["bytes"] for event in found] == [4 * elements + 32] * 2  # a ring of two, and four numbers
        notes = next(run.events("start"))["notes"]
        assert any(note.startswith("exact: no. Replicas are synchronised only") for note in notes)
        summary = summarise(run.folder)
        assert (summary.averagings.count, summary.averagings.bytes) == (2, 2 * (4 * elements + 32))

    @pytest.mark.parametrize(
        "plan", ["dp=2 pp=2 micro=4 sync=diloco every=2", *longer("dp=2 fsdp=2 zero=1 sync=local every=2")]
    )
    def test_a_replica_may_be_several_ranks(self, plan: str, tmp_path: Path) -> None:
        run = fit(plan, tmp_path / "run", **short(5), checkpoint_every=2)
        assert len(run.losses) == 5
        assert {event["rank"] for event in run.events("memory")} == set(range(4))
        if "pp" in plan:
            assert {event["rank"] for event in run.events("timeline")} == {0, 2}

    def test_replicas_that_start_from_other_values_are_found(self, tmp_path: Path) -> None:
        class Drawn(Net):
            def __init__(self) -> None:
                super().__init__()
                nn.init.constant_(self.head.bias, float(os.getpid()))

        with pytest.raises(WorkerError, match="other initial values on rank 1"):
            fit("dp=2 sync=local every=3", tmp_path / "run", model=Drawn)
