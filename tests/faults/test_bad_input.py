"""What users get wrong: one clear error each, before any process starts where it can be known there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import LENGTH, Net, fit, job, table
from torch import nn

import phalanx as px
from law_rows import in_one_test, longer
from phalanx.errors import GradientError, LossError, PhalanxError, RefusedError, SpecError, WorkerError
from phalanx.launch.worker_pool import WorkerPool


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", refuse)


@pytest.mark.usefixtures("no_fork")
class TestBeforeAnyProcess:
    def test_cuda_where_there_is_none(self) -> None:
        if torch.cuda.device_count():
            pytest.skip("there is a CUDA device")
        with pytest.raises(RefusedError, match="device=cuda for 2 replicas on this machine; CUDA devices here: 0"):
            px.fit(job(), "dp=2 device=cuda")


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes starting workers an error; a look at the job in a process beside this one is none."""

    def refuse(pool: WorkerPool) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(WorkerPool, "start", refuse)


class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__()
        assert torch.distributed.get_rank() == 0
        self.head = nn.parallel.DistributedDataParallel(self.head)


class MeanSquares(torch.optim.SGD):
    """Keeps one number of each parameter, which rows of DTensors leave to be added up."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["v"] = one.grad.square().mean()
        return super().step(closure)


FIRST_STEP: dict[str, tuple[dict[str, Any], type[PhalanxError], str]] = {
    "a loss for each sample": (
        {"loss": lambda output, batch: nn.functional.cross_entropy(output, batch["y"], reduction="none")},
        LossError,
        "the loss function gave a tensor of shape",
    ),
    "a loss without a graph": (
        {"loss": lambda output, batch: output.mean().detach()},
        LossError,
        "the loss depends on no parameter",
    ),
    "a batch without the arguments": ({"model": lambda: nn.Bilinear(9, 9, 5)}, LossError, "forward takes input1"),
    "a key that is not there": (
        {"loss": lambda output, batch: px.cross_entropy(output, batch["label"])},
        SpecError,
        r"job.loss: .*KeyError: 'label'.*test_bad_input.py line \d+: .*the batch has x, y",
    ),
    "classes that are not there": (
        {"loss": lambda output, batch: px.cross_entropy(output, batch["y"] + 3)},
        LossError,
        r"targets from 3 to \d for logits of 5 classes",
    ),
    "a module for a function": ({"model": Net()}, SpecError, "job.model: given a model, a Net; allowed: a function"),
    "a wrapped model": ({"model": Wrapped}, SpecError, "a model in DistributedDataParallel"),
    "another model's parameters": (
        {"optimizer": lambda params: torch.optim.SGD(Net().parameters(), lr=0.1)},
        GradientError,
        "tensors it was not given",
    ),
    "an optimizer with a closure": (
        {"optimizer": lambda params: torch.optim.LBFGS(params)},
        SpecError,
        "LBFGS, which steps with a closure",
    ),
    "Adafactor": (
        {"optimizer": lambda params: torch.optim.Adafactor(params)},
        RefusedError,
        "Adafactor under fsdp=2: it fails on rows of DTensors",
    ),
    "state that cannot be saved": (
        {"optimizer": lambda params: MeanSquares(params, lr=0.1)},
        RefusedError,
        "no checkpoint can hold",
    ),
    "metrics that are means": (
        {"evaluate": table, "metrics": lambda output, batch: {"mean": output.mean()}},
        LossError,
        "metric 'mean' is a Tensor",
    ),
    "a loader for data": (
        {"data": lambda: torch.utils.data.DataLoader(range(8))},
        SpecError,
        "job.data: given a DataLoader",
    ),
    "evaluation of a stream": ({"evaluate": lambda: iter([])}, SpecError, "job.evaluate: given a stream"),
}


@pytest.mark.usefixtures("no_worker")
@in_one_test("name", FIRST_STEP)
def test_what_would_stop_the_first_step_is_said_before_it(name: str) -> None:
    how, kind, words = FIRST_STEP[name]
    with pytest.raises(kind, match=words) as caught:
        px.fit(job(**how), "fsdp=2")
    assert caught.value.exit_code == 2  # nothing has run


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize("plan", ["fsdp=2 zero=1", *longer("dp=2", "pp=2 micro=4")])
def test_parameters_that_nothing_uses_are_named_before_the_first_step(plan: str) -> None:
    with pytest.raises(GradientError, match=r"forgotten\.weight, forgotten\.bias"):
        px.fit(job(model=Forgetful), plan)


class OfSomeBatches(Net):
    """Uses a layer where a batch has more than two samples: what two samples show is not what a run does."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.more(x) if len(x) > 2 else x)


def test_what_only_two_samples_show_is_tried_on_a_whole_batch(tmp_path: Path) -> None:
    assert len(fit("dp=2", tmp_path / "run", model=OfSomeBatches, steps=1, epochs=None).losses) == 1


def fails(match: str, plan: str = "dp=2", **how: Any) -> PhalanxError:
    with pytest.raises(PhalanxError, match=match) as caught:
        fit(plan, "run", **how)
    return caught.value


class Forgetful(Net):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(9, 3)


@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("dp=2", "fsdp=2", "threads=2")])
def test_parameters_without_gradient(plan: str) -> None:
    assert "forgotten.weight, forgotten.bias" in str(fails("got no gradient", plan, model=Forgetful))
    allowed = fit(plan, "allowed", model=Forgetful, unused="allow")
    assert allowed.losses == pytest.approx(fit("single", "same", model=Forgetful, unused="allow").losses, rel=1e-6)


def test_data_of_another_length_on_each_rank() -> None:
    error = fails("another length on each rank", data=lambda: table(50 + torch.distributed.get_rank()))
    assert "rank 0: 50, rank 1: 51" in str(error)


def by_process(seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([os.getpid(), epoch]).permutation(LENGTH)


def test_another_order_on_each_rank() -> None:
    error = fails("another order of the first", sampler=by_process)
    assert "a sampler that draws from its seed and epoch alone" in str(error)


@pytest.mark.parametrize("plan", ["pp=2", *longer("single", "threads=2", "fsdp=2 zero=3")])
def test_columns_of_float64_are_named(plan: str) -> None:
    def columns() -> px.Table:
        return px.Table(x=np.random.default_rng(0).normal(size=(LENGTH, 9)), y=np.zeros(LENGTH, dtype=np.int64))

    error = fails(
        r"float64 in batch\['x'\], for a model that has none: mat1 and mat2 must have the same dtype",
        plan,
        data=columns,
    )
    assert '.astype("float32")' in str(error)
    assert "Traceback" not in str(error)
    fit(plan, "fine", data=columns, model=lambda: Net().double(), epochs=1)


def test_a_checkpoint_of_another_model() -> None:
    fit("single", "run", steps=2, epochs=None)

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(9, 6)
            self.extra = nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.extra(super().forward(x))

    text = str(fails("another model", "single", resume=True, model=Wider))
    assert "extra.weight" in text
    assert "head.weight" in text


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        with pytest.raises(WorkerError, match="No space left"):
            fit("dp=2", disk / "run", checkpoint_every=1, model=Growing)
        from phalanx.checkpoint import latest, verify

        path = latest(disk / "run" / "checkpoints")
        assert path is not None
        assert path.name == "step-00000001"
        assert verify(path) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Growing(Net):
    """About 80 kB with its optimizer state: one checkpoint fits on the disk, a second beside it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 600), nn.Linear(600, 9)])


class Stream:
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(64 + 32 * torch.distributed.get_rank()):
            yield {"x": torch.ones(9), "y": torch.tensor(index % 5)}


def test_streams_that_differ_by_whole_batches() -> None:
    error = fails("the stream has another length on each rank", data=Stream, epochs=None, steps=6)
    assert "epoch by rank: 1, 0" in str(error)
    assert error.step == 2


def test_a_stream_that_has_ended_on_one_rank() -> None:
    assert "step by rank: ended, 2" in str(fails("the stream has another length", data=Stream, epochs=1))


def test_evaluation_data_of_another_length_on_each_rank() -> None:
    error = fails("job.evaluate gives data of another length", evaluate=lambda: table(9 + torch.distributed.get_rank()))
    assert "rank 0: 9, rank 1: 10" in str(error)


class Unseeded(Net):
    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng().standard_normal((5, 9))
        self.head.weight = nn.Parameter(torch.tensor(draw, dtype=torch.float32))


@pytest.mark.parametrize("plan", ["dp=2", *longer("fsdp=2 zero=2")])
def test_initial_values_that_differ(plan: str) -> None:
    error = fails("other initial values on rank 1", plan, model=Unseeded)
    assert "differs: head.weight" in str(error)
