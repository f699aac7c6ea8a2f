"""Proofs against a user's own loop, of jobs at the edges, and by the very calls that ``fit`` trains by.

Which function calls which is recorded in a run and in a proof, and compared.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from models import MODELS, job, rows
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.errors import WorkerError
from phalanx.train import loop as training_loop

TABLE = rows()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5))


def classified(**how: Any) -> px.Job:
    loss = lambda output, batch: px.cross_entropy(output, batch["y"])  # noqa: E731
    given: dict[str, Any] = {"inputs": lambda batch: batch["x"], **how}
    return job(net, TABLE, loss, **given)


def steps_of(model: nn.Module, samples: Any, steps: int, *, rate: float = 1e-3, clip: float = 0.3) -> Iterator[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        ids = torch.tensor(samples[step])
        loss = nn.functional.cross_entropy(model(TABLE.columns["x"][ids]), TABLE.columns["y"][ids])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield loss


def whole(steps: int, model: nn.Module, samples: Any) -> Any:
    yield from steps_of(model, samples, steps)
    return model


def listed(steps: int, samples: Any) -> dict[str, Any]:
    model = net()
    return {"losses": [loss.item() for loss in steps_of(model, samples, steps)], "model": model}


@pytest.mark.parametrize("loop", [whole, listed])
def test_a_users_own_loop_is_the_measure(loop: Callable[..., Any]) -> None:
    proof = px.prove(classified(), "dp=2", steps=6, against=loop)
    assert proof.equal, proof.first
    assert proof.reference == f"your own {loop.__name__}()"
    kinds = {check.kind for check in proof.checks}
    assert {"loss", "used", "parameter", "state", "copies"} <= kinds
    assert proof.parameters


@pytest.mark.parametrize(
    ("how", "first", "cause"),
    [
        ({"rate": 2e-3}, "the learning rate of", "the learning rates differ"),
        ({"clip": 0.1}, "that the optimizer was given in step 0", "changed between backward and the update"),
    ],
    ids=str,
)
def test_a_loop_that_does_something_else_is_not_equal(how: dict[str, float], first: str, cause: str) -> None:
    def loop(steps: int, model: nn.Module, samples: Any) -> Any:
        yield from steps_of(model, samples, steps, **how)
        return model

    proof = px.prove(classified(), "single", steps=3, against=loop)
    assert not proof.equal
    assert first in proof.first
    assert cause in proof.cause
    assert ("clipping" in proof.cause) == ("clip" in how)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (lambda model: [1.0], "gave a list"),
        (lambda steps, model: {"losses": [0.5], "model": model}, "1 losses for 3 steps"),
        (lambda batches: None, "asks for batches"),
        (lambda steps, model: {"losses": [0.5] * steps, "model": model}, "no step of a torch.optim.Optimizer"),
    ],
)
def test_what_is_no_training_loop_is_said(loop: Callable[..., Any], words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        px.prove(classified(), "single", steps=3, against=loop)


def test_a_job_that_the_plain_loop_fails_with_is_told_by_phalanx() -> None:
    wrong = replace(classified(), loss=lambda output, batch: output)
    with pytest.raises(WorkerError, match=r"it may give px\.Loss"):
        px.prove(wrong, "single", steps=2)


def classify(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    return nn.functional.cross_entropy(output, batch["y"])


def test_data_smaller_than_the_batch_are_no_fault_of_the_sampler() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    small = job(net, rows(), classify, inputs=lambda batch: batch["x"])
    proof = px.prove(replace(small, batch=10 * small.batch), "dp=2", steps=2)
    assert not proof.equal
    assert "BatchNorm" in proof.cause


PACKAGES = ("train/", "parallel/", "data/", "comm/", "checkpoint/")
BY_CHANCE = ("__del__", "<module>", "_files.<locals>.<lambda>")
"""Called when memory is let go, by who is first to import, and once for each file that other ranks have begun."""
NO_SIGNALS = "train/interruptions.py:no_signal"
"""Nobody asks a proof to stop; a run's answer to that question comes from its launcher."""
LOOKS_BY_THE_CLOCK = "comm/point_agreement.py:PointAgreement._watch"
"""A thread that asks twice a second whether to stop: never, where all the steps take less."""
ONLOOKERS = ("train/observer.py", "verify/recording.py", "verify/fingerprints.py", "witness/reference_step.py")


@cache
def place_in_house(code: CodeType) -> str:
    """File within the house and function, such as ``train/step.py:Step.update``; empty for others' code."""
    _, inside, file = code.co_filename.rpartition("/phalanx/")
    return f"{file}:{code.co_qualname}" if inside else ""


class Calls:
    """Which functions of the training packages call which, directly or through torch and the job, in every thread."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        callee = place_in_house(frame.f_code) if event == "call" else ""
        if not callee.startswith(PACKAGES) or callee.startswith(ONLOOKERS) or callee.endswith((*BY_CHANCE, NO_SIGNALS)):
            return
        callers = [place for each in outwards(frame.f_back) if (place := place_in_house(each.f_code))]
        if any(place.startswith(ONLOOKERS) for place in callers):
            return
        if callers and callers[0].startswith(PACKAGES) and not callers[0].endswith(("<module>", LOOKS_BY_THE_CLOCK)):
            self.found.add(f"{callers[0]} -> {callee}")


def outwards(frame: FrameType | None) -> Any:
    """The frame and those that called it, without those that switch dropout off around torch's functions."""
    while frame is not None:
        if not place_in_house(frame.f_code).startswith(("verify/capture.py", "witness/dropout_off.py")):
            yield frame
        frame = frame.f_back


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def train(job: Any, run: Any, place: Any, *rest: Any, **how: Any) -> Any:
        calls = Calls()
        threading.setprofile(calls)
        sys.setprofile(calls)
        try:
            return right(job, run, place, *rest, **how)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            folder.mkdir(exist_ok=True)
            (folder / f"{run.plan} on {place.rank}.json").write_text(json.dumps(sorted(calls.found)))

    right = training_loop.train
    monkeypatch.setattr(training_loop, "train", train)


def read(folder: Path, plan: str) -> list[list[str]]:
    found = [folder / f"{px.Plan.parse(plan)} on {rank}.json" for rank in range(px.Plan.parse(plan).processes)]
    return [json.loads(file.read_text()) for file in found]


PLANS = ("fsdp=2", "dp=2 server=1")
MORE = ("pp=2 micro=7", "single", "dp=2 micro=2", "threads=2", "tp=2 sequence=true", "cp=2", "fsdp=2 zero=1")
OF_STEPS = (
    "train/loop.py:TrainingLoop",
    "train/run_recorder.py:RunRecorder.stepped",
    "train/step.py:Step.update",
    "train/memory_use.py:MeasuredStep",
    "train/evaluate.py:evaluate",
    "checkpoint/background.py:BackgroundSaver.save",
)
COMPUTED = ("gradient_worker.py:Computer", "coordinator.py")
WITHOUT_CLOCK = (
    *("parallel/", "checkpoint/", "data/", "train/loop.py", "train/run_recorder.py"),
    *(f"train/parameter_server/{name}" for name in COMPUTED),
)
"""Of servers and their workers; in other rooms they wait, beat and part by the clock, and what that calls is chance."""
OF_SERVERS = (
    *OF_STEPS[:2],
    *("train/parameter_server/coordinator.py", "parallel/parameter_server/update.py", "checkpoint/format.py"),
)


@pytest.mark.parametrize("plan", [*PLANS, *longer(*MORE)])
def test_a_proof_takes_the_path_of_a_run(plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = MODELS["own GPT" if px.Plan.parse(plan).kind == "split" else "MLP"]()
    given = replace(given, steps=4, epochs=None, evaluate=given.data, evaluate_every=2)
    with monkeypatch.context() as patched:
        recorded(patched, tmp_path / "fit")
        # without grace: what a rank keeps to save when its peers are lost, no proof goes on from; nor from its check
        spec = px.RunSpec(
            job="", plan=px.Plan.parse(plan), folder=tmp_path / "run", forecast="none", grace=0.0, check="off"
        )
        px.fit(given, run=spec)
    with monkeypatch.context() as patched:
        recorded(patched, tmp_path / "prove")
        assert px.prove(given, plan, steps=4, resume=False).equal
    fitted, proven = read(tmp_path / "fit", plan), read(tmp_path / "prove", plan)
    found = list(chain.from_iterable(fitted))
    for name in OF_SERVERS if "server" in plan else OF_STEPS:
        assert any(name in call for call in found), name
    if "server" in plan:  # which worker takes which step is by the clock
        fitted, proven = [[*chain.from_iterable(fitted)]], [[*chain.from_iterable(proven)]]
    for here, there in zip(fitted, proven, strict=True):
        other = {call for call in set(here) ^ set(there) if "server" not in plan or not by_the_clock(call)}
        assert other == set()


def by_the_clock(call: str) -> bool:
    return not all(end.startswith(WITHOUT_CLOCK) for end in call.split(" -> "))
