"""A run in Python: what happened in it, and the model that it has trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from phalanx.config import Job, Plan
from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.errors import MissingExtraError, SpecError
from phalanx.events import read
from phalanx.files import is_written, read_text

if TYPE_CHECKING:
    import pandas
    import torch
    from torch import Tensor, nn

    from phalanx.checkpoint import Exported
    from phalanx.data.saved_batch import SavedBatch
    from phalanx.launch.side_process import BackgroundRun

_OF_A_STEP = ("step", "evaluate", "checkpoint")  # events that there is one of a step
_SOON = 0.05  # seconds between looks at a run of another process
Which = int | Literal["best"] | None
"""Which checkpoint: of that step, of the best evaluation, or the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder and what is in it. Nothing in it is executed.

    Attributes:
        folder: where it is.
        job: that it trains; ``None`` where that is not known. ``model`` needs it.
        process: that trains it in the background, where this one has started it so (``px.start``).
    """

    folder: Path
    job: Job | None = field(default=None, compare=False, repr=False)
    process: BackgroundRun | None = field(default=None, compare=False, repr=False)

    def events(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """The run's events in order; those called ``name`` where given."""
        return (event for event in read(self.folder / EVENTS) if name is None or event["event"] == name)

    @property
    def losses(self) -> list[float]:
        """Loss of each logged step. A step taken again after a resume counts as it went the last time."""
        return list({event["step"]: event["loss"] for event in self.events("step")}.values())

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The last evaluation: ``loss``, ``samples``, ``metrics``; ``None`` where there was none."""
        found = list(self.events("evaluate"))
        return found[-1] if found else None

    @property
    def running(self) -> bool:
        """Return True if it is being trained now, by whatever process of this machine."""
        return self.process.running if self.process else is_written(self.folder)

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run is over, at most ``timeout`` seconds; also one that ``stop`` has ended is over.

        Raises:
            TimeoutError: it goes on.
            WorkerError: a worker failed, of a run that this process has started.
            RunError: the process that trained it was killed.
        """
        if self.process:
            self.process.wait(timeout)
            return self
        until = None if timeout is None else time.monotonic() + timeout
        while self.running:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"the run in {self.folder} goes on after {timeout:g} s")
            time.sleep(_SOON)
        return self

    def stop(self) -> Self:
        """Have the run save after the step that is under way, and wait for its end; nothing where it is over.

        Raises:
            SpecError: another process trains it.
            WorkerError: a worker failed.
        """
        if self.process:
            self.process.stop()
        elif self.running:
            allowed = "a run that px.start has begun in this process"
            given = f"the run in {self.folder}, which another process trains"
            raise SpecError.of("run", given, allowed, f"kill -TERM the process in {self.folder / 'writer.json'}")
        return self

    def evaluations(self) -> list[dict[str, Any]]:
        """Every evaluation by step: ``step``, ``loss``, ``samples``, ``metrics``; one taken again as it went last."""
        last = {event["step"]: event for event in self.events("evaluate")}
        return [last[step] for step in sorted(last)]

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation; ``None`` where the job compares none (``px.Best``), or none gave a number."""
        from phalanx.checkpoint import best_step

        step = best_step(self.folder)
        return next((one for one in self.evaluations() if one["step"] == step), None)

    def metrics(self, event: str = "step") -> pandas.DataFrame:
        """What was logged of each step as a table, one row a step, also while the run goes on, here or elsewhere.

        Args:
            event: the events that become rows: ``"step"``, ``"checkpoint"``, or ``"evaluate"``, whose ``metrics`` get
                a column each; of ``"step"`` the loss of each phase has one, such as ``loss.critic``. A step that was
                taken again after a resume counts as it went the last time.

        Raises:
            SpecError: events of another name were asked for.
            MissingExtraError: pandas is not installed.
        """
        if event not in _OF_A_STEP:
            raise SpecError.of("event", repr(event), ", ".join(_OF_A_STEP), 'run.metrics("evaluate")')
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", "pandas") from None
        rows = {one["step"]: _row(one) for one in self.events(event)}
        table = pandas.DataFrame([rows[step] for step in sorted(rows)], index=pandas.Index(sorted(rows), name="step"))
        return table.drop(columns="step", errors="ignore")

    @property
    def accidents(self) -> list[SavedBatch]:
        """The batches that losses or gradients were not finite with, or spikes came from, by step."""
        from phalanx.train.accidents import saved_batches

        return saved_batches(self.folder)

    @property
    def plan(self) -> Plan:
        """The plan it ran under."""
        return Plan.from_toml(read_text(self.folder / "plan.toml", where="plan.toml", fix="the folder of a run"))

    def checkpoint(self, step: Which = None) -> Path:
        """The folder of a checkpoint: the newest complete one, that of ``step``, or of the ``"best"`` evaluation.

        Raises:
            SpecError: there is no such checkpoint.
        """
        from phalanx.checkpoint import best_step, checkpoints

        found = [one for one in checkpoints(self.folder / CHECKPOINTS) if one.whole]
        there = ", ".join(str(one.step) for one in found) or "none yet"
        wanted: object = step
        if step == "best":
            wanted = best_step(self.folder)
            if wanted is None:
                fix = 'px.Job(..., evaluate=..., best=px.Best("loss"))'
                raise SpecError.of("step", "best", f"a run that compares evaluations; or one of {there}", fix)
        if step is None and found:
            return found[0].path
        chosen = next((one.path for one in found if one.step == wanted), None)
        if chosen is None:
            given = f"{step!r}, of which {self.folder} has no complete checkpoint"
            raise SpecError.of("step", given, f"None, or one of {there}", f"step={found[0].step if found else None}")
        return chosen

    def state_dict(self, step: Which = None, *, averaged: bool = False) -> dict[str, Tensor]:
        """Every tensor of the trained model, whole, on the CPU, by its name in the model; of tied ones the first name.

        Args:
            step: as of ``checkpoint``.
            averaged: the average of the weights that ``job.average`` keeps, in place of the weights.

        Raises:
            SpecError: there is no such checkpoint, or it has no averaged weights.
            CheckpointError: it is damaged; tensors are verified as they are read.
        """
        from phalanx.checkpoint import model_tensors
        from phalanx.train.frozen_values import completed

        path = self.checkpoint(step)
        return completed(self.job, path, model_tensors(path, averaged=averaged))

    def model(self, job: Job | None = None, *, step: Which = None, averaged: bool = False) -> nn.Module:
        """The trained model on the CPU, in evaluation mode, whatever the plan that it was trained under.

        Args:
            job: that builds it, where the run does not know its own.
            step: as of ``checkpoint``.
            averaged: with the average of the weights, as of ``state_dict``.

        Raises:
            SpecError: no job is known, its model is another one, or there is no such checkpoint or average.
            CheckpointError: the checkpoint is damaged.
        """
        from phalanx.checkpoint import model_tensors
        from phalanx.train.frozen_values import completed
        from phalanx.train.trained_model import trained_model

        job = job or self.job
        if job is None:
            allowed = "the job that builds the model: a run's folder holds values, and no code"
            raise SpecError.of("job", "none", allowed, "px.load(folder, job()).model()")
        path = self.checkpoint(step)  # once: a run that goes on may save another meanwhile
        return trained_model(job, completed(job, path, model_tensors(path, averaged=averaged)), str(path))

    def evaluate(
        self, data: Any = None, *, step: Which = None, micro: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Evaluate the stored model in this process, on one device, with the loss and the metrics of the run's job.

        It computes in bf16 where the run did. Where the job keeps an average of the weights to evaluate, it is that, as
        soon as there is one. Nothing of the run is changed.

        Args:
            data: a map-style dataset, or a function that gives one; the job's evaluation data where not given.
            step: as of ``checkpoint``.
            micro: most samples in a forward; ``job.batch`` where not given.
            device: kind of device, such as ``"cuda"``: the first one. A process that has used it can fork no more
                workers for that kind (``fit``).

        Returns:
            ``step``, ``loss``, ``samples`` and ``metrics``, as in ``evaluations``.

        Raises:
            SpecError: no job is known, there is nothing to evaluate on, or no such checkpoint; or this is one of
                several processes of torchrun.
            RefusedError: the device is not there.
            CheckpointError: the checkpoint is damaged.
            LossError: the loss or a metric is of a wrong form.
        """
        from phalanx.launch.torchrun import place_of_this_process
        from phalanx.train.trained_model import evaluate_stored

        if self.job is None:
            allowed = "the job that builds the model and measures: a run's folder holds values, and no code"
            raise SpecError.of("job", "none", allowed, "px.load(folder, job()).evaluate()")
        if (place := place_of_this_process()) is not None and place.world_size > 1:
            allowed = "a process by itself, or px.Job(evaluate=...), which all ranks evaluate together"
            raise SpecError.of("run", "run.evaluate() in a worker of torchrun", allowed, "python script.py")
        path = self.checkpoint(step)
        plan = Plan(micro=micro, device=device, precision="bf16" if self.plan.precision == "bf16" else "fp32")
        found = evaluate_stored(self.job, plan, self._evaluated_values(path), path, data)
        at = int(path.name.removeprefix("step-"))
        return {"step": at, "loss": found.loss, "samples": found.samples, "metrics": found.metrics}

    def _evaluated_values(self, path: Path) -> dict[str, Tensor]:
        """Of the checkpoint ``path``, what an evaluation of the run computes with."""
        from phalanx.checkpoint import model_tensors

        average = self.job.average if self.job else None
        if average is not None and average.evaluate:
            with suppress(SpecError):  # there is none yet
                return model_tensors(path, averaged=True)
        return model_tensors(path)

    def save_pretrained(
        self,
        target: str | Path,
        *,
        step: Which = None,
        dtype: torch.dtype | None = None,
        adapter: bool = False,
        merged: bool = False,
        averaged: bool = False,
    ) -> Exported:
        """Write the trained model for others: a new folder that ``from_pretrained`` reads, or a new ``*.safetensors``.

        Args:
            step: as of ``checkpoint``.
            dtype: of floating point tensors; as saved where not given.
            adapter: write the adapters of peft alone, a folder for ``PeftModel.from_pretrained``.
            merged: write the model of transformers that peft's adapters have been merged into.
            averaged: the average of the weights, as of ``state_dict``.

        Raises:
            SpecError: ``target`` exists, there is no such checkpoint or average, or there are no adapters.
            CheckpointError: the checkpoint is damaged, or the target cannot be written.
        """
        from phalanx.checkpoint import ExportForm
        from phalanx.train.adapters import export_model

        if adapter and merged:
            raise SpecError.of("merged", "adapter=True, merged=True", "one of the two", "adapter=True")
        content = "adapter" if adapter else "merged" if merged else "model"
        form = ExportForm(content=content, averaged=averaged, dtype=dtype)
        return export_model(self.checkpoint(step), Path(target), form, job=self.job)


def _row(event: dict[str, Any]) -> dict[str, Any]:
    """An event as columns: those of a dictionary in it stand beside the others; of a phase ``loss.critic``."""
    row = {name: value for name, value in event.items() if name != "event" and not isinstance(value, dict)}
    for name, value in event.items():
        if isinstance(value, dict):
            row |= {f"loss.{key}": loss for key, loss in value.items()} if name == "losses" else value
    return row


def load(folder: str | Path, job: Job | None = None) -> Run:
    """The run in ``folder``, ended or not, as ``fit`` gives it; ``job`` is what it trains, for ``Run.model``.

    Raises:
        SpecError: there is no run.
    """
    where = Path(folder)
    if not (where / EVENTS).exists() and not (where / CHECKPOINTS).is_dir():
        given = f"{where}, which {'is no folder' if not where.is_dir() else 'holds no run'}"
        raise SpecError.of("folder", given, "the folder of a run", 'px.load("runs/digits-1", job())')
    return Run(folder=where, job=job)
