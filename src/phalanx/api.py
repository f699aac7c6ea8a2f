"""The public functions of ``import phalanx as px``:

``fit``, ``build``, ``prove``, ``forecast``, ``plan``, and a run to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import Cluster, Job, Plan, RunSpec
from phalanx.config.fields import is_whole
from phalanx.config.run import NOT_IN_FILE
from phalanx.config.run_files import EVENTS
from phalanx.errors import SpecError
from phalanx.files import read_text
from phalanx.report.run_results import Run, load

if TYPE_CHECKING:
    from phalanx.comm import Place
    from phalanx.config.run import Resume
    from phalanx.forecast import Forecast
    from phalanx.launch.local import LocalLauncher
    from phalanx.launch.targets.target import AttachedTarget
    from phalanx.planner import Advice
    from phalanx.report.shown_progress import Watch
    from phalanx.train.own_step import OwnLoader, OwnStep
    from phalanx.verify import Proof

_RUN = 'run="runs/mine-1"'


def fit(
    job: Job,
    plan: Plan | str | None = None,
    *,
    run: RunSpec | str | Path | None = None,
    folder: str | Path | None = None,
    watch: Watch = None,
    cores: int | None = None,
    launcher: str | LocalLauncher | AttachedTarget = "local",
    **settings: Any,
) -> Run:
    """Train ``job`` under ``plan`` and return the run.

    A plan of several processes starts them on this machine, each on its own device. Inside a worker started by
    torchrun, this process takes its own part instead, in rank 0's folder, for any ``launcher``. Without a plan: the
    best one for the CUDA devices here, or one process. A forecast of the run is made beside it and stored in its
    folder.

    Args:
        job: what to train.
        plan: a ``Plan``, its text, such as ``"dp=2"``, or the path of a ``plan.toml``.
        run: the run folder, or all of the run's settings in one object; ``plan``, if given, replaces its plan.
        folder: the run folder, in place of the one in ``run``; by default ``runs/<name>-<n>``.
        watch: called about ten times a second while workers run; never inside a worker started by torchrun. By default
            progress is shown like ``phalanx train`` if stdout is a terminal, in one line in a notebook, and in lines on
            stderr by rank 0 of torchrun's workers; elsewhere the logger ``phalanx`` gets differences from one device,
            and other warnings. ``False``: no output.
        cores: CPU cores of each replica; by default its share of the machine's.
        launcher: starts the workers: ``local`` forks them from this process; on the hosts of ``ssh:hosts.toml`` they
            are new processes that load the job from ``run.job``.
        settings: fields of ``RunSpec`` by their names, such as ``resume="auto"`` or ``checkpoint_every="5m"``, in place
            of those in ``run``. A resumed run has only the present ones; ``phalanx train`` keeps earlier ones.

    Raises:
        SpecError: if there is no such launcher or setting, or the run cannot be started so, or not in that folder.
        RefusedError: if the plan cannot serve the job here, or is forecast not to fit (``RunSpec.forecast``).
        WorkerError: if a worker failed: the first one's rank, step and traceback. Inside a worker started by torchrun,
            this worker's own error is raised unchanged.
        KeyboardInterrupt: after Ctrl-C; the run has saved by then (``RunSpec.grace``), and its message says in which
            folder.
        SystemExit: after SIGTERM, SIGUSR1 and SIGHUP; with 75, ``EX_TEMPFAIL``, once the run has saved.
    """
    from phalanx.launch.runfile import how_to_go_on
    from phalanx.preflight.supervised_run import RunStarter, train_here
    from phalanx.report.shown_progress import looked_on

    asked, spec, place, starter = _asked(job, plan, run, folder, launcher, settings)
    _need_cores(cores)
    if place is not None:
        return _take_part(asked, spec, place, cores, watch)
    there = RunStarter(launcher=starter, cores=cores, loadable=isinstance(run, RunSpec))
    with looked_on(watch, spec.folder / EVENTS) as look:
        try:
            train_here(asked, spec, there, look)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how_to_go_on(spec)) from None
    return Run(folder=spec.folder, job=asked)


def start(
    job: Job,
    plan: Plan | str | None = None,
    *,
    run: RunSpec | str | Path | None = None,
    folder: str | Path | None = None,
    cores: int | None = None,
    launcher: str | LocalLauncher | AttachedTarget = "local",
    **settings: Any,
) -> Run:
    """Begin to train ``job`` under ``plan`` in the background, and return the run once it has begun.

    ``run.wait()`` waits for its end and raises its error, ``run.stop()`` makes it save and stop, ``run.running`` and
    ``run.metrics()`` report its state. The logger ``phalanx`` gets differences from one device. One process forked from
    this one does the work of ``fit``, so callbacks of the job change values there, and that process logs. The run ends
    with this process: a normal exit makes it save and stop, a kill ends it, too.

    Args:
        job, plan, run, folder, cores, launcher, settings: as of ``fit``.

    Raises:
        SpecError: as of ``fit``, and inside a worker started by torchrun.
        RefusedError: as of ``fit``: no run has begun then.
    """
    from phalanx.events.following import Follower
    from phalanx.launch.side_process import BackgroundRun
    from phalanx.preflight.supervised_run import RunStarter, train_here
    from phalanx.report.shown_progress import LoggedWarnings

    asked, spec, place, starter = _asked(job, plan, run, folder, launcher, settings)
    _need_cores(cores)
    if place is not None:
        raise SpecError.of("launcher", "px.start in a worker of torchrun", "px.fit", "px.fit(job(), plan)")
    there = RunStarter(launcher=starter, cores=cores, loadable=isinstance(run, RunSpec))
    there.refuse(spec)

    def work(begun: Callable[[], None]) -> None:
        with Follower(spec.folder / EVENTS, [LoggedWarnings()]) as look:
            train_here(asked, spec, there, look, begun)

    process = BackgroundRun.begin(spec.folder, work)
    return Run(folder=spec.folder, job=asked, process=process)


def _asked(
    job: Job,
    plan: Plan | str | None,
    run: RunSpec | str | Path | None,
    folder: str | Path | None,
    launcher: str | LocalLauncher | AttachedTarget,
    settings: dict[str, Any],
) -> tuple[Job, RunSpec, Place | None, LocalLauncher | AttachedTarget]:
    """Return the job with overrides, the run with plan and folder, torchrun's place, and the launcher."""
    from phalanx.config.run import override
    from phalanx.launch.local import find_launcher
    from phalanx.launch.runfile import default_folder, job_of
    from phalanx.launch.torchrun import place_of_this_process

    _need(job, Job, "job", "px.fit(job(), plan)")
    _need(run, (RunSpec, str, Path, type(None)), "run", _RUN)
    _need(folder, (str, Path, type(None)), "folder", 'folder="runs/mine-1"')
    starter = find_launcher(launcher)
    _need_settings(settings)
    if settings.get("resume") and run is None and folder is None:
        given = f"{settings['resume']!r} without a folder: each time there would be a new one"
        raise SpecError.of("resume", given, "only with the folder of the run", 'folder="runs/mine", resume="auto"')
    place = place_of_this_process()
    chosen = _chosen(plan, run, job, place)
    whole: dict[str, Any] = {"plan": chosen, **({} if folder is None else {"folder": Path(folder)}), **settings}
    given = run if run is not None else folder if folder is not None else default_folder(job.name)
    name = job.name if isinstance(given, RunSpec) else job_of(whole.get("folder", Path(given)), job.name)
    spec = RunSpec.of(given, name, **whole)
    return override(job, spec), spec, place, starter


def _need_settings(settings: dict[str, Any]) -> None:
    names = sorted(field.name for field in fields(RunSpec) if field.name not in (*NOT_IN_FILE, "job", "plan", "folder"))
    for name, value in settings.items():
        if name not in names:
            near = (get_close_matches(name, names) or ["resume"])[0]
            fix = f'{near}="auto"' if near == "resume" else f"{near}=..."
            raise SpecError.of(name, repr(value), f"settings of a run: {', '.join(names)}", fix)


def _chosen(plan: Plan | str | None, run: RunSpec | str | Path | None, job: Job, place: Place | None) -> Plan:
    return _plan(run.plan if plan is None and isinstance(run, RunSpec) else plan, job, place)


def _need_cores(cores: int | None) -> None:
    if cores is not None and not is_whole(cores, 1):
        raise SpecError.of("cores", repr(cores), "a whole number, 1 or more", "cores=2")


def _take_part(job: Job, spec: RunSpec, place: Place, cores: int | None, watch: Watch) -> Run:
    import torch

    from phalanx.launch.reaper import raise_stopped
    from phalanx.launch.restarts import fitted
    from phalanx.launch.worker import WorkerStatus, train_as_worker
    from phalanx.report.shown_progress import viewers_of_worker

    spec = fitted(spec, place.world_size, job)
    if cores is not None:
        torch.set_num_threads(cores * spec.plan.threads)
    status = WorkerStatus(replace(place, timeout=spec.timeout))
    try:
        folder = train_as_worker(job, spec, status, viewers=viewers_of_worker(watch)).folder
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
    """Return the step and the loader of ``job`` under ``plan``, for a loop of your own.

    ``for batch in loader: metrics = step(batch)`` is the whole loop, under every plan. A plan of several processes is
    built in each of them: start the script with ``torchrun --nproc-per-node N script.py``. Rank 0 logs differences from
    one device, and settings that waste devices or have no effect, to the logger ``phalanx``.

    With a ``run`` the same loop keeps a run folder: ``step(batch)`` records the step, saves and evaluates if due, and
    the loader begins at the run's present step, in the middle of an epoch and under another plan, too.

    Args:
        run: the run folder, or all of the run's settings; without it there are no records and no checkpoints.
        resume: resume from the run's last checkpoint; ``"auto"``: if there is one. Replaces the value in ``run``.
        checkpoint_every: optimizer steps, or time such as ``"15m"``, between checkpoints; replaces the value in
            ``run``.

    Raises:
        RefusedError: if the plan cannot serve the job here, or its processes are missing.
        SpecError: if the run folder cannot be used, or belongs to another job; or a setting is not for loops.
    """
    from phalanx.config.run import override
    from phalanx.launch.torchrun import place_of_this_process
    from phalanx.preflight.own_run import laid_out, own_spec

    _need(job, Job, "job", "px.build(job(), plan)")
    _need(run, (RunSpec, str, Path, type(None)), "run", _RUN)
    place = place_of_this_process()
    chosen = _chosen(plan, run, job, place)
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
    resume: bool | None = None,
) -> Proof:
    """Compare ``job`` under ``plan`` with one device over ``steps`` steps; see ``phalanx.verify.prove``.

    One device is a plain PyTorch loop made from the job, or ``against``: a training loop of your own. ``resume``:
    resume the run from its middle and compare that, too; None does so for small models.
    """
    from phalanx.verify import prove as compare

    _need(job, Job, "job", "px.prove(job(), plan)")
    if not is_whole(steps, 1):
        raise SpecError.of("steps", repr(steps), "a whole number, 1 or more", "steps=20")
    if against is not None and not callable(against):
        raise SpecError.of("against", f"a {type(against).__name__}", "a function: a training loop", "against=loop")
    if plan is None:
        _need(plan, (Plan, str), "plan", 'px.prove(job(), "dp=2")')
    compared = {"against": against, "say": say, "watch": watch, "resume": resume}
    return compare(job, _plan(plan, job, None), steps=steps, **compared)


def forecast(job: Job, plan: Plan | str, cluster: Cluster | str) -> Forecast:
    """Return the memory and time of ``job`` under ``plan`` on ``cluster``, such as ``"8xH100"``, without its devices.

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
    """Return the best plans for ``job`` on ``cluster``, such as ``"8xH100"``, the best first, with reasons.

    ``plan(job, cluster).ranking.best.plan`` is the best ``Plan``; without one (``ranking.best`` is ``None``) the
    ``shortfall`` gives the missing memory.

    Raises:
        RefusedError: if no plan can spread the job over so many devices.
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
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds):
        names = " or ".join(f"a {kind.__name__}" for kind in kinds if kind is not type(None))
        shown = "None" if value is None else f"{repr(value)[:60]}, a {type(value).__name__}"
        hint = ": its result, where it is a function" if callable(value) and Job in kinds else ""
        raise SpecError.of(where, shown, names + hint, fix)


__all__ = ["Run", "build", "fit", "forecast", "load", "plan", "prove", "start"]


def _plan(plan: Plan | str | None, job: Job, place: Place | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        _need(plan, (Plan, str), "plan", '"dp=2", or px.Plan(dp=2)')
        if plan.endswith(".toml"):
            return Plan.from_toml(read_text(Path(plan), where="plan", fix='"dp=2"', below=0))
        return Plan.parse(plan)
    if place is not None:
        return Plan(dp=place.world_size)
    from phalanx.preflight import choose_plan

    return choose_plan(job).plan
