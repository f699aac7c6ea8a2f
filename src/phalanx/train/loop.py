"""The training loop, the same for every plan: steps, evaluations, checkpoints, records and observers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from phalanx.checkpoint import BestSoFar, Saving
from phalanx.comm import Place
from phalanx.config import Job, RunSpec
from phalanx.config.run_files import CHECKPOINTS
from phalanx.data import StepBatch
from phalanx.train.evaluate import Evaluation
from phalanx.train.findings import Findings
from phalanx.train.interruptions import Interruptions, LauncherLink
from phalanx.train.metrics import Metrics
from phalanx.train.observer import Observer
from phalanx.train.run_recorder import Lap, RunRecorder


def train(
    job: Job,
    run: RunSpec,
    place: Place,
    link: LauncherLink | None = None,
    *,
    observer: Observer | None = None,
    findings: Findings | None = None,
) -> dict[str, Any]:
    """Run the whole training on this worker, which ``link`` connects to its launcher.

    ``observer`` looks on; every run goes the same way, with and without one. ``findings`` are those of a trace before
    the run: their causes become notes of the run, and their facts are used again.

    Returns a summary: steps taken, last loss, last evaluation, the signal that stopped it or 0.
    """
    link, observer, findings = link or LauncherLink(), observer or Observer(), findings or Findings()
    if run.plan.server:
        from phalanx.train.parameter_server import take_part

        return take_part(job, run, place, link, observer=observer, findings=findings)
    from phalanx.train.mesh_stepper import rank_of_mesh

    with rank_of_mesh(job, run, place, link, observer=observer, findings=findings) as (stepper, recorder):
        with Interruptions(run, link.asked, place=place) as interruptions:
            return TrainingLoop(job, run, stepper, recorder, observer, interruptions).run()


class StepsLostError(Exception):
    """Loss of steps that are repeated from the place to which ``Stepper.recover`` returns."""


class Stepper(ABC):
    """The optimizer steps of a run: the ranks of a mesh all together, or servers as gradients come in.

    It records events beside the steps itself (averagings, new shares, workers that come and go).
    """

    @property
    @abstractmethod
    def taken(self) -> int:
        """Return the number of steps taken; without a bound on staleness some later steps may be taken, too."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Return True if all steps of the run have been taken."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Return the number of samples this run has trained on."""

    @abstractmethod
    def steps(self, pause: int | None, interruptions: Interruptions) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        """Take steps, up to ``pause``, to the end, or until ``interruptions`` are reached.

        Afterwards no step is pending, and the losses so far are finite.

        Raises:
            LossError: if a loss is not finite, or its count is 0.
        """

    @abstractmethod
    def evaluate(self, interruptions: Interruptions, *, batches: int | None = None) -> Evaluation | None:
        """Evaluate the present model, on the first ``batches`` if given.

        ``None`` if the job has no evaluation data, or the run was asked to stop before the end.
        """

    @abstractmethod
    def save(self, folder: Path, *, keep: int, keep_every: int | None) -> Saving | None:
        """Begin a checkpoint of this moment in ``folder``; ``None`` if another process writes it.

        Kept are the newest ``keep``, this one included, and multiples of ``keep_every``.

        Raises:
            CheckpointError: if it, or the one begun before, cannot be written.
        """

    def awaits_evaluation(self) -> bool:
        """Return True if the learning rates of the next step depend on a pending evaluation."""
        return False

    def evaluated(self, value: float) -> None:
        """Take ``value``, by which evaluations are compared, of the present evaluation."""
        del value

    def agreed(self, value: Any) -> Any:
        """Return the JSON ``value`` of the process that writes events. Collective."""
        return value

    def recover(self, lost: StepsLostError) -> None:
        """Return to a state from which the run can continue.

        Raises:
            RunError: if there is none.
        """
        raise lost

    @abstractmethod
    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        """End background work. Returns the run's last events: its memory, traffic, timeline, workers."""


@final
class TrainingLoop:
    """The steps of a run, with evaluations and checkpoints between them.

    ``run`` takes them all. In a user's own loop they come one by one, between ``begin`` and ``finish``: ``stepped``
    follows each step, and ``between`` follows at every pause.
    """

    def __init__(
        self,
        job: Job,
        run: RunSpec,
        stepper: Stepper,
        recorder: RunRecorder,
        observer: Observer,
        interruptions: Interruptions | None = None,
    ) -> None:
        self._job, self._run, self._stepper, self._recorder, self._observer = job, run, stepper, recorder, observer
        self._interruptions = interruptions or Interruptions(run)
        self._saved_at, self._evaluated_at, self._tried = stepper.taken, -1, False
        self._evaluation: dict[str, Any] = {}
        self._result: Evaluation | None = None
        self._metrics: Metrics | None = None
        self._saving: Saving | None = None
        self._best = BestSoFar(job.best) if job.best else None

    def run(self) -> dict[str, Any]:
        """Train to the end. Returns the run's summary."""
        lost: StepsLostError | None = None
        if self._run.rolls_back and not self._run.resume:
            self.save()  # for accidents before the first one that is due
        self._read_best()
        while True:
            try:
                if lost:
                    self._stepper.recover(lost)
                    self._read_best()
                    self._record_saved()
                    self._saving = None  # one that could not be written is over, too
                    self._saved_at = self._evaluated_at = -1
                    self._tried = True
                self._try_evaluation()
                self._train()
                return self.finish()
            except StepsLostError as error:
                lost = error

    def begin(self) -> None:
        """Prepare the first step; an evaluation that cannot run is refused."""
        self._read_best()
        self._try_evaluation()
        self._catch_up()

    def pause_after(self, taken: int) -> int | None:
        """Return the number of steps after which a save or an evaluation is due; ``None``: not before the end."""
        every = [one for one in (self._job.evaluate_every, self._run.save_steps) if one]
        return min((taken // one * one + one for one in every), default=None)

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of the present model, if it was evaluated."""
        return self._result if self._evaluated_at == self._stepper.taken else None

    def flush(self) -> None:
        """Bring everything recorded so far to disk."""
        self._recorder.flush()

    @property
    def over(self) -> bool:
        """Return True once a stop was requested or early stopping has triggered."""
        return bool(self._interruptions.stop) or (self._best is not None and self._best.exhausted)

    def stepped(self, batch: StepBatch, metrics: Metrics, lap: Lap | None) -> None:
        """Record a step."""
        self._metrics = metrics
        self._observer.updated(batch, metrics)
        if self._observer.finding:
            self._recorder.write("check", **self._observer.finding)
            self._observer.finding = None
        self._recorder.stepped(batch, metrics, lap)
        self._record_saved()

    def between(self) -> None:
        """Save and evaluate if due, at a pause of the steps or at their end."""
        stepper, interruptions = self._stepper, self._interruptions
        self._recorder.flush()
        if self._saved_at != stepper.taken and (interruptions.save or self._due(self._run.save_steps)):
            self.save()  # before an evaluation, which may fail in code of the job's own
        if self._evaluated_at != stepper.taken and self._due(self._job.evaluate_every) and not interruptions.stop:
            self.evaluate()

    def leave(self) -> None:
        """Save unsaved steps when the loop ends early."""
        if self._saved_at != self._stepper.taken:
            self.save()

    def _train(self) -> None:
        self._catch_up()
        while not self.over:
            for batch, metrics, lap in self._stepper.steps(self.pause_after(self._stepper.taken), self._interruptions):
                self.stepped(batch, metrics, lap)
            self.between()
            if self._stepper.ended:
                break
        if self.over:
            self.leave()

    def _catch_up(self) -> None:
        unknown = self._best is not None and not self._best.knows(self._stepper.taken)
        awaited = unknown or self._stepper.awaits_evaluation()
        if awaited and self._stepper.taken and self._due(self._job.evaluate_every):
            self.evaluate()

    def _try_evaluation(self) -> None:
        """Evaluate once before training, so that a failing evaluation is known then."""
        if self._tried or self._job.evaluate is None:
            return
        found = self._stepper.evaluate(self._interruptions, batches=1)
        if self._best and found:
            self._best.refuse_unknown(found.metrics)
        self._recorder.begin()
        self._tried = True

    def _record_early_end(self) -> None:
        if self._best is not None and self._best.exhausted and not self._stepper.ended:
            step, value = self._best.best or (None, None)
            facts = {"metric": self._best.metric, "best": step, "value": value}
            since = self._best.without_better
            self._recorder.write("ended_early", step=self._stepper.taken, **facts, evaluations=since)

    def _read_best(self) -> None:
        if self._best is None or self._job.best is None:
            return
        evaluations = self._stepper.agreed(BestSoFar.read(self._job.best, self._run.folder).evaluations)
        self._best = BestSoFar(self._job.best, ((step, value) for step, value in evaluations))
        self._best.go_back(self._stepper.taken)

    def _due(self, every: int | None) -> bool:
        return self._stepper.ended or bool(every and self._stepper.taken % every == 0)

    def evaluate(self) -> Evaluation | None:
        """Evaluate the present model once and record it; repeated calls return the same result.

        ``None`` if the job has no evaluation data, or the run was asked to stop before the end.
        """
        if found := self.evaluation:
            return found
        result = self._result = self._stepper.evaluate(self._interruptions)
        if result is None:
            return None
        step = self._evaluated_at = self._stepper.taken
        self._evaluation = {"loss": result.loss, "samples": result.samples, "metrics": result.metrics}
        self._observer.evaluated(step, self._evaluation)
        self._recorder.write("evaluate", step=step, seconds=result.seconds, **self._evaluation)
        value = self._best.value_of(self._evaluation) if self._best else result.loss
        self._stepper.evaluated(value)
        if self._best and self._best.add(step, value) and self._saved_at != step:
            self.save()
        if self._best:
            self._recorder.note_best(self._best)
        return result

    def save(self) -> None:
        """Begin a checkpoint of this moment; it is written while steps continue."""
        self.wait_for_save()
        run = self._run
        self._saving = self._stepper.save(run.folder / CHECKPOINTS, keep=run.keep, keep_every=run.keep_every)
        self._saved_at = self._stepper.taken
        self._interruptions.saved()
        self._record_saved()

    def wait_for_save(self) -> None:
        """Wait until the last begun checkpoint is written; all processes wait at the same steps.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._saving:
            self._saving.wait()
            self._record_saved()

    def _record_saved(self) -> None:
        """Record the last begun checkpoint once it is written, possibly some steps later."""
        saved = self._saving
        if saved is None or not saved.published:
            return
        self._saving = None
        self._observer.saved(saved.step, saved.path)
        relative = str(saved.path.relative_to(self._run.folder))
        self._recorder.write(
            "checkpoint",
            step=saved.step,
            path=relative,
            bytes=saved.nbytes,
            seconds=saved.seconds,
            standstill=saved.standstill,
        )
        if saved.note:
            self._recorder.write("warning", message=saved.note)
        self._recorder.copy(saved.path)

    def finish(self) -> dict[str, Any]:
        """End the run, complete or stopped, and return its summary."""
        self.wait_for_save()
        stopped = self._interruptions.signal
        if not stopped:
            self._observer.ended()
            self._record_early_end()
        self._interruptions.finish()
        events, loss = self._stepper.finish(), self._metrics.loss if self._metrics else None
        facts = {"step": self._stepper.taken, "samples": self._stepper.samples, "loss": loss}
        summary = self._recorder.finish(events, **facts, stopped=stopped)
        return {**summary, "evaluation": self._evaluation, "stopped": self._interruptions.stop}
