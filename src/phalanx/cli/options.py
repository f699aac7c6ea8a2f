"""Options that several verbs share: the job, the plan, and how a plan is completed in a shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from phalanx.errors import Problem, SpecError
from phalanx.spec import Plan, plan


class PlanText(click.ParamType):
    """A plan: a line such as ``fsdp=2 zero=3``, or the path of a plan.toml."""

    name = "plan"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Plan:
        """The plan that ``value`` stands for.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        if isinstance(value, Plan):
            return value
        if not value.endswith(".toml"):
            return Plan.parse(value)
        try:
            return Plan.from_toml(Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(
                [
                    Problem(
                        where="--plan",
                        given=f"{value}: {error.strerror}",
                        allowed="a plan such as dp=2, or a TOML file of plan keys",
                        fix="--plan dp=2",
                    )
                ]
            ) from None

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
    return click.argument("job", type=_JobReference())(function)


class _JobReference(click.ParamType):
    name = "job"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]
