"""The option ``--html``: the same answer as one page with charts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from phalanx.errors import Problem, SpecError


def html_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option ``--html FILE``."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--html", type=kind, help="Write the answer as one page with charts into this file.")(function)


def write(path: Path, text: str) -> None:
    """Write a page.

    Raises:
        SpecError: if it cannot be written there.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        allowed = "a file in a folder that exists and can be written to"
        given = f"{path}: {error.strerror}"
        raise SpecError([Problem(where="--html", given=given, allowed=allowed, fix="--html plan.html")]) from None
    click.echo(f"wrote {path}", err=True)
