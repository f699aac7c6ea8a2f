"""Replicas hold the same bits; one parameter that is off on one rank is named, soon, with the rank."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Normal, OfOutput, fit
from small import job as small_job
from small import table as small_table
from test_step_traffic import Sent, job_for, listed

import phalanx as px
from longer import longer
from phalanx.comm import Place, default_process_group, local
from phalanx.config import Plan
from phalanx.config.run import DRIFT_EVERY
from phalanx.errors import WorkerError
from phalanx.launch import launch
from phalanx.parallel import assemble
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.placement.collective_bytes import MeshSizes
from phalanx.placement.step_traffic import fingerprints
from phalanx.train import drift
from phalanx.train.assembly import build
from phalanx.train.drift import PARTS, DriftWatch

CPU = torch.device("cpu")


def off_by(job: px.Job, by: float, step: int, name: str = "head.weight") -> px.Job:
    """``job``, whose optimizer makes one element of ``name`` larger on rank 1, after ``step`` steps."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = job.optimizer(parameters)
        tensor, taken = dict(parameters.named())[name], [0]

        def spoil(*_: Any) -> None:
            taken[0] += 1
            if taken[0] == step and torch.distributed.get_rank() == 1:
                with torch.no_grad():
                    local(tensor).view(-1)[5] += by

        made.register_step_post_hook(spoil)
        return made

    return replace(job, optimizer=optimizer)


def trained(job: px.Job, plan: str, folder: Path, **how: Any) -> px.Run:
    spec = px.RunSpec(job="job", plan=Plan.parse(plan), folder=folder / "run", forecast="none", **how)
    return px.fit(job, run=spec)


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("dp=3", "1"),
        ("dp=2 fsdp=2 zero=2", "1, 3"),
        *longer(("dp=2", "0, 1"), ("dp=2 fsdp=2", "1, 3"), ("cp=2", "0, 1")),
    ],
)
def test_one_element_off_by_a_thousandth_is_named_within_50_steps(plan: str, ranks: str, tmp_path: Path) -> None:
    job = replace(off_by(job_for(plan), 1e-3, step=4), batch=12 if plan == "dp=3" else 16, steps=4 + 50)
    with pytest.raises(WorkerError, match="have drifted apart") as raised:
        trained(job, plan, tmp_path)
    said = str(raised.value)
    assert "'head.weight'" in said
    assert f"of rank{'s' * (len(ranks) > 1)} {ranks} differ" in said
    assert raised.value.step is not None
    assert raised.value.step < 4 + 50
    assert raised.value.exit_code == 3


def test_warn_goes_on_and_off_does_not_look(tmp_path: Path) -> None:
    job = replace(off_by(job_for("dp=2"), 1e-3, step=1), steps=8)
    warned = trained(job, "dp=2", tmp_path / "warn", drift="warn", drift_every=1)
    assert any("drifted apart" in event["message"] for event in warned.events("warning"))
    assert len(warned.losses) == 8
    silent = trained(job, "dp=2", tmp_path / "off", drift="off", drift_every=1)
    assert not any("drifted" in event["message"] for event in silent.events("warning"))


def normalised() -> px.Job:
    """A job whose ranks see other samples, and so take other running statistics until these are brought together."""
    return small_job(model=Normal, drop_last=True)


@pytest.mark.parametrize(
    ("plan", "job"),
    [
        ("dp=2 compress=powersgd:2", job_for),
        ("dp=2 fsdp=2 zero=1 micro=2", job_for),
        ("dp=2 shares=3,1", lambda plan: normalised()),
        *longer(
            *((plan, job_for) for plan in ("dp=2 compress=bf16", "dp=2 tp=2", "pp=2 dp=2 micro=2", "dp=2 cp=2")),
            *((plan, lambda plan: normalised()) for plan in ("pp=2 dp=2 micro=2", "dp=2 fsdp=2 zero=2")),
        ),
    ],
)
def test_replicas_are_the_same_to_the_last_bit(plan: str, job: Callable[[str], px.Job], tmp_path: Path) -> None:
    given = replace(job(plan), epochs=None, steps=6)
    run = trained(given, plan, tmp_path, drift_every=1)
    assert not any("drifted" in event["message"] for event in run.events("warning"))
    assert len(run.losses) == 6


@pytest.mark.parametrize("plan", ["dp=2 fsdp=2 zero=1", *longer("dp=2", "dp=2 fsdp=2", "pp=2 dp=2 micro=2")])
def test_a_running_statistic_off_by_a_thousandth_on_one_rank_is_named(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = BufferSync.share

    def spoiled(self: BufferSync) -> None:
        share(self)
        if torch.distributed.get_rank() == 1 and self.buffers:
            self.buffers[-1].view(-1)[5] += 1e-3

    monkeypatch.setattr(BufferSync, "share", spoiled)
    with pytest.raises(WorkerError, match=r"have drifted apart: after step \d+, 'last.running_var' of ranks? .*1"):
        trained(normalised(), plan, tmp_path, drift_every=1)


def test_what_is_the_same_again_as_ranks_look_closer_is_said_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, settle, steps = BufferSync.share, DriftWatch.settle, [0]
    waiting: list[Any] = [None]

    def spoiled(self: BufferSync) -> None:
        share(self)
        steps[0] += 1
        if torch.distributed.get_rank() == 1 and steps[0] % 2:
            self.buffers[-1].view(-1)[5] += 1e-3

    def later(self: DriftWatch) -> None:
        """A step after the look, as on a device."""
        if waiting[0] is not self._waiting:
            waiting[0] = self._waiting
        else:
            settle(self)

    monkeypatch.setattr(BufferSync, "share", spoiled)
    monkeypatch.setattr(DriftWatch, "settle", later)
    run = trained(replace(normalised(), epochs=None, steps=10), "dp=2", tmp_path, drift_every=1)
    (message,) = [event["message"] for event in run.events("warning")]
    assert re.match(r"replicas differed after step \d, and no longer do", message)
    assert len(run.losses) == 10


def test_sums_of_blocks_that_happen_to_be_the_same_hide_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_BLOCKS", 1)
    sums = drift.bit_sum

    def work(place: Place, report: Callable[[int], None]) -> str:
        def blind(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
            """Sees nothing from the third call on, which is that of the blocks."""
            calls.append(sums(tensors))
            return calls[-1] if len(calls) < 3 else torch.zeros((), dtype=torch.int64)

        calls = list[torch.Tensor]()
        drift.bit_sum = blind
        with default_process_group(place, CPU):
            group = torch.distributed.group.WORLD
            assert group is not None
            watch = DriftWatch({"w": torch.full((8,), float(place.rank == 1))}, group, "warn", PARTS)
            watch.stepped(PARTS * PARTS - 1)
        return "".join(watch.news())

    for told in launch(work, 3):
        assert "after step 24, 'w' of rank 1 differs from their replicas, by up to 1; from here on" in told


@pytest.mark.parametrize(
    ("at_once", "amount"), [(1000, 1e-3), (2**22, math.nan), *longer((1000, math.inf), (2**22, 0.5))]
)
def test_rounding_hides_nothing(amount: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on unlike processors differ in last bits, in many blocks of all tensors; one element by more."""
    monkeypatch.setattr(drift, "_AT_ONCE", at_once)

    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        tensors = {name: torch.linspace(-1, 1, 100_000) for name in ("a", "b", "c")}
        noise = torch.Generator().manual_seed(place.rank)
        for tensor in tensors.values():
            tensor[::97] *= 1 + 1e-7 * torch.randint(-1, 2, (len(tensor[::97]),), generator=noise)
        with default_process_group(place, CPU):
            group = torch.distributed.group.WORLD
            assert group is not None
            watch = DriftWatch(tensors, group, "warn", 1)
            for step in range(PARTS):
                watch.stepped(step)
            before = list(watch.news())
            if place.rank == 1:
                tensors["b"][61_234] += amount
            for step in range(PARTS, 2 * PARTS):
                watch.stepped(step)
        return [*before, *watch.news()]

    for told in launch(work, 3):
        assert len(told) == 2
        assert "no more than rounding" in told[0]
        shown = "inf" if not math.isfinite(amount) else f"{amount:.2g}"
        assert f"'b' of rank 1 differs from their replicas, by up to {shown}; from here on" in told[1]


@pytest.mark.parametrize("text", ["dp=2 fsdp=2", *longer("dp=2")])
def test_looks_send_what_placement_lists(text: str) -> None:
    plan = Plan.parse(text)

    def work(place: Place, report: Callable[[int], None]) -> list[Any]:
        with default_process_group(place, CPU):
            assembly = build(job_for(text), plan, place, CPU)
            watch = DriftWatch.of(plan, place.rank, assembly.layout.parameters, "stop", DRIFT_EVERY)
            assert watch is not None
            with Sent() as sent:
                for step in range(PARTS * DRIFT_EVERY):
                    watch.stepped(step)
        return [[*key, times] for key, times in sent.exchanges.items()]

    one = fingerprints(MeshSizes.of(plan, 16), DRIFT_EVERY)
    for rank, rows in enumerate(launch(work, plan.world_size)):
        every = listed([replace(one, times=one.times * PARTS * DRIFT_EVERY)], plan, rank)
        assert Counter({(kind, tuple(ranks), size): times for kind, ranks, size, times in rows}) == every


@pytest.mark.quick
@pytest.mark.parametrize("at", [0, 1, 6, 7, 5000, 70_001])
def test_a_look_sees_each_element(at: int) -> None:
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        values = torch.randn(70_002).to(kind)[1:]  # an odd place in memory, as views have
        changed = values.clone()
        changed[at - 1 if at else 0] += 1
        assert drift.bit_sum([values]) != drift.bit_sum([changed])
        assert drift.bit_sum([values]) == drift.bit_sum([values.clone()])


class TestBuffers:
    """Running statistics: the same on every rank after a step, saved, and read by evaluations."""

    @pytest.mark.parametrize("text", ["fsdp=2 zero=2", "dp=2 offload=optimizer", *longer("fsdp=2", "fsdp=2 zero=1")])
    def test_every_rank_has_the_same_statistics(self, text: str) -> None:
        plan, backward = Plan.parse(f"{text} device=cpu"), OfOutput(lambda output: output.square().mean())

        def work(place: Place, report: Any) -> dict[str, list[float]]:
            torch.set_num_threads(1)
            with default_process_group(place, CPU):
                torch.manual_seed(0)
                layout = assemble(Normal(), small_job(), plan, place.rank, CPU)
                generator = torch.Generator().manual_seed(place.rank)
                for _ in range(2):
                    layout.accumulate([[torch.randn(6, 9, generator=generator) for _ in range(2)]], backward)
                    layout.finish()
                    layout.stepped()
                return {name: tensor.tolist() for name, tensor in layout.module.named_buffers() if "running" in name}

        first, other = launch(work, 2)
        assert len(first) == 6
        assert any(value not in (0.0, 1.0) for values in first.values() for value in values)
        assert other == first

    def test_resuming_with_statistics_changes_no_bit(self, tmp_path: Path) -> None:
        how: dict[str, Any] = {"model": Normal, "drop_last": True}
        whole = fit("fsdp=2", tmp_path / "whole", **how)
        fit("fsdp=2", tmp_path / "half", **how, epochs=None, steps=4)
        assert fit("fsdp=2", tmp_path / "half", **how, resume=True).losses == whole.losses

    @pytest.mark.parametrize("plan", ["fsdp=2 zero=1", *longer("dp=2", "fsdp=2 zero=2")])
    def test_evaluation_reads_the_statistics_that_are_saved(self, plan: str, tmp_path: Path) -> None:
        """A checkpoint evaluated on one device gives what the ranks measured together."""
        how: dict[str, Any] = {"model": Normal, "drop_last": True, "epochs": None, "steps": 3}
        how["evaluate"] = lambda: small_table(35, seed=1)
        many = fit(plan, tmp_path / "run", **how).evaluation
        one = fit("single", tmp_path / "run", resume=True, **how).evaluation  # no step is left: it evaluates
        assert many is not None
        assert one is not None
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
