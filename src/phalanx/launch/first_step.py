"""Compares the first step of a run with one device: the loss, the gradients before clipping, the first update.

Rank 0 starts a process beside it that takes the same step in a plain PyTorch loop, ``phalanx.witness.reference_step``.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from phalanx.comm import Place, device_for, local
from phalanx.config import Job, Plan, RunSpec
from phalanx.data import StepBatch
from phalanx.device_kinds import kind_named, on_host
from phalanx.errors import RunError
from phalanx.hardware import memory_bytes
from phalanx.launch.side_process import Send, SideProcess
from phalanx.parallel import device_kind, devices_here
from phalanx.parallel.advice import differs
from phalanx.placement.batch_split import Lane, cuts
from phalanx.train.findings import Findings
from phalanx.train.metrics import Metrics, Totals
from phalanx.train.observer import Observer, Scene, changes_of_forward
from phalanx.units import show_names
from phalanx.witness.dropout_off import dropout_off
from phalanx.witness.reference_step import (
    FirstStepOfOne,
    Kind,
    Piece,
    piece_of,
    real,
    sample_digests,
    signed,
)
from phalanx.witness.rounding import LAST_PLACE

PATIENCE = 10.0
"""Seconds that rank 0 waits for the first step of one device: on CPU at the end of its own, else before it begins."""
LARGEST, _BYTES = 2e8, 300
"""Elements of parameters up to which it is taken, if so many bytes for each are no more than the host has."""
_SMALL = "; phalanx prove --small compares a small copy of the model"


@contextmanager
def first_step_checked(job: Job, run: RunSpec, place: Place, found: Findings) -> Generator[Observer]:
    """Who compares the first step of ``run`` with one device, on every rank; ``found``: of a look at the job.

    To be entered before a process group, or a device, is there.
    """
    alone = replace(run.plan, device="auto", precision="fp32") == Plan()
    if run.check == "off" or alone or (why := why_unchecked(job, run.plan)):
        silent = Observer()
        silent.finding = None if run.check == "off" or alone else {**_not_compared(why), "seconds": 0.0}
        yield silent
        return
    checked = FirstStepCheck(job, run, place.rank, found.causes)
    kind = kind_named(device_kind(run.plan, devices_here(run.plan, place)))
    if not place.rank:
        most = min(LARGEST, memory_bytes() / _BYTES)
        large = f"the model has more than {most:,.0f} parameters{_SMALL}" if found.size else "its size is not known"
        alone = "" if kind.forks else f"no process is forked beside one that uses {kind.label} devices"
        checked.without = large if found.size is None or found.size > most else alone
        checked.reference = None if checked.without else _ReferenceProcess(job, run, place, bool(found.causes))
        if checked.reference and not on_host(kind.name):  # the memory of the device may not do for both
            checked.reference.result(sure=True)
    try:
        yield checked
    finally:
        checked.close()


def why_unchecked(job: Job, plan: Plan) -> str:
    """Return why no first step of ``job`` under ``plan`` is compared, in words; empty where it is."""
    reasons = {
        f"no step of the plan is one device's{_SMALL}": bool(plan.server or not plan.exact),
        f"the job has phases{_SMALL}": bool(job.phases),
        f"compiled code would be compiled again, without dropout{_SMALL}": plan.compile,
        f"precision={plan.precision} is not that of a plain loop": plan.precision not in LAST_PLACE,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _not_compared(why: str) -> dict[str, Any]:
    return {"equal": None, "message": f"first step not compared with one device: {why}"}


_Held = tuple[Piece, list[float]]  # the piece of a tensor that a rank holds, and its products with random signs


@final
class FirstStepCheck(Observer):
    """Compares the first step of a run, on each rank of it; ``finding`` is what there is to say."""

    def __init__(self, job: Job, run: RunSpec, rank: int, causes: Sequence[str]) -> None:
        """``causes``: known ones of a difference."""
        self.reference: _ReferenceProcess | None = None
        self.without = ""
        self._job, self._run, self._rank, self._causes = job, run, rank, causes
        self._scene: Scene | None = None
        self._start = list[dict[str, _Held]]()
        self._gradients: tuple[float, dict[str, _Held]] = 0.0, {}
        self._seconds = self._largest = self._most = 0.0
        self._moved = False
        self._samples: dict[str, str] = {}
        self._micro = list[list[int]]()
        self._cut = False
        self._off = ExitStack()

    def built(self, scene: Scene) -> None:
        self._scene = scene

    def begins(self, batch: StepBatch) -> None:
        if batch.step:
            self.close()
        elif self._scene and not self._scene.from_every_process(self.without)[0]:  # else nothing is changed, too
            self._start = [_parts(self._scene, one) for one in (self._scene.stepped(), self._scene.values())]
            held = [micro for part in batch.parts for micro in part if micro.samples]
            self._micro = [list(micro.ids) for micro in held]
            self._samples = {key: one for micro in held for key, one in sample_digests(micro.ids, micro.batch).items()}
            self._off.enter_context(dropout_off())  # the masks of one device cannot be had in pieces

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        if self._scene and not batch.step:
            self._off.close()
            loss, count = (float(one) for one in totals)
            self._gradients = loss / count if count else math.nan, _parts(self._scene, self._scene.gradients())

    def steps(self, batch: StepBatch) -> None:
        if self._scene and not batch.step:  # what the run itself finds wrong with the step, it has said by now
            self._compare("gradient", *self._gradients)

    def updated(self, batch: StepBatch, metrics: Metrics) -> None:
        if self._scene and not batch.step and not metrics.skipped:
            scene, slices = self._scene, self._scene.slices
            # the buffers of another stage are kept up to date there
            kept = {name: one for name, one in scene.buffers().items() if name not in slices or slices[name].counts}
            buffers = _parts(scene, kept)
            for before, after in zip(self._start, (scene.stepped(), scene.values()), strict=True):
                parts = {
                    name: (piece, [a - b for a, b in zip(products, before[name][1], strict=True)])
                    for name, (piece, products) in _parts(scene, after).items()
                }
                self._compare("update", metrics.loss, parts)
            self._compare("buffer", metrics.loss, buffers)
        self.close()

    def _compare(self, kind: Kind, loss: float, parts: Mapping[str, _Held]) -> None:
        """Have rank 0 judge what all have. Collective; ends the comparison where it cannot be made."""
        if self._scene is None:  # what came before could not be compared
            return
        begun = time.perf_counter()
        told = {"samples": self._samples, "micro": self._micro, "parts": dict(parts)}
        self._samples, self._micro = {}, []
        everyone = self._scene.from_every_process(told)
        said = self._judged(kind, loss, everyone) if self._rank == 0 else None
        self._seconds += time.perf_counter() - begun
        said = self._scene.from_every_process(said)[0]
        if said["stop"]:
            raise _error(self._run, said["message"])
        if said["message"]:
            self.finding = {"message": said["message"], "equal": said["equal"], "seconds": self._seconds}
            self.close()

    def _judged(self, kind: Kind, loss: float, everyone: list[Any]) -> dict[str, Any]:
        # a loss that is not finite the run answers as it was told to
        without, result = self.without if math.isfinite(loss) else "its loss is not finite", None
        words, largest, most = "", 0.0, 0.0
        for sure in (False, True):  # what is equal without noise is so with it
            if self.reference and not without and (words or not sure):
                result, without = self.reference.result(sure)
                if result:
                    words, largest, most = result.judged(kind, loss, [told["parts"] for told in everyone])
        if result is None or (without and not words):
            return {"stop": False, **_not_compared(without)}
        self._moved |= kind == "update" and any(any(one[1]) for told in everyone for one in told["parts"].values())
        if kind == "gradient":  # an update may be off where a gradient is rounding alone
            self._largest, self._most = largest, most
            taken = {tuple(ids) for told in everyone for ids in told["micro"]}
            self._cut = len(taken) > 1 and taken == set(map(tuple, result.answer["micro"]))
        source = "job.transform, job.data, or reading it," if self._job.transform else "job.data, or reading it,"
        data = result.other_data([told["samples"] for told in everyone])
        if data and (words or self._job.collate is None):  # a collate of the job's own may give a sample other rows
            words = f"{data}: {source} depends on the rank, the time or a generator without a seed"
        one = "one device that takes the same micro-batches" if self._cut else "one device"
        if not words:
            reached = f"gradients to {self._largest:.0e}, allowed {self._most:.0e}"
            reached += "" if self._moved else "; at a learning rate of 0 no update was compared"
            message = f"first step equals {one} ({reached})" if kind == "buffer" else ""
            return {"stop": False, "equal": True, "message": message}
        assert self._scene
        known = not self._cut and [*self._causes, *differs(self._scene.modules[0], self._job, self._run.plan)]
        cause = "as was said before the run" if known else _cause(kind, self._job, self._run.plan, result.answer)
        words += "" if data else f"\n    {cause}"
        return {"stop": not known, "equal": False, "message": f"first step differs from {one}: {words}"}

    def close(self) -> None:
        """Compare no more."""
        self._scene = None
        self._off.close()
        if self.reference:
            self.reference.close()


def _cause(kind: Kind, job: Job, plan: Plan, of_one: Mapping[str, Any]) -> str:
    """What the difference likely comes from, in a sentence."""
    backward, changes = kind == "gradient" and of_one["bends"], of_one["changes"]
    parts = kind == "update" and (plan.kind != "replicate" or plan.zero > 0)
    causes = {
        "gradients do not grow with the loss: a hook, or an autograd.Function, changes them in backward": backward,
        f"forward changes {show_names(changes)}, which ranks and micro-batches do not share": changes,
        "the optimizer computes a number of all parameters, and a rank has a part of them": parts,
        "ranks use other parameters in a step: try zero=2": plan.zero == 3 and job.unused == "allow",
        "forward or loss computes something of weights or features that are in parts": plan.kind == "split",
    }
    return next((f"likely {cause}" for cause, holds in causes.items() if holds), "no known cause")


def _error(run: RunSpec, message: str) -> RunError:
    error = RunError(
        f'the {message}\n    try: px.prove(job, "{run.plan}") to find the cause; check="off" trains all the same'
    )
    error.everywhere = True
    return error


@final
class _ReferenceProcess:
    """The first step of a job on one device, taken in a process beside rank 0."""

    def __init__(self, job: Job, run: RunSpec, place: Place, whole: bool) -> None:
        """``whole``: take no micro-batches, though BatchNorm does: other differences are known, too."""
        self._whole = whole
        # Without a name: nothing is left of it where this process is killed.
        self._precision, self._file = run.plan.precision, tempfile.TemporaryFile()  # noqa: SIM115
        self._process = SideProcess(partial(self._work, job, run, place))
        self._found: tuple[FirstStepOfOne | None, str] = None, ""
        self._answers = 0

    def _work(self, job: Job, run: RunSpec, place: Place, send: Send) -> None:
        from phalanx.witness.reference_step import take_first_step

        try:
            device = device_for(place, device_kind(run.plan, devices_here(run.plan, place)))
            with changes_of_forward() as changes:
                cut = partial(self._micro_batches, job, run.plan)
                for told in take_first_step(job, self._precision, device, self._file, run.lr_scale, cut):
                    send({**told, "changes": list(changes)})
        except Exception as error:
            send({"without": f"the plain loop fails with {type(error).__name__}: {error}"})

    def _micro_batches(self, job: Job, plan: Plan, module: nn.Module, size: int) -> list[tuple[int, int]]:
        if self._whole or not differs(module, job, plan):
            return []
        held = [part for rank in range(plan.world_size) for part in cuts(size, Lane.of(plan, rank), plan.micro)]
        return sorted({(start, stop) for part in held for start, stop in part if stop > start})

    def result(self, sure: bool = False) -> tuple[FirstStepOfOne | None, str]:
        """Return what it came to, or why it came to nothing; ``sure``: with the noise, which takes two more steps.

        Noise that does not come in time is without end: what is off by more than it may hide differs all the same.
        """
        read, without = self._found
        while not without and self._answers <= sure:
            self._answers += 1
            answer = self._process.next(PATIENCE) or {"without": f"that takes more than {PATIENCE:g} s longer{_SMALL}"}
            without = answer.get("without", "")
            if read:
                read = replace(read, answer={**read.answer, "noise": {}, "off": math.inf, **answer})
            elif not without:
                read = FirstStepOfOne.read(answer, self._file, self._precision)
        if without or sure:
            self._process.close()
        self._found = read, without
        return self._found

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._file.close()


def _parts(scene: Scene, tensors: Mapping[str, Tensor]) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for name, tensor in tensors.items():
        holding, values = scene.slices.get(name), real(local(tensor))
        if values.numel():
            piece, whole = piece_of(tensor, holding), holding.shape if holding is not None else tensor.shape
            shape = (*whole, *values.shape[len(whole) :])
            found[name] = piece, signed(values, piece, shape)
    return found
