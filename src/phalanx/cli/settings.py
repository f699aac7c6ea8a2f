"""The source of each value of a run: argument, run file of the run to resume, job, or default, in this order."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.elastic import DeviceRange
from phalanx.config.run import Resume
from phalanx.config.run_files import RUN_TOML
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.files import read_text

if TYPE_CHECKING:
    from phalanx.preflight import PlanChoice
    from phalanx.report.tables import Setting

_NOT_OWN = {"job", "plan", "asked_plan", "folder", "resume", "from_step", "batch", "epochs", "steps"}
_OWN = tuple(field.name for field in fields(RunSpec) if field.name not in _NOT_OWN)  # values that a job does not have


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The arguments of ``phalanx train``; ``None`` for options that are not given.

    Attributes:
        devices: from ``-n``; text such as ``1:4`` if their number may change.
        values: the other options by their names in ``RunSpec``.
        chosen: the planner's plan for the target, if no plan is given.
    """

    job: str
    plan: Plan | None
    devices: int | str | None
    folder: Path | None
    resume: Resume
    from_step: int | None = None
    values: dict[str, Any]
    chosen: PlanChoice | None = None

    @classmethod
    def of(cls, job: str, options: Mapping[str, Any]) -> Given:
        """Return the arguments for ``job`` from a command's options by name."""
        values = dict(options)
        own = {name: values.pop(name) for name in ("plan", "devices", "folder", "from_step", "resume")}
        if (text := own["devices"]) and text.removeprefix("-").isdecimal():
            own["devices"] = int(text)
        if own["resume"] != "auto":
            own["resume"] = bool(own["resume"]) or own["from_step"] is not None
        return cls(job=job, **own, values=values)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if isinstance(self.devices, str):
            DeviceRange.parse(self.devices, "-n")
        elif self.devices is not None and self.devices < 1:
            problems.append(Problem(where="-n", given=str(self.devices), allowed="1 or more devices", fix="-n 2"))
        if self.resume and self.folder is None:
            name, allowed = "--resume" if self.from_step is None else "--from", "the folder of the run to resume"
            problems.append(Problem(where=name, given="no --run", allowed=allowed, fix="--run runs/digits-1 --resume"))
        if problems:
            raise SpecError(problems)
        if self.plan and isinstance(self.devices, int) and self.plan.devices != self.devices:
            raise RefusedError.of(
                where="--plan",
                given=f"{self.plan}, which is for {self.plan.devices} devices, with -n {self.devices}",
                allowed="a mesh that multiplies to the devices: pp × dp × fsdp × ep × cp × tp × threads = n",
                fix=f"-n {self.plan.devices}",
            )

    def plan_of(self, earlier: RunSpec | None, batch: int) -> tuple[Plan, str]:
        """Return the plan and its source."""
        if self.plan:
            return self.plan, "argument"
        if self.devices:
            most = DeviceRange.parse(self.devices, "-n").most if isinstance(self.devices, str) else self.devices
            return Plan(dp=most), "argument"
        if earlier:
            return earlier.plan, "run file"
        from phalanx.preflight import plain_replicas

        return plain_replicas(batch), "default"


def earlier_run(given: Given) -> RunSpec | None:
    """Return the run file of the run to resume; None if there is none.

    If a target has the run folder: the run file of the last launch, with this machine's paths.
    """
    if not (given.resume and given.folder):
        return None
    runfile = given.folder / RUN_TOML
    if os.path.lexists(runfile):
        return _read(runfile)
    from phalanx.launch.targets.handed_over import is_handed_over

    handed = given.folder / "launch" / RUN_TOML
    if not (is_handed_over(given.folder) and os.path.lexists(handed)):
        return None
    from phalanx.launch.jobfile import Reference, with_no_values, with_values

    run = _read(handed)
    here, there = Reference.parse(given.job), Reference.parse(run.job)
    values = dict(there.values) if here.stem == there.stem else {}  # the same file, as far as its name says
    return replace(run, job=with_values(with_no_values(given.job), values), folder=given.folder)


def _read(runfile: Path) -> RunSpec:
    fix = f"mv {runfile} {runfile}.away, and give --plan and what else the run had"
    return RunSpec.from_toml(read_text(runfile, where="run.toml", fix=fix))


def settle(given: Given, earlier: RunSpec | None, job: Job) -> tuple[RunSpec, list[Setting]]:
    """Return the run to start, and the source of each of its values. Raises SpecError with all that is wrong."""
    from phalanx.launch.runfile import default_folder
    from phalanx.report.tables import Setting

    values = {name: value for name, value in given.values.items() if value is not None}
    if earlier and earlier.mirror and "mirror" not in values:  # it leads out of the folder, which may be a stranger's
        none = f"none, where run.toml names {earlier.mirror}, in which a run writes and deletes"
        fix = f"--mirror {shlex.quote(earlier.mirror)}"
        raise SpecError.of("--mirror", none, "the mirror, or a run.toml without it", fix)
    if isinstance(given.devices, str):
        values["devices"] = given.devices
    taken = dict.fromkeys(values, "argument")
    if earlier:
        for name in (*_OWN, "batch", *([] if {"epochs", "steps"} & set(values) else ["epochs", "steps"])):
            if name not in values and getattr(earlier, name) is not None:
                values[name], taken[name] = getattr(earlier, name), "run file"
    (plan, plan_from), why = given.plan_of(earlier, values.get("batch") or job.batch), ""
    if plan_from == "default":
        from phalanx.preflight import choose_plan

        choice = given.chosen or choose_plan(replace(job, batch=values.get("batch") or job.batch))
        plan, plan_from, why = choice.plan, choice.source, choice.why
    if plan_from == "argument" and taken.get("devices") == "run file":  # the argument says on how many devices
        del values["devices"]
    folder = given.folder or default_folder(job.name)
    run = RunSpec(job=given.job, plan=plan, folder=folder, resume=given.resume, from_step=given.from_step, **values)

    length = next((name for name in ("steps", "epochs") if name in values), "steps" if job.steps else "epochs")
    shown: dict[str, tuple[Any, str]] = {"job": (given.job, "argument"), "plan": (plan, plan_from)}
    shown["run"] = (folder, "argument" if given.folder else "default")
    shown |= {name: (values.get(name, getattr(job, name)), taken.get(name, "job")) for name in ("batch", length)}
    shown["seed"] = (job.seed, "job")
    shown |= {name: (getattr(run, name), taken.get(name, "default")) for name in _OWN if getattr(run, name) is not None}
    settings = [
        Setting(name=name.replace("_", "-"), value=str(value), source=source, why=why if name == "plan" else "")
        for name, (value, source) in shown.items()
    ]
    return run, settings


def loaded_run(given: Given) -> tuple[Job, RunSpec, list[Setting]]:
    """Load the job, and return it, the run to start, and the source of each value, the job's own included."""
    from phalanx.launch.jobfile import Reference, declared_values, going_on, load_job
    from phalanx.report.tables import Setting

    earlier = earlier_run(given)
    reference = going_on(given.job, earlier.job) if earlier else given.job
    job = load_job(reference)
    run, settings = settle(replace(given, job=reference), earlier, job)
    source = "argument" if reference == given.job else "run file"
    changed = dict.fromkeys(dict(Reference.parse(reference).values), source)
    for one in declared_values(reference):
        settings.append(Setting(name=f"set {one.name}", value=str(one.value), source=changed.get(one.name, "job")))
    return job, run, settings
