"""``phalanx.build``: a job laid out in the process that calls it, and the run that its loop is, where it is one."""

from __future__ import annotations

import atexit
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.comm import Place, default_process_group, device_for, place_within
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run import Resume
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.launch.reaper import StopRequest, raise_stopped
from phalanx.launch.runfile import job_of
from phalanx.launch.worker import WorkerStatus, within_folder
from phalanx.parallel import device_kind, devices_here
from phalanx.train.assembly import Assembly, build, refuse
from phalanx.train.findings import Findings
from phalanx.train.interruptions import Interruptions, LauncherLink
from phalanx.train.loop import TrainingLoop
from phalanx.train.mesh_stepper import rank_of_mesh
from phalanx.train.observer import Observer
from phalanx.train.own_step import CallersProcess, LoopWithoutRun, OwnLoader, OwnRun, OwnStep

_log = logging.getLogger("phalanx")

_group = ExitStack()  # the process group that is joined stays until the process ends
_open: dict[Path, OwnRun] = {}


def own_spec(
    run: RunSpec | str | Path | None,
    name: str,
    plan: Plan,
    *,
    resume: Resume | None,
    checkpoint_every: int | str | None,
) -> RunSpec | None:
    """The run of a loop of one's own, of the job ``name``; ``None`` where it has none.

    Raises:
        SpecError: what is asked for needs a run, or a launcher.
    """
    given = {"resume": resume, "checkpoint_every": checkpoint_every}
    given = {key: value for key, value in given.items() if value is not None}
    if run is None:
        if given:
            key, value = next(iter(given.items()))
            allowed = "together with a run folder"
            raise SpecError.of(key, f"{value!r} without a run", allowed, f'run="runs/{name}-1", {key}={value!r}')
        return None
    whole: dict[str, Any] = {"plan": plan, **given}
    spec = RunSpec.of(run, name if isinstance(run, RunSpec) else job_of(Path(run), name), **whole)
    problems: list[Problem] = []
    if spec.devices is not None:
        what = f"devices={spec.devices!r} for a loop of one's own"
        allowed = "phalanx.fit or phalanx train, which start workers again on another number of devices"
        problems.append(Problem(where="run.devices", given=what, allowed=allowed, fix="devices=None"))
    if spec.rolls_back:
        what = "'rollback' for a loop of one's own, which cannot be taken back"
        problems.append(
            Problem(where="run.on_nonfinite", given=what, allowed="stop or skip", fix='on_nonfinite="skip"')
        )
    if problems:
        raise SpecError(problems)
    return spec


def laid_out(job: Job, plan: Plan, place: Place | None, run: RunSpec | None) -> tuple[OwnStep, OwnLoader]:
    """The step and the loader of ``job`` under ``plan`` in this process, with what ``run`` asks for. Collective.

    Raises:
        RefusedError: if the plan cannot serve the job here, or its processes are not there.
        SpecError: if the run folder cannot be used.
    """
    if place is None and plan.world_size > 1:
        raise RefusedError([_alone(plan)])
    place = place or Place()
    here = devices_here(plan, place)
    refuse(job, plan, place.world_size, here)
    if plan.server:
        allowed = "phalanx.fit or phalanx train: servers own the steps, and workers compute what they are dealt"
        raise RefusedError.of("plan.server", f"{plan} for a loop of one's own", allowed, f"dp={plan.dp}")
    if run:
        place = replace(place, timeout=run.timeout)
    kind = device_kind(plan, here)
    device = device_for(place, kind)
    _group.enter_context(default_process_group(place_within(plan, place), device, plan.device))
    found = Findings()
    if run:
        assembly, own = _begun(job, run, place, found)
    else:
        assembly, own = build(job, plan, place, device), None
        if (scheduler := assembly.step.scheduler) is not None and scheduler.follows_evaluations:
            raise RefusedError.of(
                "job.optimizer",
                "ReduceLROnPlateau for a loop of one's own without a run, whose evaluations nobody sees",
                "a run, whose evaluations it follows; or one that your loop makes over step.optimizer, and steps",
                'px.build(job, plan, run="runs/mine"), or ReduceLROnPlateau(step.optimizer)',
            )
    if place.rank == 0:
        unread = [] if run else _unread(job)
        for note in [*(f"differs from one device: {note}" for note in assembly.notes), *assembly.advice, *unread]:
            _log.warning("%s", note)
    loop = own or LoopWithoutRun(assembly.step, assembly.loader)
    return OwnStep(job, plan, assembly, loop, first=place.rank == 0), OwnLoader(assembly.loader, loop)


def _unread(job: Job) -> list[str]:
    """What of ``job`` only a loop that keeps a run heeds."""
    given = {"evaluate_every": job.evaluate_every, "best": job.best, "callbacks": job.callbacks}
    names = [name for name, value in given.items() if value]
    what = " and ".join(names)
    return [f'{what}: heeded with a run, px.build(job, plan, run="runs/mine"), and not without.'] if names else []


def _begun(job: Job, run: RunSpec, place: Place, found: Findings) -> tuple[Assembly, OwnRun]:
    """The run in this process up to its first step, restored where it resumes."""
    key = run.folder.resolve()
    if before := _open.get(key):
        before.close()  # a loop that was left, of a notebook's cell that is run again
    status, signals, over = WorkerStatus(place), _Signals(), ExitStack()
    try:
        with over:
            over.enter_context(status.watched())
            run = over.enter_context(within_folder(job, run, status))
            link = LauncherLink(report=status.report_step, asked=signals.asked)
            observer = Observer()
            ranks = rank_of_mesh(job, run, status.place, link, observer=observer, findings=found)
            stepper, recorder = over.enter_context(ranks)
            interruptions = over.enter_context(Interruptions(run, link.asked, place=status.place))
            over.callback(_open.pop, key, None)
            loop = TrainingLoop(job, run, stepper, recorder, observer, interruptions)
            here = CallersProcess(
                heeding=signals.heeded if run.grace else ExitStack,
                failed=status.report_failure,
                stop=signals.stop,
                over=over.pop_all(),
            )
    except Exception as error:
        status.report_failure(error)
        if isinstance(error, SpecError):
            words = [replace(one, fix=re.sub("^folder=", "run=", one.fix)) for one in error.problems]
            raise type(error)(words) from None  # phalanx.build takes the folder as run
        raise
    own = _open[key] = OwnRun(run, loop, stepper, interruptions, here)
    return stepper.assembly, own


def _close_all() -> None:
    """Of a process that ends."""
    for own in list(_open.values()):
        own.close()


atexit.register(_group.close)
atexit.register(_close_all)  # first, for it talks to the other ranks


class _Signals:
    """The stop signal that the loop of this process has got since it began, or was begun again."""

    def __init__(self) -> None:
        self._request: StopRequest | None = None
        self._taken_up = False

    def asked(self) -> int:
        return self._request.number if self._request else 0

    @contextmanager
    def heeded(self) -> Iterator[None]:
        self._taken_up = False
        with StopRequest() as self._request:
            try:
                yield
            finally:
                request, self._request = self._request, None
        if request.number and not self._taken_up:
            os.kill(os.getpid(), request.number)

    def stop(self, number: int) -> None:
        self._taken_up = True
        raise_stopped(number, saved=True)


def _alone(plan: Plan) -> Problem:
    return Problem(
        where="plan",
        given=f"{plan} for 1 workers: torchrun did not start this process",
        allowed="in phalanx.build, as many processes as the plan has, of torchrun; phalanx.fit starts them itself",
        fix=f"torchrun --nproc-per-node {plan.world_size} script.py",
    )
