"""The training loop, the same for every plan: steps, evaluations, checkpoints, what is recorded and who looks on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from phalanx.comm import Place
from phalanx.config import Job, RunSpec
from phalanx.data import StepBatch
from phalanx.train.assembly import Findings
from phalanx.train.evaluate import Evaluation
from phalanx.train.metrics import Metrics
from phalanx.train.observer import Observer
from phalanx.train.run_recorder import Lap, RunRecorder


def train(
    job: Job,
    run: RunSpec,
    place: Place,
    *,
    report: Callable[[int], None],
    observer: Observer | None = None,
    findings: Findings | None = None,
) -> dict[str, Any]:
    """Run the whole training on this worker; ``report(step)`` is called as each step begins.

    ``observer`` looks on; every run goes the same way, with and without one. ``findings`` are those of a look at the
    job before the run: causes of a difference from one device stand among the run's notes, facts are not looked for.

    Returns a summary: steps taken, last loss, last evaluation.
    """
    observer, findings = observer or Observer(), findings or Findings()
    if run.plan.server:
        from phalanx.train.parameter_server import take_part

        return take_part(job, run, place, report, observer=observer, causes=findings.causes)
    from phalanx.train.mesh_stepper import rank_of_mesh

    with rank_of_mesh(job, run, place, report, observer=observer, findings=findings) as (stepper, recorder):
        return TrainingLoop(job, run, stepper, recorder, observer).run()


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
    def steps(self, pause: int | None) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        """Take steps, up to ``pause`` or to the end; then nothing is on its way, and the losses so far are finite.

        Raises:
            LossError: if a loss is not finite, or nothing was counted.
        """

    @abstractmethod
    def evaluate(self) -> Evaluation | None:
        """Evaluate the model as it is; ``None`` where the job has nothing to evaluate on."""

    @abstractmethod
    def save(self, folder: Path, *, keep: int) -> Path | None:
        """Write a checkpoint into ``folder``; ``None`` where another process writes it for this one."""

    def recover(self, lost: StepsLostError) -> None:
        """Go back to where the run can go on from. A mesh cannot: it needs all of its ranks.

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

    def __init__(self, job: Job, run: RunSpec, stepper: Stepper, recorder: RunRecorder, observer: Observer) -> None:
        self._job, self._run, self._stepper, self._recorder, self._observer = job, run, stepper, recorder, observer
        self._saved_at, self._evaluated_at = stepper.taken, -1
        self._evaluation: dict[str, Any] = {}
        self._metrics: Metrics | None = None

    def run(self, lost: StepsLostError | None = None) -> dict[str, Any]:
        """Train to the end; ``lost``: what has to be recovered from before. Returns the run's summary."""
        while True:
            try:
                if lost:
                    self._stepper.recover(lost)
                    self._saved_at = self._evaluated_at = -1
                self._train()
                return self._finish()
            except StepsLostError as error:
                lost = error

    def _train(self) -> None:
        stepper, evaluate_every, save_every = self._stepper, self._job.evaluate_every, self._run.checkpoint_every
        every = [one for one in (evaluate_every, save_every) if one]
        while True:
            pause = min((stepper.taken // one * one + one for one in every), default=None)
            for batch, metrics, lap in stepper.steps(pause):
                self._metrics = metrics
                self._observer.updated(batch, metrics)
                self._recorder.stepped(batch, metrics, lap)
            self._recorder.flush()
            if self._evaluated_at != stepper.taken and self._due(evaluate_every):
                self._evaluate()
            if self._saved_at != stepper.taken and self._due(save_every):
                self._save()
            if stepper.ended:
                return

    def _due(self, every: int | None) -> bool:
        return self._stepper.ended or bool(every and self._stepper.taken % every == 0)

    def _evaluate(self) -> None:
        result = self._stepper.evaluate()
        if result is None:
            return
        step = self._evaluated_at = self._stepper.taken
        self._evaluation = {"loss": result.loss, "samples": result.samples, "metrics": result.metrics}
        self._observer.evaluated(step, self._evaluation)
        self._recorder.write("evaluate", step=step, seconds=result.seconds, **self._evaluation)

    def _save(self) -> None:
        begun = time.perf_counter()
        path = self._stepper.save(self._run.folder / "checkpoints", keep=self._run.keep)
        step = self._saved_at = self._stepper.taken
        if path is None:
            return
        self._observer.saved(step, path)
        size, seconds = sum(file.stat().st_size for file in path.iterdir()), time.perf_counter() - begun
        relative = str(path.relative_to(self._run.folder))
        self._recorder.write("checkpoint", step=step, path=relative, bytes=size, seconds=seconds)

    def _finish(self) -> dict[str, Any]:
        self._observer.ended()
        events, loss = self._stepper.finish(), self._metrics.loss if self._metrics else None
        summary = self._recorder.finish(events, step=self._stepper.taken, samples=self._stepper.samples, loss=loss)
        return {**summary, "evaluation": self._evaluation}
