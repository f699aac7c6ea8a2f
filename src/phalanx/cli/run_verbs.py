"""Verbs about runs that exist: ``status``, ``logs``, ``stop``, ``audit`` and ``compare``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from phalanx.cli.options import FOLDER
from phalanx.cli.output import NO, Answer, json_option
from phalanx.errors import RunError, SpecError
from phalanx.files.plain_files import MOST, open_plain
from phalanx.units import visible

_SOON = 0.3  # seconds between reads of a log that grows
_UNCHECKED = (
    "the numbers (phalanx prove compares a plan with one device)",
    "whether replicas were the same (train compares them as it goes, unless --drift off)",
    "whether checkpoints are whole",
)
_run_argument = click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False, exists=True))


@click.command("status", short_help="The state of a run, wherever it is.")
@_run_argument
@json_option
def status_command(folder: Path) -> Answer:
    """Show the state of the run in the folder RUN: its target's answer, the last step, the newest checkpoint.

    Exit code 0 in any state; 2 if RUN is not a run.

    \b
    Examples:
      phalanx status runs/digits-1
    """
    from phalanx.report.run_standing import run_standing, standing_table

    found = run_standing(folder)
    return Answer(found.to_dict(), lambda _: standing_table(found))


@click.command("logs", short_help="What the workers of a launched run have printed.")
@_run_argument
@click.option("--rank", type=click.IntRange(min=0), help="Of this rank alone.")
@click.option("--follow", "-f", is_flag=True, help="Print more as it comes, until the run ends.")
@json_option
def logs_command(folder: Path, rank: int | None, follow: bool) -> Answer:
    """Print the output of the workers of the run in RUN, handed over by phalanx launch.

    \b
    Examples:
      phalanx logs runs/digits-1 --rank 3
      phalanx logs runs/digits-1 --follow
    """
    as_json = click.get_current_context().params["as_json"]
    if follow and as_json:
        raise SpecError.of("--follow", "with --json", "one of the two", f"phalanx logs {folder} --follow")
    if follow:
        _follow(folder, rank)
        return Answer()
    path = _log(folder, rank)
    text, at = _read(path, 0)
    if not text:
        _refuse_no_run(folder, rank)
        who = "its workers have" if rank is None else f"rank {rank} has"
        if not as_json:
            click.echo(f"{who} printed nothing\n    phalanx status {folder} shows its state", err=True)
    while text and not as_json:
        show_output(text)
        text, at = _read(path, at)
    return Answer({"path": str(path), "text": text})


def _log(folder: Path, rank: int | None) -> Path:
    from phalanx.launch.targets.handed_over import UnmarkedError, log_of
    from phalanx.launch.targets.launch_folder import attached_log

    try:
        return log_of(folder, rank)
    except UnmarkedError as error:
        click.echo(f"{error.problems[0].given}: nobody is asked, and this is what the folder has", err=True)
        return attached_log(folder, rank)


def _refuse_no_run(folder: Path, rank: int | None) -> None:
    from phalanx.report.run_standing import ranks_of, run_standing

    run_standing(folder)
    ranks = ranks_of(folder)
    if rank is not None and ranks is not None and rank >= ranks:
        raise SpecError.of("--rank", f"{rank}", f"0 to {ranks - 1}", f"phalanx logs {folder} --rank {ranks - 1}")


def _read(path: Path, since: int) -> tuple[str, int]:
    """Return the text of a file from ``since`` on, and its end; "" if there is no file yet."""
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY, below=2), "rb") as file:
            file.seek(since)
            data = file.read(MOST)
    except FileNotFoundError:
        return "", since
    return data.decode(errors="replace"), since + len(data)


def show_output(text: str) -> None:
    """Print the output of a run; a terminal gets no control characters."""
    click.echo(visible(text.replace("\r", "\n")) if sys.stdout.isatty() else text, nl=False)


def _follow(folder: Path, rank: int | None) -> None:
    """Print a log as it grows, until the run ends; once it is quiet, ask for the run's state and the file to read."""
    from phalanx.report.run_standing import run_standing

    path, at, quiet, running = _log(folder, rank), 0, time.monotonic(), True
    while running:
        text, at = _read(path, at)
        if not text and time.monotonic() - quiet > 10 * _SOON:
            running = run_standing(folder).goes_on
            path = _log(folder, rank)  # the target may bring it up to date once more after the end
            (text, at), quiet = _read(path, at), time.monotonic()
        if text:
            show_output(text)
            quiet = time.monotonic()
        time.sleep(_SOON)


@click.command("stop", short_help="Make a run save and stop, wherever it is.")
@_run_argument
@click.option("--wait", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds to wait for it.")
@json_option
def stop_command(folder: Path, wait: float) -> Answer:
    """Make the run in RUN save after the current step, and stop; it is not queued again.

    phalanx train or launch with --resume resumes it. A run that has ended, or never began, is left as it is.

    \b
    Examples:
      phalanx stop runs/digits-1
    """
    from phalanx.report.run_standing import run_standing, stop_run

    asked = stop_run(folder)
    until = time.monotonic() + wait
    found = run_standing(folder)
    while asked and found.goes_on and time.monotonic() < until:
        time.sleep(_SOON)
        found = run_standing(folder)
    if asked and found.goes_on and wait:
        raise RunError(
            f"{folder} was asked to stop, and runs after {wait:g} s: {found.state}\n    try: phalanx status {folder}"
        )
    text = f"{folder}: {found.state}" + ("" if asked else "; it was not running")
    return Answer({**found.to_dict(), "asked": asked}, text)


@click.command("audit", short_help="Check that a run saw each sample once an epoch.")
@click.argument("run", type=FOLDER)
@json_option
def audit_command(run: Path) -> Answer:
    """Read the ledger in the run folder RUN, which records the samples of each step.

    Only samples are checked. Errors, hangs and drift in the run's log, and a list of things not checked, are shown.

    Exit code 0: each sample was seen exactly once in each epoch, over all parts of the run. 1: samples seen twice or
    never, or missing steps; they are named.

    \b
    Examples:
      phalanx audit runs/digits-1
      phalanx audit runs/digits-1 --json
    """
    from rich.console import Group
    from rich.text import Text

    from phalanx.report.samples_seen import samples_seen, troubles
    from phalanx.report.tables import seen_table

    result, log = samples_seen(run), troubles(run)
    lines = [Text(f"  its log says: {sentence}") for sentence in log]
    lines.append(Text(f"not checked: {'; '.join(_UNCHECKED)}", style="dim"))
    told = {**result.to_dict(), "log": log, "not_checked": list(_UNCHECKED)}
    return Answer(told, lambda _: Group(seen_table(result), *lines), 0 if result.once else NO)


@click.command("compare", short_help="Runs side by side: losses, time, what differs.")
@click.argument("runs", metavar="RUN RUN", nargs=2, type=FOLDER)
@json_option
def compare_command(runs: tuple[Path, ...]) -> Answer:
    """Show the plan, losses, time and pace of the runs in these folders, and the settings that differ.

    Names the first step in which losses differ by more than rounding, a part in 10,000.

    \b
    Examples:
      phalanx compare runs/digits-1 runs/digits-2
    """
    from phalanx.report.comparison import runs_beside, runs_table

    told = runs_beside(runs)
    return Answer(told, lambda _: runs_table(told))
