"""Step and loader for a user's own loop; with a run, also the work between steps.

``TrainingLoop`` saves, evaluates and records for every run. Here the user's loop asks for batches and takes steps, and
both do the work that is due: ``step(batch)`` records and saves, the loader begins at the run's present step, and ends
the run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from phalanx.checkpoint.folder import name_of
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import CHECKPOINTS
from phalanx.data import Loader, StepBatch
from phalanx.errors import RunError, SpecError
from phalanx.train.assembly import Assembly
from phalanx.train.evaluate import Evaluation, evaluate
from phalanx.train.mesh_stepper import evaluation_data
from phalanx.train.metrics import Metrics

if TYPE_CHECKING:
    from phalanx.parallel import Layout, Sync
    from phalanx.train.interruptions import Interruptions
    from phalanx.train.loop import TrainingLoop
    from phalanx.train.mesh_stepper import MeshStepper
    from phalanx.train.step import Progress, Step
    from phalanx.train.weight_average import WeightAverage


@dataclass(frozen=True, kw_only=True, slots=True)
class CallersProcess:
    """Services of the process of a user's own loop for its run.

    Attributes:
        heeding: in the block, stop signals are remembered.
        failed: called with the error that ended a step, a save or an evaluation.
        stop: called with a signal's number once the run has stopped for it, and saved; does not return.
        over: ends background work; other processes may write the folder then.
    """

    heeding: Callable[[], AbstractContextManager[object]]
    failed: Callable[[Exception], object]
    stop: Callable[[int], None]
    over: ExitStack


@final
class OwnRun:
    """A run whose steps are taken by a user's own loop."""

    def __init__(
        self, run: RunSpec, loop: TrainingLoop, stepper: MeshStepper, interruptions: Interruptions, here: CallersProcess
    ) -> None:
        self._run, self._loop, self._stepper = run, loop, stepper
        self._interruptions, self._here = interruptions, here
        self._first, self._read, self._over = stepper.taken, False, False

    def batches(self) -> Generator[StepBatch, None, None]:
        """Yield the batches of the remaining steps; at their end the run is over.

        Raises:
            RunError: a batch was left out.
        """
        if self._over:
            return
        self._begin()
        with self._here.heeding():
            try:
                while not self._loop.over:
                    with self._reported():
                        batch = self._stepper.next_batch()
                    if batch is None:
                        break
                    yield batch
                    if not self._over and self._stepper.taken <= batch.step:
                        raise _left_out(batch.step, self._stepper.taken)
                if not self._over:
                    self._finish()
            finally:
                if not self._over:  # the loop was left
                    self._loop.flush()

    def take(self, batch: StepBatch) -> Metrics:
        """Take the step of ``batch``, record it, and save and evaluate if due.

        Raises:
            RunError: it is not the batch of the next step, or the run is over.
        """
        stepper = self._stepper
        if self._over:
            raise _ended("a step", stepper.taken)
        if batch.step != stepper.taken:
            raise _left_out(batch.step, stepper.taken)
        try:
            metrics = stepper.take(batch)
            self._loop.stepped(batch, metrics, stepper.assembly.step.seconds)
            stepper.stepped()
            if self._interruptions.reached(stepper.taken) or stepper.taken == self._loop.pause_after(batch.step):
                stepper.settle()
                self._loop.between()
        except Exception as error:
            self._failed(error)
            raise
        self._stop_if_asked()
        return metrics

    def save(self) -> Path:
        """Write a checkpoint of this moment, and return its folder once it is whole. Collective.

        Raises:
            RunError: the run was closed without one.
        """
        path = self._run.folder / CHECKPOINTS / name_of(self._stepper.taken)
        if self._over and not path.is_dir():
            raise _ended("a save", self._stepper.taken)
        with self._reported():
            if not self._over:
                self._stepper.settle()
                if self._stepper.taken == self._first and not self._run.resume:
                    self._loop.save()
                self._loop.leave()
                self._loop.wait_for_save()
        return path

    def evaluate(self) -> Evaluation | None:
        """Evaluate and record it; ``None`` after a stop signal, or if the run ended without an evaluation."""
        if self._over:
            return self._loop.evaluation
        with self._reported():
            self._stepper.settle()
            found = self._loop.evaluate()
        if found is None:
            self._stop_if_asked()
        return found

    def close(self) -> None:
        """End the steps, perhaps early, and wait for pending writes.

        Raises:
            LossError, GradientError: of the last step, if its check was pending.
        """
        if self._over:
            return
        with self._reported():
            self._stepper.assembly.step.settle()
        self._over = True
        with self._here.over:
            self._loop.flush()
            self._loop.wait_for_save()

    def _begin(self) -> None:
        if self._read:
            self._stepper.read_from(self._stepper.taken)
            return
        self._read = True
        with self._reported():
            self._loop.begin()

    def _finish(self) -> None:
        with self._reported():
            self._stepper.settle()
            if self._stepper.ended:
                self._loop.between()
            else:
                self._loop.leave()
            self._loop.finish()
        self._over = True
        self._here.over.close()

    def _stop_if_asked(self) -> None:
        if self._interruptions.stop:
            self._finish()
            self._here.stop(self._interruptions.stop)

    def _failed(self, error: Exception) -> None:
        self._over = True
        self._here.failed(error)
        self._here.over.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise


def _ended(what: str, taken: int) -> RunError:
    return RunError(
        f"{what} after the run has ended, by step.close(), by its last step or by an error: {taken} steps are taken\n"
        '    try: px.build(job, plan, run="runs/mine", resume=True), to resume from the last checkpoint'
    )


@final
class LoopWithoutRun:
    """The steps of a user's own loop without a run; steps and batches are as with a run."""

    def __init__(self, step: Step, loader: Loader) -> None:
        self._step, self._loader, self._read, self._over = step, loader, False, False

    def batches(self) -> Generator[StepBatch, None, None]:
        """Yield the batches of the remaining steps, of all epochs.

        Raises:
            RunError: a batch was left out.
        """
        if self._over:
            return
        loader = self._loader.starting_at(self._step.progress.step) if self._read else self._loader
        self._read = True
        with closing(iter(loader)) as batches:
            for batch in batches:
                yield batch
                if self._step.progress.step <= batch.step:
                    raise _left_out(batch.step, self._step.progress.step)
        self._step.settle()
        self._over = True

    def take(self, batch: StepBatch) -> Metrics:
        """Take the step of ``batch``.

        Raises:
            RunError: it is not the batch of the next step.
        """
        if batch.step != self._step.progress.step:
            raise _left_out(batch.step, self._step.progress.step)
        return self._step(batch)


def _left_out(step: int, taken: int) -> RunError:
    what = f"the loop is at step {taken}, and got the batch of step {step}"
    if step == taken:
        what = f"the batch of step {step} got no step before the next one was asked for, or the loop has been closed"
    return RunError(
        f"{what}: each batch has one step\n"
        "    try: metrics = step(batch) once for every batch, in the order of the loader"
    )


@final
class OwnStep:
    """A callable that takes one optimizer step with a batch of the loader and returns ``Metrics``; collective.

    On an accelerator the loss and the gradient of a step may be checked in the next call, in ``evaluate``, ``save`` and
    ``close``, and at the loader's end. Weights never include a step that fails its check.

    Raises, when called:
        LossError: if the loss is not finite, or not of an allowed form, or if its count is 0.
        GradientError: if a gradient is not finite, or parameters get none and the job does not allow it.
        RunError: if it is not the batch of the next step; with a run, if that is over, too.
        SystemExit: with a run, once it has saved for SIGTERM, SIGUSR1 or SIGHUP; with 75, ``EX_TEMPFAIL``.
        KeyboardInterrupt: with a run, once it has saved for Ctrl-C.
    """

    def __init__(self, job: Job, plan: Plan, assembly: Assembly, loop: OwnRun | LoopWithoutRun, *, first: bool) -> None:
        self._job, self._plan, self._assembly, self._loop, self._first = job, plan, assembly, loop, first
        self._run = loop if isinstance(loop, OwnRun) else None
        self._evaluation_data: Any = None

    def __call__(self, batch: StepBatch) -> Metrics:
        if self.average is not None:
            self.average.refuse_within("a step")
        return self._loop.take(batch)

    @property
    def model(self) -> nn.Module:
        """Return the model in this process: its parameters may be shards of the whole."""
        return self._assembly.layout.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the job's optimizer over the parameters stepped by this process."""
        return self._assembly.optimizer

    @property
    def first(self) -> bool:
        """Return True on the first of the plan's processes, rank 0, which should print and write files."""
        return self._first

    @property
    def taken(self) -> int:
        """Return the optimizer steps taken, those before a resume included."""
        return self._step.progress.step

    @property
    def progress(self) -> Progress:
        """Return the values carried from step to step."""
        return self._step.progress

    @property
    def layout(self) -> Layout:
        """Return the layout: the tensors of each rank, and the reduction of gradients."""
        return self._assembly.layout

    @property
    def sync(self) -> Sync:
        """Return the synchronisation of replicas; call ``sync.together()`` before reading parameters."""
        return self._step.sync

    @property
    def average(self) -> WeightAverage | None:
        """Return the average of the weights, if the job keeps one; ``average.applied()`` puts it into the model."""
        return self._step.average

    def zero_grad(self) -> None:
        """Drop all gradients, to free memory between steps: a step begins without any."""
        self._assembly.layout.begin()

    def evaluate(self) -> Evaluation:
        """Return the job's evaluation of the present model; with a run it is recorded. Collective.

        Within ``average.applied()`` the averaged weights are evaluated, without a record.

        Raises:
            SpecError: the job has no evaluation data.
            LossError: the loss is not of an allowed form, or a metric is not a sum and a count.
        """
        if self._job.evaluate is None:
            allowed = "a job that says what to evaluate on"
            raise SpecError.of("job.evaluate", "None", allowed, 'px.Job(..., evaluate=lambda: Digits("test"))')
        averaged = self.average is not None and self.average.inside
        found = self._run.evaluate() if self._run and not averaged else None
        return found or self._evaluated()

    def save(self) -> Path:
        """Write a checkpoint of this moment, and return its folder once it is whole. Collective.

        Raises:
            SpecError: there is no run to save in.
            CheckpointError: it cannot be written.
        """
        if self._run is None:
            given = "step.save() in a loop without a run"
            raise SpecError.of("run", given, "a run folder to save in", 'px.build(job, plan, run="runs/mine")')
        if self.average is not None:
            self.average.refuse_within("a save")
        return self._run.save()

    def close(self) -> None:
        """Release the run and its folder, if any: no more steps can be taken.

        The end of the run and of the process do this, too. Unsaved steps are lost.
        """
        if self._run is not None:
            self._run.close()
        else:
            self._step.settle()

    @property
    def _step(self) -> Step:
        return self._assembly.step

    def _evaluated(self) -> Evaluation:
        if self._evaluation_data is None:
            assert self._job.evaluate
            self._evaluation_data = evaluation_data(self._job)
        self._step.settle()
        found = evaluate(self._job, self._plan, self._assembly, self._evaluation_data)
        assert found  # it is never asked to stop
        return found


@final
class OwnLoader:
    """The batches of the remaining steps, of all epochs and in order; each ``iter()`` begins with the next step."""

    def __init__(self, loader: Loader, loop: OwnRun | LoopWithoutRun) -> None:
        self._loader, self._loop = loader, loop

    @property
    def length(self) -> int | None:
        """Return the samples in the data; ``None`` for a stream."""
        return self._loader.length

    @property
    def steps_per_epoch(self) -> int | None:
        """Return the steps in one pass; ``None`` for a stream, and if batch or data change with the step."""
        return self._loader.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        """Return the step after the last; ``None`` for a stream that ends with its epochs."""
        return self._loader.total_steps

    def __iter__(self) -> Generator[StepBatch, None, None]:
        return self._loop.batches()
