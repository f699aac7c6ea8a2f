"""A run that this process starts and follows, from what refuses it to its end; the same for ``fit`` and ``start``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.comm import Place
from phalanx.config import Job, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, SpecError, WorkerError
from phalanx.events.following import Follower, callback_viewers
from phalanx.launch.failure import record
from phalanx.launch.first_step import first_step_checked
from phalanx.launch.jobfile import Reference
from phalanx.launch.local import LocalLauncher, refuse_copies, refuse_what_needs_a_fork, supervise
from phalanx.launch.reaper import StopRequest, ignore_signal
from phalanx.launch.restarts import ElasticSize, Restarts
from phalanx.launch.runfile import RunFolder, absolute, check_folder, settled
from phalanx.launch.side_process import LookAhead, look_ahead
from phalanx.launch.targets.handed_over import forget_handed_over, one_launch_at_a_time, refuse_handed_over
from phalanx.launch.targets.target import AttachedTarget, Submission
from phalanx.launch.worker_process import Launch, StepReport, WorkerFunction
from phalanx.preflight.launch_check import refuse_plan
from phalanx.preflight.run_forecast import RunForecaster, forecast_after_look, too_little
from phalanx.train import loop
from phalanx.train.assembly import refuse
from phalanx.train.findings import Findings
from phalanx.train.interruptions import LauncherLink
from phalanx.train.lr_schedule import RunStart
from phalanx.train.resumed_from import checkpoint_of


@contextmanager
def _called_back(job: Job, folder: Path, watch: Callable[[], None] | None) -> Iterator[Callable[[], None] | None]:
    """What calls ``watch`` and the job's callbacks, which hear of everything before the block ends."""
    if not job.callbacks:
        yield watch
        return
    with Follower(folder / EVENTS, callback_viewers(job.callbacks)) as follower:

        def look() -> None:
            follower()
            if watch:
                watch()

        yield look


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarter:
    """The launcher of a run, and how it starts the workers.

    Attributes:
        cores: CPU cores that each replica computes with; its share of the machine's if ``None``.
        loadable: new processes find the job by ``run.job``.
    """

    launcher: LocalLauncher | AttachedTarget
    cores: int | None
    loadable: bool

    def refuse(self, run: RunSpec) -> None:
        """Refuse what cannot be started from this process."""
        if isinstance(self.launcher, AttachedTarget):
            refuse_what_needs_a_fork(run, self.launcher.name, loadable=self.loadable)
        else:
            self.launcher.prepare(self.launch(run, _nothing))

    def launch(self, run: RunSpec, work: WorkerFunction) -> Launch:
        """Return the launch of ``run``, each of whose workers does ``work``."""
        return Launch(
            world_size=run.plan.processes,
            function=work,
            run=run,
            threads=None if self.cores is None else self.cores * run.plan.threads,
            timeout=run.timeout,
        )


def train_here(
    job: Job,
    spec: RunSpec,
    how: RunStarter,
    watch: Callable[[], None] | None,
    begun: Callable[[], None] | None = None,
) -> None:
    """Train ``job`` by workers that this process starts and follows; ``begun`` is called when nothing refuses it.

    Raises:
        SpecError: the launcher cannot start this run, or the folder cannot be used.
        RefusedError: the plan cannot serve the job here, or is forecast not to fit.
        WorkerError: a worker failed.
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after SIGTERM, SIGUSR1 and SIGHUP.
    """
    refuse_copies()
    refuse_handed_over(spec.folder)
    if isinstance(target := how.launcher, AttachedTarget):  # rank 0 calls the job's callbacks there
        how.refuse(spec)
        run = absolute(spec)
        prepared = target.prepare(Submission.of(run, job, target, options={}))
        refuse_plan(job, run, target)
        check_folder(run, job=job)
        target.follow(prepared, how.launch(run, _nothing).threads, watch or _nothing, begun or _nothing)
        return
    with _called_back(job, spec.folder, watch) as look:
        _train(job, spec, how, how.launcher, look, begun or _nothing)


def _nothing(*_: Any) -> None: ...


def _train(
    job: Job,
    spec: RunSpec,
    how: RunStarter,
    launcher: LocalLauncher,
    watch: Callable[[], None] | None,
    tell_begun: Callable[[], None],
) -> None:
    size, folder, cores = ElasticSize.of(job, spec) if spec.devices else None, spec.folder, how.cores
    spec = spec.resized_to(size.plan) if size else spec
    found, restarts = Findings(), Restarts(spec.restarts, folder, size)

    def work(place: Place, report: StepReport) -> dict[str, Any]:
        with StopRequest(ignore_signal, ctrl_c=False) as stop:
            link = LauncherLink(report=report, asked=lambda: stop.number or report.asked())
            with first_step_checked(job, begun, place, found) as observer:
                return loop.train(job, begun, place, link, observer=observer, findings=found)

    def wanted() -> Launch:
        nonlocal begun, found
        if restarts.starts:
            begun, before = entered.again(), begun.plan
            begun = begun.resized_to(size.plan) if size else begun
            found = found if begun.plan == before else _looked_at(job, begun)
            launcher.prepare(how.launch(begun, work))
        return how.launch(begun, work)

    refuse(job, spec.plan, spec.plan.world_size)
    located = replace(spec, job=str(Reference.parse(spec.job)))
    begun = settled(located)
    with (
        RunFolder(located, job=job) as entered,
        LookAhead(
            job,
            spec.plan,
            replace(RunStart.of(begun), checkpoint=checkpoint_of(begun)),
            forecast_after_look(job, spec, cores),
        ) as look,
    ):
        launcher.prepare(how.launch(spec, work))  # loads what workers need, while the job is looked at
        found = look.findings()
        with RunForecaster(spec, look.side, watch) as forecaster:
            begun = entered.prepare()
            with one_launch_at_a_time(folder):
                refuse_handed_over(folder)  # since it was looked at
                forget_handed_over(folder)
            tell_begun()
            try:
                supervise(wanted, forecaster, grace=spec.grace, restarts=restarts)
            except Exception as error:
                record(error, folder)
                if isinstance(error, WorkerError) and (advice := too_little(error, folder)):
                    error.add_note(advice)
                raise


def _looked_at(job: Job, run: RunSpec) -> Findings:
    """What there is to be found of ``job`` under the plan that ``run`` goes on with.

    Raises:
        SpecError: what refuses the plan; what else is wrong, the workers say.
    """
    try:
        return look_ahead(job, run.plan, RunStart.of(run))
    except SpecError:
        raise
    except PhalanxError:
        return Findings()
