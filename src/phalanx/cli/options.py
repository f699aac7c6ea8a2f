"""Options that several verbs share: the job, the plan, what is asked about, and the page that ``--html`` writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.shell_completion import CompletionItem

from phalanx.config import Plan, plan
from phalanx.config.plan import Precision
from phalanx.config.run import Answer
from phalanx.errors import Problem, SpecError
from phalanx.files import read_text
from phalanx.units import DURATION_UNITS, parse_duration

if TYPE_CHECKING:
    from phalanx.preflight.subject import Subject


class PlanText(click.ParamType):
    """A plan: a line such as ``fsdp=2 zero=3``, or the path of a plan.toml."""

    name = "plan"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Plan:
        if isinstance(value, Plan):
            return value
        if not value.endswith(".toml"):
            return Plan.parse(value)
        return Plan.from_toml(read_text(Path(value), where="--plan", fix="--plan dp=2", below=0))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Keys of a plan, and the values of those that take one of a few."""
        head, gap, word = incomplete.rpartition(" ")
        key, equals, value = word.partition("=")
        if equals:
            few = {"zero": ("1", "2", "3"), **dict.fromkeys(plan.TRUTHS, ("true", "false"))}
            choices = few.get(key) or get_args(getattr(plan, key.capitalize(), None))
            ends = [f"{key}={choice}" for choice in choices if choice.startswith(value)]
        else:
            used = {one.partition("=")[0] for one in head.split()}
            keys = [field.name for field in fields(Plan) if field.name not in used]
            ends = [f"{name}=" for name in keys if name.startswith(word)]
        return [CompletionItem(f"{head}{gap}{end}") for end in ends]


def job_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The argument JOB, a file or module that says what to train."""
    return click.argument("job", type=JobReference())(set_option("job")(function))


def set_option(argument: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option ``--set NAME=VALUE``, which overrides what the job in ``argument`` declares."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if pairs := options.pop("overrides"):
                options[argument] = _with_overrides(options[argument], pairs)
            return function(*args, **options)

        told = "In place of a value that the job declares by px.param; may be given again."
        return click.option("--set", "overrides", metavar="NAME=VALUE", multiple=True, help=told)(call)

    return decorate


def _with_overrides(reference: str, pairs: tuple[str, ...]) -> str:
    from phalanx.launch.jobfile import with_values

    refuse_params(reference, pairs[0])
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise SpecError.of("--set", repr(pair), "NAME=VALUE, of a name that the job declares", "--set lr=1e-3")
        if name in values:
            raise SpecError.of("--set", f"{name} twice", "one value for a name", f"--set {pair}")
        values[name] = value
    return with_values(reference, values)


def refuse_params(reference: str, pair: str) -> None:
    """Raise a ``SpecError`` where ``reference`` is of something that declares no values, so that ``pair`` sets none."""
    if Path(reference).is_dir() or reference.endswith(".json"):
        allowed = "a job, whose function calls px.param: this is a folder or a configuration"
        raise SpecError.of("--set", f"{pair} with {reference}", allowed, "phalanx train train.py --set lr=1e-3")


class JobReference(click.ParamType):
    """A file or module that says what to train."""

    name = "job"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


PRECISIONS = get_args(Precision)


profile_option = click.option(
    "--profile",
    type=click.Choice(["trace", "measure"]),
    default="trace",
    help="Run the model on stand-ins, or, where its shapes depend on values, a step on samples of the data.",
)


def subject_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The argument WHAT, and the options that say more of the work."""
    options = [
        click.argument("what", metavar="JOB|CONFIG"),
        set_option("what"),
        click.option("--batch", type=int, default=0, help="Global batch, in place of the job's."),
        click.option("--seq", type=int, default=0, help="Tokens in a sample, in place of those of the data."),
        click.option("--steps", type=int, default=0, help="Optimizer steps of the whole training."),
        profile_option,
        click.option("--price", metavar="NUMBER|FILE", help="Of a device for an hour, or a TOML file of prices."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def subject(what: str, *, batch: int, seq: int, steps: int, profile: str = "trace") -> Subject:
    """The work of a job, or of the ``config.json`` of a model.

    Raises:
        SpecError: with what is wrong in the options, or with the job or configuration.
    """
    problems = [
        Problem(where=f"--{name}", given=str(value), allowed="a whole number, 1 or more", fix=f"--{name} {fix}")
        for name, value, fix in (("batch", batch, 1024), ("seq", seq, 4096), ("steps", steps, 10000))
        if value < 0
    ]
    if problems:
        raise SpecError(problems)
    from phalanx.launch.jobfile import load_job
    from phalanx.planner.advise import config_work, is_config
    from phalanx.preflight.subject import Subject

    if is_config(what):
        if profile != "trace":
            allowed = "trace: a configuration has no data to measure with"
            raise SpecError.of(where="--profile", given=profile, allowed=allowed, fix="--profile trace")
        path = Path(what)
        name = path.parent.name if path.suffix == ".json" and path.parent.name else path.stem
        work = config_work(what, batch=batch, length=seq)
        return Subject(name=name, steps=steps, work=lambda: work)
    return Subject.of(load_job(what), batch=batch, length=seq, steps=steps, values=profile == "measure")


def deadline_of(given: str | None) -> float:
    """Seconds from ``90m``, ``24h`` or ``3d``; 0 from ``None``. A ``SpecError`` if it is no time above 0."""
    if given is None:
        return 0.0
    try:
        return parse_duration(given)
    except ValueError:
        allowed = f"a time above 0 in {DURATION_UNITS}"
        raise SpecError.of(where="--deadline", given=repr(given), allowed=allowed, fix="--deadline 24h") from None


def budget_of(given: float | None) -> float:
    """A budget above 0; 0 from ``None``. A ``SpecError`` if it is a budget of nothing."""
    if given is None:
        return 0.0
    if not 0 < given < float("inf"):
        allowed = "more than 0: money with --price, else device-hours"
        raise SpecError.of(where="--budget", given=f"{given:g}", allowed=allowed, fix="--budget 500")
    return given


def html_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option ``--html FILE``."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--html", type=kind, help="Write the answer as one page with charts into this file.")(function)


def write(path: Path, text: str, option: str = "--html") -> None:
    """Write a page or a picture, as ``option`` asks.

    Raises:
        SpecError: if it cannot be written there.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        allowed = "a file in a folder that exists and can be written to"
        given = f"{path}: {getattr(error, 'strerror', None) or error}"
        fix = f"{option} plan.{option.removeprefix('--')}"
        raise SpecError.of(where=option, given=given, allowed=allowed, fix=fix) from None
    click.echo(f"wrote {path}", err=True)


_ANSWERS = click.Choice(get_args(Answer))


class RunCommand(click.Command):
    """Of a run: ``--resume`` stands by itself, or has the word ``auto`` after it; what else follows is not its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        following = [*args, ""][1:]
        alone = [one == "--resume" and after != "auto" for one, after in zip(args, following, strict=True)]
        return super().parse_args(
            ctx, ["--resume=yes" if by_itself else one for one, by_itself in zip(args, alone, strict=True)]
        )


class _Every(click.ParamType):
    """Steps as a number, or a time as text, which ``RunSpec`` looks at."""

    name = "steps|time"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        return int(value) if isinstance(value, str) and value.isdecimal() else value


class _Devices(click.ParamType):
    """How many as a number, or from how many to how many as text, ``1:4``, which ``Given`` looks at."""

    name = "n|least:most"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        return value if isinstance(value, str) and ":" in value else click.INT(value, param, ctx)


_OPTIONS = (
    click.option(
        "--plan", type=PlanText(), help='How to split the work: "dp=2", "fsdp=2 zero=3 micro=8", or a plan.toml.'
    ),
    click.option(
        "-n", "devices", type=_Devices(), help="Devices, or 1:4: 1 to 4; without --plan the same as --plan dp=N."
    ),
    click.option("--run", "folder", type=click.Path(path_type=Path, file_okay=False), help="Run folder [runs/JOB-N]."),
    click.option(
        "--resume",
        type=click.Choice(["yes", "auto"]),
        metavar="[auto]",
        help="Go on from the newest checkpoint in the run folder; auto: if there is one, else begin.",
    ),
    click.option("--from", "from_step", metavar="STEP", type=int, help="Go on from the checkpoint of this step."),
    click.option("--batch", type=int, help="Global batch, in place of the job's."),
    click.option("--lr-scale", type=float, help="Factor on every learning rate."),
    click.option("--steps", type=int, help="Optimizer steps, in place of the job's length."),
    click.option("--epochs", type=int, help="Passes over the data, in place of the job's length."),
    click.option("--checkpoint-every", type=_Every(), help="Steps or time (90s, 15m, 2h) between checkpoints [15m]."),
    click.option(
        "--checkpoint", type=click.Choice(["all", "trainable"]), help="Parameters that checkpoints hold [all]."
    ),
    click.option("--keep", type=int, help="Checkpoints to keep [2]."),
    click.option("--keep-every", type=int, help="Keep also those whose step is a multiple of this."),
    click.option("--mirror", metavar="URL", help="Copy checkpoints to s3://bucket/runs/1 or the like."),
    click.option("--grace", type=float, help="Seconds for the last checkpoint when asked to stop; 0: none [30]."),
    click.option("--restarts", type=int, help="How often lost workers are started again [3]."),
    click.option("--log-every", type=int, help="Steps between lines in events.jsonl [1]."),
    click.option("--on-nonfinite", type=_ANSWERS, help="Of a loss, gradient or parameter that is not finite [stop]."),
    click.option("--spike", type=float, help="Deviations above the median that make a loss a spike [none is one]."),
    click.option("--on-spike", type=_ANSWERS, help="What to do about a spike [stop]."),
    click.option("--timeout", type=float, help="Seconds that ranks wait for one that does not come [300]."),
    click.option("--drift", type=click.Choice(["stop", "warn", "off"]), help="Where replicas are not the same [stop]."),
    click.option("--drift-every", type=int, help="Steps between looks at a fifth of the parameters [10]."),
    click.option("--anyway", "forecast", flag_value="anyway", help="Train even if the plan is forecast not to fit."),
    click.option("--no-forecast", "forecast", flag_value="none", help="Make no forecast."),
    click.option("--check", type=click.Choice(["first-step", "off"]), help="Against one device [first-step]."),
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run, by their names in ``Given``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
