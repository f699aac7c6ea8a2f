"""What ``import phalanx as px`` offers: ``fit``, ``build``, ``prove``, ``forecast``, ``plan``, and a run to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import Cluster, Job, Plan, RunSpec
from phalanx.config.fields import is_whole
from phalanx.errors import PhalanxError, SpecError, WorkerError
from phalanx.events.following import Follower, callback_viewers
from phalanx.report.run_results import Run, load

if TYPE_CHECKING:
    from phalanx.comm import Place
    from phalanx.config.run import Resume
    from phalanx.forecast import Forecast
    from phalanx.launch import Launch, Launcher
    from phalanx.launch.hosts import Hosts
    from phalanx.launch.launcher import StepReport, WorkerFunction
    from phalanx.planner import Advice
    from phalanx.train.assembly import Findings
    from phalanx.train.own_step import OwnLoader, OwnStep
    from phalanx.verify import Proof


def fit(
    job: Job,
    plan: Plan | str | None = None,
    *,
    run: RunSpec | None = None,
    folder: str | Path | None = None,
    watch: Callable[[], None] | None = None,
    cores: int | None = None,
    hosts: Hosts | None = None,
    launcher: str = "local",
) -> Run:
    """Train ``job`` under ``plan`` and give back the run.

    A plan of several processes starts them on this machine, each on a device of its own; inside a worker that torchrun
    started, this process takes its own part instead, in the folder that rank 0 takes, whatever ``launcher`` says.
    Without a plan: the best there is for the CUDA devices here, or one process. The forecast of the run is made beside
    it and stored in its folder.

    Args:
        job: what to train.
        plan: a ``Plan`` or its text, such as ``"dp=2"``.
        run: everything else (folder, resume, checkpoints); its plan is replaced by ``plan`` where that is given.
        folder: the run folder; ``runs/<name>-<n>`` where not given.
        watch: called about ten times a second while workers run; never inside a worker that torchrun started.
        cores: CPU cores that each replica computes with; its share of the machine's where not given.
        hosts: where workers are put; all on this machine's own network where not given.
        launcher: what starts the workers: ``local`` forks them from this process. With ``torchrun`` they are new
            processes that load the job from where ``run.job`` says, whatever ``job`` has been changed to here.

    Raises:
        SpecError: if there is no such launcher, or it cannot start this run.
        RefusedError: if the plan cannot serve the job here, or is forecast not to fit (``RunSpec.forecast``).
        WorkerError: if a worker failed: the first one's rank, step and traceback. Inside a worker that torchrun
            started, this worker's own error comes as it is.
        KeyboardInterrupt: after Ctrl-C; the run has saved by then (``RunSpec.grace``).
        SystemExit: after SIGTERM and SIGUSR1; with 75, ``EX_TEMPFAIL``, once the run has saved.
    """
    from phalanx.config.run import override
    from phalanx.launch import default_folder, find_launcher, place_of_this_process

    _need(job, Job, "job", "px.fit(job(), plan)")
    _need(run, (RunSpec, type(None)), "run", 'run=px.RunSpec(job="train.py", plan=plan, folder="runs/mine-1")')
    _need(folder, (str, Path, type(None)), "folder", 'folder="runs/mine-1"')
    _need(launcher, str, "launcher", 'launcher="local"')
    if cores is not None and not is_whole(cores, 1):
        raise SpecError.of("cores", repr(cores), "a whole number, 1 or more", "cores=2")
    chosen_launcher, place = find_launcher(launcher), place_of_this_process()
    chosen = _plan(plan if plan is not None or run is None else run.plan, job, place)
    where = Path(folder) if folder is not None else run.folder if run is not None else default_folder(job.name)
    spec = replace(run, plan=chosen, folder=where) if run else RunSpec(job=job.name, plan=chosen, folder=where)
    job = override(job, spec)
    if place is not None:
        return _take_part(job, spec, place, cores)
    there = _Start(launcher=chosen_launcher, hosts=hosts, cores=cores, loadable=run is not None)
    with _called_back(job, spec.folder, watch) as look:
        return _start(job, spec, there, look)


@contextmanager
def _called_back(job: Job, folder: Path, watch: Callable[[], None] | None) -> Iterator[Callable[[], None] | None]:
    """What calls ``watch`` and the job's callbacks, which hear of everything before the block ends."""
    if not job.callbacks:
        yield watch
        return
    with Follower(folder / "events.jsonl", callback_viewers(job.callbacks)) as follower:

        def look() -> None:
            follower()
            if watch:
                watch()

        yield look


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """Who starts the workers and where, and whether ``RunSpec.job`` says where other processes find the job."""

    launcher: Launcher
    hosts: Hosts | None
    cores: int | None
    loadable: bool

    def launch(self, run: RunSpec, work: WorkerFunction) -> Launch:
        """What is to be started for ``run``, each of whose workers does ``work``."""
        from phalanx.launch import Launch

        return Launch(
            world_size=run.plan.processes,
            function=work,
            run=run,
            loadable=self.loadable,
            threads=None if self.cores is None else self.cores * run.plan.threads,
            hosts=self.hosts,
            reserves=_RESERVES if run.plan.server else 0,
            timeout=run.timeout,
        )


def _start(job: Job, spec: RunSpec, how: _Start, watch: Callable[[], None] | None) -> Run:
    from phalanx.launch import (
        ElasticSize,
        LookAhead,
        Reference,
        Restarts,
        RunFolder,
        StopSignals,
        settled,
        supervise,
    )
    from phalanx.preflight import RunForecaster, forecast_after_look
    from phalanx.train.assembly import Findings, refuse
    from phalanx.train.launcher_link import LauncherLink
    from phalanx.train.loop import train
    from phalanx.train.lr_schedule import RunStart

    size, folder, hosts, cores = ElasticSize.of(job, spec) if spec.devices else None, spec.folder, how.hosts, how.cores
    spec = spec.resized_to(size.plan) if size else spec
    found, restarts = Findings(), Restarts(spec.restarts, folder, size)

    def work(place: Place, report: StepReport) -> dict[str, Any]:
        report_step = hosts.counted(place.rank, report) if hosts else report
        with StopSignals(report.asked) as signals:
            link = LauncherLink(report=report_step, asked=signals.asked, unsaved=report.unsaved)
            return train(job, begun, place, link, findings=found)

    def wanted() -> Launch:
        nonlocal begun, found
        if restarts.starts:
            begun, before = entered.again(), begun.plan
            begun = begun.resized_to(size.plan) if size else begun
            found = found if begun.plan == before else _looked_at(job, begun)
            how.launcher.prepare(how.launch(begun, work))
        return how.launch(begun, work)

    refuse(job, spec.plan, spec.plan.world_size)
    located = replace(spec, job=str(Reference.parse(spec.job)))
    begun = settled(located)
    with (
        RunFolder(located, job=job) as entered,
        LookAhead(job, spec.plan, RunStart.of(begun), forecast_after_look(job, spec, cores)) as look,
    ):
        how.launcher.prepare(how.launch(spec, work))  # loads what workers need, while the job is looked at
        found = look.findings()
        with RunForecaster(spec, look.side, watch) as forecaster:
            begun = entered.prepare()
            with _recorded(folder):
                supervise(how.launcher.start, wanted, forecaster, grace=spec.grace, restarts=restarts)
    return Run(folder=folder, job=job)


def _looked_at(job: Job, run: RunSpec) -> Findings:
    """What there is to be found of ``job`` under the plan that ``run`` goes on with; what is wrong workers say."""
    from phalanx.launch import look_ahead
    from phalanx.train.assembly import Findings
    from phalanx.train.lr_schedule import RunStart

    try:
        return look_ahead(job, run.plan, RunStart.of(run))
    except PhalanxError:
        return Findings()


@contextmanager
def _recorded(folder: Path) -> Iterator[None]:
    """Have the run's log say what it failed by."""
    from phalanx.launch import record
    from phalanx.preflight import too_little

    try:
        yield
    except SpecError as error:  # what only a worker could see, or the forecast once the run had begun
        record(error, folder)
        raise
    except WorkerError as error:
        record(error, folder)
        if advice := too_little(error, folder):
            error.add_note(advice)
        raise


def _take_part(job: Job, spec: RunSpec, place: Place, cores: int | None) -> Run:
    import torch

    from phalanx.launch import raise_stopped
    from phalanx.launch.elastic_size import fitted
    from phalanx.launch.worker import WorkerStatus, train_as_worker

    spec = fitted(spec, place.world_size, job)
    if cores is not None:
        torch.set_num_threads(cores * spec.plan.threads)
    status = WorkerStatus(replace(place, timeout=spec.timeout))
    try:
        folder = train_as_worker(job, spec, status).folder
    except Exception as error:
        status.report_failure(error)
        raise
    raise_stopped(status.stopped, saved=True)
    return Run(folder=folder, job=job)


def build(
    job: Job,
    plan: Plan | str | None = None,
    *,
    run: RunSpec | str | Path | None = None,
    resume: Resume | None = None,
    checkpoint_every: int | str | None = None,
) -> tuple[OwnStep, OwnLoader]:
    """The step and the loader of ``job`` under ``plan``, for a loop of your own.

    ``for batch in loader: metrics = step(batch)`` is the whole loop, under every plan. A plan of several processes is
    built in each of them: start the script with ``torchrun --nproc-per-node N script.py``. Rank 0 tells the logger
    ``phalanx`` what the plan does not keep of one device's result, and what it wastes or leaves unread.

    With a ``run`` the same loop keeps a run folder: ``step(batch)`` records the step, saves and evaluates where that is
    due, and the loader begins where the run stands, in the middle of an epoch and under another plan, too.

    Args:
        run: the run folder, or all of the run's settings; without it nothing is recorded, and nothing saved.
        resume: go on from the run's last checkpoint; ``"auto"``: if there is one. In place of what ``run`` says.
        checkpoint_every: optimizer steps, or time such as ``"15m"``, between checkpoints; in place of ``run``'s.

    Raises:
        RefusedError: if the plan cannot serve the job here, or its processes are not there.
        SpecError: if the run folder cannot be used, or is of another job; or settings of a run are no loop's.
    """
    from phalanx.config.run import override
    from phalanx.launch import place_of_this_process
    from phalanx.launch.own_run import laid_out, own_spec

    _need(job, Job, "job", "px.build(job(), plan)")
    _need(run, (RunSpec, str, Path, type(None)), "run", 'run="runs/mine"')
    place = place_of_this_process()
    chosen = _plan(plan if plan is not None or not isinstance(run, RunSpec) else run.plan, job, place)
    spec = own_spec(run, job.name, chosen, resume=resume, checkpoint_every=checkpoint_every)
    return laid_out(override(job, spec) if spec else job, chosen, place, spec)


def prove(
    job: Job,
    plan: Plan | str,
    *,
    steps: int = 20,
    against: Callable[..., Any] | None = None,
    say: Callable[[str], None] | None = None,
    watch: Callable[[], None] | None = None,
    dropout: bool = False,
) -> Proof:
    """Compare ``job`` under ``plan`` with one device over ``steps`` steps; see ``phalanx.verify.prove``.

    One device is a plain PyTorch loop that the job is turned into, or ``against``: a training loop of your own.
    """
    from phalanx.verify import prove as compare

    _need(job, Job, "job", "px.prove(job(), plan)")
    if not is_whole(steps, 1):
        raise SpecError.of("steps", repr(steps), "a whole number, 1 or more", "steps=20")
    if against is not None and not callable(against):
        raise SpecError.of("against", f"a {type(against).__name__}", "a function: a training loop", "against=loop")
    if plan is None:  # pyright: ignore[reportUnnecessaryComparison]
        _need(plan, (Plan, str), "plan", 'px.prove(job(), "dp=2")')
    compared = {"against": against, "say": say, "watch": watch, "dropout": dropout}
    return compare(job, _plan(plan, job, None), steps=steps, **compared)


def forecast(job: Job, plan: Plan | str, cluster: Cluster | str) -> Forecast:
    """The memory and time of ``job`` under ``plan`` on ``cluster``, such as ``"8xH100"``; no device need be here.

    Raises:
        RefusedError: if the plan cannot serve the job on that cluster.
        ProfileError: if the model's operations or shapes depend on values.
    """
    from phalanx.forecast import forecast as priced
    from phalanx.preflight.subject import Subject

    _need(job, Job, "job", 'px.forecast(job(), "dp=2", "8xH100")')
    _need(plan, (Plan, str), "plan", 'px.forecast(job(), "dp=2", "8xH100")')
    chosen, there = _plan(plan, job, None), _cluster(cluster)
    return priced(Subject.of(job).question(there, chosen).work, chosen, there)


def plan(job: Job, cluster: Cluster | str) -> Advice:
    """The best plans for ``job`` on ``cluster``, such as ``"8xH100"``, the best first, and why.

    ``plan(job, cluster).ranking.best.plan`` is the best ``Plan``; without one (``ranking.best`` is ``None``) the
    ``shortfall`` says what is missing.

    Raises:
        RefusedError: if no plan can deal the job out to so many devices.
        ProfileError: if the model's operations or shapes depend on values.
    """
    from phalanx.planner import advise
    from phalanx.preflight.subject import Subject

    _need(job, Job, "job", 'px.plan(job(), "8xH100")')
    there = _cluster(cluster)
    return advise(Subject.of(job).question(there))


def _cluster(cluster: Cluster | str) -> Cluster:
    from phalanx.hardware import cluster as read

    _need(cluster, (Cluster, str), "cluster", '"8xH100"')
    return read(cluster) if isinstance(cluster, str) else cluster


def _need(value: object, kinds: type | tuple[type, ...], where: str, fix: str) -> None:
    """Refuse an argument of another type than it has to have."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds):
        names = " or ".join(f"a {kind.__name__}" for kind in kinds if kind is not type(None))
        shown = "None" if value is None else f"{repr(value)[:60]}, a {type(value).__name__}"
        hint = ": its result, where it is a function" if callable(value) and Job in kinds else ""
        raise SpecError.of(where, shown, names + hint, fix)


__all__ = ["Run", "build", "fit", "forecast", "load", "plan", "prove"]

_RESERVES = 3  # killed workers and servers that a run with servers replaces


def _plan(plan: Plan | str | None, job: Job, place: Place | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        _need(plan, (Plan, str), "plan", '"dp=2", or px.Plan(dp=2)')
        return Plan.parse(plan)
    if place is not None:
        return Plan(dp=place.world_size)
    from phalanx.preflight import choose

    return choose(job).plan
