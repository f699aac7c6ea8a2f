"""Server 0's main thread: makes updates as their pieces come in, saves and evaluates.

Everything that fails here ends the run. The launcher starts it again from the newest checkpoint if a process was lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from phalanx.checkpoint import Saving
from phalanx.checkpoint.sections import MODEL, name_in
from phalanx.config import Job, RunSpec
from phalanx.config.losses import names_of
from phalanx.config.run_files import LEDGER
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.data.loader import BatchPieces
from phalanx.parallel.parameter_server import FrameKind, Report, StalenessBound, Update, WorkQueue
from phalanx.train.accidents import Accidents
from phalanx.train.evaluate import Evaluation
from phalanx.train.evaluation_sums import Sums, add_up
from phalanx.train.grad_clipping import clip_factor
from phalanx.train.interruptions import Interruptions
from phalanx.train.loop import Stepper
from phalanx.train.loss import check_count
from phalanx.train.metrics import Metrics
from phalanx.train.named_losses import check_alike
from phalanx.train.nonfinite_trace import Sighting
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server import Server
from phalanx.train.parameter_server.server_group import Directory, Patience, ServerGroup, ServerScene, gone
from phalanx.train.parameter_server.shard_store import ShardStore, put_together
from phalanx.train.run_recorder import Lap, RunRecorder

_LOOK = 0.2  # seconds between looks at who is there, while nothing comes in


@final
@dataclass(kw_only=True, eq=False)
class Coordinator(Stepper):
    """The steps of a run with servers, from its work queue's present step.

    ``server`` and ``store`` are server 0, which is here. ``report`` is called with each step that begins, and
    ``samples_before`` were trained on before this run.
    """

    job: Job
    run: RunSpec
    store: ShardStore
    server: Server
    group: ServerGroup
    requests: RequestHandler
    recorder: RunRecorder
    directory: Directory
    pieces: BatchPieces
    evaluation: BatchPieces | None
    patience: Patience
    observer: Observer
    scene: ServerScene
    report: Callable[[int], None]
    samples_before: int

    def __post_init__(self) -> None:
        self._queue, self._total, self._divisor = self.requests.queue, self.pieces.total_steps, divisor_of(self.job)
        self._samples = self.samples_before
        self._refused = set[str]()  # already reported connections from outside the run
        self._accidents = Accidents(self.run, self.recorder.write)

    @property
    def taken(self) -> int:
        return self._queue.floor

    @property
    def ended(self) -> bool:
        return self.taken >= self._total

    @property
    def samples(self) -> int:
        return self._samples - self.samples_before

    def steps(self, pause: int | None, interruptions: Interruptions) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        requests, queue = self.requests, self._queue
        with requests.news:
            queue.limit = self._total if pause is None else min(pause, self._total)
        requests.turn_to("train", queue)
        for step, reports in self._complete(queue):
            self.report(step)
            batch, metrics = self._update(step, reports)
            with requests.news:
                closed, dropped = queue.applied(step)
                statistics = requests.statistics.pop(step, None)
            if statistics is not None and not metrics.skipped:
                self.store.statistics = statistics
            self._samples += metrics.samples
            version = queue.version
            yield batch, metrics, None
            self.recorder.write(
                "update",
                step=step,
                version=version,
                staleness=[version - 1 - report.version for report in closed.values()],
                workers=[report.worker for report in closed.values()],
                dropped=dropped,
            )
            if interruptions.reached(self.taken):
                with requests.news:
                    queue.begin_no_more()

    def _complete(self, queue: WorkQueue) -> Iterator[tuple[int, Mapping[int, Report]]]:
        requests = self.requests
        while True:
            with requests.news:
                step = queue.ready()
                if step is None and queue.at_rest:
                    return
                if step is None:
                    requests.news.wait(_LOOK)
                    step = queue.ready()
                reports = queue.pieces(step) if step is not None else {}
            if step is not None:
                yield step, reports
                requests.dispatch()
            self._look()

    def _look(self) -> None:
        self.requests.look()
        self._record_workers()
        for text in self.server.listener.refusals().keys() - self._refused:
            self._refused.add(text)
            self.recorder.write("warning", message=f"server 0 refused {text}")
        if trouble := self.requests.trouble or self.server.trouble:
            raise trouble
        self.group.look()

    def _update(self, step: int, reports: Mapping[int, Report]) -> tuple[StepBatch, Metrics]:
        job, observer, scene, parts = self.job, self.observer, self.scene, list(reports)
        names = names_of(job.loss)
        pairs = [[report.gradient_sums[name] for report in reports.values()] for name in ("loss", *names)]
        (total, count), *named = ((sum(one for one, _ in each), sum(one for _, one in each)) for each in pairs)
        check_count(step, count)
        check_alike(step, names, [counted for _, counted in named])
        rate = self.run.lr_scale * job.lr_schedule.factor(step=step, batch=job.batch, total_steps=self._total)
        scale, batch = self._divisor / count, batch_of(self.pieces, step, parts)
        squares = self.group.tell(FrameKind.PREPARE, {"step": step, "parts": parts})
        norm = math.sqrt(sum(answer["square"] for answer in squares)) * scale
        scene.scale, scene.stepped_with = scale, False
        observer.gradients(batch, (total, count))
        why = self._accident(step, total / count, norm, reports)
        limit = job.clipping.norm if job.clipping else None
        if limit is not None:
            scale *= float(clip_factor(torch.tensor(norm, dtype=torch.float64), limit))
        largest = job.clipping.value if job.clipping and job.clipping.value else 0.0
        update = Update(
            step=step, scale=scale, largest=largest, rate=rate, watched=observer.listens, left_out=bool(why)
        )
        self.group.tell(FrameKind.APPLY, asdict(update))
        if not why:
            scene.stepped_with = True
            observer.steps(batch)
        metrics = Metrics(
            step=step,
            epoch=batch.epoch,
            samples=batch.samples,
            lr=self.store.rates[0] * rate,
            skipped=bool(why),
            accident=why,
            _totals=(total, count, *(number for pair in named for number in pair)),
            names=names,
            _norm=torch.tensor(norm, dtype=torch.float64) if limit is not None else None,
        )
        return batch, metrics

    def _accident(self, step: int, loss: float, norm: float, reports: Mapping[int, Report]) -> str:
        """Return the reason to make no update of ``step``, or "" if there is none.

        It names the piece with the largest mean loss, a non-finite one first.
        """
        accident = self._accidents.judge(step, loss, norm)
        if accident is None:
            self._accidents.passed()
            return ""
        sums = {part: report.gradient_sums["loss"] for part, report in reports.items()}
        means = {part: total / (count or 1.0) for part, (total, count) in sums.items()}
        part = max(means, key=lambda part: (not math.isfinite(means[part]), means[part]))
        seen = Sighting(order=(), where="", part=0, micro=-1, rank=reports[part].worker)
        self._accidents.answer(accident, seen, samples=self.pieces.ids(step, part).tolist())
        return accident.told

    def evaluate(self, interruptions: Interruptions, *, batches: int | None = None) -> Evaluation | None:
        data, begun, given_up = self.evaluation, time.perf_counter(), False
        if data is None:
            return None
        sums: Sums = {}
        samples = 0
        limit = data.total_steps if batches is None else min(batches, data.total_steps)
        queue = WorkQueue(data.sizes, first=0, limit=limit, pace=StalenessBound(staleness=math.inf))
        queue.version = self._queue.version
        self.requests.turn_to("evaluate", queue)
        for step, reports in self._complete(queue):
            for report in reports.values():
                samples += report.samples
                add_up(sums, report.gradient_sums)
            with self.requests.news:
                queue.applied(step)
                if not given_up and interruptions.stopping():
                    given_up = True
                    queue.begin_no_more()
        self.requests.turn_to("train", self._queue)
        return None if given_up else Evaluation.of(self.job, sums, samples, begun)

    def save(self, folder: Path, *, keep: int, keep_every: int | None) -> Saving:
        begun = time.perf_counter()
        parameters = self.store.layout.parameters
        tensors, states = put_together(self.group.gather("everything"), parameters)
        self._accidents.look_at_values(self.taken, {name: tensors[name_in(MODEL, name)] for name in parameters})
        progress = {"step": self.taken, "samples": self._samples, "divisor": self._divisor}
        kept = {"keep": keep, "keep_every": keep_every or 0}
        progress |= {"data": self.pieces.told}
        return Saving.done(self.taken, self.store.save(folder, tensors, states, progress, kept), begun)

    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        requests = self.requests
        requests.finish()
        until = time.monotonic() + self.patience.parting
        with requests.news:
            while requests.present and time.monotonic() < until:
                requests.news.wait(_LOOK)
        self.directory.finish()
        answers = self.group.part()
        self._record_workers()
        for index, answer in answers.items():
            if refused := answer["refused"]:
                said = "; ".join(f"{times} times {text}" for text, times in sorted(refused.items()))
                self.recorder.write("warning", message=f"server {index} refused connections: {said}")
        workers = sorted(requests.workers.items())
        held = {rank: worker.memory for rank, worker in workers if worker.memory}
        held |= {self.run.plan.dp + index: answer["memory"] for index, answer in answers.items()}
        events: list[tuple[str, dict[str, Any]]] = [("memory", {"rank": rank} | one) for rank, one in held.items()]
        for rank, one in workers:
            seconds = max(0.0, one.last - one.joined)
            events.append(("worked", {"rank": rank, "samples": one.samples, "pieces": one.pieces, "seconds": seconds}))
        return events

    def find_others(self) -> None:
        """Connect to every other server.

        Raises:
            RunError: if one cannot be found in time.
        """
        until = time.monotonic() + self.patience.back
        while missing := self.group.missing:
            for index in missing:
                address = self.directory.find(index)
                why = self.group.connect(index, address) if address else "it has not said where it is"
                if why and time.monotonic() > until:
                    raise gone(f"server {index} could not be reached for {self.patience.back:g} s: {why}")
                if why:
                    time.sleep(_LOOK / 4)

    def _record_workers(self) -> None:
        requests = self.requests
        with requests.news:
            happened, requests.happened = requests.happened, []
        for fields in happened:
            self.recorder.write("worker", **fields)


def divisor_of(job: Job) -> float:
    """Return the power of two by which workers divide sums before backward, to stay in range."""
    return 2.0 ** round(math.log2(job.batch))


def segment(run: RunSpec, first: int) -> Ledger:
    """Open the part of the run's ledger that begins with step ``first``; server 0 writes it for all workers."""
    return Ledger(run.folder / LEDGER, rank=0, first_step=first, world_size=1)


def batch_of(pieces: BatchPieces, step: int, parts: list[int]) -> StepBatch:
    """Return the samples of a step's ``parts``; the batches themselves are with the workers."""
    every = (tuple(pieces.ids(step, part).tolist()) for part in parts)
    micros = tuple(MicroBatch(batch=None, ids=ids, samples=len(ids)) for ids in every)
    samples = sum(micro.samples for micro in micros)
    return StepBatch(step=step, epoch=pieces.epoch(step), samples=samples, parts=(micros,))
