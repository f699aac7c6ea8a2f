"""Options of several verbs: the job, its values, the plan, and one option for each field of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from phalanx.config import Plan, RunSpec, plan
from phalanx.config.run import Resume
from phalanx.errors import SpecError
from phalanx.files import read_text
from phalanx.units import DURATION_UNITS, parse_duration

Command = Callable[..., Any]

ANY_PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


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
        """Complete keys of a plan, and the values of keys that have few."""
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


def plan_option(text: str, **more: Any) -> Callable[[Command], Command]:
    """Return the option ``--plan``."""
    return click.option("--plan", type=PlanText(), help=text, **more)


def job_argument(function: Command) -> Command:
    """Add the argument JOB, a file or module, and ``--set``."""
    return click.argument("job", shell_complete=complete_file)(set_option("job")(function))


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete names of files."""
    return [CompletionItem(incomplete, type="file")]


def set_option(argument: str) -> Callable[[Command], Command]:
    """Return the option ``--set NAME=VALUE``, which overrides values that the job in ``argument`` declares."""

    def decorate(function: Command) -> Command:
        @wraps(function)
        def call(*args: Any, overrides: tuple[str, ...], **options: Any) -> Any:
            if overrides:
                from phalanx.launch.jobfile import with_values

                options[argument] = with_values(options[argument], named_values(options[argument], overrides))
            return function(*args, **options)

        text = "Value in place of one that the job declares by px.param; may be repeated."
        return click.option("--set", "overrides", metavar="NAME=VALUE", multiple=True, help=text)(call)

    return decorate


def named_values(reference: str, pairs: tuple[str, ...], several: str = "") -> dict[str, str]:
    """Return the texts behind ``NAME=`` by name; ``several`` says how more values of a name are written."""
    values: dict[str, str] = {}
    for pair in pairs:
        if Path(reference).is_dir() or reference.endswith(".json"):
            allowed = "a job, whose function calls px.param: this is a folder or a configuration"
            raise SpecError.of("--set", f"{pair} with {reference}", allowed, "phalanx train train.py --set lr=1e-3")
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier() or (several and "" in map(str.strip, value.split(","))):
            allowed = f"NAME=VALUE{several} of a name that the job declares"
            raise SpecError.of("--set", repr(pair), allowed, f"--set lr=1e-3{several and ',3e-4'}")
        if name in values:
            raise SpecError.of("--set", f"{name} twice", "each name behind one --set", f"--set {pair}")
        values[name] = value
    return values


def duration(text: str) -> float:
    """Return the seconds in ``90m``, ``24h`` or ``3d``. Raises BadParameter unless it is a time above 0."""
    try:
        return parse_duration(text)
    except ValueError:
        message = f"{text!r} is not a time above 0 in {DURATION_UNITS}.\n    try: 24h"
        raise click.BadParameter(message) from None


class RunCommand(click.Command):
    """A verb with the options of a run: ``--resume`` takes no value but the word ``auto``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        following = [*args, ""][1:]
        alone = [one == "--resume" and after != "auto" for one, after in zip(args, following, strict=True)]
        return super().parse_args(
            ctx, ["--resume=yes" if by_itself else one for one, by_itself in zip(args, alone, strict=True)]
        )


def steps_or_time(text: str) -> int | str:
    """Return a number of steps as a number, and a time, which RunSpec checks, as text."""
    return int(text) if text.isdecimal() else text


_TYPES: dict[Any, Any] = {
    **dict.fromkeys((int, int | None), click.INT),
    **dict.fromkeys((float, float | None), click.FLOAT),
    str | None: click.STRING,
    int | str: steps_or_time,
    Plan: PlanText(),
    Path: FOLDER,
    Resume: click.Choice(["yes", "auto"]),
}
_HINTS = get_type_hints(RunSpec)
_OPTIONS = {field.name: field for field in fields(RunSpec) if "help" in field.metadata}
FLAGS = {name: field.metadata.get("flag", f"--{name.replace('_', '-')}") for name, field in _OPTIONS.items()}
FLAGS |= {"cluster": "--on"}


def run_options(function: Command) -> Command:
    """Add an option for each field of RunSpec that has a help text, by the field's name."""
    forecast = [
        click.option("--anyway", "forecast", flag_value="anyway", help="Train a plan that is forecast not to fit."),
        click.option("--no-forecast", "forecast", flag_value="none", help="Make no forecast."),
    ]
    for option in reversed([*map(_option, _OPTIONS.values()), *forecast]):
        function = option(function)
    return function


def _option(field: Field[Any]) -> Callable[[Command], Command]:
    name, default, hint, text = field.name, field.default, _HINTS[field.name], field.metadata["help"]
    kind = click.Choice(get_args(hint)) if get_origin(hint) is Literal else _TYPES[hint]
    if default not in (None, False, MISSING):
        text = f"{text.removesuffix('.')} [{f'{default:g}' if isinstance(default, float) else default}]."
    return click.option(FLAGS[name], name, type=kind, metavar="[auto]" if hint == Resume else None, help=text)
