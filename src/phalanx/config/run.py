"""A run's own settings: which job, which plan, how long, where to. Workers are started with it, as ``run.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from phalanx.config.fields import FieldKind, is_number, is_whole, misfits
from phalanx.config.job import Job
from phalanx.config.plan import Plan
from phalanx.errors import Problem, SpecError

Foresight = Literal["refuse", "anyway", "none"]
"""What is made of a run's forecast."""

_LEAST = {"batch": 1, "epochs": 1, "steps": 1, "checkpoint_every": 0, "snapshot_every": 0, "keep": 1, "log_every": 1}
_KINDS = {
    "job": FieldKind(types=(str,), allowed="a text", fix='job = "examples/digits.py"'),
    "plan": FieldKind(types=(str, Plan), allowed="a plan as one line of text", fix='plan = "dp=2"'),
    "folder": FieldKind(types=(str, Path), allowed="a path", fix='folder = "runs/digits-1"'),
    "resume": FieldKind(types=(bool,), allowed="true or false", fix="resume = true"),
}
_SNAPSHOTS = 100
_OPTIONAL = ("batch", "epochs", "steps", "snapshot_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One run.

    Attributes:
        job: where the job is: ``path/to/file.py`` (its ``job()``), ``path/to/file.py:name`` or ``package.module:name``.
        plan: how it is laid over devices.
        folder: the run folder.
        resume: go on from the folder's last checkpoint.
        batch: global batch in place of the job's own.
        epochs: in place of the job's own.
        steps: in place of the job's own.
        lr_scale: factor on every learning rate, such as the linear scaling rule's when the user changed the batch.
        checkpoint_every: optimizer steps between checkpoints; 0: at the end only.
        snapshot_every: with servers, updates between the snapshots that they go back to when one of them is lost: the
            most updates that are lost with it. 0: none, and all are lost. 100 where not given.
        keep: checkpoints kept; older ones are deleted.
        log_every: optimizer steps between ``step`` events; the first and the last are always written.
        forecast: ``refuse`` a plan that is forecast not to fit; run it ``anyway``; or ``none``, make no forecast.
    """

    job: str
    plan: Plan
    folder: Path
    resume: bool = False
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    lr_scale: float = 1.0
    checkpoint_every: int = 0
    snapshot_every: int | None = None
    keep: int = 2
    log_every: int = 1
    forecast: Foresight = "refuse"

    def __post_init__(self) -> None:
        problems = misfits("run", {name: getattr(self, name) for name in _KINDS}, _KINDS)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not is_whole(value, least):
                allowed, fix = f"a whole number, {least} or more", f"--{name.replace('_', '-')} {least + 1}"
                problems.append(_wrong(name, repr(value), allowed, fix))
        if not problems and self.snapshot_every is not None and not self.plan.server:
            given = f"snapshot_every={self.snapshot_every!r} with plan {self.plan}, which has no servers"
            allowed = "only together with server=1 or more; checkpoints are written every checkpoint_every steps"
            problems.append(_wrong("snapshot_every", given, allowed, "--checkpoint-every 100"))
        if self.epochs is not None and self.steps is not None:
            problems.append(_wrong("epochs", "epochs and steps", "one of the two", "--steps 100"))
        if not (is_number(self.lr_scale) and self.lr_scale > 0):
            problems.append(_wrong("lr_scale", repr(self.lr_scale), "a number above 0", "--lr-scale 2"))
        if self.forecast not in get_args(Foresight):
            allowed = ", ".join(get_args(Foresight))
            problems.append(_wrong("forecast", repr(self.forecast), allowed, 'forecast = "anyway"'))
        if problems:
            raise SpecError(problems)

    @property
    def snapshots(self) -> int:
        """Updates between snapshots of servers, where the plan has any; 0: none are written."""
        return _SNAPSHOTS if self.snapshot_every is None else self.snapshot_every

    def to_toml(self) -> str:
        """The run as a TOML document; what was not given is left out."""
        table: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                table[field.name] = str(value) if isinstance(value, Plan | Path) else value
        return tomli_w.dumps(table)

    @classmethod
    def from_toml(cls, text: str) -> RunSpec:
        """The run in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(
                [Problem(where="run file", given=str(error), allowed="a TOML document", fix=_KINDS["job"].fix)]
            ) from None
        names = {field.name for field in fields(cls)}
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


def _wrong(name: str, given: str, allowed: str, fix: str) -> Problem:
    return Problem(where=f"run.{name}", given=given, allowed=allowed, fix=fix)


def override(job: Job, run: RunSpec) -> Job:
    """``job`` with the batch, steps or epochs that ``run`` states."""
    if run.batch is not None:
        job = replace(job, batch=run.batch)
    if run.steps is not None:
        job = replace(job, steps=run.steps, epochs=None)
    if run.epochs is not None:
        job = replace(job, epochs=run.epochs, steps=None)
    return job
