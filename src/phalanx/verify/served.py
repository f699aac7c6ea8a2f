"""What a proof looks at where servers hold the parameters: seen from the server that coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from phalanx.comm import Place
from phalanx.spec import Job, Plan, RunSpec
from phalanx.train.metrics import Metrics
from phalanx.train.served import Watcher, take_part
from phalanx.verify.capture import switch_off_dropout, without_dropout
from phalanx.verify.prints import prints_of


def capture_served(
    job: Job, plan: Plan, steps: int, folder: Path
) -> Callable[[Place, Callable[[int], None]], list[dict[str, Any]]]:
    """A process's work: as ``capture`` does, under a plan with servers. The first server returns all ranks' answers."""
    given = replace(job, model=without_dropout(job))
    short = replace(given, steps=steps, epochs=None, evaluate=None, metrics=None, evaluate_every=0)
    run = RunSpec(job="proof", plan=plan, folder=folder / "run", snapshot_every=0, forecast="none")

    def work(place: Place, report: Callable[[int], None]) -> list[dict[str, Any]]:
        switch_off_dropout()
        watcher = _Capture(folder) if place.rank == plan.dp else None
        take_part(short, run, place, report, watcher=watcher)
        return watcher.answers() if watcher else []

    return work


class _Capture(Watcher):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prints: dict[str, Any] = {}
        self._metrics: list[Metrics] = []
        self._notes: list[str] = []
        self._ids: list[list[int]] = []

    def begun(self, parameters: Mapping[str, torch.Tensor], notes: list[str]) -> None:
        self._notes = notes
        self._keep("initial", "start", parameters)

    def gradients(self, gradients: Mapping[str, torch.Tensor], ids: list[list[int]]) -> None:
        self._ids = ids
        self._keep("gradients", "gradients", gradients)

    def updated(self, metrics: Metrics) -> None:
        self._metrics.append(metrics)

    def ended(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._keep("parameters", "end", parameters)

    def answers(self) -> list[dict[str, Any]]:
        """One for each worker: all have the same values, and pieces of their own."""
        metrics = sorted(self._metrics, key=lambda one: one.step)
        same = {
            "losses": [one.loss for one in metrics],
            "skipped": [one.skipped for one in metrics],
            "lr": max((one.lr for one in metrics), default=0.0),
            "trace": {},
            "notes": self._notes,
            **self._prints,
        }
        return [{**same, "ids": ids} for ids in self._ids]

    def _keep(self, file: str, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        save_file({name: one.contiguous() for name, one in tensors.items()}, self._folder / f"{file}-0.safetensors")
        self._prints[what] = prints_of(tensors, {})
