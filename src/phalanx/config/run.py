"""A run's own settings: which job, which plan, how long, where to. Workers are started with it, as ``run.toml``."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from phalanx.config.elastic import DeviceRange, elastic_problems
from phalanx.config.fields import FieldKind, is_number, is_whole, misfits
from phalanx.config.job import Job
from phalanx.config.plan import Plan
from phalanx.errors import Problem, SpecError
from phalanx.files import toml_table
from phalanx.units import DURATION_UNITS, parse_duration

Foresight = Literal["refuse", "anyway", "none"]
"""What is made of a run's forecast."""

Answer = Literal["stop", "skip", "rollback"]
"""What a run does when numbers go wrong: it ends, leaves the update out, or goes back to its newest checkpoint."""

Content = Literal["all", "trainable"]
"""What of a model's parameters a checkpoint holds: all, or those that are trained."""

Resume = bool | Literal["auto"]
"""Whether a run goes on from a checkpoint; ``auto``: if there is one, and else it begins."""

TIMEOUT = 300.0
"""Seconds that ranks wait for each other where a run does not say: beyond what one of them may take longer than
others for the same work, such as compiling a model or reading it from a slow disk."""

DRIFT_EVERY = 10
"""Optimizer steps between looks at a fifth of the parameters, where a run does not say: all within 50 steps."""

Check = Literal["first-step", "off"]
DriftPolicy = Literal["stop", "warn", "off"]

_LEAST = {
    "batch": 1,
    "epochs": 1,
    "steps": 1,
    "log_every": 1,
    "keep": 1,
    "keep_every": 1,
    "from_step": 0,
    "restarts": 0,
    "drift_every": 1,
}
_KINDS = {
    "job": FieldKind(types=(str,), allowed="a text", fix='job = "examples/digits.py"'),
    "plan": FieldKind(types=(str, Plan), allowed="a plan as one line of text", fix='plan = "dp=2"'),
    "folder": FieldKind(types=(str, Path), allowed="a path", fix='folder = "runs/digits-1"'),
    "resume": FieldKind(types=(bool, str), allowed='true, false or "auto"', fix="resume = true"),
}
NOT_IN_FILE = ("asked_plan",)
"""Fields of a ``RunSpec`` that no run file has."""
_PASSWORD = re.compile(r"([\w+.-]+)://([^/?#:]*):[^/?#]*@(.*)")  # a URL's scheme, user, and what is after its password
_LONGEST = 86_400
_OPTIONAL = ("batch", "epochs", "steps", "keep_every", "from_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One run.

    Attributes:
        job: where the job is: ``path/to/file.py`` (its ``job()``), ``path/to/file.py:name`` or ``package.module:name``.
        plan: how it is laid over devices.
        folder: the run folder, a path or its text.
        resume: go on from the folder's last checkpoint; ``auto``: if it holds a whole one, and else begin.
        from_step: go on from the checkpoint of this step instead of the last one; later ones are set aside.
        batch: global batch in place of the job's own.
        epochs: in place of the job's own.
        steps: in place of the job's own.
        lr_scale: factor on every learning rate, such as the linear scaling rule's when the user changed the batch.
        checkpoint_every: optimizer steps between checkpoints, or time by the clock of rank 0, such as ``90s``, ``15m``
            or ``2h``; one more is written at the end. 0: at the end only.
        checkpoint: what of the model's parameters they hold: ``all``; or ``trainable``, those that are trained, with
            buffers, for models of which much is frozen (adapters): a run that goes on takes the others from the job,
            and refuses to if they are not what they were.
        keep: checkpoints kept; older ones are deleted.
        keep_every: of those the ones whose step is a multiple of this are kept besides.
        mirror: URL of a folder that each checkpoint is copied to, such as ``s3://bucket/runs/digits-1``; a run that
            goes on fetches the newest from there if it is newer than those of its own folder. It holds no password:
            fsspec takes one from ``FSSPEC_SFTP_PASSWORD`` or the like, or from ``~/.config/fsspec``.
        grace: seconds that a run which is asked to stop has for its last checkpoint; 0: it is ended at once. As
            long have workers that hold what would be lost with another, to save it.
        restarts: how often workers that were lost are started again, from the newest checkpoint.
        devices: from how many to how many the run may have, such as ``1:4``: it begins with the most there are, goes on
            with fewer where workers are lost again and again. ``None``: as many as ``plan`` says.
        log_every: optimizer steps between ``step`` events; the first and the last are always written.
        on_nonfinite: what to do about a loss, a gradient or a parameter that is not finite, before an update is made of
            it. ``stop`` ends the run; ``skip`` leaves the update out; ``rollback`` goes back to the newest checkpoint
            and leaves the update out when its step comes again.
        spike: a loss this many robust standard deviations above the median of the last hundred is a spike; ``None``:
            none is looked for.
        on_spike: what to do about one.
        timeout: seconds that ranks wait for one that does not come, in every exchange; then there is a report of where
            each stands, and all are started again as often as ``restarts`` says.
        drift: what is done where replicas' parameters are no longer the same: ``stop``, ``warn``, or ``off``, no look.
        drift_every: optimizer steps between looks at a fifth of the parameters.
        forecast: ``refuse`` a plan that is forecast not to fit; run it ``anyway``; or ``none``, make no forecast.
        check: ``first-step`` compares the first step with one device, and stops the run where they differ; ``off``.
        asked_plan: the plan that was asked for, where ``plan`` is that plan on another number of devices; a run file
            holds it as ``plan``. Set by ``resized_to``.
    """

    job: str
    plan: Plan
    folder: Path
    resume: Resume = False
    from_step: int | None = None
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    lr_scale: float = 1.0
    checkpoint_every: int | str = "15m"
    checkpoint: Content = "all"
    keep: int = 2
    keep_every: int | None = None
    mirror: str | None = None
    grace: float = 30.0
    restarts: int = 3
    devices: str | None = None
    log_every: int = 1
    on_nonfinite: Answer = "stop"
    spike: float | None = None
    on_spike: Answer = "stop"
    timeout: float = TIMEOUT
    drift: DriftPolicy = "stop"
    drift_every: int = DRIFT_EVERY
    forecast: Foresight = "refuse"
    check: Check = "first-step"
    asked_plan: Plan | None = None

    def __post_init__(self) -> None:
        if isinstance(self.folder, str):
            object.__setattr__(self, "folder", Path(self.folder))
        problems = misfits("run", {name: getattr(self, name) for name in _KINDS}, _KINDS)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not is_whole(value, least):
                allowed, fix = f"a whole number, {least} or more", f"{name}={least + 1}"
                problems.append(_wrong(name, repr(value), allowed, fix))
        if not str(self.folder).isprintable():  # a line break would begin a command of its own in a batch script
            problems.append(_wrong("folder", ascii(str(self.folder)), "one printable line", 'folder = "runs/digits-1"'))
        problems += _of_going_on(self)
        if self.epochs is not None and self.steps is not None:
            problems.append(_wrong("epochs", "epochs and steps", "one of the two", "steps=100"))
        if not (is_number(self.lr_scale) and self.lr_scale > 0):
            problems.append(_wrong("lr_scale", repr(self.lr_scale), "a number above 0", "lr_scale=2"))
        if not (is_number(self.timeout) and 1 <= self.timeout <= _LONGEST):
            allowed = f"seconds, from 1 to {_LONGEST:,} (a day)"
            problems.append(_wrong("timeout", repr(self.timeout), allowed, "timeout=600"))
        for name, choices, fix in (
            ("forecast", Foresight, 'forecast = "anyway"'),
            ("drift", DriftPolicy, 'drift="warn"'),
            ("check", Check, 'check="off"'),
            ("checkpoint", Content, 'checkpoint="trainable"'),
        ):
            if (value := getattr(self, name)) not in get_args(choices):
                problems.append(_wrong(name, repr(value), ", ".join(get_args(choices)), fix))
        problems += [] if problems else [*self._answer_problems(), *_of_resizing(self)]
        if not problems and self.checkpoint != "all" and (self.plan.server or self.plan.sync != "each"):
            given, allowed = f"'trainable' with plan {self.plan}", "all with servers and with replicas that step apart"
            problems.append(_wrong("checkpoint", given, allowed, 'checkpoint="all"'))
        if problems:
            raise SpecError(problems)

    def _answer_problems(self) -> list[Problem]:
        """What is wrong in the answers to numbers that go wrong, and which plans cannot give them."""
        found: list[Problem] = []
        given = {"on_nonfinite": self.on_nonfinite, "on_spike": self.on_spike}
        for name, answer in given.items():
            if answer not in get_args(Answer):
                allowed = ", ".join(get_args(Answer))
                found.append(_wrong(name, repr(answer), allowed, f'{name}="skip"'))
        if self.spike is not None and not (is_number(self.spike) and self.spike > 0):
            found.append(_wrong("spike", repr(self.spike), "a number of deviations above 0", "spike=10"))
        if self.spike is None and self.on_spike != "stop":
            given_here = f"{self.on_spike!r} without spike, so that none is looked for"
            found.append(_wrong("on_spike", given_here, "together with spike", f'spike=10, on_spike="{self.on_spike}"'))
        for name in (name for name, answer in given.items() if answer == "rollback"):
            if why := keeps_from_going_back(self.plan):
                allowed, fix = f"stop or skip: {why}", f'{name}="skip"'
                found.append(_wrong(name, f"'rollback' with plan {self.plan}", allowed, fix))
        return found

    @property
    def rolls_back(self) -> bool:
        """Return True if the run may go back to its newest checkpoint by itself."""
        return "rollback" in (self.on_nonfinite, self.on_spike)

    @property
    def save_steps(self) -> int:
        """Optimizer steps between checkpoints; 0 where time says when, or nothing does before the end."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def save_seconds(self) -> float:
        """Seconds between checkpoints; 0 where steps say when, or nothing does before the end."""
        return parse_duration(self.checkpoint_every) if isinstance(self.checkpoint_every, str) else 0.0

    @property
    def device_range(self) -> DeviceRange | None:
        """What ``devices`` says; ``None`` where the number of devices is the plan's."""
        return None if self.devices is None else DeviceRange.parse(self.devices, "run.devices")

    def resized_to(self, plan: Plan) -> RunSpec:
        """The run under ``plan``, which is its own on another number of devices."""
        return replace(self, plan=plan, asked_plan=self.asked_plan or self.plan)

    @classmethod
    def of(cls, given: RunSpec | str | Path, job: str, **settings: Any) -> RunSpec:
        """The run that ``given`` says, all of its settings or the folder alone, with these ``settings`` in their place.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        if isinstance(given, RunSpec):
            return replace(given, **settings)
        whole: dict[str, Any] = {"folder": Path(given), **settings}
        return cls(job=job, **whole)

    def to_toml(self) -> str:
        """The run as a TOML document, as it was asked for; what was not given is left out."""
        table: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name) if field.name != "plan" else self.asked_plan or self.plan
            if value is not None and field.name not in NOT_IN_FILE:
                table[field.name] = str(value) if isinstance(value, Plan | Path) else value
        return tomli_w.dumps(table)

    @classmethod
    def from_toml(cls, text: str) -> RunSpec:
        """The run in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        table = toml_table(text, where="run file", fix=_KINDS["job"].fix)
        names = {field.name for field in fields(cls)} - {*NOT_IN_FILE}
        allowed, fix = ", ".join(sorted(names)), _KINDS["job"].fix
        problems = [_wrong(key, "unknown key", allowed, fix) for key in table if key not in names]
        required = ("job", "plan", "folder")
        problems += [_wrong(key, "nothing", "a text", f'{key} = "..."') for key in required if key not in table]
        problems += misfits("run", table, {name: _KINDS[name] for name in required})
        plan = Plan()
        try:
            plan = Plan.parse(table["plan"]) if _KINDS["plan"].holds(table.get("plan")) else plan
        except SpecError as error:
            problems += error.problems
        known = {key: value for key, value in table.items() if key in names}
        whole: dict[str, Any] = {"job": "job", **known, "plan": plan, "folder": Path(str(table.get("folder", ".")))}
        try:
            run = cls(**whole)
        except SpecError as error:
            said = {problem.where for problem in problems}
            raise SpecError([*problems, *(one for one in error.problems if one.where not in said)]) from None
        if problems:
            raise SpecError(problems)
        return run


def keeps_from_going_back(plan: Plan) -> str:
    """Why a run under ``plan`` cannot go back to a checkpoint by itself; empty where it can."""
    if plan.server:
        return "servers have taken gradients of other steps in meanwhile"
    if plan.sync != "each":
        return "replicas step by themselves, and one alone cannot go back"
    if plan.shares:
        return "shares of later steps have been dealt out already"
    return ""


def _of_going_on(run: RunSpec) -> list[Problem]:
    """What is wrong in when a run saves, and in what it goes on from."""
    problems: list[Problem] = []
    every, grace = run.checkpoint_every, run.grace
    if not _is_interval(every):
        allowed = f"steps, 0 or more, or a time above 0 in {DURATION_UNITS}; 0: a checkpoint at the end only"
        problems.append(_wrong("checkpoint_every", repr(every), allowed, 'checkpoint_every="15m"'))
    if run.mirror is not None and not (isinstance(run.mirror, str) and "://" in run.mirror):
        allowed, fix = (
            "a URL that fsspec reaches: s3://, gs://, abfs://, sftp://, file://",
            'mirror="s3://bucket/runs/1"',
        )
        problems.append(_wrong("mirror", repr(run.mirror), allowed, fix))
    elif run.mirror and (found := _PASSWORD.match(run.mirror)):
        scheme, user, rest = found.groups()
        on_s3 = scheme.startswith("s3")
        given = "a URL with a password before @, which would stand in run.toml and in what a launch sends"
        variable = "AWS_SECRET_ACCESS_KEY" if on_s3 else f"FSSPEC_{scheme.upper()}_PASSWORD"
        allowed = f"a URL without: fsspec takes it from {variable} or ~/.config/fsspec, where the workers run"
        name = f"{user}@" if user and not on_s3 else ""
        problems.append(_wrong("mirror", given, allowed, f'mirror="{scheme}://{name}{rest}"'))
    if not (is_number(grace) and grace >= 0):
        problems.append(_wrong("grace", repr(grace), "seconds, 0 or more", "grace=30"))
    if isinstance(run.resume, str) and run.resume != "auto":
        problems.append(_wrong("resume", repr(run.resume), _KINDS["resume"].allowed, _KINDS["resume"].fix))
    if run.from_step is not None and run.resume is not True:
        given = f"from_step={run.from_step!r} with resume={run.resume!r}"
        problems.append(_wrong("from_step", given, "only together with resume=True", "resume = true"))
    return problems


def _of_resizing(run: RunSpec) -> list[Problem]:
    """What is wrong in how the number of devices may change."""
    return elastic_problems(run.asked_plan or run.plan, run.devices) if run.devices is not None else []


def _is_interval(given: object) -> bool:
    """Return True if it is a number of optimizer steps, 0 or more, or a time such as ``15m``."""
    if not isinstance(given, str):
        return is_whole(given, 0)
    with suppress(ValueError):
        return parse_duration(given) > 0
    return False


def _wrong(name: str, given: str, allowed: str, fix: str) -> Problem:
    return Problem(where=f"run.{name}", given=given, allowed=allowed, fix=fix)


def override(job: Job, run: RunSpec) -> Job:
    """``job`` with the batch, steps or epochs that ``run`` states; a run that goes on has values of its own.

    It has those of all parameters, unless its checkpoints hold what is trained alone.
    """
    if run.resume is True and run.checkpoint == "all":
        job = replace(job, initial=None)
    if run.batch is not None:
        job = replace(job, batch=run.batch)
    if run.steps is not None:
        job = replace(job, steps=run.steps, epochs=None)
    if run.epochs is not None:
        job = replace(job, epochs=run.epochs, steps=None)
    return job
