"""The role of each process of a run with servers, by its rank: workers first, then servers; the first server leads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.checkpoint import resume_newest
from phalanx.comm import Place, device_for
from phalanx.comm.handshake import SECRET, Identity, Role
from phalanx.comm.listener import Caller
from phalanx.config import Job, RunSpec
from phalanx.config.run_files import CHECKPOINTS
from phalanx.data.loader import BatchPieces, data_facts
from phalanx.errors import RunError
from phalanx.parallel import advice, device_kind, devices_here, notes
from phalanx.parallel.compression import Codec, codec
from phalanx.parallel.parameter_server import StalenessBound, WorkQueue
from phalanx.train.build_model import make_data
from phalanx.train.findings import Findings
from phalanx.train.interruptions import Interruptions, LauncherLink
from phalanx.train.loop import TrainingLoop
from phalanx.train.lr_schedule import none_left, resume_notes
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.coordinator import Coordinator, divisor_of, segment
from phalanx.train.parameter_server.gradient_worker import Worker
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server import Server
from phalanx.train.parameter_server.server_group import Address, Directory, Patience, ServerGroup, ServerScene, gone
from phalanx.train.parameter_server.server_links import ServerLinks
from phalanx.train.parameter_server.shard_store import ShardStore
from phalanx.train.run_recorder import RunRecorder
from phalanx.train.state import identity, refuse_other_job


def take_part(
    job: Job,
    run: RunSpec,
    place: Place,
    link: LauncherLink | None = None,
    *,
    patience: Patience | None = None,
    observer: Observer | None = None,
    findings: Findings | None = None,
) -> dict[str, Any]:
    """Run the worker or server of rank ``place.rank``, to the end of the run.

    Ranks 0 to dp - 1 are workers, the next are servers, the first of them the coordinator. ``findings`` come from a
    trace of the job before the run; ``link`` is as in ``train``.

    Returns on server 0 the run's summary, as ``train`` does, and an empty one elsewhere.

    Raises:
        RefusedError: if the plan cannot serve the job.
        RunError: if a server does not come within ``patience.back``.
        LostError: if a worker or a server was lost.
    """
    link, waits = link or LauncherLink(), patience or Patience(stuck=run.timeout)
    if len(place.secret) != SECRET:
        raise RunError("this process was not given its run's secret, by which servers and workers know each other")
    if place.rank < run.plan.dp:
        directory = Directory(place)

        def reported(step: int) -> None:
            link.report(step)
            directory.ask_to_stop(link.asked())

        _work(job, run, place, reported, waits, observer or Observer())
        return {}
    return ServerProcess(job, run, place, waits, observer or Observer(), link).serve(findings or Findings())


def _work(
    job: Job, run: RunSpec, place: Place, report: Callable[[int], None], patience: Patience, observer: Observer
) -> None:
    kind = device_kind(run.plan, devices_here(run.plan, place))
    device = device_for(place, kind)
    data = _data(job, run)
    worker = Worker(job, run.plan, device, divisor_of(job), data)
    worker.observer = observer
    caller = Caller(identity=Identity(Role.WORKER, place.rank), secret=place.secret)
    links = ServerLinks(caller, data[0].told, run.plan.server, Directory(place), patience, _codec(run))
    links.start()
    try:
        worker.run(links, report)
    finally:
        links.close()


class ServerProcess:
    """One server's process."""

    def __init__(
        self, job: Job, run: RunSpec, place: Place, patience: Patience, observer: Observer, link: LauncherLink
    ) -> None:
        self._job, self._run, self._place, self._patience, self._observer = job, run, place, patience, observer
        self._index, self._link = place.rank - run.plan.dp, link
        self._directory = Directory(place)

    def serve(self, findings: Findings) -> dict[str, Any]:
        """Serve to the end; server 0 has the loop of the run."""
        store = ShardStore(self._job, self._run.plan, self._index)
        resumed, state, damaged = None, dict[str, Any](), list[str]()
        if self._run.resume:
            resumed, state, damaged = resume_newest(self._run.folder / CHECKPOINTS, store.resume)
        store.settle()
        server = Server(store, self._place, self._run.plan.dp, _codec(self._run))
        try:
            if self._index == 0:
                coordinator = self._coordinator(store, server, state, resumed)
                return self._lead(coordinator, resumed, damaged, findings)
            server.start()
            self._publish(server)
            return self._follow(server)
        finally:
            server.close()

    def _follow(self, server: Server) -> dict[str, Any]:
        while not server.over.wait(0.2):
            if server.trouble:
                raise server.trouble
            self._directory.ask_to_stop(self._link.asked())
            if server.alone_for > self._patience.back:
                back = self._patience.back
                raise gone(f"server 0, which coordinates the others, has not been there for {back:g} s")
        return {}

    def _coordinator(
        self, store: ShardStore, server: Server, state: dict[str, Any], resumed: Path | None
    ) -> Coordinator:
        job, run, plan, patience = self._job, self._run, self._run.plan, self._patience
        pieces, evaluation = _data(job, run)
        if resumed:
            refuse_other_job(state["identity"], identity(job, pieces.told), resumed)
        first = int(state.get("step", 0))
        pace = StalenessBound(staleness=plan.staleness or 0, backup=plan.backup, after=plan.after)
        queue = WorkQueue(pieces.sizes, first=first, limit=first, pace=pace)
        secret = self._place.secret
        group = ServerGroup(server, store, plan.server, patience, secret)
        return Coordinator(
            job=job,
            run=run,
            store=store,
            server=server,
            group=group,
            requests=RequestHandler(queue, pieces.told, store.statistics.form, patience, secret),
            recorder=RunRecorder(run, ledger=segment(run, first), writes=True, total_steps=pieces.total_steps),
            directory=self._directory,
            pieces=pieces,
            evaluation=evaluation,
            patience=patience,
            observer=self._observer,
            scene=ServerScene(store, group, _notes(job, run, store)),
            report=self._link.report,
            samples_before=int(state.get("samples", 0)),
        )

    def _lead(
        self, coordinator: Coordinator, resumed: Path | None, damaged: list[str], findings: Findings
    ) -> dict[str, Any]:
        with coordinator.recorder:
            try:
                coordinator.find_others()
                self._start(coordinator, resumed, damaged, findings)
                coordinator.server.start(coordinator.requests)
                self._publish(coordinator.server)
                interruptions = Interruptions(self._run, lambda: self._link.asked() or self._directory.asked_to_stop())
                recorder, observer = coordinator.recorder, self._observer
                return TrainingLoop(self._job, self._run, coordinator, recorder, observer, interruptions).run()
            finally:
                coordinator.group.close()

    def _start(self, coordinator: Coordinator, resumed: Path | None, damaged: list[str], findings: Findings) -> None:
        job, run, first, pieces = self._job, self._run, coordinator.taken, coordinator.pieces
        device = device_kind(run.plan, devices_here(run.plan, self._place))
        said = resume_notes(job, run.folder, step=first, total_steps=pieces.total_steps) if resumed else []
        coordinator.recorder.start(
            job,
            advice=[
                *damaged,
                *advice(job, run.plan, device, pieces.epoch_samples),
                *pieces.remarks,
                *(none_left(first, pieces.total_steps) if resumed else []),
            ],
            resumed=resumed,
            placement=findings.placement,
            world_size=self._place.world_size,
            device=device,
            **data_facts(pieces),
            first_step=first,
            parameters=coordinator.store.elements,
            notes=[*coordinator.scene.notes, *findings.causes, *said],
        )
        self._observer.built(coordinator.scene)

    def _publish(self, server: Server) -> None:
        self._directory.publish(self._index, Address(self._place.host, server.port))


def _data(job: Job, run: RunSpec) -> tuple[BatchPieces, BatchPieces | None]:
    plan = run.plan
    pieces = BatchPieces(make_data(job, job.data), job, plan.dp, micro=plan.micro)
    found = make_data(job, job.evaluate) if job.evaluate else None
    evaluation = None if found is None else BatchPieces(found, job, plan.dp, micro=plan.micro, once=True)
    return pieces, evaluation


def _notes(job: Job, run: RunSpec, store: ShardStore) -> list[str]:
    found = notes(store.layout.module, job, run.plan)
    if store.statistics.named:
        found.append("running statistics of normalisation are those that went through the first piece of each batch.")
    if job.workers:
        found.append("workers of servers read each piece when it is assigned, none ahead: job.workers is not used.")
    return found


def _codec(run: RunSpec) -> Codec | None:
    return None if run.plan.compress == "none" else codec(run.plan.compress)
