"""Numerical accidents: non-finite losses and gradients, and jumps of the loss, handled before an update is made.

Every rank judges by the same numbers, the loss of the whole batch and the norm over all gradients, so all ranks decide
alike without communication.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.comm import active, from_every_rank
from phalanx.config import RunSpec
from phalanx.config.run import Answer, keeps_from_going_back
from phalanx.data import StepBatch
from phalanx.data.saved_batch import SavedBatch
from phalanx.errors import GradientError, LossError, RunError
from phalanx.parallel.rng_streams import stream
from phalanx.train.nonfinite_trace import Sighting, bad_parameters, first_sighting

if TYPE_CHECKING:
    from phalanx.train.step import Step

LOOK_AT_VALUES = 50
"""Steps between looks at the parameters; a checkpoint looks at them, too."""

_MOST_SKIPPED, _MOST_ROLLED_BACK = 10, 3  # one after the other; since the newest checkpoint
_WINDOW, _FEWEST = 100, 20  # losses that a spike is told from, and how many there must be at least
_MOST_NAMED = 10  # samples in a message


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Accident:
    """The defect of a step.

    Attributes:
        kind: ``loss``, ``gradient`` and ``parameter`` are not finite; ``spike``: the loss is finite and far too large.
        told: a sentence with the step.
    """

    step: int
    kind: Literal["loss", "gradient", "parameter", "spike"]
    told: str


class RollBackError(Exception):
    """Request to return to the newest checkpoint, and to leave out the affected steps."""


@final
class LossSpikes:
    """A detector of losses far above earlier ones."""

    def __init__(self, limit: float | None) -> None:
        """Set ``limit``, in robust standard deviations above the median; ``None`` disables it."""
        self._limit = limit
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    @property
    def watched(self) -> bool:
        """Return True if a finite loss can be a spike."""
        return self._limit is not None

    def describe(self, loss: float) -> str:
        """Return the reason why ``loss`` is a spike, or "". A loss that is not a spike is remembered."""
        if self._limit is None:
            return ""
        if len(self._losses) >= _FEWEST:
            median = statistics.median(self._losses)
            # 1.4826: of normal deviates the ratio of standard to median absolute deviation. A loss that hardly moves
            # has no deviation to speak of: a hundredth of it stands in.
            deviation = 1.4826 * statistics.median(abs(one - median) for one in self._losses)
            above = (loss - median) / max(deviation, abs(median) / 100, 1e-12)
            if above > self._limit:
                return (
                    f"{loss:.4g}, {above:.3g} deviations above the median of the last {len(self._losses)}, {median:.4g}"
                )
        self._losses.append(loss)
        return ""


@final
class Accidents:
    """The policy of a run for accidents in its steps. Without a run, as in a user's own loop, it stops.

    Attributes:
        left_out: steps without update when they are repeated, and the reasons.
    """

    def __init__(
        self, run: RunSpec | None = None, write: Callable[..., None] | None = None, *, phase: str = ""
    ) -> None:
        """Take the run's policy; ``write`` appends an event to the log, ``phase`` names the losses' phase."""
        self._phase, self._in = phase, f"of the phase {phase} in step" if phase else "of step"
        self._answer: Answer = run.on_nonfinite if run else "stop"
        self._answer_to_spikes: Answer = run.on_spike if run else "stop"
        self._spikes = LossSpikes(run.spike if run else None)
        self._folder = run.folder / "accidents" if run else None
        self._way_on = _way_on(run)
        self._write = write
        self._in_a_row = self._back = 0
        self._newest = -1
        self._buffers = BufferCopies() if {self._answer, self._answer_to_spikes} != {"stop"} else None
        self.left_out: dict[int, str] = {}

    @property
    def only_stops(self) -> bool:
        """Return True if the only possible action is a stop because of a non-finite number."""
        return self._buffers is None and not self._spikes.watched

    def judge(self, step: int, loss: float, norm: float, *, overflows: bool = False) -> Accident | None:
        """Return the accident of a step with this loss and gradient norm, if any.

        ``overflows``: non-finite numbers are the result of a loss scale that is too large.
        """
        if not overflows and not math.isfinite(loss):
            return Accident(step=step, kind="loss", told=f"the loss {self._in} {step} is {loss}")
        if not overflows and not math.isfinite(norm):
            told = f"the gradient {self._in} {step} is not finite, and its loss is {loss:.4g}"
            return Accident(step=step, kind="gradient", told=told)
        if math.isfinite(loss) and (spike := self._spikes.describe(loss)):
            return Accident(step=step, kind="spike", told=f"the loss {self._in} {step} is a spike: {spike}")
        return None

    def begins(self, step: Step) -> None:
        """Begin a step: copy buffers that its forward may spoil, if the run may skip its update."""
        if self._buffers:
            self._buffers.take(step.layout.modules)

    def passed(self) -> None:
        """Record a completed step."""
        self._in_a_row = 0

    def saved(self, step: int) -> None:
        """Record a checkpoint after ``step`` steps."""
        if step > self._newest:
            self._newest, self._back = step, 0

    def meet(self, accident: Accident, step: Step, batch: StepBatch) -> str:
        """Find the origin of an accident, save the batch, and apply the run's policy. Collective.

        Returns the reason to leave out the update of this step.

        Raises:
            LossError, GradientError: the run stops.
            RollBackError: the run must return to a checkpoint.
        """
        try:
            seen = first_sighting(step, batch)
        except Exception as error:  # of running the step again, such as memory that runs out
            # perhaps on this rank alone, which is to be named then
            raise self._worded(accident, "", f"Where it comes from could not be found: {error}", "") from error
        if seen.parameter:
            self.spoilt(accident.step, seen.parameter)
        here = dist.get_rank() if active() else 0
        kept = self._keep(accident, seen, step, batch) if here == seen.rank else None
        ids, path = from_every_rank(kept)[seen.rank]
        if self._buffers:
            self._buffers.put_back()
        ids = [ids[row] for row in seen.rows] or ids
        self.answer(accident, seen, samples=ids, path=path)
        return accident.told

    def look_at_values(self, step: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Apply the run's policy if one of ``parameters`` is not finite after ``step`` steps. Collective.

        Raises:
            GradientError: the run stops.
            RollBackError: the run must return to a checkpoint.
        """
        if names := [name for names in from_every_rank(bad_parameters(parameters)[:1]) for name in names]:
            self.spoilt(step, names[0])

    def spoilt(self, step: int, name: str) -> NoReturn:
        """Apply the run's policy to the parameter ``name``, which was not finite before ``step``.

        Raises:
            GradientError: the run stops.
            RollBackError: the run must return to a checkpoint.
        """
        told = f"the parameter {name} is not finite after step {step - 1}"
        self.answer(Accident(step=step, kind="parameter", told=told))
        raise AssertionError("no answer to this lets a run go on")

    def answer(
        self, accident: Accident, seen: Sighting | None = None, *, samples: Collection[int] = (), path: str = ""
    ) -> None:
        """Apply the run's policy to ``accident``; return if the update is to be left out.

        ``seen``: its first place, with these ``samples``; ``path``: their saved batch in the run folder.

        Raises:
            LossError, GradientError: the run stops.
            RollBackError: the run must return to a checkpoint.
        """
        answer = self._answer_to_spikes if accident.kind == "spike" else self._answer
        place = _place(accident, seen, samples) if seen else ""
        why = ""
        self._in_a_row += 1
        if answer == "skip" and accident.kind == "parameter":
            answer, why = "stop", "To leave out updates does not mend a parameter."
        elif answer == "skip" and self._in_a_row > _MOST_SKIPPED:
            answer, why = "stop", f"The updates of {_MOST_SKIPPED} steps in a row have been left out already."
        elif answer == "rollback" and self._back == _MOST_ROLLED_BACK:
            answer, why = "stop", f"The run has gone back {_MOST_ROLLED_BACK} times since its newest checkpoint."
        if self._write:
            facts = {"step": accident.step, "kind": accident.kind, "action": answer, "message": accident.told}
            self._write("accident", **facts, where=place, samples=list(samples), path=path)
        if answer == "stop":
            raise self._error(accident, place, why, path, of_data=bool(seen and seen.of_data))
        if answer == "rollback":
            self._back += 1
            made_by = accident.step - (accident.kind == "parameter")  # which the update before has spoilt
            self.left_out[made_by] = accident.told
            raise RollBackError(accident.told)

    def _keep(self, accident: Accident, seen: Sighting, step: Step, batch: StepBatch) -> tuple[list[int], str]:
        folder, micro = self._folder, batch.parts[seen.part][seen.micro]
        if folder is None:
            return list(micro.ids), ""
        named = f"step-{accident.step:08d}"
        saved = SavedBatch(
            folder=folder / named,
            step=accident.step,
            reason=accident.told,
            where=seen.where,
            samples=micro.ids,
            rank=seen.rank,
            micro=seen.micro,
            seed=stream(step.job.seed, accident.step, seen.micro, step.first_part + seen.part, *step.streams),
        )
        return list(micro.ids), str(Path("accidents") / named) if saved.keep(micro.batch) else ""

    def _error(self, accident: Accident, place: str, why: str, path: str, *, of_data: bool = False) -> RunError:
        error = self._worded(accident, place, why, path, of_data)
        error.everywhere = True
        return error

    def _worded(self, accident: Accident, place: str, why: str, path: str, of_data: bool = False) -> RunError:
        lines = [f"{accident.told}.", *([f"    {place}"] if place else []), *([f"    {why}"] if why else [])]
        if path and self._folder:
            lines.append(f"    The batch is kept in {self._folder.parent / path}.")
        if accident.kind == "parameter":
            lines.append(f"    try: {self._way_on}")
            return GradientError("\n".join(lines))
        kept = (
            "phases before it in the step have made theirs"
            if self._phase
            else "parameters are those of the step before"
        )
        lines.append(f"    No update was made of it: {kept}.")
        if accident.kind == "spike":
            lines.append('    try: resume=True, on_spike="skip"; or a larger spike')
            return LossError("\n".join(lines))
        lines += _DATA_ADVICE if of_data else _ADVICE
        return (LossError if accident.kind == "loss" else GradientError)("\n".join(lines))


def _way_on(run: RunSpec | None) -> str:
    if run is None:
        return "a lower lr"
    if run.on_nonfinite == "rollback" or keeps_from_going_back(run.plan):
        return "resume=True, lr_scale=0.5: from the newest checkpoint, with a lower lr"
    return 'resume=True, on_nonfinite="rollback", from the newest checkpoint; or a lower lr'


_ADVICE = (
    "    Usual causes: a learning rate too high or without warm-up, a logarithm, a root or a division by zero "
    "in the model or the loss, bad values in the data.",
    "    try: px.Job(..., clip=1.0, schedule=px.Schedule(warmup_steps=100)), or a lower lr; to leave out such batches: "
    'on_nonfinite="skip"',
)
_DATA_ADVICE = (
    "    try: leave these samples out of job.data, or mend their values there; to leave out such batches: "
    'on_nonfinite="skip"',
)


def _place(accident: Accident, seen: Sighting, ids: Collection[int]) -> str:
    few = ", ".join(map(str, list(ids)[:_MOST_NAMED])) + (", ..." if len(ids) > _MOST_NAMED else "")
    if seen.of_data and accident.kind != "spike":
        return f"First not finite: {seen.where}, sample{'s' if len(ids) > 1 else ''} {few}, on rank {seen.rank}."
    of = f"{f'micro-batch {seen.micro} on' if seen.micro >= 0 else 'the piece of'} rank {seen.rank} (samples {few})"
    if accident.kind == "spike":
        return f"Its largest part is the loss of {of}."
    if seen.micro < 0:
        return (
            f"The loss is largest, or not finite, in {of}; train on these samples with one device to find the module."
        )
    if not seen.where:
        return (
            "The same step, run again, gave finite numbers: code that does not repeat itself, or a device at fault. "
            f"The loss is largest in {of}."
        )
    return f"First not finite: {seen.where}, in {of}."


@final
class BufferCopies:
    """Copies of buffers before a step, such as running statistics, which its forward changes."""

    def __init__(self) -> None:
        self._owners: list[tuple[nn.Module, str]] | None = None
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    @torch.no_grad()
    def take(self, modules: list[nn.Module]) -> None:
        """Copy the buffers that may have changed since the last copy."""
        if self._owners is None:
            every = [child for module in modules for child in module.modules()]
            self._owners = [(child, name) for child in every for name in child._buffers]
        copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for owner, name in self._owners:
            tensor = owner._buffers.get(name)
            if tensor is not None:
                had = self._copies.get(id(tensor))
                # torch's normalisation layers write into theirs without counting it as a new version.
                same = had is not None and had[1] == tensor._version and not isinstance(owner, _NormBase)
                copies[id(tensor)] = had if same and had else (tensor, tensor._version, tensor.detach().clone())
        self._copies = copies

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the copied values."""
        for tensor, _, copy in self._copies.values():
            tensor.copy_(copy)


def saved_batches(folder: Path) -> list[SavedBatch]:
    """Return the batches saved after accidents in the run folder ``folder``, by step.

    Raises:
        DataError: if one cannot be read.
        SpecError: if a link or another special file is in its place.
    """
    return [SavedBatch.read(path) for path in sorted((folder / "accidents").glob("step-*"))]
