"""Compares the first step of a run with one device: the loss, the gradients before clipping, the first update.

Rank 0 starts a process beside it that takes the same step in a plain PyTorch loop, ``phalanx.witness.first_step``.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from phalanx.comm import Place, device_for, local
from phalanx.config import Job, Plan, RunSpec
from phalanx.data import StepBatch
from phalanx.errors import RunError
from phalanx.launch.side_process import Send, SideProcess
from phalanx.parallel import device_kind, devices_here
from phalanx.train.metrics import Metrics, Totals
from phalanx.train.observer import Observer, Scene
from phalanx.train.split_causes import LARGEST
from phalanx.witness.first_step import LAST_PLACE, FirstStepOfOne, Kind, real, signed
from phalanx.witness.pieces import Piece, piece_of

PATIENCE = 10.0
"""Seconds that rank 0 waits, at the end of its own first step, for that of one device."""


@contextmanager
def first_step_checked(job: Job, run: RunSpec, place: Place, size: int | None) -> Generator[Observer]:
    """Who compares the first step of ``run`` with one device, on every rank; ``size``: elements of its parameters.

    To be entered before a process group, or a device, is there.
    """
    if why_unchecked(job, run):
        yield Observer()
    elif place.rank:
        yield FirstStep(run, place.rank)
    elif size is None or size > LARGEST:
        yield FirstStep(run, 0, f"more than {LARGEST:,.0f} parameters are not held beside the run")
    else:
        with tempfile.TemporaryDirectory(prefix="phalanx-first-step-") as folder:
            checked = FirstStep(run, 0)
            checked.reference = _Reference(job, run, place, Path(folder))
            try:
                yield checked
            finally:
                checked.reference.close()


def why_unchecked(job: Job, run: RunSpec) -> str:
    """Why the first step of ``run`` is not compared, in words; empty where it is, or nothing divides its steps."""
    plan = run.plan
    if run.check == "off":
        return "the run was told so"
    if replace(plan, device="auto", precision="fp32") == Plan():
        return "the plan is one device"
    if plan.server or plan.sync != "each" or plan.compress != "none":
        return "no step of the plan is one device's"
    if job.phases:
        return "the job has phases"
    if plan.precision not in LAST_PLACE:
        return f"precision={plan.precision} is not that of a plain loop"
    return ""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank holds of a tensor: which piece of the whole, and its products with random signs."""

    piece: Piece
    products: list[float]


@final
class FirstStep(Observer):
    """Compares the first step of a run, on each rank of it; ``finding`` is what there is to say."""

    def __init__(self, run: RunSpec, rank: int, without: str = "") -> None:
        """``without``: why there is nothing to compare with, on rank 0."""
        self.reference: _Reference | None = None
        self._run, self._rank, self._without = run, rank, without
        self._scene: Scene | None = None
        self._start: dict[str, _Part] = {}
        self._seconds = 0.0

    def built(self, scene: Scene) -> None:
        self._scene = scene

    def begins(self, batch: StepBatch) -> None:
        if batch.step:
            self._end()
        elif self._scene:
            self._start = _parts(self._scene, self._scene.stepped())

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        if self._scene and not batch.step:
            loss, count = (float(one) for one in totals)
            self._compare("gradient", loss / count if count else math.nan, _parts(self._scene, self._scene.gradients()))

    def updated(self, batch: StepBatch, metrics: Metrics) -> None:
        if not self._scene or batch.step or metrics.skipped:
            self._end()
            return
        parts = _parts(self._scene, self._scene.stepped())
        moved = {
            name: replace(
                part, products=[a - b for a, b in zip(part.products, self._start[name].products, strict=True)]
            )
            for name, part in parts.items()
        }
        self._compare("update", metrics.loss, moved)
        self._end()

    def _compare(self, kind: Kind, loss: float, parts: Mapping[str, _Part]) -> None:
        """Have rank 0 judge what all have. Collective; ends the comparison where it cannot be made."""
        assert self._scene
        begun = time.perf_counter()
        told = {name: [part.piece, part.products] for name, part in parts.items()}
        everyone = self._scene.from_every_process(told)
        said = self._judged(kind, loss, everyone) if self._rank == 0 else None
        self._seconds += time.perf_counter() - begun
        said = self._scene.from_every_process(said)[0]
        if said["differs"] and not self._scene.notes:
            raise _error(self._run, said["differs"])
        if said["message"]:
            self.finding = {"message": said["message"], "equal": said["equal"], "seconds": self._seconds}
            self._end()

    def _judged(self, kind: Kind, loss: float, everyone: list[Any]) -> dict[str, Any]:
        without, result = self._without, None
        if not without and self.reference:
            result, without = self.reference.result()
        if result is None:
            return {"differs": "", "equal": None, "message": f"first step not compared with one device: {without}"}
        differs, largest = result.judged(kind, loss, everyone)
        message = f"first step equals one device ({largest:.0e})" if kind == "update" else ""
        if differs:
            message = f"first step differs from one device: {differs}"
        return {"differs": differs, "equal": not differs, "message": message}

    def _end(self) -> None:
        self._scene = None
        if self.reference:
            self.reference.close()


def _error(run: RunSpec, differs: str) -> RunError:
    error = RunError(
        f"the first step differs from one device: {differs}\n"
        f'    try: phalanx prove {run.job} --plan "{run.plan}" to find the cause; --check off trains all the same'
    )
    error.everywhere = True
    return error


@final
class _Reference:
    """The first step of a job on one device, taken in a process beside rank 0."""

    def __init__(self, job: Job, run: RunSpec, place: Place, folder: Path) -> None:
        self._precision, self._file = run.plan.precision, folder / "first-step.safetensors"

        self._process = SideProcess(partial(self._work, job, run.plan, place))
        self._result: FirstStepOfOne | None = None

    def _work(self, job: Job, plan: Plan, place: Place, send: Send) -> None:
        from phalanx.witness.first_step import take_first_step

        try:
            device = device_for(place, device_kind(plan, devices_here(plan, place)))
            send(take_first_step(job, plan.precision, device, self._file))
        except Exception as error:
            send({"without": f"the plain loop fails with {type(error).__name__}: {error}"})

    def result(self) -> tuple[FirstStepOfOne | None, str]:
        """What it came to, or why it came to nothing."""
        if self._result is None:
            answer = self._process.next(PATIENCE)
            if answer is None:
                return None, f"that takes more than {PATIENCE:g} s longer"
            if "without" in answer:
                return None, answer["without"]
            self._result = FirstStepOfOne.read(answer, self._file, self._precision)
        return self._result, ""

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _parts(scene: Scene, tensors: Mapping[str, Tensor]) -> dict[str, _Part]:
    found: dict[str, _Part] = {}
    for name, tensor in tensors.items():
        holding, values = scene.slices.get(name), real(local(tensor))
        if values.numel():
            piece, whole = piece_of(tensor, holding), holding.shape if holding is not None else tensor.shape
            shape = (*whole, *values.shape[len(whole) :])
            found[name] = _Part(piece, signed(values, piece, shape))
    return found
