"""Entry point of a worker started by torchrun, and the decisions that rank 0 makes for all ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from torch.distributed import PrefixStore  # pyrefly: ignore

from phalanx.comm import Place
from phalanx.comm.process_group import meet
from phalanx.config import Job, RunSpec
from phalanx.config.run import override
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import kind_named
from phalanx.errors import (
    PhalanxError,
    RefusedError,
    RunError,
    WorkerError,
    error_from_dict,
    error_to_dict,
)
from phalanx.events.following import Viewer, callback_viewers, followed
from phalanx.files import join, read_text, token_of
from phalanx.launch.failure import Failure, describe_error, record, worker_error
from phalanx.launch.first_step import first_step_checked
from phalanx.launch.hangs import HangProbe
from phalanx.launch.jobfile import load_job
from phalanx.launch.reaper import SAVED, StopRequest, die_with, ignore_signal, terminated_later
from phalanx.launch.restarts import devices_before, fitted, record_resize
from phalanx.launch.run_secret import share_secret
from phalanx.launch.runfile import RunFolder, absolute
from phalanx.launch.side_process import look_ahead
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready
from phalanx.launch.torchrun import (
    AGENT,
    SharedStands,
    begun_before,
    claim,
    note_begun,
    place_of_this_process,
    started_by_agent,
)
from phalanx.launch.worker_process import leave_warnings_to_rank_0, show_rank
from phalanx.parallel import device_kind, devices_here
from phalanx.train.assembly import refuse
from phalanx.train.findings import Findings
from phalanx.train.interruptions import LauncherLink
from phalanx.train.look_ahead import refuse_job
from phalanx.train.loop import train
from phalanx.train.lr_schedule import RunStart
from phalanx.units import visible

_runs = count()  # that this process takes part in
_SECOND_THOUGHTS = 0.5  # seconds in which the worker that failed first may say so before one that only lost its peer


class WorkerStatus:
    """The progress of one worker that torchrun started, or that is alone, and the report of its failure.

    Attributes:
        folder: the run folder, once it is this run's; ``None`` before.
        stopped: the signal that the run has stopped for, with a checkpoint; 0 if it came to its end.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.folder: Path | None = None
        self.stopped = 0
        self._step: int | None = None
        self._probe: HangProbe | None = None

    @property
    def alone(self) -> bool:
        """True if no other process limits the time that this one takes to stop."""
        return self.place.store != "env://"

    def enter(self, entered: RunFolder, again: bool) -> RunSpec:
        """On rank 0: become the writer of the run folder. Return the run as it begins.

        ``again``: earlier workers have begun the run.
        """
        if again:
            entered.again()
        entered.__enter__()
        run = entered.prepare()
        before, now = devices_before(run.folder), run.plan.devices
        if run.devices and before not in (0, now):
            record_resize(run.folder, before, now, "hosts of torchrun have come or gone")
        return run

    def report_step(self, step: int | None) -> None:
        """Take in the number of the optimizer step that begins; ``None`` as long as none has."""
        self._step = step
        if self._probe:
            self._probe.report_step(step)

    @contextmanager
    def watched(self) -> Generator[None]:
        """Within, this process publishes its stack for the other ranks if it does not go on."""
        place = self.place
        if place.store == "env://" and place.world_size > 1:
            with TemporaryFile() as file:
                stacks = os.dup(file.fileno())  # open as long as the process lives: a signal may come at any time
            self._probe = HangProbe(place, stacks, SharedStands(place).publish)
        try:
            yield
        finally:
            if self._probe:
                self._probe.ended.set()

    def report_failure(self, error: BaseException) -> WorkerError | None:
        """The error as a launcher words it, appended to the run's events; ``None`` where a launcher or worker does."""
        failure = Failure(rank=self.place.rank, step=self._step, **describe_error(error))
        if self.place.store != "env://":
            return self._recorded(failure)
        time.sleep(_SECOND_THOUGHTS if failure.lost_peer else 0.0)
        with terminated_later():  # as another leaves the word to this one and ends, torchrun's agent ends this one
            if not claim(self.place, f"failed/{self.place.number}"):
                return None
            return self._recorded(SharedStands(self.place).blamed(failure) if self._probe else failure)

    def _recorded(self, failure: Failure) -> WorkerError:
        worded = worker_error(failure, self.place.world_size, memory_kills=0, launched=False)
        if self.folder:
            record(worded, self.folder)
        return worded


def train_as_worker(
    job: Job, run: RunSpec, status: WorkerStatus, *, runfile: Path | None = None, viewers: Sequence[Viewer] = ()
) -> RunSpec:
    """Train ``job``, with the run's overrides applied, as the worker whose status this is. Collective.

    ``runfile``: the file that ``run`` was read from, if any. ``viewers``: who sees the events of the run on rank 0.

    Returns:
        The run with the folder that rank 0 took.

    Raises:
        RefusedError: if the plan cannot serve the job here.
        SpecError: if the run folder cannot be used.
    """
    with status.watched():
        return _train(job, run, status, runfile, viewers)


def _train(job: Job, run: RunSpec, status: WorkerStatus, runfile: Path | None, viewers: Sequence[Viewer]) -> RunSpec:
    refuse(job, run.plan, status.place.world_size, devices_here(run.plan, status.place))
    if run.plan.server:  # what keeps others from a job they find as they build its model together
        refuse_job(job, run.plan)
    make_ready(run.plan)
    leave_compiler_out()
    with within_folder(job, run, status, runfile, viewers) as run:
        place, found = status.place, Findings()
        if run.plan.server:
            place = replace(place, secret=share_secret(place, run.folder))
        if place.rank == 0:  # it writes the log; what is refused all ranks refuse together, as they build
            with suppress(PhalanxError):
                found = look_ahead(job, run.plan, RunStart.of(run))
        # one that is alone ends by a second signal, or when the time for its checkpoint is over
        again, seconds = (None, run.grace) if status.alone else (ignore_signal, 0.0)
        with StopRequest(again, seconds=seconds) if run.grace else nullcontext() as stop:
            link = LauncherLink(report=status.report_step, asked=lambda: stop.number if stop else 0)
            with first_step_checked(job, run, place, found) as observer:
                summary = train(job, run, place, link, observer=observer, findings=found)
    status.stopped = summary.get("stopped", 0)
    return run


@contextmanager
def within_folder(
    job: Job, run: RunSpec, status: WorkerStatus, runfile: Path | None = None, viewers: Sequence[Viewer] = ()
) -> Generator[RunSpec]:
    """Within, the run of this worker has the folder that rank 0 took, and there calls its callbacks, and ``viewers``.

    Collective.

    Raises:
        SpecError: if the run folder cannot be used.
    """
    status.place = place = replace(status.place, number=next(_runs))
    if started_by_agent():  # which may have ended while this process was importing
        die_with(int(os.environ.get(AGENT) or os.getppid()))
    entered = RunFolder(run, job=job, given=runfile)
    run = enter_folder(run, place, partial(status.enter, entered))
    status.folder = run.folder
    looking = [*callback_viewers(job.callbacks), *viewers] if place.rank == 0 else []
    try:
        with followed(looking, run.folder / EVENTS):
            yield run
    finally:
        entered.__exit__()


def main(runfile: Path, job_here: str = "") -> int:
    """Train as one of torchrun's workers of the run in ``runfile``, or as the only one.

    An error goes to stderr and to the run's events, once for all workers, with the rank and the step.
    ``job_here``: the job on this host, if it is not where the run file says.

    Returns:
        The exit code for this process: 0, that of the error, or ``SAVED`` if the run was asked to stop and has saved.
    """
    status = WorkerStatus(Place())
    try:
        status.place = place_of_this_process() or status.place
        show_rank(status.place.rank)
        leave_warnings_to_rank_0(status.place.rank)
        status.report_step(None)
        run = _read(runfile)
        if not run.devices and status.place.world_size != run.plan.processes:
            raise RefusedError.of(
                where="workers",
                given=f"{status.place.world_size}",
                allowed=f"{run.plan.processes}, as the plan {run.plan} says",
                fix=f"torchrun --nproc-per-node {run.plan.processes} --no-python phalanx worker {runfile}",
            )
        if started_by_agent() and AGENT not in os.environ:
            here = status.place.local_world_size or status.place.world_size
            kind = kind_named(device_kind(run.plan, devices_here(run.plan, status.place)))
            kind.before_workers(status.place.world_size // here, here)
        status.place = replace(status.place, timeout=run.timeout)
        job = override(load_job(job_here or run.job), run)
        train_as_worker(job, fitted(run, status.place.world_size, job), status, runfile=runfile)
    except (Exception, SystemExit) as error:  # job code that leaves has not trained to the end
        with terminated_later():
            if worded := status.report_failure(error):
                print(visible(str(worded)), file=sys.stderr, flush=True)
        return describe_error(error)["exit_code"]
    return SAVED if status.stopped else 0


def _read(runfile: Path) -> RunSpec:
    return RunSpec.from_toml(read_text(runfile, where="run file", fix="phalanx worker runs/digits-1/run.toml", below=0))


def enter_folder(run: RunSpec, place: Place, enter: Callable[[bool], RunSpec]) -> RunSpec:
    """Have rank 0 ``enter`` the run folder, and give back the run with the folder it took. Collective.

    Raises:
        SpecError: on every rank, if the folder cannot be used.
    """

    def decide() -> str:
        chosen = enter(begun_before(place.number))
        note_begun(place.number)
        token = token_of(run.folder)
        told = {"folder": str(run.folder.absolute()), "resume": chosen.resume, "from_step": None}
        return json.dumps([told, token.identity if token else ""])

    decided, writer = json.loads(decided_by_rank_0(place, decide, f"decision/{place.number}"))
    entered = replace(absolute(run), **{**decided, "folder": Path(decided["folder"])})  # pyrefly: ignore[bad-argument-type]
    if writer and place.rank:
        with suppress(RunError):  # on storage of another host it is not there, and this rank publishes nothing
            join(entered.folder, writer)
    return entered


_LONGEST, _SOON = 3600.0, 0.02  # seconds


def decided_by_rank_0(place: Place, decide: Callable[[], str], about: str) -> str:
    """What ``decide`` gives on rank 0, where alone it is called; its error is every rank's. Collective.

    ``about``: what no other decision of these workers is called.
    """
    if place.world_size == 1:
        return decide()
    store = PrefixStore(f"phalanx/{about}", meet(place))
    if place.rank == 0:
        answer: dict[str, object] = {"error": error_to_dict(RunError("rank 0 could not prepare the run"))}
        try:
            answer = {"decision": (decision := decide())}
        except Exception as error:
            answer = {"error": error_to_dict(error)}
            raise
        finally:
            store.set("answer", json.dumps(answer))
        return decision
    until = time.monotonic() + _LONGEST
    while not store.check(["answer"]) and time.monotonic() < until:  # a proof may take longer than any exchange
        time.sleep(_SOON)
    decided = json.loads(store.get("answer"))
    if "error" in decided:
        raise error_from_dict(decided["error"])
    return decided["decision"]
