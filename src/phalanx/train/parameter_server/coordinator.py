"""Server 0's main thread: makes updates as their pieces come in, saves, evaluates, and has servers go back.

Everything that fails here ends the run, but the loss of a server: then all go back to the newest snapshot that each of
them has, and what was dealt since is dealt anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from phalanx.config import Job, RunSpec
from phalanx.data.loader import Pieces
from phalanx.errors import RunError
from phalanx.parallel.parameter_server import Kind, Report, StalenessBound, WorkQueue
from phalanx.train.loss_form import check_totals
from phalanx.train.metrics import Metrics
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.recorder import Recorder, ServerScene, batch_of
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server import Server
from phalanx.train.parameter_server.server_group import Directory, Group, Patience, ServerLostError
from phalanx.train.parameter_server.shard_store import ShardStore, put_together

_LOOK = 0.2  # seconds between looks at who is there, while nothing comes in


@dataclass(kw_only=True, slots=True)
class Progress:
    """What has been done.

    Attributes:
        samples: trained on.
        begun: samples before this run.
        loss: of the last update.
        evaluation: the last.
        evaluated: at which step that was.
        saved: at which step the last checkpoint was.
    """

    samples: int = 0
    begun: int = 0
    loss: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])
    evaluated: int = -1
    saved: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorContext:
    """Everything that the coordinator works with."""

    job: Job
    run: RunSpec
    keeper: ShardStore
    servant: Server
    group: Group
    desk: RequestHandler
    recorder: Recorder
    directory: Directory
    pieces: Pieces
    evaluation: Pieces | None
    patience: Patience
    observer: Observer
    scene: ServerScene


@final
class Coordinator:
    """Trains from where its dealer stands to the end."""

    def __init__(self, office: CoordinatorContext, progress: Progress, report: Callable[[int], None]) -> None:
        self._office, self.progress, self._report = office, progress, report
        self._dealer = office.desk.dealer
        self._divisor = divisor_of(office.job)

    def run(self, *, behind: bool) -> dict[str, Any]:
        """Train to the end; ``behind``: servers have to be brought to one version first. Returns the run's summary."""
        office = self._office
        lost = 0 if behind else None
        while True:
            try:
                if lost is not None:
                    self._recover(lost)
                    lost = None
                return self._train()
            except ServerLostError as error:
                office.group.lose(error.index)
                lost = error.index

    def _train(self) -> dict[str, Any]:
        office, dealer = self._office, self._dealer
        every = [one for one in (office.job.evaluate_every, office.run.checkpoint_every) if one]
        total = office.pieces.total_steps
        office.desk.turn_to("train", dealer)
        while dealer.floor < total:
            with office.desk.news:
                dealer.limit = min([total, *(dealer.floor // one * one + one for one in every)])
            office.desk.deal()
            self._until_rest(dealer, self._update)
            if dealer.floor < total:
                self._rest(last=False)
        self._rest(last=True)
        office.desk.finish()
        return self._part()

    def _until_rest(self, dealer: WorkQueue, act: Callable[[int, Mapping[int, Report]], None]) -> None:
        desk = self._office.desk
        while True:
            with desk.news:
                step = dealer.ready()
                if step is None and dealer.at_rest:
                    return
                if step is None:
                    desk.news.wait(_LOOK)
                    step = dealer.ready()
                reports = dealer.pieces(step) if step is not None else {}
            if step is not None:
                act(step, reports)
                desk.deal()
            self._look()

    def _look(self) -> None:
        office = self._office
        office.desk.look()
        self._tell_of_workers()
        if trouble := office.desk.trouble or office.servant.trouble:
            raise trouble
        if office.desk.nobody_for > office.patience.back:
            raise RunError(
                f"no worker has been there for {office.patience.back:g} s, and none has come\n"
                "    try: --resume, which goes on from the last checkpoint"
            )
        office.group.look()

    def _update(self, step: int, reports: Mapping[int, Report]) -> None:
        office = self._office
        self._report(step)
        total, count = (sum(report.sums["loss"][index] for report in reports.values()) for index in range(2))
        check_totals(step, total, count)
        job, run, parts = office.job, office.run, list(reports)
        rate = run.lr_scale * job.schedule.factor(step=step, batch=job.batch, total_steps=office.pieces.total_steps)
        scale, norm, meta = self._divisor / count, None, {"parts": parts}
        batch = batch_of(office.pieces, step, parts)
        if job.clip is not None or office.observer.listens:
            squares = office.group.tell(Kind.PREPARE, {"step": step, "parts": parts})
            norm = math.sqrt(sum(answer["square"] for answer in squares)) * scale
            meta, office.scene.scale = {}, scale
            office.scene.stepped_with = False
            office.observer.gradients(batch, (total, count))
            if job.clip is not None:
                scale *= min(1.0, job.clip / (norm + 1e-6))
            else:
                norm = None
        with office.desk.news:
            oldest = self._dealer.oldest
        told = {"scale": scale, "rate": rate, "oldest": oldest, "watched": office.observer.listens}
        office.group.tell(Kind.APPLY, {"step": step, **told, **meta})
        office.scene.stepped_with = True
        office.observer.steps(batch)
        with office.desk.news:
            closed, dropped = self._dealer.applied(step)
            brought = office.desk.statistics.pop(step, None)
        if brought is not None:
            office.keeper.statistics = brought
        metrics = Metrics(
            step=step,
            epoch=office.pieces.epoch(step),
            samples=sum(report.samples for report in closed.values()),
            lr=office.keeper.rates[0] * rate,
            skipped=False,
            _totals=(total, count),
            _norm=None if norm is None else torch.tensor(norm),
        )
        office.observer.updated(batch, metrics)
        self._settle(metrics, closed, dropped)

    def _settle(self, metrics: Metrics, reports: Mapping[int, Report], dropped: int) -> None:
        """Write one update down."""
        office, version = self._office, self._dealer.version
        self.progress.samples += metrics.samples
        self.progress.loss = metrics.loss
        office.recorder.updated(metrics, version, reports, dropped)
        every = office.run.snapshots
        if every and version % every == 0 and version < office.pieces.total_steps:
            office.recorder.flush()
            self.snapshot()

    def snapshot(self) -> None:
        """Have every server write one."""
        with self._office.desk.news:
            dealer = {"floor": self._dealer.floor, "done": sorted(self._dealer.done)}
        progress = {**dealer, "samples": self.progress.samples, "begun": self.progress.begun}
        self._office.group.tell(Kind.SNAPSHOT, {"progress": progress})

    def _rest(self, *, last: bool) -> None:
        """Nothing is on its way: evaluate and save, if it is time."""
        office, at, progress = self._office, self._dealer.floor, self.progress

        def due(every: int | None) -> bool:
            return last or bool(every and at % every == 0)

        if office.evaluation and progress.evaluated != at and due(office.job.evaluate_every):
            self._evaluate(office.evaluation)
        if progress.saved != at and due(office.run.checkpoint_every):
            self._save()
        if last:
            office.observer.ended()

    def _evaluate(self, data: Pieces) -> None:
        office, begun = self._office, time.perf_counter()
        sums: dict[str, list[float]] = {}
        counted = 0
        dealer = WorkQueue(data.sizes, first=0, limit=data.total_steps, pace=StalenessBound(staleness=math.inf))
        dealer.version = self._dealer.version

        def add(step: int, reports: Mapping[int, Report]) -> None:
            nonlocal counted
            for report in reports.values():
                counted += report.samples
                for name, (total, count) in report.sums.items():
                    entry = sums.setdefault(name, [0.0, 0.0])
                    entry[0] += total
                    entry[1] += count
            with office.desk.news:
                dealer.applied(step)

        office.desk.turn_to("evaluate", dealer)
        self._until_rest(dealer, add)
        office.desk.turn_to("train", self._dealer)
        ratios = {name: total / count if count else math.nan for name, (total, count) in sorted(sums.items())}
        result = {"loss": ratios.pop("loss"), "samples": counted, "metrics": ratios}
        self.progress.evaluated, self.progress.evaluation = self._dealer.floor, result
        seconds = time.perf_counter() - begun
        office.observer.evaluated(self._dealer.floor, result)
        office.recorder.write("evaluate", step=self._dealer.floor, seconds=seconds, **result)

    def _save(self) -> None:
        office, begun = self._office, time.perf_counter()
        office.recorder.flush()
        tensors, states = put_together(office.group.gather("everything"), office.keeper.layout.parameters)
        progress = {
            "step": self._dealer.floor,
            "samples": self.progress.samples,
            "divisor": self._divisor,
            "length": office.pieces.length,
        }
        path = office.keeper.save(office.run.folder / "checkpoints", tensors, states, progress, office.run.keep)
        self.progress.saved = self._dealer.floor
        office.observer.saved(self._dealer.floor, path)
        office.recorder.write(
            "checkpoint",
            step=self._dealer.floor,
            path=str(path.relative_to(office.run.folder)),
            bytes=sum(file.stat().st_size for file in path.iterdir()),
            seconds=time.perf_counter() - begun,
        )

    def _recover(self, lost: int) -> None:
        """Bring every server to the newest version that all of them can go back to."""
        office = self._office
        find_others(office)
        said = office.group.tell(Kind.HELLO)
        initial = {0} if not office.run.resume else set[int]()
        common = set.intersection(*({*answer["snapshots"]} | initial for answer in said))
        if not common:
            raise RunError(
                "a server is lost, and there is no snapshot that all servers have\n    try: --resume, from a checkpoint"
            )
        version, term = max(common), max([self._office.desk.term, *(answer["term"] for answer in said)]) + 1
        progress = office.keeper.progress(version) or {"floor": 0, "done": [], "samples": 0, "begun": 0}
        office.desk.restart(term)
        office.group.tell(Kind.RESTORE, {"version": version, "term": term, "progress": progress})
        with office.desk.news:
            before, _ = self._dealer.version, self._dealer.restore(progress["floor"], progress["done"])
        self.progress.samples, self.progress.begun = progress["samples"], progress["begun"]
        self.progress.evaluated = self.progress.saved = -1
        office.recorder.go_back(progress["floor"], progress["done"])
        office.recorder.write(
            "server", index=lost, restarted=True, version=version, lost_updates=max(0, before - version)
        )

    def _part(self) -> dict[str, Any]:
        """Say good-bye to everybody, and write the last events."""
        office = self._office
        until = time.monotonic() + office.patience.parting
        with office.desk.news:
            while office.desk.present and time.monotonic() < until:
                office.desk.news.wait(_LOOK)
        office.directory.finish()
        held = [answer["memory"] for answer in office.group.tell(Kind.END)]
        self._tell_of_workers()
        workers = sorted(office.desk.workers.items())
        ranks = {rank: known.memory for rank, known in workers if known.memory}
        ranks |= {office.run.plan.dp + index: memory for index, memory in enumerate(held)}
        recorder = office.recorder
        recorder.last()
        for rank, memory in ranks.items():
            recorder.write("memory", rank=rank, **memory)
        for rank, known in workers:
            recorder.write(
                "worked",
                rank=rank,
                samples=known.samples,
                pieces=known.pieces,
                seconds=max(0.0, known.last - known.joined),
            )
        summary = {
            "step": self._dealer.floor,
            "samples": self.progress.samples - self.progress.begun,
            "seconds": recorder.seconds,
            "loss": self.progress.loss,
        }
        recorder.write("end", **summary)
        recorder.close()
        return {**summary, "evaluation": self.progress.evaluation}

    def _tell_of_workers(self) -> None:
        """Write down what became of workers since the last look."""
        with self._office.desk.news:
            happened, self._office.desk.happened = self._office.desk.happened, []
        for fields in happened:
            self._office.recorder.write("worker", **fields)


def find_others(office: CoordinatorContext) -> None:
    """Connect to every server that there is no connection to.

    Raises:
        RunError: if one cannot be found in time.
    """
    until = time.monotonic() + office.patience.back
    while missing := office.group.missing:
        for index in missing:
            address = office.directory.find(index)
            if address is None or not office.group.connect(index, address):
                if time.monotonic() > until:
                    raise RunError(
                        f"server {index} could not be reached for {office.patience.back:g} s\n"
                        "    try: --resume, which goes on from the last checkpoint"
                    )
                time.sleep(_LOOK / 4)


def divisor_of(job: Job) -> float:
    """The power of two that workers divide sums by before backward, to stay in range."""
    return 2.0 ** round(math.log2(job.batch))
