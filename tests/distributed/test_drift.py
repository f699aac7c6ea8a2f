"""Ranks that drift apart are named, soon; shares that follow slow ones change no result, and reports name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from small import Normal, OfOutput, fit
from small import job as small_job
from small import table as small_table
from test_step_traffic import job_for

import phalanx as px
from law_rows import longer
from phalanx.comm import Place, default_process_group, local
from phalanx.config import Plan
from phalanx.data import records
from phalanx.errors import RefusedError, WorkerError
from phalanx.events.schema import faults
from phalanx.launch.local import launch
from phalanx.parallel import assemble
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.report.summary import summarise
from phalanx.train import drift, uneven_shares
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


@pytest.mark.parametrize(("plan", "ranks"), [("dp=3", "1"), *longer(("dp=2 fsdp=2 zero=2", "1, 3"), ("cp=2", "0, 1"))])
def test_one_element_off_by_a_thousandth_is_named_within_50_steps(plan: str, ranks: str, tmp_path: Path) -> None:
    job = replace(off_by(job_for(plan), 1e-3, step=4), batch=12 if plan == "dp=3" else 16, steps=4 + 50)
    with pytest.raises(WorkerError, match="have drifted apart") as raised:
        trained(job, plan, tmp_path)
    said = str(raised.value)
    assert "'head.weight'" in said
    assert f"of rank{'s' * (len(ranks) > 1)} {ranks} differ" in said
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
        ("dp=2 shares=3,1", lambda plan: normalised()),
        *longer(
            *((plan, job_for) for plan in ("dp=2 fsdp=2 zero=1 micro=2", "dp=2 tp=2", "dp=2 cp=2")),
            ("pp=2 dp=2 micro=2", lambda plan: normalised()),
        ),
    ],
)
def test_replicas_are_the_same_to_the_last_bit(plan: str, job: Callable[[str], px.Job], tmp_path: Path) -> None:
    given = replace(job(plan), epochs=None, steps=6)
    run = trained(given, plan, tmp_path, drift_every=1)
    assert not any("drifted" in event["message"] for event in run.events("warning"))
    assert len(run.losses) == 6


@pytest.mark.parametrize("plan", ["dp=2", *longer("dp=2 fsdp=2 zero=1", "dp=2 fsdp=2", "pp=2 dp=2 micro=2")])
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
    @pytest.mark.parametrize("text", ["dp=2 offload=optimizer", *longer("fsdp=2 zero=2", "fsdp=2", "fsdp=2 zero=1")])
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
        whole = fit("dp=2", tmp_path / "whole", **how)
        fit("dp=2", tmp_path / "half", **how, epochs=None, steps=4)
        assert fit("dp=2", tmp_path / "half", **how, resume=True).losses == whole.losses

    @pytest.mark.parametrize("plan", ["fsdp=2 zero=1", *longer("dp=2", "fsdp=2 zero=2")])
    def test_evaluation_reads_the_statistics_that_are_saved(self, plan: str, tmp_path: Path) -> None:
        """A checkpoint evaluated on one device gives what the ranks measured together."""
        how: dict[str, Any] = {"model": Normal, "drop_last": True, "epochs": None, "steps": 3}
        how["evaluate"] = lambda: small_table(35, seed=1)
        many = fit(plan, tmp_path / "run", **how).evaluation
        one = fit("single", tmp_path / "run", resume=True, **how).evaluation  # no step is left: it evaluates
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)


class Clock:
    """Seconds of each process by itself, which pass as its model computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven_shares, "time", CLOCK)


class Slow(small.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and dist.is_initialized():
            CLOCK.now += len(x) * (0.003 if dist.get_rank() % 2 else 0.001)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("plan", "workers"), [("dp=2 shares=auto micro=4", 2), *longer(("dp=2 shares=auto", 0))])
def test_shares_follow_a_slow_rank_and_change_nothing(clock: None, tmp_path: Path, plan: str, workers: int) -> None:
    one = fit("single", tmp_path / "one", epochs=4)
    run = fit(plan, tmp_path / "run", model=Slow, epochs=4, workers=workers)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    first, *moved = run.events("shares")
    assert (first["step"], first["shares"], first["seconds"]) == (0, [16, 16], [])
    assert moved
    assert all(not faults(event) for event in moved)
    fast, slow = moved[-1]["shares"]
    assert (fast, slow) == (24, 8)
    assert summarise(run.folder).slowest.startswith("; rank 1 of dp takes ")
    # what the events say is what ranks then took
    last = max(records(tmp_path / "run" / "ledger").items())[0]
    full = [step for step in range(moved[-1]["step"], last) if (step + 1) % 4]
    for step in full:
        assert [len(record.ids) for record in records(tmp_path / "run" / "ledger")[step]] == [fast, slow]


def test_a_run_goes_on_with_even_shares(tmp_path: Path) -> None:
    one = fit("single", tmp_path / "one", epochs=3)
    fit("dp=2 shares=3,1", tmp_path / "run", steps=5, epochs=None)
    run = fit("dp=2 shares=auto", tmp_path / "run", resume=True, epochs=3)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    assert [event["shares"] for event in run.events("shares")][:2] == [[24, 8], [16, 16]]


def test_weights_that_leave_a_device_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="shares=100,1") as caught:
        fit("dp=2 shares=100,1", tmp_path / "run")
    assert "dp=2 shares=auto" in str(caught.value)
