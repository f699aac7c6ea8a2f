"""Whole runs: what a run folder holds, resuming under any plan, evaluation, many ranks, steps that are checked late."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BATCH, LENGTH, fit, job, table
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx as px
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.comm import mesh
from phalanx.config import Plan
from phalanx.data import audit, sampler
from phalanx.data.sampler import Permutation
from phalanx.demo.jobs import gpt
from phalanx.device_kinds import host
from phalanx.device_kinds import kind_of as real_kind_of
from phalanx.errors import WorkerError
from phalanx.events import faults
from phalanx.launch import addresses
from phalanx.parallel import deferred_init, split, unwrapped_blocks
from phalanx.parallel.pipeline import StageCuts, cut, cutting
from phalanx.train import grad_accumulation, refusals
from phalanx.train.build_model import build_model
from phalanx.train.few_samples import example_of


def test_a_run_folder_holds_what_happened(tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", checkpoint_every=3, evaluate=lambda: table(50, seed=1), evaluate_every=4)
    events = list(run.events())
    assert [fault for event in events for fault in faults(event)] == []
    assert [event["step"] for event in run.events("step")] == list(range(8))
    assert [event["samples"] for event in run.events("step")] == [32, 32, 32, 7] * 2
    assert [event["step"] for event in run.events("checkpoint")] == [3, 6, 8]
    assert [event["step"] for event in run.events("evaluate")] == [4, 8]
    assert [event["rank"] for event in run.events("memory")] == [0, 1]
    assert events[0]["event"] == "start"
    assert [event["event"] for event in events if event["event"] != "forecast"][-1] == "end"  # it comes when it comes
    assert str(run.plan) == "dp=2"
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run stopped after 5 of 8 steps, one into the second epoch, and the losses of one that was not."""
    folder = tmp_path_factory.mktemp("half")
    whole = fit("dp=2", folder / "whole", epochs=2)
    fit("dp=2", folder / "half", epochs=None, steps=5)
    return folder / "half", whole.losses


@pytest.mark.parametrize(
    "plan", ["dp=2", "threads=2", *longer("fsdp=3 zero=1", "fsdp=2", "fsdp=2 zero=2", "dp=2 offload=optimizer")]
)
def test_resume_goes_on_under_any_plan(plan: str, halfway: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, losses = halfway
    shutil.copytree(folder, tmp_path / "run")
    run = fit(plan, tmp_path / "run", resume=True)
    if plan == "dp=2":
        assert run.losses == losses
    else:
        assert run.losses == pytest.approx(losses, rel=1e-6)
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []
    assert len(read_ledger(run.folder / "ledger")) == 8
    assert next(run.events("resume"))["step"] == 5


@pytest.mark.parametrize("plan", ["dp=2 server=1", *longer("single")])
def test_a_length_that_moves_the_schedule_and_one_that_is_over_are_said(plan: str, tmp_path: Path) -> None:
    decays = px.Schedule(decay="linear")
    fit(plan, tmp_path / "run", epochs=None, steps=4, checkpoint_every=2, schedule=decays)
    run = fit(plan, tmp_path / "run", epochs=None, steps=8, resume=True, schedule=decays)
    (said,) = [note for note in list(run.events("start"))[-1]["notes"] if "length of the run" in note]
    assert "step 4 is taken at 0.5 of the optimizer's rate, where 0 was to be" in said
    assert "px.Schedule(..., total_steps=4)" in said
    again = fit(plan, tmp_path / "run", epochs=None, steps=9, resume=True, schedule=replace(decays, total_steps=8))
    assert not any("length of the run" in note for note in list(again.events("start"))[-1]["notes"])
    over = fit(plan, tmp_path / "run", resume=True, epochs=None, steps=3, schedule=replace(decays, total_steps=8))
    assert any("no step is left" in event["message"] for event in over.events("warning"))
    assert len(over.losses) == 9


def test_fp16_resumes_with_its_loss_scale(tmp_path: Path) -> None:
    whole = fit("precision=fp16", tmp_path / "whole")
    fit("precision=fp16", tmp_path / "half", epochs=None, steps=5)
    assert fit("precision=fp16", tmp_path / "half", resume=True).losses == whole.losses


@pytest.mark.parametrize("plan", ["dp=4", *longer("single micro=5", "fsdp=4", "threads=3", "dp=3", "fsdp=2 zero=2")])
def test_evaluation_counts_each_sample_once(plan: str, tmp_path: Path) -> None:
    seen = fit(
        plan,
        tmp_path / "run",
        epochs=None,
        steps=1,
        evaluate=lambda: table(35, seed=1),  # a last batch of 3: fewer samples than ranks
        metrics=lambda output, batch: {"ones": px.Loss(torch.ones(len(output)).sum(), 1)},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    ).evaluation
    model = build_model(job())
    data = table(35, seed=1).__getitems__(list(range(35)))
    with torch.no_grad():
        expected = cross_entropy(model(data["x"]), data["y"])
    assert seen["samples"] == 35
    assert seen["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_build_leaves_the_loop_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="phalanx"):
        step, loader = px.build(job(), "threads=2 micro=64")
    (said,) = [one.getMessage() for one in caplog.records]
    assert "micro=64 splits nothing" in said
    losses = [step(batch).loss for batch in loader]
    assert len(losses) == 8
    assert losses == pytest.approx(fit("single", "one").losses, rel=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(9, 16), nn.Linear(16, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """Four blocks between two layers with one weight: in a pipeline only the first and the last stage have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(9, 9, bias=False), nn.ModuleList(Block() for _ in range(4))
        self.last, self.head = nn.Linear(9, 9, bias=False), nn.Linear(9, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.last(x)))


TIED: dict[str, Any] = {
    "model": Tied,
    "inputs": lambda batch: batch["x"],
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def plain(length: int, batch: int, epochs: int) -> list[float]:
    """The losses of a loop by hand over the permutations of the job's seed."""
    net, losses, columns = Tied(), list[float](), table(length).columns
    net.load_state_dict(build_model(job(**TIED)).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        order = torch.from_numpy(Permutation.keyed(length, 0, epoch)(torch.arange(length).numpy()))
        for ids in order.split(batch):
            loss = cross_entropy(net(columns["x"][ids]), columns["y"][ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who talks is connected as it first does, of a batch a rank knows its own part."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(addresses, "_MOST_CONNECTED", 1)
    monkeypatch.setattr("phalanx.data.map_style.BLOCK", 1)


def of_later_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made by ``dist.new_group``, all ranks taking part in each."""
    monkeypatch.setattr(mesh, "_READ", (2, 10))


PRODUCTS = (
    *("dp=3", "dp=2 fsdp=2", "dp=2 fsdp=2 zero=1 micro=3", "fsdp=2 tp=2", "pp=2 tp=2 micro=4", "pp=3 micro=4"),
    *("dp=2 pp=2 micro=4", "dp=3 shares=2,1,1"),
)
CHOSEN = (("pp=2 tp=2 micro=4", of_many), ("dp=2 pp=2 micro=4", of_later_torch))


@pytest.mark.parametrize(
    ("plan", "way"),
    [
        *CHOSEN,
        *longer(*((plan, way) for plan in PRODUCTS for way in (of_many, of_later_torch) if (plan, way) not in CHOSEN)),
    ],
)
def test_it_trains_as_one_device_and_goes_on(
    plan: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way(monkeypatch)
    fit(plan, tmp_path / "run", **{**TIED, "epochs": None, "steps": 5})
    run = fit(plan, tmp_path / "run", resume=True, **TIED)
    assert run.losses == pytest.approx(plain(LENGTH, 32, 2), abs=5e-6)
    assert audit(run.folder / "ledger", length=LENGTH, batch=32, drop_last=False) == []


@pytest.mark.parametrize("plan", ["dp=3 shares=2,1,1", *longer("threads=2", "single", "dp=3", "fsdp=2 micro=1000")])
def test_of_a_large_batch_a_rank_knows_its_own_part(plan: str, tmp_path: Path) -> None:
    length, batch = 20000, sampler.BLOCK + 7
    how = {**TIED, "data": lambda: table(length), "batch": batch}
    run = fit(plan, tmp_path / "run", **how)
    assert run.losses == pytest.approx(plain(length, batch, 2), abs=5e-6)
    assert audit(run.folder / "ledger", length=length, batch=batch, drop_last=False) == []


class Event:
    def record(self, stream: Any = None) -> None:
        return

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        return


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores with streams: forked workers inherit it."""
    for name, value in {"streams": True, "event": lambda self, **_: Event()}.items():
        monkeypatch.setattr(type(host()), name, value)
    monkeypatch.setattr(type(host()), "current_stream", lambda self, device: Event())
    accelerator = copy.copy(host())
    accelerator.on_host = False

    def kind_of(device: Any, named: str = "auto") -> Any:
        return accelerator if real_kind_of(device, named) is host() else real_kind_of(device, named)

    monkeypatch.setattr(grad_accumulation, "kind_of", kind_of)


def checked(*, bad: int | None = None, optimizer: Any = None) -> px.Job:
    rows = torch.randn(48, 9, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        rows[bad * 8] = float("inf")

    def data() -> px.Table:
        return px.Table(x=rows, y=torch.arange(48) % 3)

    given = {"optimizer": optimizer} if optimizer else {}
    return job(data=data, batch=8, epochs=1, shuffle=False, clip=1.0, **given)


def one_rank_chooses(params: Any) -> torch.optim.Optimizer:
    """On one stage of a pipeline another implementation than on the other."""
    last = any(tensor.shape[0] == 5 for tensor in params)
    return torch.optim.AdamW(params, lr=0.01, foreach=None if last else True)


LATE = ("pp=2 micro=4", "fsdp=2 micro=2 precision=bf16", "fsdp=2 zero=2")


@pytest.mark.parametrize(
    ("plan", "optimizer"), [("pp=2 micro=4", one_rank_chooses), *longer(*((plan, None) for plan in LATE))]
)
@pytest.mark.usefixtures("streams")
def test_every_rank_stops(plan: str, optimizer: Any, tmp_path: Path) -> None:
    given = checked(bad=3, optimizer=optimizer)
    with pytest.raises(WorkerError, match="the loss of step 3 is nan"):
        px.fit(given, plan, folder=tmp_path / "run", drift="off", watch=False, checkpoint_every=5)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


LOOKS: tuple[tuple[Any, str], ...] = (
    (split, "look"),
    (deferred_init, "followed"),
    (unwrapped_blocks, "look_inside"),
    (cutting, "units"),
    (refusals, "slice_problems"),
)


def gpt_job() -> px.Job:
    given = gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=2)
    return replace(given, evaluate=None)  # over all held-out text, which takes longer than the steps


def counted(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """Have every look write down which process takes it."""

    def noted(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def looking(*args: Any, **kwargs: Any) -> Any:
            with log.open("a") as file:
                file.write(f"{name} {os.getpid()}\n")
            return look(*args, **kwargs)

        return looking

    for module, name in LOOKS:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))


@pytest.mark.parametrize(
    ("text", "looked"),
    [
        ("pp=2 micro=2 tp=2 recompute=full", "look look_inside slice_problems units"),
        *longer(("cp=2", "look"), ("fsdp=2", "look_inside")),
    ],
)
def test_one_process_looks(text: str, looked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch, tmp_path / "looks")
    plan, folder = Plan.parse(text), tmp_path / "run"
    px.fit(gpt_job(), run=px.RunSpec(job="gpt", plan=plan, folder=folder, forecast="none"))
    looks = (tmp_path / "looks").read_text().splitlines()
    names, processes = zip(*(look.split() for look in looks), strict=True)
    assert sorted(names) == looked.split()
    assert len(set(processes)) == 1


def test_a_pipeline_is_cut_where_it_is_known_to_be_and_looked_for_where_that_cannot_be() -> None:
    plan, module = Plan.parse("pp=2"), build_model(gpt_job())
    example = example_of(gpt_job(), module)
    fresh = cut(module, example, plan)
    known = cut(module, example, plan, fresh.cuts)
    assert (known.regions, known.stages_of, known.cuts) == (fresh.regions, fresh.stages_of, fresh.cuts)
    inside = f"blocks.0.{next(name for name, _ in module.get_submodule('blocks.0').named_children())}"
    wrong = StageCuts(units=(*fresh.cuts.units, inside), starts=(0, 1))
    assert cut(module, example, plan, wrong).regions == fresh.regions
    earlier = StageCuts(units=fresh.cuts.units, starts=(0, 1))
    assert cut(module, example, plan, earlier).regions[0] == range(1)
