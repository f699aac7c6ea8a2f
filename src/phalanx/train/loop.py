"""The training loop, the same for every plan: steps, evaluations, checkpoints, what is recorded and who looks on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from phalanx.checkpoint import BestSoFar, Saving
from phalanx.comm import Place
from phalanx.config import Job, RunSpec
from phalanx.data import StepBatch
from phalanx.train.assembly import Findings
from phalanx.train.evaluate import Evaluation
from phalanx.train.interruptions import Interruptions
from phalanx.train.launcher_link import LauncherLink
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
    """Run the whole training on this worker, which ``link`` binds to whoever started it.

    ``observer`` looks on; every run goes the same way, with and without one. ``findings`` are those of a look at the
    job before the run: causes of a difference from one device stand among the run's notes, facts are not looked for.

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
    """Steps are lost with the process ``index``, which held them; ``Stepper.recover`` brings back what it can."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class Stepper(ABC):
    """Takes the optimizer steps of a run: the ranks of a mesh all together, or servers as gradients come in.

    What happens beside the steps (averagings, new shares, workers that come and go) it records itself.
    """

    @property
    @abstractmethod
    def taken(self) -> int:
        """Every step before this one has been taken; without a bound on staleness some later ones, too."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all steps of the run have been taken."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Samples that this run has trained on."""

    @abstractmethod
    def steps(self, pause: int | None, interruptions: Interruptions) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        """Take steps, up to ``pause``, to the end, or to where ``interruptions`` are reached.

        Afterwards nothing is on its way, and the losses so far are finite.

        Raises:
            LossError: if a loss is not finite, or nothing was counted.
        """

    @abstractmethod
    def evaluate(self, interruptions: Interruptions, *, batches: int | None = None) -> Evaluation | None:
        """Evaluate the model as it is, on the first ``batches`` where given.

        ``None`` where the job has nothing to evaluate on, or the run was asked to stop before the end.
        """

    @abstractmethod
    def save(self, folder: Path, *, keep: int, keep_every: int | None) -> Saving | None:
        """Begin a checkpoint of this moment in ``folder``; ``None`` where another process writes it for this one.

        Of the older ones the newest are kept, ``keep`` with this one, and those of the multiples of ``keep_every``.

        Raises:
            CheckpointError: if it, or the one begun before, cannot be written.
        """

    def awaits_evaluation(self) -> bool:
        """Whether the learning rates of the next step follow from an evaluation that has not been made."""
        return False

    def evaluated(self, value: float) -> None:
        """The evaluation of this moment gave ``value``, by which evaluations are compared."""
        del value

    def agreed(self, value: Any) -> Any:
        """What the process that writes events has for ``value``, which is JSON. Collective."""
        return value

    def recover(self, lost: StepsLostError) -> None:
        """Go back to where the run can go on from.

        Raises:
            RunError: if it cannot.
        """
        raise lost

    @abstractmethod
    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        """End what goes on beside the steps. Returns the run's last events: its memory, traffic, timeline, workers."""


@final
class TrainingLoop:
    """Steps with what happens between them."""

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
        self._saved_at, self._evaluated_at = stepper.taken, -1
        self._evaluation: dict[str, Any] = {}
        self._metrics: Metrics | None = None
        self._saving: Saving | None = None
        self._best = BestSoFar(job.best) if job.best else None

    def run(self, lost: StepsLostError | None = None) -> dict[str, Any]:
        """Train to the end; ``lost``: what has to be recovered from before. Returns the run's summary."""
        if self._run.rolls_back and not lost and not self._run.resume:
            self._save()  # for accidents before the first one that is due
        tried = self._job.evaluate is None or lost is not None
        self._read_best()
        while True:
            try:
                if lost:
                    self._stepper.recover(lost)
                    self._read_best()
                    self._record_saved()
                    self._saving = None  # one that could not be written is over, too
                    self._saved_at = self._evaluated_at = -1
                if not tried:  # what cannot be evaluated is known before anything is trained
                    found = self._stepper.evaluate(self._interruptions, batches=1)
                    if self._best and found:
                        self._best.refuse_unknown(found.metrics)
                    self._recorder.begin()
                    tried = True
                self._train()
                return self._finish()
            except StepsLostError as error:
                lost = error

    def _train(self) -> None:
        stepper, evaluate_every, save_every = self._stepper, self._job.evaluate_every, self._run.save_steps
        every, interruptions = [one for one in (evaluate_every, save_every) if one], self._interruptions
        unknown = self._best is not None and not self._best.knows(stepper.taken)
        if (unknown or stepper.awaits_evaluation()) and stepper.taken and self._due(evaluate_every):
            self._evaluate()  # the run ended after the save of this step, and before its evaluation
        while not (interruptions.stop or self._exhausted()):
            pause = min((stepper.taken // one * one + one for one in every), default=None)
            for batch, metrics, lap in stepper.steps(pause, interruptions):
                self._metrics = metrics
                self._observer.updated(batch, metrics)
                self._recorder.stepped(batch, metrics, lap)
                self._record_saved()
            self._recorder.flush()
            if self._saved_at != stepper.taken and (interruptions.save or self._due(save_every)):
                self._save()  # before an evaluation, which may fail in code of the job's own
            if self._evaluated_at != stepper.taken and self._due(evaluate_every) and not interruptions.stop:
                self._evaluate()
            if stepper.ended:
                break
        if (interruptions.stop or self._exhausted()) and self._saved_at != stepper.taken:
            self._save()

    def _record_early_end(self) -> None:
        if self._best is not None and self._best.exhausted and not self._stepper.ended:
            step, value = self._best.best or (None, None)
            facts = {"metric": self._best.metric, "best": step, "value": value}
            since = self._best.without_better
            self._recorder.write("ended_early", step=self._stepper.taken, **facts, evaluations=since)

    def _exhausted(self) -> bool:
        """Whether evaluations have brought nothing better for as long as the job waits."""
        return self._best is not None and self._best.exhausted

    def _read_best(self) -> None:
        """Take up the evaluations of the run up to the step where it goes on."""
        if self._best is None or self._job.best is None:
            return
        evaluations = self._stepper.agreed(BestSoFar.read(self._job.best, self._run.folder).evaluations)
        self._best = BestSoFar(self._job.best, ((step, value) for step, value in evaluations))
        self._best.go_back(self._stepper.taken)

    def _due(self, every: int | None) -> bool:
        return self._stepper.ended or bool(every and self._stepper.taken % every == 0)

    def _evaluate(self) -> None:
        result = self._stepper.evaluate(self._interruptions)
        if result is None:
            return
        step = self._evaluated_at = self._stepper.taken
        self._evaluation = {"loss": result.loss, "samples": result.samples, "metrics": result.metrics}
        self._observer.evaluated(step, self._evaluation)
        self._recorder.write("evaluate", step=step, seconds=result.seconds, **self._evaluation)
        value = self._best.value_of(self._evaluation) if self._best else result.loss
        self._stepper.evaluated(value)
        if self._best and self._best.add(step, value) and self._saved_at != step:
            self._save()
        if self._best:
            self._recorder.note_best(self._best)

    def _save(self) -> None:
        self._wait_for_save()
        run = self._run
        self._saving = self._stepper.save(run.folder / "checkpoints", keep=run.keep, keep_every=run.keep_every)
        self._saved_at = self._stepper.taken
        self._interruptions.saved()
        self._record_saved()

    def _wait_for_save(self) -> None:
        """Wait until the checkpoint begun last is written; every process waits at the same steps, and hears the same.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._saving:
            self._saving.wait()
            self._record_saved()

    def _record_saved(self) -> None:
        """Record the checkpoint begun last once it is written: steps may have been taken since."""
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

    def _finish(self) -> dict[str, Any]:
        self._wait_for_save()
        stopped = self._interruptions.signal
        if not stopped:
            self._observer.ended()
            self._record_early_end()
        self._interruptions.finish()
        events, loss = self._stepper.finish(), self._metrics.loss if self._metrics else None
        facts = {"step": self._stepper.taken, "samples": self._stepper.samples, "loss": loss}
        summary = self._recorder.finish(events, **facts, stopped=stopped)
        return {**summary, "evaluation": self._evaluation, "stopped": self._interruptions.stop}
