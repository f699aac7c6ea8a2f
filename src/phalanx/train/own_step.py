"""Step and loader of a loop of one's own; with a run, what happens between steps, too.

``TrainingLoop`` saves, evaluates and records for every run. Here the caller's loop asks for batches and has steps
taken, and each of the two does what is due by then: ``step(batch)`` records and saves, the loader begins where the run
stands, and ends it.
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
    """What the process of a loop of one's own does for its run.

    Attributes:
        heeding: within, signals that ask to stop are remembered.
        failed: called with the error that a step, a save or an evaluation ended by.
        stop: called with the number of a signal once the run has stopped for it, and saved; does not return.
        over: ends what goes on beside the steps; the folder may be written by others then.
    """

    heeding: Callable[[], AbstractContextManager[object]]
    failed: Callable[[Exception], object]
    stop: Callable[[int], None]
    over: ExitStack


@final
class OwnRun:
    """A run whose steps are taken by a loop of one's own."""

    def __init__(
        self, run: RunSpec, loop: TrainingLoop, stepper: MeshStepper, interruptions: Interruptions, here: CallersProcess
    ) -> None:
        self._run, self._loop, self._stepper = run, loop, stepper
        self._interruptions, self._here = interruptions, here
        self._first, self._read, self._over = stepper.taken, False, False

    def batches(self) -> Generator[StepBatch, None, None]:
        """The batches of the steps that are left, from where the run stands; at their end the run is over.

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
        """Take the step of ``batch``, record it, and save and evaluate where that is due.

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
        """Write a checkpoint of this moment; it is whole when this returns its folder. Collective.

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
        """Evaluate, and note it; ``None`` where a signal asked to stop meanwhile, or the run is over without one."""
        if self._over:
            return self._loop.evaluation
        with self._reported():
            self._stepper.settle()
            found = self._loop.evaluate()
        if found is None:
            self._stop_if_asked()
        return found

    def close(self) -> None:
        """No more steps come, though it may not be the end: what is being written is waited for.

        Raises:
            LossError, GradientError: of the last step, if that was still to be checked.
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
        '    try: px.build(job, plan, run="runs/mine", resume=True), which goes on from the last checkpoint'
    )


@final
class LoopWithoutRun:
    """The steps of a loop of one's own that keeps no run: what is a step of which batch is as with one."""

    def __init__(self, step: Step, loader: Loader) -> None:
        self._step, self._loader, self._read, self._over = step, loader, False, False

    def batches(self) -> Generator[StepBatch, None, None]:
        """The batches of the steps that are left, of all epochs; none once they are all taken.

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
    """Calling it with a batch of the loader takes one optimizer step and gives its ``Metrics``; every rank has to.

    On an accelerator the loss and the gradient of a step may be checked in the next call, in ``evaluate``, ``save`` and
    ``close``, and where the loader ends. Weights never take in a step that fails its check.

    Raises, when called:
        LossError: if the loss is not finite, or not of an allowed form, or if nothing was counted.
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
        """The model as this process has it: its parameters may be shards of the whole."""
        return self._assembly.layout.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The job's optimizer over the parameters that this process steps."""
        return self._assembly.optimizer

    @property
    def first(self) -> bool:
        """Return True if this is the first of the plan's processes, rank 0: the one to print and to write files."""
        return self._first

    @property
    def taken(self) -> int:
        """Optimizer steps taken, those before a resume included."""
        return self._step.progress.step

    @property
    def progress(self) -> Progress:
        """What a step carries to the next."""
        return self._step.progress

    @property
    def layout(self) -> Layout:
        """Who holds which tensor, and how gradients come together."""
        return self._assembly.layout

    @property
    def sync(self) -> Sync:
        """How replicas are kept together; before parameters are read, ``sync.together()``."""
        return self._step.sync

    @property
    def average(self) -> WeightAverage | None:
        """Of the weights, if the job keeps one: the model computes with it within ``average.applied()``."""
        return self._step.average

    def zero_grad(self) -> None:
        """Drop all gradients, for memory between steps: a step begins without any, whoever left some."""
        self._assembly.layout.begin()

    def evaluate(self) -> Evaluation:
        """The job's evaluation of the model as it is; with a run it is recorded. Collective.

        Within ``average.applied()`` it is one of the averaged weights, which is not recorded.

        Raises:
            SpecError: the job has nothing to evaluate on.
            LossError: the loss is not of an allowed form, or a metric is not a sum and a count.
        """
        if self._job.evaluate is None:
            allowed = "a job that says what to evaluate on"
            raise SpecError.of("job.evaluate", "None", allowed, 'px.Job(..., evaluate=lambda: Digits("test"))')
        averaged = self.average is not None and self.average.inside
        found = self._run.evaluate() if self._run and not averaged else None
        return found or self._evaluated()

    def save(self) -> Path:
        """Write a checkpoint of this moment; it is whole when this returns its folder. Collective.

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
        """Let go of the run and its folder, where it has one: no more steps can be taken.

        Its end does that, too, and so does the end of the process. What is not saved is lost.
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
        assert found  # nobody asks it to leave off
        return found


@final
class OwnLoader:
    """The batches of the steps that are left, of all epochs and in order; each ``iter()`` begins with the next step."""

    def __init__(self, loader: Loader, loop: OwnRun | LoopWithoutRun) -> None:
        self._loader, self._loop = loader, loop

    @property
    def length(self) -> int | None:
        """Samples in the data; ``None`` for a stream."""
        return self._loader.length

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in one pass over the data; ``None`` for a stream, and where batch or data change with the step."""
        return self._loader.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        """The step after the last of the whole training; ``None`` for a stream that ends with its epochs."""
        return self._loader.total_steps

    def __iter__(self) -> Generator[StepBatch, None, None]:
        return self._loop.batches()
