"""A proof trains by the very calls that ``fit`` trains by: which function calls which is recorded, and compared."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from models import MODELS

import phalanx as px
from longer import longer
from phalanx.train import loop

PACKAGES = ("train/", "parallel/", "data/", "comm/", "checkpoint/")
BY_CHANCE = ("__del__", "<module>", "_files.<locals>.<lambda>")
"""Called when memory is let go, by who is first to import, and once for each file that other ranks have begun."""
NO_SIGNALS = "train/launcher_link.py:no_signal"
"""Nobody asks a proof to stop; a run's answer to that question comes from its launcher."""
LOOKS_BY_THE_CLOCK = "comm/point_agreement.py:PointAgreement._watch"
"""A thread that asks twice a second whether to stop: never, where all the steps take less."""
ONLOOKERS = ("train/observer.py", "verify/recording.py", "verify/fingerprints.py")


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
        if not place_in_house(frame.f_code).startswith("verify/capture.py"):
            yield frame
        frame = frame.f_back


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have workers write into ``folder`` what they call."""

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

    right = loop.train
    monkeypatch.setattr(loop, "train", train)


def read(folder: Path, plan: str) -> list[list[str]]:
    """What each rank called, those of servers behind the others."""
    found = [folder / f"{px.Plan.parse(plan)} on {rank}.json" for rank in range(px.Plan.parse(plan).processes)]
    return [json.loads(file.read_text()) for file in found]


PLANS = ("fsdp=2", "pp=2 micro=7", "dp=2 server=1")
MORE = ("single", "dp=2 micro=2", "threads=2", "tp=2 sequence=true", "cp=2", "fsdp=2 zero=1")
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
        # without grace: what a rank keeps to save when its peers are lost, no proof goes on from
        spec = px.RunSpec(job="", plan=px.Plan.parse(plan), folder=tmp_path / "run", forecast="none", grace=0.0)
        px.fit(given, run=spec)
    with monkeypatch.context() as patched:
        recorded(patched, tmp_path / "prove")
        assert px.prove(given, plan, steps=4).equal
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
    """Whether one of both ends is where servers and workers wait for each other."""
    return not all(end.startswith(WITHOUT_CLOCK) for end in call.split(" -> "))
