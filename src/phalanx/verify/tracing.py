"""Looks on while the first step is taken: what passes the modules, and what comes back to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor

from phalanx.config import Plan
from phalanx.data import StepBatch
from phalanx.train.metrics import Totals
from phalanx.train.observer import AssemblyScene, Observer, Scene
from phalanx.verify.auxiliary import auxiliary_gradients
from phalanx.verify.trace import Passed, trace_from_json, trace_to_json, traceable, traced

_AUXILIARY = "auxiliary.safetensors"


class Tracing(Observer):
    """One process's trace of the first step; ``answer`` is what it tells as JSON."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._scene: AssemblyScene | None = None
        self._inside = ExitStack()
        self._passed: Mapping[str, Passed] = {}
        self.answer: dict[str, Any] = {"trace": {}}

    def built(self, scene: Scene) -> None:
        if isinstance(scene, AssemblyScene) and traceable(self._plan):
            self._scene = scene

    def begins(self, batch: StepBatch) -> None:
        if self._scene is None or batch.step:
            return
        if self._plan.kind == "single" and (alone := auxiliary_gradients(self._scene.step, batch)):
            save_file(alone, self._folder / _AUXILIARY)
        self._passed = self._inside.enter_context(traced(self._scene.modules[0]))

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        self._inside.close()
        if self._passed:
            self.answer["trace"] = trace_to_json(self._passed)


def traces_of(answers: list[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Passed]], dict[str, Tensor]]:
    """Each process's trace, and the gradients of an auxiliary loss alone, by parameter."""
    file = folder / _AUXILIARY
    alone = load(file.read_bytes()) if file.exists() else {}
    return [trace_from_json(answer["trace"]) for answer in answers], alone
