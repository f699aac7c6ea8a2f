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
            ends = [f"{key}={choice}" for choice in _choices(key) if choice.startswith(value)]
        else:
            used = {one.partition("=")[0] for one in head.split()}
            keys = [field.name for field in fields(Plan) if field.name not in used]
            ends = [f"{name}=" for name in keys if name.startswith(word)]
        return [CompletionItem(f"{head}{gap}{end}") for end in ends]


def _choices(key: str) -> tuple[str, ...]:
    if key == "zero":
        return ("1", "2", "3")
    if key in plan.TRUTHS:
        return ("true", "false")
    return get_args(getattr(plan, key.capitalize(), None))


def job_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The argument JOB, a file or module that says what to train."""
    return click.argument("job", type=JobReference())(set_option("job")(function))


def set_option(argument: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option ``--set NAME=VALUE``, which overrides what the job in ``argument`` declares."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            pairs = options.pop("overrides")
            if pairs:
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
