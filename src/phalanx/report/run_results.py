"""A run in Python: its events, and the model that it has trained."""

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
from phalanx.events import RunLog
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
    """A run folder and its content. Nothing in it is executed.

    Attributes:
        job: the trained job, if it is known; ``model`` needs it.
        process: trains the run in the background, if this process has started it (``px.start``).
    """

    folder: Path
    job: Job | None = field(default=None, compare=False, repr=False)
    process: BackgroundRun | None = field(default=None, compare=False, repr=False)

    def events(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Return the run's events in order; only those called ``name``, if given."""
        log = RunLog(self.folder)
        return iter(log.events if name is None else log.named(name))

    @property
    def losses(self) -> list[float]:
        """Loss of each logged step. A step taken again after a resume counts as it went the last time."""
        return list({event["step"]: event["loss"] for event in self.events("step")}.values())

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The last evaluation: ``loss``, ``samples``, ``metrics``."""
        return next(reversed([*self.events("evaluate")]), None)

    @property
    def running(self) -> bool:
        """True while a process of this machine trains it."""
        return self.process.running if self.process else is_written(self.folder)

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run has ended or stopped, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it still runs.
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
        """Ask the run to save after its current step, and wait for its end.

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
        """Return every evaluation by step, the last of each: ``step``, ``loss``, ``samples``, ``metrics``."""
        last = {event["step"]: event for event in self.events("evaluate")}
        return [last[step] for step in sorted(last)]

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation; ``None`` without ``px.Best`` in the job, or if no evaluation gave a number."""
        from phalanx.checkpoint import best_step

        step = best_step(self.folder)
        return next((one for one in self.evaluations() if one["step"] == step), None)

    def metrics(self, event: str = "step") -> pandas.DataFrame:
        """Return the events of one name as a table, one row a step, also while the run is trained.

        A step that was repeated after a resume has its last row.

        Args:
            event: ``"step"``, ``"checkpoint"`` or ``"evaluate"``. Each metric has a column, and so has the loss of each
                phase, such as ``loss.critic``.

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
        """The batches with losses or gradients that were not finite, or with a spike, by step."""
        from phalanx.train.accidents import saved_batches

        return saved_batches(self.folder)

    @property
    def plan(self) -> Plan:
        """The plan it ran under."""
        return Plan.from_toml(read_text(self.folder / "plan.toml", where="plan.toml", fix="the folder of a run"))

    def checkpoint(self, step: Which = None) -> Path:
        """Return the folder of a checkpoint: the newest complete one, that of ``step``, or of ``"best"``.

        Raises:
            SpecError: there is no such checkpoint.
        """
        from phalanx.checkpoint import best_step, checkpoints

        found = {one.step: one.path for one in checkpoints(self.folder / CHECKPOINTS) if one.whole}  # the newest first
        there = ", ".join(map(str, found)) or "none yet"
        wanted = best_step(self.folder) if step == "best" else next(iter(found), None) if step is None else step
        if step == "best" and wanted is None:
            fix = 'px.Job(..., evaluate=..., best=px.Best("loss"))'
            raise SpecError.of("step", "best", f"a run that compares evaluations; or one of {there}", fix)
        if wanted not in found:
            given = f"{step!r}, of which {self.folder} has no complete checkpoint"
            raise SpecError.of("step", given, f"None, or one of {there}", f"step={next(iter(found), None)}")
        return found[wanted]

    def state_dict(self, step: Which = None, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return every tensor of the trained model, whole, on the CPU, by its first name in the model.

        Args:
            step: as of ``checkpoint``.
            averaged: take the average of the weights that ``job.average`` keeps.

        Raises:
            SpecError: there is no such checkpoint, or it has no averaged weights.
            CheckpointError: it is damaged; tensors are verified as they are read.
        """
        from phalanx.checkpoint import model_tensors
        from phalanx.train.frozen_values import completed

        path = self.checkpoint(step)
        return completed(self.job, path, model_tensors(path, averaged=averaged))

    def model(self, job: Job | None = None, *, step: Which = None, averaged: bool = False) -> nn.Module:
        """Return the trained model on the CPU, in evaluation mode, for a run of any plan.

        Args:
            job: builds the model, if the run does not know its own.
            step: as of ``checkpoint``.
            averaged: as of ``state_dict``.

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

        It computes in bf16 if the run did, and with the average of the weights if the job evaluates that.

        Args:
            data: a map-style dataset, or a function that returns one; by default the job's evaluation data.
            step: as of ``checkpoint``.
            micro: most samples in a forward; by default ``job.batch``.
            device: kind of device, such as ``"cuda"``. Afterwards ``fit`` cannot fork workers for that kind here.

        Returns:
            ``step``, ``loss``, ``samples`` and ``metrics``, as in ``evaluations``.

        Raises:
            SpecError: no job, data or checkpoint is known, or torchrun started several such processes.
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
            dtype: of floating point tensors; by default as saved.
            adapter: write only the adapters of peft, a folder for ``PeftModel.from_pretrained``.
            merged: write the model of transformers with peft's adapters merged in.
            averaged: as of ``state_dict``.

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
    """Return an event as columns: its fields, metrics, and the loss of each phase as ``loss.critic``."""
    row = {name: value for name, value in event.items() if name != "event" and not isinstance(value, dict)}
    for name, value in event.items():
        if isinstance(value, dict):
            row |= {f"loss.{key}": loss for key, loss in value.items()} if name == "losses" else value
    return row


def load(folder: str | Path, job: Job | None = None) -> Run:
    """Return the run in ``folder``, ended or not, as ``fit`` does; ``job`` is the trained job, for ``Run.model``.

    Raises:
        SpecError: there is no run.
    """
    where = Path(folder)
    if not (where / EVENTS).exists() and not (where / CHECKPOINTS).is_dir():
        given = f"{where}, which {'is no folder' if not where.is_dir() else 'holds no run'}"
        raise SpecError.of("folder", given, "the folder of a run", 'px.load("runs/digits-1", job())')
    return Run(folder=where, job=job)


def to_keras(run: Run, job: Job | None = None, *, step: Which = None, averaged: bool = False) -> Any:
    """Return the Keras model that ``run`` has trained, as the job's function builds and compiles it.

    It is a model of Keras alone: ``to_keras(run).save("model.keras")``, ``.save_weights("model.weights.h5")``. Its
    optimizer has the run's state at that step, so that Keras' ``fit`` continues it. With averaged weights, or under
    another optimizer than the compiled one, the optimizer begins without state.

    Args:
        run: of a job that ``px.from_keras`` has made.
        job: builds the model, if the run does not know its own.
        step: which checkpoint, as of ``Run.checkpoint``.
        averaged: with the average of the weights that ``job.average`` keeps.

    Raises:
        SpecError: no job is known, it is none of Keras, or there is no such checkpoint or average.
        CheckpointError: the checkpoint is damaged.
    """
    known = job or run.job
    if known is None or not hasattr(known.model, "plain"):
        given = "none" if known is None else "a job whose model is none of Keras"
        raise SpecError.of("job", given, "a job that px.from_keras has made", "px.to_keras(px.load(folder, job()))")
    import torch

    path = run.checkpoint(step)  # once: a run that goes on may save another meanwhile
    trained: Any = run.model(known, step=int(path.name.removeprefix("step-")), averaged=averaged)
    with torch.random.fork_rng(devices=[]):
        model: Any = known.model.plain()  # pyrefly: ignore
    for variable, value in zip(model.weights, trained.keras_model.weights, strict=True):
        variable.assign(value.value)
    model.optimizer.build(model.trainable_variables)  # files of Keras have its state
    if not averaged:
        _give_state(known, trained, path, model.optimizer)
    return model


def _give_state(job: Job, trained: Any, path: Path, optimizer: Any) -> None:
    """Copy the optimizer state of the checkpoint ``path`` into ``optimizer``, which is of Keras and built."""
    from phalanx.checkpoint import read_state, restore_optimizer
    from phalanx.train.build_optimizer import optimizer_over
    from phalanx.train.keras.keras_optimizers import KerasFormula

    learning = {name: one for name, one in trained.named_parameters() if one.requires_grad}
    saved = optimizer_over(job, learning).optimizer
    kind = (read_state(path).get("optimizer") or {}).get("kind")
    if isinstance(saved, KerasFormula) and type(saved).__name__ == kind:
        restore_optimizer(saved, learning, path)
        saved.give_state(trained.learning, optimizer)
        optimizer.iterations.assign(int(path.name.removeprefix("step-")))
