"""What goes to stdout and what to stderr. With ``--json``, stdout carries one JSON document and nothing else."""

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
from dataclasses import asdict, replace
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TextIO

import click

from phalanx.errors import PhalanxError, Problem, RefusedError, SpecError
from phalanx.events import finite
from phalanx.units import visible

if TYPE_CHECKING:
    from phalanx.launch.targets.target import Prepared

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
    from phalanx.report.render import PlainConsole

    console = PlainConsole()
    console.print(view(console.width), highlight=False)


def show_prepared(prepared: Prepared, *, as_json: bool) -> None:
    """Print all that a launch would write and run."""
    if as_json:
        print_json(prepared.to_dict())
    else:
        click.echo(prepared.shown())


def show_error(error: PhalanxError, *, as_json: bool) -> None:
    """Print an error that was raised on purpose: one block on stderr, and its content as JSON on stdout if asked."""
    word = "refused" if isinstance(error, RefusedError) else "error"
    problems = [_as_options(one) for one in error.problems] if isinstance(error, SpecError) else []
    if len(problems) > 1:
        text = f"{len(problems)} things are wrong\n" + "\n".join(f"- {problem}" for problem in problems)
    else:
        text = str(problems[0]) if problems else _worded(error)
    notes = list(getattr(error, "__notes__", ()))
    text = visible("\n\n".join([text, *notes]))
    click.echo(f"{click.style(word, fg='red', bold=True)}: {text}", err=True)
    if as_json:
        message = "\n".join(map(str, problems)) if problems else _worded(error)
        told = {"kind": type(error).__name__, "message": message, "notes": notes}
        told |= {"problems": [asdict(problem) for problem in problems], "exit_code": error.exit_code}
        print_json({"error": told})


_ARGUMENT = re.compile(r"""(\w+)=("[^"]*"|'[^']*'|[^\s,]+)(?:, |$)""")
_SHORT = {"devices": "-n", "from_step": "--from", "folder": "--run", "cluster": "--on"}
_WORDS = {("forecast", "anyway"): "--anyway", ("forecast", "none"): "--no-forecast", ("resume", "True"): "--resume"}
_SETTING = re.compile(
    r"""(?<![\w.(])(?:resume|folder|from_step|plan|cluster|launcher|forecast|mirror|lr_scale|drift|on_nonfinite|on_spike|check)="""
    r"""(?:"[^"]*"|'[^']*'|True|[\d.]*\d)(?:, (?=\w+=))?"""
)  # those that errors advise besides what else there is to do
_HINT = re.compile(r"^ *(?:try|what to do): .*", re.MULTILINE)


def _as_options(problem: Problem) -> Problem:
    """A problem whose way out is an argument in Python, with the option of the command line in its place."""
    if problem.where == "cluster":
        problem = replace(problem, where="--on", fix=problem.fix.replace("batch=", "--batch "))
    if not problem.where.startswith("run.") or _ARGUMENT.sub("", problem.fix):
        return replace(problem, fix=_options_in(problem.fix))
    return replace(problem, fix=" ".join(_option(name, value) for name, value in _ARGUMENT.findall(problem.fix)))


def _option(name: str, value: str) -> str:
    """An argument in Python as an option."""
    plain = value.strip("\"'")
    shown = shlex.quote(plain) if name == "folder" else f'"{plain}"' if "=" in plain else plain
    return _WORDS.get((name, plain), f"{_SHORT.get(name, '--' + name.replace('_', '-'))} {shown}")


def _worded(error: PhalanxError) -> str:
    """What a run failed by, with options in its advice."""
    return _HINT.sub(lambda line: _options_in(line[0]), str(error))


def _options_in(line: str) -> str:
    """A line of advice with options in place of settings of a run."""

    def option(found: re.Match[str]) -> str:
        name, _, value = found[0].removesuffix(", ").partition("=")
        return _option(name, value) + (" " if found[0].endswith(", ") else "")

    return _SETTING.sub(option, re.sub(r'px\.prove\(job, (".*?")\)', r"phalanx prove FILE:job --plan \1", line))


class Outlet(io.RawIOBase):
    """One of the process's own streams, which may go away while the process goes on.

    Whoever reads it may have seen enough (``phalanx train JOB | head``), its terminal may be gone, the disk it is
    written to full. Then the rest goes nowhere: what a run prints is no reason to end it.

    Attributes:
        error: why; ``None`` as long as everything went there.
    """

    def __init__(self, descriptor: int) -> None:
        self.error: OSError | None = None
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: Any) -> int | None:
        try:
            return os.write(self._descriptor, content)
        except BlockingIOError:
            return None
        except OSError as error:
            self.error = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)  # for workers, too, and what they start
            os.close(nowhere)
            return len(content)

    @property
    def lost(self) -> str:
        """Why part of what was written is nowhere; empty where it is not, or nobody wanted to see it."""
        gone = self.error is None or self.error.errno in (errno.EPIPE, errno.EIO)
        return "" if gone or self.error is None else str(self.error.strerror)


@contextmanager
def streams_that_may_end() -> Iterator[Outlet | None]:
    """Within, the process's stdout and stderr may go away; gives the outlet of stdout.

    Nothing happens where they are not the process's own, such as in a test, and ``None`` is given.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by whoever started this process: else the next file opened would take its place
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
    """The stream anew over an ``Outlet``; ``None`` where it is not the process's own."""
    own = sys.__stdout__ if descriptor == 1 else sys.__stderr__
    if stream is not own or not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        if stream.fileno() != descriptor:
            return None
        stream.flush()
    except (OSError, ValueError):
        return None
    buffer = io.BufferedWriter(Outlet(descriptor))
    lines = stream.line_buffering or descriptor == 2
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=lines)
