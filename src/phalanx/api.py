"""What ``import phalanx as px`` offers: ``fit``, ``build``, ``prove``, ``forecast``, ``plan``, and a run to read."""

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
    from phalanx.launch.targets import AttachedTarget
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
    """Train ``job`` under ``plan`` and give back the run.

    A plan of several processes starts them on this machine, each on a device of its own; inside a worker that torchrun
    started, this process takes its own part instead, in the folder that rank 0 takes, whatever ``launcher`` says.
    Without a plan: the best there is for the CUDA devices here, or one process. The forecast of the run is made beside
    it and stored in its folder.

    Args:
        job: what to train.
        plan: a ``Plan``, its text, such as ``"dp=2"``, or the path of a ``plan.toml``.
        run: the run folder, or all of the run's settings as one; its plan is replaced by ``plan`` where that is given.
        folder: the run folder, in place of what ``run`` says; ``runs/<name>-<n>`` where neither says one.
        watch: called about ten times a second while workers run; never inside a worker that torchrun started. Without
            it progress is shown as ``phalanx train`` does where stdout is a terminal, in one line in a notebook, and in
            lines on stderr by rank 0 of torchrun's workers; elsewhere the logger ``phalanx`` is told what differs from
            one device, and other warnings. ``False``: nothing is shown or told.
        cores: CPU cores that each replica computes with; its share of the machine's where not given.
        launcher: what starts the workers: ``local`` forks them from this process; on the hosts of ``ssh:hosts.toml``
            they are new processes that load the job from where ``run.job`` says.
        settings: fields of ``RunSpec`` by their names, such as ``resume="auto"`` or ``checkpoint_every="5m"``, in place
            of what ``run`` says. A run that goes on has those given now alone; ``phalanx train`` keeps those before.

    Raises:
        SpecError: if there is no such launcher or setting, or the run cannot be started so, or not in that folder.
        RefusedError: if the plan cannot serve the job here, or is forecast not to fit (``RunSpec.forecast``).
        WorkerError: if a worker failed: the first one's rank, step and traceback. Inside a worker that torchrun
            started, this worker's own error comes as it is.
        KeyboardInterrupt: after Ctrl-C; the run has saved by then (``RunSpec.grace``), and it says where.
        SystemExit: after SIGTERM, SIGUSR1 and SIGHUP; with 75, ``EX_TEMPFAIL``, once the run has saved.
    """
    from phalanx.launch import how_to_go_on
    from phalanx.preflight.supervised_run import RunStarter, train_here
    from phalanx.report.shown_progress import looked_on

    asked, spec, place, starter = _asked(job, plan, run, folder, launcher, settings)
    _need_cores(cores)
    if place is not None:
        return _take_part(asked, spec, place, cores, watch)
    loadable = isinstance(run, RunSpec)
    there = RunStarter(launcher=starter, cores=cores, loadable=loadable)
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
    """Begin to train ``job`` under ``plan`` in the background, and give back the run once it has begun.

    ``run.wait()`` waits for its end and raises what it failed by, ``run.stop()`` has it save and stop, ``run.running``
    and ``run.metrics()`` say how it stands; the logger ``phalanx`` is told what differs from one device. One process
    beside this one, forked from it, does all that ``fit`` does, so what callbacks of the job change they change there,
    and that is where the logger is told. The run ends with this process: one that ends by itself has it
    save and stop, one that is killed takes it along.

    Args:
        job, plan, run, folder, cores, launcher, settings: as of ``fit``.

    Raises:
        SpecError: as of ``fit``, and inside a worker that torchrun started.
        RefusedError: as of ``fit``: nothing has begun then.
    """
    from phalanx.launch.background_run import BackgroundRun
    from phalanx.preflight.supervised_run import RunStarter, train_here
    from phalanx.report.shown_progress import logged

    asked, spec, place, starter = _asked(job, plan, run, folder, launcher, settings)
    _need_cores(cores)
    if place is not None:
        raise SpecError.of("launcher", "px.start in a worker of torchrun", "px.fit", "px.fit(job(), plan)")
    there = RunStarter(
        launcher=starter,
        cores=cores,
        loadable=isinstance(run, RunSpec),
        background=True,
    )
    there.refuse(spec)

    def work(begun: Callable[[], None]) -> None:
        with logged(spec.folder / EVENTS) as look:
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
    """Return the job with overrides, the run with plan and folder, the place given by torchrun, and the launcher."""
    from phalanx.config.run import override
    from phalanx.launch import default_folder, job_of, place_of_this_process
    from phalanx.launch.local import find_launcher

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

    from phalanx.launch import raise_stopped
    from phalanx.launch.elastic_size import fitted
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

    One device is a plain PyTorch loop that the job is turned into, or ``against``: a training loop of your own.
    ``resume``: resume the run from its middle and compare that, too; None does so for small models.
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
