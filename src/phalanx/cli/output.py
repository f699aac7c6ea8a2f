"""What goes to stdout and what to stderr. With ``--json``, stdout carries one JSON document and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from functools import update_wrapper
from typing import Any

import click

from phalanx.errors import PhalanxError, RefusedError, SpecError
from phalanx.events import finite

STOPPED = 130  # exit code after Ctrl-C


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option ``--json``, as ``as_json``.

    With it, whatever the command and its workers print to stdout goes to stderr; the command prints its answer by
    ``print_json``.
    """

    def run(*args: Any, as_json: bool, **kwargs: Any) -> Any:
        with only_answers_on_stdout() if as_json else nullcontext():
            return function(*args, as_json=as_json, **kwargs)

    return click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON on stdout.")(
        update_wrapper(run, function)
    )


_answers: list[Any] = []


@contextmanager
def only_answers_on_stdout() -> Iterator[None]:
    """Within the block, stdout is for ``print_json`` alone; everything else goes to stderr."""
    _answers.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON document; numbers that JSON does not know become null."""
    stdout = _answers[-1] if _answers else sys.stdout
    print(json.dumps(finite(value), indent=2, default=str), file=stdout, flush=True)


def answer(as_json: bool, told: dict[str, Any], view: Callable[[int], Any]) -> None:
    """Print the answer: ``told`` as JSON, or what ``view`` makes of it for a terminal of so many columns."""
    if as_json:
        print_json(told)
        return
    from rich.console import Console

    console = Console()
    console.print(view(console.width), highlight=False)


def show_error(error: PhalanxError, *, as_json: bool) -> None:
    """Print an error that was raised on purpose: one block on stderr, and its content as JSON on stdout if asked."""
    word = "refused" if isinstance(error, RefusedError) else "error"
    problems = error.problems if isinstance(error, SpecError) else ()
    if len(problems) > 1:
        text = f"{len(problems)} things are wrong\n" + "\n".join(f"- {problem}" for problem in problems)
    else:
        text = str(error)
    notes = list(getattr(error, "__notes__", ()))
    text = "\n\n".join([text, *notes])
    click.echo(f"{click.style(word, fg='red', bold=True)}: {text}", err=True)
    if as_json:
        told = {"kind": type(error).__name__, "message": str(error), "notes": notes}
        told |= {"problems": [asdict(problem) for problem in problems], "exit_code": error.exit_code}
        print_json({"error": told})
