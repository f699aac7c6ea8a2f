"""Output of verbs: the answer on stdout, everything else on stderr. With ``--json`` stdout is one JSON document."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, TextIO

import click

from phalanx.cli.options import FLAGS
from phalanx.errors import PhalanxError, Problem, RefusedError, SpecError
from phalanx.events import finite
from phalanx.units import visible

NO, STOPPED = 1, 130  # exit codes: the answer is no; after Ctrl-C


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a verb: ``told`` as JSON, or for a terminal the text, or rich's view by its number of columns."""

    told: dict[str, Any] = field(default_factory=dict)
    shown: str | Callable[[int], Any] = ""
    code: int = 0

    def show(self, *, as_json: bool) -> None:
        """Print it to stdout."""
        if as_json:
            if self.told:
                print_json(self.told)
        elif isinstance(self.shown, str):
            click.echo(self.shown, nl=bool(self.shown))
        else:
            from phalanx.report.render import PlainConsole

            console = PlainConsole()
            console.print(self.shown(console.width), highlight=False)


def json_option(function: Callable[..., Answer | None]) -> Callable[..., Any]:
    """Add the option ``--json``, print the ``Answer`` that the command returns, and exit with its code.

    With ``--json``, other output of the command and its workers goes to stderr.
    """

    def run(*args: Any, as_json: bool, **kwargs: Any) -> None:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            answer = function(*args, **kwargs) or Answer()
        answer.show(as_json=as_json)
        click.get_current_context().exit(answer.code)

    option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON on stdout.")
    return option(update_wrapper(run, function))


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON document; numbers unknown to JSON become null."""
    print(json.dumps(finite(value), indent=2, default=str), flush=True)


def write_page(path: Path, text: str, option: str = "--html") -> None:
    """Write a page or picture into the file given by ``option``. Raises SpecError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        given, fix = f"{path}: {getattr(error, 'strerror', None) or error}", f"{option} {path.name or 'file'}"
        raise SpecError.of(option, given, "a file in a folder that exists and can be written to", fix) from None
    if option != "-o":
        click.echo(f"wrote {path}", err=True)


def show_error(error: PhalanxError, *, as_json: bool) -> None:
    """Print an error that was raised on purpose to stderr, and as JSON to stdout if asked."""
    problems = [_with_options(one) for one in error.problems] if isinstance(error, SpecError) else []
    message = "\n".join(map(str, problems)) or _HINT.sub(lambda line: _options_in(line[0]), str(error))
    notes = list(getattr(error, "__notes__", ()))
    text = f"{len(problems)} things are wrong\n- " + "\n- ".join(map(str, problems)) if problems[1:] else message
    word = click.style("refused" if isinstance(error, RefusedError) else "error", fg="red", bold=True)
    text = visible("\n\n".join([text, *notes]))
    click.echo(f"{word}: {text}", err=True)
    if as_json:
        told = {"kind": type(error).__name__, "message": message, "notes": notes}
        print_json({"error": told | {"problems": [asdict(one) for one in problems], "exit_code": error.exit_code}})


_ARGUMENT = re.compile(r"""(\w+)=("[^"]*"|'[^']*'|[^\s,]+)(?:, |$)""")
_WORDS = {("forecast", "anyway"): "--anyway", ("forecast", "none"): "--no-forecast"}
_FLAGS = ("adapter", "merged", "averaged")
_PLACES = {"cluster": "--on", "target": "OUT", "run": "RUN", **{name: f"--{name}" for name in _FLAGS}}
_SETTING = re.compile(
    r"""(?<![\w.(])(resume|folder|from_step|plan|cluster|launcher|forecast|mirror|lr_scale|drift|on_nonfinite|on_spike|check"""
    r"""|adapter|merged)=("[^"]*"|'[^']*'|True|[\d.]*\d)(, (?=\w+=))?"""
)  # arguments in the advice of errors
_CALLS = {
    r'px\.prove\(job, (".*?")\)': r"phalanx prove FILE:job --plan \1",
    r"px\.load\(folder, job\(\)\)(\.save_pretrained\(.*\))?": "phalanx export RUN OUT --job train.py",
    r"run\.save_pretrained\(target\)": "phalanx export RUN OUT",
}
_HINT = re.compile(r"^ *(?:try|what to do): .*", re.MULTILINE)


def _with_options(problem: Problem) -> Problem:
    """Return ``problem`` with options of the command line in place of Python's arguments."""
    fix = problem.fix.replace("batch=", "--batch ") if problem.where == "cluster" else problem.fix
    if problem.where.startswith("run.") and not _ARGUMENT.sub("", fix):
        fix = " ".join(_option(name, value) for name, value in _ARGUMENT.findall(fix))
    where = _PLACES.get(problem.where, problem.where)
    allowed = _options_in(problem.allowed) if where.startswith("--") else problem.allowed
    return replace(problem, where=where, allowed=allowed, fix=_options_in(fix))


def _option(name: str, value: str) -> str:
    plain, flag = value.strip("\"'"), FLAGS.get(name, f"--{name.replace('_', '-')}")
    shown = shlex.quote(plain) if name == "folder" else f'"{plain}"' if "=" in plain else plain
    return _WORDS.get((name, plain)) or (flag if plain == "True" else f"{flag} {shown}")


def _options_in(line: str) -> str:
    for call, verb in _CALLS.items():
        line = re.sub(call, verb, line)
    return _SETTING.sub(lambda found: _option(found[1], found[2]) + (" " if found[3] else ""), line)


class Outlet(io.FileIO):
    """A standard stream that may close while the process goes on, as in ``phalanx train JOB | head``.

    The rest of the output is then dropped: a run does not end because its output cannot be printed.
    """

    lost = ""

    def write(self, content: Any) -> int | None:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # else its reader has ended
                self.lost = str(error.strerror)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for workers, too, and what they start
            os.close(nowhere)
            return len(content)


@contextmanager
def streams_that_may_end() -> Iterator[Outlet | None]:
    """Let the process's stdout and stderr close within the block; yield the outlet of stdout.

    Yields None if stdout is not the process's own, such as in a test.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed before the process began: else the next file opened would take its place
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    outlets = [_outlet(stream, number) for number, stream in enumerate(before, 1)]
    sys.stdout, sys.stderr = (new or old for new, old in zip(outlets, before, strict=True))
    try:
        yield outlets[0].buffer.raw if outlets[0] else None  # pyrefly: ignore
    finally:
        for stream in outlets:
            if stream:
                stream.flush()
        sys.stdout, sys.stderr = before


def _outlet(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper | None:
    own = sys.__stdout__ if descriptor == 1 else sys.__stderr__
    if stream is not own or not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        if stream.fileno() != descriptor:
            return None
        stream.flush()
    except (OSError, ValueError):
        return None
    lines = stream.line_buffering or descriptor == 2
    buffer = io.BufferedWriter(Outlet(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=lines)
