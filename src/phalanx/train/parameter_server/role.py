"""What each process of a run with servers does, by its rank: workers first, then servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.comm import Place, device_for
from phalanx.comm.frames import Connection, LostError
from phalanx.config import Job, RunSpec
from phalanx.data.loader import Pieces
from phalanx.errors import CheckpointError, RunError
from phalanx.events import SCHEMA_VERSION
from phalanx.parallel import advice, device_kind, notes
from phalanx.parallel.compression import Codec, codec
from phalanx.parallel.parameter_server import Kind, StalenessBound, WorkQueue
from phalanx.train.assembly import refuse
from phalanx.train.lr_schedule import resume_notes
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.connections import Links
from phalanx.train.parameter_server.coordinator import (
    Coordinator,
    CoordinatorContext,
    Progress,
    divisor_of,
    find_others,
)
from phalanx.train.parameter_server.recorder import Recorder, ServerScene, last_version
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server import Server
from phalanx.train.parameter_server.server_group import Address, Directory, Group, Patience
from phalanx.train.parameter_server.shard_store import ShardStore
from phalanx.train.parameter_server.worker import Worker


def take_part(
    job: Job,
    run: RunSpec,
    place: Place,
    report: Callable[[int], None],
    *,
    patience: Patience | None = None,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Be the worker or the server that ``place.rank`` is, to the end of the run.

    Ranks 0 to dp - 1 are workers, the next are servers, the first of which coordinates. A process that takes the place
    of one that was killed has ``place.generation`` above 0.

    Returns on server 0 the run's summary, as ``train`` does, and nothing elsewhere.

    Raises:
        RefusedError: if the plan cannot serve the job.
        RunError: if a server or every worker is gone for longer than ``patience.back``.
    """
    plan, waits = run.plan, patience or Patience()
    refuse(job, plan, place.world_size, workers_here(run, place))
    if place.rank < plan.dp:
        _work(job, run, place, report, waits, observer or Observer())
        return {}
    return _Serving(job, run, place, waits, observer or Observer()).run(report)


def workers_here(run: RunSpec, place: Place) -> int:
    """How many of the run's workers share this machine's devices; servers need none."""
    return min(place.workers_here, run.plan.dp)


def _work(
    job: Job, run: RunSpec, place: Place, report: Callable[[int], None], patience: Patience, observer: Observer
) -> None:
    kind = device_kind(run.plan, workers_here(run, place))
    device = device_for(place, kind)
    data = _data(job, run)
    worker = Worker(job, run.plan, device, divisor_of(job), data)
    worker.observer = observer
    links = Links(place.rank, data[0].length, run.plan.server, Directory(place), patience, _codec(run))
    links.start()
    try:
        worker.run(links, report)
    finally:
        links.close()


class _Serving:
    """One server's process."""

    def __init__(self, job: Job, run: RunSpec, place: Place, patience: Patience, observer: Observer) -> None:
        self._job, self._run, self._place, self._patience, self._observer = job, run, place, patience, observer
        self._index = place.rank - run.plan.dp
        self._directory = Directory(place)
        self._again = place.generation > 0
        self._alone()

    def run(self, report: Callable[[int], None]) -> dict[str, Any]:
        """Serve to the end."""
        keeper = ShardStore(self._job, self._run.plan, self._index, self._run.folder)
        resumed = _newest(self._run) if self._run.resume and not self._again else None
        state = keeper.resume(resumed) if resumed else {}
        if not self._again:
            keeper.clear()
        keeper.settle()
        servant = Server(keeper, self._place.host, _codec(self._run))
        try:
            if self._index:
                servant.start()
                self._publish(servant)
                return self._follow(servant)
            return self._lead(keeper, servant, state, resumed, report)
        finally:
            servant.close()

    def _follow(self, servant: Server) -> dict[str, Any]:
        while not servant.over.wait(0.2):
            if servant.trouble:
                raise servant.trouble
            if servant.alone_for > self._patience.back + self._patience.parting:
                raise RunError(
                    f"server 0, which coordinates the others, has not been there for {self._patience.back:g} s\n"
                    "    try: --resume, which goes on from the last checkpoint"
                )
        return {}

    def _lead(
        self,
        keeper: ShardStore,
        servant: Server,
        state: dict[str, Any],
        resumed: Path | None,
        report: Callable[[int], None],
    ) -> dict[str, Any]:
        job, run, patience = self._job, self._run, self._patience
        pieces, evaluation = _data(job, run)
        first = last_version(run) if self._again else int(state.get("step", 0))
        plan = run.plan
        pace = StalenessBound(staleness=plan.staleness or 0, backup=plan.backup, after=plan.after)
        dealer = WorkQueue(pieces.sizes, first=first, limit=first, pace=pace)
        desk = RequestHandler(dealer, pieces.length, keeper.statistics.form, patience)
        group = Group(servant, run.plan.server, patience)
        recorder = Recorder(run, pieces, first)
        office = CoordinatorContext(
            job=job,
            run=run,
            keeper=keeper,
            servant=servant,
            group=group,
            desk=desk,
            recorder=recorder,
            directory=self._directory,
            pieces=pieces,
            evaluation=evaluation,
            patience=patience,
            observer=self._observer,
            scene=ServerScene(keeper, group, _notes(job, run, keeper)),
        )
        samples = int(state.get("samples", 0))
        coordinator = Coordinator(office, Progress(samples=samples, begun=samples, saved=first), report)
        try:
            find_others(office)
            if not self._again:
                self._begin(office, coordinator, resumed, first)
            servant.start(desk)
            self._publish(servant)
            return coordinator.run(behind=self._again)
        finally:
            group.close()
            recorder.close()

    def _begin(self, office: CoordinatorContext, coordinator: Coordinator, resumed: Path | None, first: int) -> None:
        job, run, keeper = self._job, self._run, office.keeper
        device = device_kind(run.plan, workers_here(run, self._place))
        said = list(office.scene.notes)
        if resumed:
            said += resume_notes(job, run.folder, step=first, total_steps=office.pieces.total_steps)
        office.recorder.write(
            "start",
            schema=SCHEMA_VERSION,
            job=job.name,
            plan=str(run.plan),
            exact=run.plan.exactness,
            world_size=self._place.world_size,
            device=device,
            batch=job.batch,
            samples=office.pieces.length,
            drop_last=job.drop_last,
            total_steps=office.pieces.total_steps,
            first_step=first,
            parameters=keeper.elements,
            notes=said,
        )
        for message in advice(job, run.plan, device):
            office.recorder.write("warning", message=message)
        if resumed:
            office.recorder.write("resume", step=first, path=str(resumed.relative_to(run.folder)))
            if run.snapshots:
                coordinator.snapshot()
        self._observer.built(office.scene)

    def _publish(self, servant: Server) -> None:
        self._directory.publish(self._index, Address(self._place.host, servant.port, self._place.generation))

    def _alone(self) -> None:
        """Refuse to hold what a live server holds already."""
        address = self._directory.find(self._index)
        if address is None:
            return
        try:
            connection = Connection.to(address.host, address.port, patience=5.0, timeout=2.0)
            connection.send(Kind.HELLO, {"rank": self._place.rank, "probe": True})
            index = connection.receive().meta["index"]
            connection.close()
        except (OSError, LostError):
            return
        if index == self._index:
            raise RunError(
                f"server {self._index} is running already, at {address.host}:{address.port}: two would hold the same "
                "parameters\n    try: another rank for this process, or end the other"
            )


def _data(job: Job, run: RunSpec) -> tuple[Pieces, Pieces | None]:
    plan = run.plan
    pieces = Pieces(job.data(), job, plan.dp, micro=plan.micro)
    found = job.evaluate() if job.evaluate is not None else None
    evaluation = None if found is None else Pieces(found, replace(job), plan.dp, micro=plan.micro, once=True)
    return pieces, evaluation


def _notes(job: Job, run: RunSpec, keeper: ShardStore) -> list[str]:
    found = notes(keeper.layout.module, job, run.plan)
    if keeper.statistics.named:
        found.append("running statistics of normalisation are those that went through the first piece of each batch.")
    if job.workers:
        found.append("workers of servers read each piece when they are dealt it, none ahead: job.workers is not used.")
    return found


def _codec(run: RunSpec) -> Codec | None:
    return None if run.plan.compress == "none" else codec(run.plan.compress)


def _newest(run: RunSpec) -> Path:
    from phalanx import checkpoint

    folder = run.folder / "checkpoints"
    path = checkpoint.latest(folder)
    if path is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint to resume from\n    try: without --resume, a new run"
        )
    return path
