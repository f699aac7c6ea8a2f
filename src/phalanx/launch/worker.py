"""What one worker of a run does that is a program of its own, as torchrun starts it; what rank 0 decides for all."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from io import TextIOWrapper
from itertools import count
from pathlib import Path

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from phalanx.comm import Place
from phalanx.comm.process_group import meet
from phalanx.config import Job, RunSpec
from phalanx.config.run import override
from phalanx.errors import PhalanxError, Problem, RefusedError, RunError, SpecError, WorkerError
from phalanx.launch.failure import Failure, WorkerReports, describe_error, record, worker_error
from phalanx.launch.jobfile import load_job
from phalanx.launch.launcher import place_of_this_process
from phalanx.launch.runfile import prepare_run
from phalanx.launch.side_process import look_ahead
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready
from phalanx.launch.torchrun import claim
from phalanx.launch.worker_process import die_with
from phalanx.parallel import devices_here
from phalanx.train.assembly import Findings, refuse
from phalanx.train.look_ahead import refuse_job
from phalanx.train.loop import train
from phalanx.train.lr_schedule import RunStart

_SECOND_THOUGHTS = 0.5  # seconds in which the worker that failed first may say so before one that only lost its peer


class WorkerStatus:
    """How far one worker came; whoever started it learns from here how it failed, by one worker for all.

    Attributes:
        folder: the run folder, once it is this run's; ``None`` before.
    """

    def __init__(self, place: Place, reports: WorkerReports | None = None) -> None:
        """``reports``: where a launcher that started this worker looks; ``None`` where none does."""
        self.place = place
        self.folder: Path | None = None
        self._step: int | None = None
        self._reports = reports

    def report_step(self, step: int | None) -> None:
        """Take in the number of the optimizer step that begins; ``None`` as long as none has."""
        self._step = step
        if self._reports:
            self._reports.write_step(self.place.rank, step)

    def report_failure(self, error: BaseException) -> WorkerError | None:
        """The error as a launcher words it, appended to the run's events; ``None`` where a launcher or worker does."""
        failure = Failure(rank=self.place.rank, step=self._step, **describe_error(error))
        if self._reports:
            self._reports.write_failure(failure)
            return None
        if self.place.store == "env://":
            time.sleep(_SECOND_THOUGHTS if failure.lost_peer else 0.0)
            if not claim("failed"):
                return None
        worded = worker_error(failure, self.place.world_size, memory_kills=0)
        if self.folder:
            record(worded, self.folder)
        return worded


def train_as_worker(job: Job, run: RunSpec, status: WorkerStatus, *, runfile: Path | None = None) -> RunSpec:
    """Train ``job``, with the run's overrides applied, as the worker whose status this is. Collective.

    ``runfile``: the file that ``run`` was read from, if any.

    Returns:
        The run with the folder that rank 0 took.

    Raises:
        RefusedError: if the plan cannot serve the job here.
        SpecError: if the run folder cannot be used.
    """
    place = status.place
    refuse(job, run.plan, place.world_size, devices_here(run.plan, place))
    if run.plan.server:  # what keeps others from a job they find as they build its model together
        refuse_job(job, run.plan)
    make_ready(run.plan)
    leave_compiler_out()
    run = enter_folder(run, place, runfile=runfile)
    status.folder, found = run.folder, Findings()
    if place.rank == 0:  # it writes the log; what is refused is refused by all ranks together, as they build
        with suppress(PhalanxError):
            found = look_ahead(job, run.plan, RunStart.of(run))
    train(job, run, place, report=status.report_step, findings=found)
    return run


def main(runfile: Path, reports: Path | None = None) -> int:
    """Be one worker of the run in ``runfile``: one of a launcher's, or the only one.

    An error goes to stderr and to the run's events, once for all workers, with the rank and the step; or into
    ``reports``, for the launcher that started this worker and then says it. Such a worker ends with its parent.

    Returns:
        The exit code for this process: 0, or that of the error.
    """
    status = WorkerStatus(Place(), WorkerReports(reports) if reports else None)
    try:
        if reports:
            _belong_to_launcher()
        status.place = place_of_this_process() or status.place
        status.report_step(None)
        run = _read(runfile)
        _refuse_another_world(run, status.place, runfile)
        train_as_worker(override(load_job(run.job), run), run, status, runfile=runfile)
    except BaseException as error:
        if not (reports or isinstance(error, Exception)):
            raise
        if worded := status.report_failure(error):
            print(worded, file=sys.stderr, flush=True)
        return describe_error(error)["exit_code"]
    return 0


def _belong_to_launcher() -> None:
    die_with(os.getppid())
    for stream in (sys.stdout, sys.stderr):
        # Into a pipe it would write in blocks, the last lost with the process; and under python -u, as torchrun starts
        # it, a line and its end each by itself, between which another rank's line may come.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _read(runfile: Path) -> RunSpec:
    try:
        return RunSpec.from_toml(runfile.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError.of(
            where="run file",
            given=f"{runfile}: {error.strerror}",
            allowed="the run.toml of a run folder",
            fix="phalanx worker runs/digits-1/run.toml",
        ) from None


def _refuse_another_world(run: RunSpec, place: Place, runfile: Path) -> None:
    if place.world_size != run.plan.processes:
        raise RefusedError.of(
            where="workers",
            given=f"{place.world_size}",
            allowed=f"{run.plan.processes}, as the plan {run.plan} says",
            fix=f"torchrun --nproc-per-node {run.plan.processes} --no-python phalanx worker {runfile}",
        )


_decisions = count()


def enter_folder(run: RunSpec, place: Place, *, runfile: Path | None = None) -> RunSpec:
    """Have rank 0 prepare the run folder, and give back the run with the folder it took. Collective.

    Raises:
        SpecError: on every rank, if the folder cannot be used.
    """
    folder = decided_by_rank_0(place, lambda: str(prepare_run(run, given=runfile).parent.absolute()))
    return replace(run, folder=Path(folder))


def decided_by_rank_0(place: Place, decide: Callable[[], str]) -> str:
    """What ``decide`` gives on rank 0, where alone it is called; its error is every rank's. Collective."""
    if place.world_size == 1:
        return decide()
    store = PrefixStore(f"phalanx/decision/{next(_decisions)}", meet(place))
    if place.rank == 0:
        answer: dict[str, object] = {}
        try:
            answer = {"decision": (decision := decide())}
        except SpecError as error:
            answer = {"problems": [asdict(problem) for problem in error.problems]}
            raise
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            store.set("answer", json.dumps(answer))
        return decision
    decided = json.loads(store.get("answer"))
    if "problems" in decided:
        raise SpecError([Problem(**problem) for problem in decided["problems"]])
    if "error" in decided:
        raise RunError(f"rank 0 could not prepare the run: {decided['error']}")
    return decided["decision"]
