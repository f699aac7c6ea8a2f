"""Where each value of a run comes from: argument, then run file (of the run to resume), then job, then default."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.elastic import DeviceRange
from phalanx.config.params import DeclaredParam
from phalanx.config.run import Resume
from phalanx.config.run_files import RUN_TOML
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.files import read_text

if TYPE_CHECKING:
    from phalanx.preflight import PlanChoice
    from phalanx.report.tables import Setting

# of the run alone: a job says nothing of them
_ASKED_EACH_TIME = {"job", "plan", "asked_plan", "folder", "resume", "from_step"}
_OF_JOB = {"batch", "epochs", "steps"}
_OWN = tuple(field.name for field in fields(RunSpec) if field.name not in _ASKED_EACH_TIME | _OF_JOB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What stands on the command line of ``phalanx train``; ``None`` where nothing does.

    Attributes:
        devices: how many, as ``-n`` says; a text such as ``1:4`` where their number may change.
        resume: whether to go on from its newest checkpoint; ``auto``: if there is one.
        from_step: go on from the checkpoint of this step.
        values: the other options by their names in ``RunSpec``.
        chosen: the planner's plan for where it is to run, where none is given and that is not here.
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
        """What was given for ``job`` by the options of the command, by their names."""
        names = ("plan", "devices", "folder", "from_step")
        own = {name: options[name] for name in names}
        told = options["resume"]
        resume = "auto" if told == "auto" else bool(told) or own["from_step"] is not None
        rest = {name: value for name, value in options.items() if name not in (*names, "resume")}
        return cls(job=job, resume=resume, **own, values=rest)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if isinstance(self.devices, str):
            DeviceRange.parse(self.devices, "-n")
        elif self.devices is not None and self.devices < 1:
            problems.append(Problem(where="-n", given=str(self.devices), allowed="1 or more devices", fix="-n 2"))
        if self.resume == "auto" and self.from_step is not None:
            given, allowed = "auto, with --from", "one of the two"
            fix = f"--from {self.from_step}"
            problems.append(Problem(where="--resume", given=given, allowed=allowed, fix=fix))
        if self.resume and self.folder is None:
            name = "--resume" if self.from_step is None else "--from"
            allowed, fix = "the folder of the run to go on with", "--run runs/digits-1 --resume"
            problems.append(Problem(where=name, given="no --run", allowed=allowed, fix=fix))
        if problems:
            raise SpecError(problems)
        if self.plan and isinstance(self.devices, int) and self.plan.devices != self.devices:
            raise RefusedError.of(
                where="--plan",
                given=f"{self.plan}, which is for {self.plan.devices} devices, with -n {self.devices}",
                allowed="a mesh that multiplies to the devices: pp × dp × fsdp × ep × cp × tp × threads = n",
                fix=f"-n {self.plan.devices}",
            )


def earlier_run(given: Given) -> RunSpec | None:
    """The run file of the run to resume; ``None`` where there is none.

    That of its last launch, where the run was handed to a target and its folder is not seen here. Such a file has
    other paths of the job and the folder than this machine: those that are given stand in their place.

    Raises:
        SpecError: if it cannot be read.
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
    values = dict(there.values) if here.stem == there.stem else {}  # a file of that name, as far as can be said
    return replace(run, job=with_values(with_no_values(given.job), values), folder=given.folder)


def _read(runfile: Path) -> RunSpec:
    fix = f"mv {runfile} {runfile}.away, and give --plan and what else the run had"
    return RunSpec.from_toml(read_text(runfile, where="run.toml", fix=fix))


def settle(given: Given, earlier: RunSpec | None, job: Job) -> tuple[RunSpec, list[Setting]]:
    """The run to start, and where each of its values came from.

    Raises:
        SpecError: with everything that is wrong in the values together.
    """
    from phalanx.launch.runfile import default_folder
    from phalanx.report.tables import Setting

    values = {name: value for name, value in given.values.items() if value is not None}
    if earlier and earlier.mirror and "mirror" not in values:  # it leads out of the folder, which may be a stranger's
        told = f"none, where run.toml names {earlier.mirror}, in which a run writes and deletes"
        raise SpecError.of(
            "--mirror", told, "the mirror, or a run.toml without it", f"--mirror {shlex.quote(earlier.mirror)}"
        )
    taken = dict.fromkeys(values, "argument")
    if isinstance(given.devices, str):
        values["devices"], taken["devices"] = given.devices, "argument"
    if earlier:
        for name in (*_OWN, "batch", *([] if {"epochs", "steps"} & set(values) else ["epochs", "steps"])):
            if name not in values and getattr(earlier, name) is not None:
                values[name], taken[name] = getattr(earlier, name), "run file"
    plan, plan_from, why = _chosen(given, earlier, replace(job, batch=values.get("batch") or job.batch))
    if plan_from == "argument" and taken.get("devices") == "run file":  # which says on how many devices
        del values["devices"]
    folder = given.folder or default_folder(job.name)
    run = RunSpec(job=given.job, plan=plan, folder=folder, resume=given.resume, from_step=given.from_step, **values)

    settings = [
        Setting(name="job", value=given.job, source="argument"),
        Setting(name="plan", value=str(plan), source=plan_from, why=why),
        Setting(name="run", value=str(folder), source="argument" if given.folder else "default"),
    ]
    length = next((name for name in ("steps", "epochs") if name in values), "steps" if job.steps else "epochs")
    for name in ("batch", length):
        value = str(values.get(name, getattr(job, name)))
        settings.append(Setting(name=name, value=value, source=taken.get(name, "job")))
    settings.append(Setting(name="seed", value=str(job.seed), source="job"))
    defaults = {field.name: field.default for field in fields(RunSpec)}
    for name in _OWN:
        value, source = values.get(name, defaults[name]), taken.get(name, "default")
        if value is None:
            continue
        settings.append(Setting(name=name.replace("_", "-"), value=str(value), source=source))
    return run, settings


def params_settings(reference: str, declared: Iterable[DeclaredParam], overridden: str) -> list[Setting]:
    """The values that a job declares, and which of them were ``overridden`` and where."""
    from phalanx.launch.jobfile import Reference
    from phalanx.report.tables import Setting

    given = dict(Reference.parse(reference).values)
    return [
        Setting(name=f"set {one.name}", value=str(one.value), source=overridden if one.name in given else "job")
        for one in declared
    ]


def _chosen(given: Given, earlier: RunSpec | None, job: Job) -> tuple[Plan, str, str]:
    """The plan, where it came from, and why where the planner was asked."""
    plan, source = plan_of(given, earlier, job.batch)
    if source != "default":
        return plan, source, ""
    from phalanx.preflight import choose_plan

    choice = given.chosen or choose_plan(job)
    return choice.plan, choice.source, choice.why


def plan_of(given: Given, earlier: RunSpec | None, batch: int) -> tuple[Plan, str]:
    """The plan, and where it came from."""
    if given.plan:
        return given.plan, "argument"
    if given.devices:
        within = DeviceRange.parse(given.devices, "-n").most if isinstance(given.devices, str) else given.devices
        return Plan(dp=within), "argument"
    if earlier:
        return earlier.plan, "run file"
    from phalanx.preflight import plain_replicas

    return plain_replicas(batch), "default"
