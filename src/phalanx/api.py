"""What ``import phalanx as px`` offers: ``fit``, ``build``, ``prove``, ``forecast``, ``plan``, and a run to read."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import Cluster, Job, Plan, RunSpec
from phalanx.errors import Problem, RefusedError, SpecError, WorkerError
from phalanx.events import read

if TYPE_CHECKING:
    from phalanx.comm import Place
    from phalanx.data import Loader
    from phalanx.forecast import Forecast
    from phalanx.launch import Launcher
    from phalanx.launch.hosts import Hosts
    from phalanx.planner import Advice
    from phalanx.train.step import Step
    from phalanx.verify import Proof


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder and what is in it.

    Attributes:
        folder: where it is.
    """

    folder: Path

    def events(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """The run's events in order; those called ``name`` where given."""
        return (event for event in read(self.folder / "events.jsonl") if name is None or event["event"] == name)

    @property
    def losses(self) -> list[float]:
        """Loss of each logged step. A step taken again after a resume counts as it went the last time."""
        return list({event["step"]: event["loss"] for event in self.events("step")}.values())

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The last evaluation: ``loss``, ``samples``, ``metrics``; ``None`` where there was none."""
        found = list(self.events("evaluate"))
        return found[-1] if found else None

    @property
    def plan(self) -> Plan:
        """The plan it ran under."""
        return Plan.from_toml((self.folder / "plan.toml").read_text())


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
    """
    from phalanx.config.run import override
    from phalanx.launch import default_folder, find_launcher, place_of_this_process

    chosen_launcher, place = find_launcher(launcher), place_of_this_process()
    chosen = _plan(plan if plan is not None or run is None else run.plan, job, place)
    where = Path(folder) if folder is not None else run.folder if run is not None else default_folder(job.name)
    spec = replace(run, plan=chosen, folder=where) if run else RunSpec(job=job.name, plan=chosen, folder=where)
    job = override(job, spec)
    if place is not None:
        return _take_part(job, spec, place, cores)
    there = _Start(launcher=chosen_launcher, hosts=hosts, cores=cores, loadable=run is not None)
    return _start(job, spec, there, watch)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """Who starts the workers and where, and whether ``RunSpec.job`` says where other processes find the job."""

    launcher: Launcher
    hosts: Hosts | None
    cores: int | None
    loadable: bool


def _start(job: Job, spec: RunSpec, how: _Start, watch: Callable[[], None] | None) -> Run:
    from phalanx.launch import Launch, LookAhead, prepare_run, record, supervise
    from phalanx.preflight import RunForecaster, forecast_after_look, too_little
    from phalanx.train.assembly import Findings, refuse
    from phalanx.train.loop import train
    from phalanx.train.lr_schedule import RunStart

    plan, folder, hosts, cores = spec.plan, spec.folder, how.hosts, how.cores
    found = Findings()

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        report_step = hosts.counted(place.rank, report) if hosts else report
        return train(job, spec, place, report=report_step, findings=found)

    launch = Launch(
        world_size=plan.processes,
        function=work,
        run=spec,
        loadable=how.loadable,
        threads=None if cores is None else cores * plan.threads,
        hosts=hosts,
        reserves=_RESERVES if plan.server else 0,
    )
    refuse(job, plan, plan.world_size)
    with LookAhead(job, plan, RunStart.of(spec), forecast_after_look(job, spec, cores)) as look:
        how.launcher.prepare(launch)  # loads what workers need, while the job is looked at
        found = look.findings()
        try:
            with RunForecaster(spec, look.side, watch) as forecaster:
                prepare_run(spec)
                supervise(lambda: how.launcher.start(launch), launch.world_size, forecaster)
        except SpecError as error:  # what only a worker could see, or the forecast once the run had begun
            if folder.is_dir():
                record(error, folder)
            raise
        except WorkerError as error:
            record(error, folder)
            if advice := too_little(error, folder):
                error.add_note(advice)
            raise
    return Run(folder=folder)


def _take_part(job: Job, spec: RunSpec, place: Place, cores: int | None) -> Run:
    import torch

    from phalanx.launch.worker import WorkerStatus, train_as_worker

    if cores is not None:
        torch.set_num_threads(cores * spec.plan.threads)
    status = WorkerStatus(place)
    try:
        return Run(folder=train_as_worker(job, spec, status).folder)
    except Exception as error:
        status.report_failure(error)
        raise


def build(job: Job, plan: Plan | str | None = None) -> tuple[Step, Loader]:
    """The step and the loader of ``job`` under ``plan``, for a loop of your own.

    ``for batch in loader: metrics = step(batch)`` is the whole loop, under every plan. A plan of several processes is
    built in each of them: start the script with ``torchrun --nproc-per-node N script.py``. Rank 0 tells the logger
    ``phalanx`` what the plan does not keep of one device's result, and what it wastes or leaves unread.

    Raises:
        RefusedError: if the plan cannot serve the job here, or its processes are not there.
    """
    from phalanx.comm import Place, default_process_group, device_for, place_within
    from phalanx.launch import place_of_this_process
    from phalanx.parallel import device_kind, devices_here
    from phalanx.train.assembly import build as assemble
    from phalanx.train.assembly import refuse

    place = place_of_this_process()
    chosen = _plan(plan, job, place)
    if place is None and chosen.world_size > 1:
        raise RefusedError([_alone(chosen)])
    place = place or Place()
    here = devices_here(chosen, place)
    refuse(job, chosen, place.world_size, here)
    if chosen.server:
        raise RefusedError([_servers_step(chosen)])
    device = device_for(place, device_kind(chosen, here))
    _group.enter_context(default_process_group(place_within(chosen, place), device))
    assembly = assemble(job, chosen, place, device)
    if place.rank == 0:
        for note in [*(f"differs from one device: {note}" for note in assembly.notes), *assembly.advice]:
            _log.warning("%s", note)
    return assembly.step, assembly.loader


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

    there = _cluster(cluster)
    return advise(Subject.of(job).question(there))


def _cluster(cluster: Cluster | str) -> Cluster:
    from phalanx.hardware import cluster as read

    return read(cluster) if isinstance(cluster, str) else cluster


def _alone(plan: Plan) -> Problem:
    return Problem(
        where="plan",
        given=f"{plan} for 1 workers: torchrun did not start this process",
        allowed="in phalanx.build, as many processes as the plan has, of torchrun; phalanx.fit starts them itself",
        fix=f"torchrun --nproc-per-node {plan.world_size} script.py",
    )


def _servers_step(plan: Plan) -> Problem:
    given = f"{plan} for a loop of one's own"
    allowed = "phalanx.fit or phalanx train: servers own the steps, and workers compute what they are dealt"
    return Problem(where="plan.server", given=given, allowed=allowed, fix=f"dp={plan.dp}")


_log = logging.getLogger("phalanx")
_RESERVES = 3  # killed workers and servers that a run with servers replaces

_group = ExitStack()  # the process group that ``build`` joins stays until the process ends
atexit.register(_group.close)


def _plan(plan: Plan | str | None, job: Job, place: Place | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return Plan.parse(plan)
    if place is not None:
        return Plan(dp=place.world_size)
    from phalanx.preflight import choose

    return choose(job).plan
