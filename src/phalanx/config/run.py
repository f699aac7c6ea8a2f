"""A run's own settings: which job, which plan, how long, where to. Workers are started with it, as ``run.toml``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from phalanx.config.elastic import DeviceRange, elastic_problems
from phalanx.config.fields import SelfChecked, Veto, from_table, is_whole, option
from phalanx.config.job import Job
from phalanx.config.plan import Plan
from phalanx.errors import Problem, SpecError
from phalanx.files import toml_table
from phalanx.units import DURATION_UNITS, parse_duration

Foresight = Literal["refuse", "anyway", "none"]
Answer = Literal["stop", "skip", "rollback"]
Content = Literal["all", "trainable"]
Resume = bool | Literal["auto"]
Check = Literal["first-step", "off"]
DriftPolicy = Literal["stop", "warn", "off"]

TIMEOUT = 300.0
"""Default seconds that ranks wait for each other, enough for one that compiles a model or reads a slow disk."""

DRIFT_EVERY = 10
"""Default optimizer steps between comparisons of a fifth of the parameters: all within 50 steps."""

NOT_IN_FILE = ("asked_plan",)
"""Fields of a ``RunSpec`` that no run file has."""

_PASSWORD = re.compile(r"([\w+.-]+)://([^/?#:]*):[^/?#]*@(.*)")  # a URL's scheme, user, and what is after its password


def _interval(given: object) -> bool:
    if not isinstance(given, str):
        return is_whole(given, 0)
    try:
        return parse_duration(given) > 0
    except ValueError:
        return False


_PLAN = {
    "allowed": "a plan as one line of text",
    "read": Plan.parse,
    "example": 'plan="dp=2"',
    "help": 'How to split the work: "dp=2", "fsdp=2 zero=3 micro=8", or a plan.toml.',
}
_FOLDER = {  # a line break would begin a command of its own in a batch script
    "accepts": lambda given: isinstance(given, Path) and str(given).isprintable(),
    "allowed": "a path, one printable line",
    "read": Path,
    "example": 'folder="runs/digits-1"',
    "flag": "--run",
    "help": "Run folder [runs/JOB-N].",
}
_INTERVAL = {
    "accepts": _interval,
    "allowed": f"steps, 0 or more, or a time above 0 in {DURATION_UNITS}; 0: a checkpoint at the end only",
    "example": 'checkpoint_every="15m"',
    "help": "Steps or time (90s, 15m, 2h) between checkpoints.",
}
_MIRROR = {
    "accepts": lambda given: given is None or (isinstance(given, str) and "://" in given),
    "allowed": "a URL that fsspec reaches: s3://, gs://, abfs://, sftp://, file://",
    "example": 'mirror="s3://bucket/runs/1"',
    "help": "Copy checkpoints to this URL, such as s3://bucket/runs/1.",
}


def keeps_from_going_back(plan: Plan) -> str:
    """Return why a run under ``plan`` cannot go back to a checkpoint by itself, or ""."""
    if plan.server:
        return "servers have taken gradients of other steps in meanwhile"
    if plan.sync != "each":
        return "replicas step by themselves, and one alone cannot go back"
    return "shares of later steps have been dealt out already" if plan.shares else ""


def _without_password(run: Any) -> tuple[str, str]:
    """Return the variable that fsspec takes the password of the mirror from, and the mirror's URL without it."""
    scheme, user, rest = _PASSWORD.match(run.mirror).groups()  # pyrefly: ignore
    if scheme.startswith("s3"):
        return "AWS_SECRET_ACCESS_KEY", f"{scheme}://{rest}"
    return f"FSSPEC_{scheme.upper()}_PASSWORD", f"{scheme}://{user and user + '@'}{rest}"


_RULES = (
    Veto(
        "mirror",
        lambda run: run.mirror and _PASSWORD.match(run.mirror),
        "a URL with a password before @, which would stand in run.toml and in what a launch sends",
        lambda run: (
            f"a URL without: fsspec takes it from {_without_password(run)[0]} or ~/.config/fsspec, "
            "where the workers run"
        ),
        lambda run: f'mirror="{_without_password(run)[1]}"',
    ),
    Veto(
        "from_step",
        lambda run: run.from_step is not None and run.resume is not True,
        "from_step={from_step} with resume={resume}",
        "only together with resume=True",
        "resume=True",
    ),
    Veto(
        "epochs",
        lambda run: run.epochs is not None and run.steps is not None,
        "epochs and steps",
        "one of the two",
        "steps=100",
    ),
    Veto(
        "on_spike",
        lambda run: run.spike is None and run.on_spike != "stop",
        "{on_spike!r} without spike, so that none is looked for",
        "together with spike",
        'spike=10, on_spike="{on_spike}"',
    ),
    *(
        Veto(
            name,
            lambda run, name=name: getattr(run, name) == "rollback" and keeps_from_going_back(run.plan),
            "'rollback' with plan {plan}",
            lambda run: f"stop or skip: {keeps_from_going_back(run.plan)}",
            f'{name}="skip"',
        )
        for name in ("on_nonfinite", "on_spike")
    ),
    Veto(
        "checkpoint",
        lambda run: run.checkpoint != "all" and (run.plan.server or run.plan.sync != "each"),
        "{checkpoint!r} with plan {plan}",
        "all with servers and with replicas that step apart",
        'checkpoint="all"',
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec(SelfChecked, where="run", rules=_RULES):
    """The settings of a run.

    Attributes:
        job: place of the job: ``path/to/file.py`` (its ``job()``), ``path/to/file.py:name`` or ``package.module:name``.
        plan: the layout over devices.
        folder: the run folder, a path or its text.
        resume: resume from the folder's newest checkpoint; ``auto``: if it holds a whole one.
        from_step: resume from the checkpoint of this step; later ones are set aside.
        batch: global batch in place of the job's own.
        epochs: in place of the job's own.
        steps: in place of the job's own.
        lr_scale: factor on every learning rate, such as the linear scaling rule's after a change of the batch.
        checkpoint_every: optimizer steps between checkpoints, or time by the clock of rank 0, such as ``90s``, ``15m``
            or ``2h``; one more is written at the end. 0: at the end only.
        checkpoint: parameters in a checkpoint: ``all``, or the ``trainable`` ones, with buffers, for models of which
            much is frozen (adapters). A resumed run takes the others from the job, and refuses changed ones.
        keep: checkpoints kept; older ones are deleted.
        keep_every: checkpoints whose step is a multiple of this are kept as well.
        mirror: URL of a folder that each checkpoint is copied to, such as ``s3://bucket/runs/digits-1``. A resumed run
            fetches the newest from there if it is newer than its own folder's. It holds no password: fsspec takes one
            from ``FSSPEC_SFTP_PASSWORD`` or the like, or from ``~/.config/fsspec``.
        grace: seconds for the last checkpoint after a request to stop; 0: none is written.
        restarts: restarts of all workers from the newest checkpoint after one is lost.
        devices: fewest and most devices of the run, such as ``1:4``: it begins with the most available, and continues
            with fewer if workers are lost repeatedly. ``None``: as many as ``plan`` needs.
        log_every: optimizer steps between ``step`` events; the first and the last are always written.
        on_nonfinite: action before an update by a number that is not finite. ``stop`` ends the run; ``skip`` leaves the
            update out; ``rollback`` returns to the newest checkpoint and then skips it.
        spike: robust standard deviations above the median loss that make a spike; ``None``: no check.
        on_spike: action after a spike.
        timeout: seconds that ranks wait for a rank in an exchange; then a report, and a restart as ``restarts`` allows.
        drift: action if replicas' parameters differ: ``stop``, ``warn``, or ``off``, do not check.
        drift_every: optimizer steps between comparisons of a fifth of the parameters.
        forecast: ``refuse`` a plan that is forecast not to fit; run it ``anyway``; or ``none``, make no forecast.
        check: ``first-step`` compares the first step with one device, and stops the run if they differ; ``off``.
        asked_plan: the plan that was asked for, if ``plan`` is resized from it; a run file holds it as ``plan``.
    """

    job: str = field(metadata={"example": 'job="examples/digits.py"'})
    plan: Plan = field(metadata=_PLAN)
    devices: str | None = option(
        None,
        'devices="1:4"',
        allowed="LEAST:MOST, such as 1:4",
        flag="-n",
        help="Devices, or 1:4: 1 to 4; without a plan as many replicas.",
    )
    folder: Path = field(metadata=_FOLDER)
    resume: Resume = option(
        False,
        'resume="auto"',
        allowed='true, false or "auto"',
        help="Resume from the newest checkpoint; auto: if there is one.",
    )
    from_step: int | None = option(None, least=0, flag="--from", help="Resume from the checkpoint of this step.")
    batch: int | None = option(None, least=1, help="Global batch, in place of the job's.")
    lr_scale: float = option(1.0, "lr_scale=2", above=0, help="Factor on every learning rate.")
    steps: int | None = option(None, least=1, help="Optimizer steps, in place of the job's length.")
    epochs: int | None = option(None, least=1, help="Passes over the data, in place of the job's length.")
    checkpoint_every: int | str = option("15m", **_INTERVAL)
    checkpoint: Content = option("all", help="Parameters that checkpoints hold.")
    keep: int = option(2, least=1, help="Checkpoints to keep.")
    keep_every: int | None = option(None, least=1, help="Keep also checkpoints whose step is a multiple of this.")
    mirror: str | None = option(None, **_MIRROR)
    grace: float = option(
        30.0, "grace=30", least=0, of="seconds", help="Seconds for the last checkpoint when asked to stop; 0: none."
    )
    restarts: int = option(3, least=0, help="Restarts of all workers after one is lost.")
    log_every: int = option(1, least=1, help="Steps between lines in events.jsonl.")
    on_nonfinite: Answer = option(
        "stop", 'on_nonfinite="skip"', help="Action on a loss, gradient or parameter that is not finite."
    )
    spike: float | None = option(
        None, "spike=10", above=0, of="deviations", help="Deviations above the median that make a loss a spike."
    )
    on_spike: Answer = option("stop", 'on_spike="skip"', help="Action on a spike.")
    timeout: float = option(
        TIMEOUT, "timeout=600", least=1, most=86_400, of="seconds", help="Seconds that ranks wait for a missing rank."
    )
    drift: DriftPolicy = option("stop", help="Action if replicas differ.")
    drift_every: int = option(DRIFT_EVERY, least=1, help="Steps between comparisons of a fifth of the parameters.")
    forecast: Foresight = "refuse"
    check: Check = option("first-step", help="Compare the first step with one device, or not.")
    asked_plan: Plan | None = option(None, in_file=False)

    def settle(self) -> None:
        """Take a plan and a folder given as text."""
        if isinstance(self.plan, str):
            object.__setattr__(self, "plan", Plan.parse(self.plan))
        if isinstance(self.folder, str):
            object.__setattr__(self, "folder", Path(self.folder))

    def more_problems(self) -> list[Problem]:
        """Return the problems of a run whose number of devices may change."""
        plan = self.asked_plan or self.plan
        return elastic_problems(plan, self.devices) if isinstance(self.devices, str) and isinstance(plan, Plan) else []

    @property
    def rolls_back(self) -> bool:
        """True if the run may go back to its newest checkpoint by itself."""
        return "rollback" in (self.on_nonfinite, self.on_spike)

    @property
    def save_steps(self) -> int:
        """Optimizer steps between checkpoints; 0 if they are counted in time, or written at the end only."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def save_seconds(self) -> float:
        """Seconds between checkpoints; 0 if they are counted in steps, or written at the end only."""
        return parse_duration(self.checkpoint_every) if isinstance(self.checkpoint_every, str) else 0.0

    @property
    def device_range(self) -> DeviceRange | None:
        """``devices`` as numbers; ``None`` if the plan's number is fixed."""
        return None if self.devices is None else DeviceRange.parse(self.devices, "run.devices")

    def resized_to(self, plan: Plan) -> RunSpec:
        """Return the run under ``plan``, its own plan on another number of devices."""
        return replace(self, plan=plan, asked_plan=self.asked_plan or self.plan)

    @classmethod
    def of(cls, given: RunSpec | str | Path, job: str, **settings: Any) -> RunSpec:
        """Return the run of ``given``, a run or a folder, with ``settings`` in place of its own.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        if isinstance(given, RunSpec):
            return replace(given, **settings)
        whole: dict[str, Any] = {"folder": Path(given), **settings}
        return cls(job=job, **whole)

    def to_toml(self) -> str:
        """Return the run as a TOML document, as it was asked for; fields without a value are left out."""
        table: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name) if one.name != "plan" else self.asked_plan or self.plan
            if value is not None and one.name not in NOT_IN_FILE:
                table[one.name] = str(value) if isinstance(value, Plan | Path) else value
        return tomli_w.dumps(table)

    @classmethod
    def from_toml(cls, text: str) -> RunSpec:
        """Return the run in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        example, problems = 'job = "examples/digits.py"', list[Problem]()
        table = toml_table(text, where="run file", fix=example)
        run = from_table(cls, "run", table, example, problems)
        if run is None:
            raise SpecError(problems)
        return run


def override(job: Job, run: RunSpec) -> Job:
    """Return ``job`` with the batch, steps or epochs of ``run``.

    The initial values of a resumed run are the checkpoint's, unless that holds trainable parameters only.
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
