"""What ``phalanx train`` says of a run that ended early: where it is, and how to go on if that can be."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from phalanx.config import RunSpec
from phalanx.config.run_files import CHECKPOINTS
from phalanx.errors import NoneWholeError, PhalanxError, RunError, WorkerError


def way_on(run: RunSpec, launcher: str, error: RunError | None = None) -> str:
    """Where the folder of a run that ended early is, and the command that goes on with it.

    ``error``: what it failed by. Where that would come again, it is to be mended first.
    """
    if not run.folder.is_dir():
        return "nothing of it was written"
    where = f"run folder: {run.folder}"
    if isinstance(error, NoneWholeError) or getattr(error, "kind", "") == NoneWholeError.__name__:
        return f"{where}, of which no checkpoint is whole\n    {_without_checkpoint(run, launcher)}"
    newest = _newest(run.folder)
    if newest is None:
        return f"{where} (no checkpoint yet)"
    # What came from outside, such as a signal, is nothing to be mended.
    again = isinstance(error, WorkerError) and not error.kind.startswith("signal ")
    first = "once what is named above is mended, " if again else ""
    return f"{where}, newest checkpoint: {newest.name}\n    {first}try: {_command(run, launcher, '--resume')}"


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint that is complete and that the run has not found damaged as it went on."""
    from phalanx.checkpoint import checkpoints
    from phalanx.report.progress import damages
    from phalanx.report.summary import run_log

    damaged = set[str]()
    with suppress(PhalanxError, OSError):  # its log may say nothing yet
        for event in run_log(folder).part:
            if damages(event):
                damaged.add(event["message"].partition(" ")[0])
            elif event["event"] == "checkpoint":  # of that step once more, in the place of the damaged one
                damaged.discard(Path(event["path"]).name)
    found = checkpoints(folder / CHECKPOINTS)
    return next((one.path for one in found if one.whole and one.path.name not in damaged), None)


def _without_checkpoint(run: RunSpec, launcher: str) -> str:
    """What can be done about a run of which no checkpoint is whole."""
    from phalanx.launch.runfile import next_free

    anew = _command(run, launcher, folder=next_free(run.folder))
    copies = f"the copies in {run.mirror} do not help either, or are another run's"
    if run.mirror is None:
        copies = f"with copies elsewhere: {_command(run, launcher, '--resume', '--mirror', 'URL')}"
    return f"try: {anew}, a new run\n    {copies}"


def _command(run: RunSpec, launcher: str, *options: str, folder: Path | None = None) -> str:
    """The command that goes on with ``run``; what it does not say stands in the run file."""
    words = ["phalanx", "train", run.job, "--run", str(folder or run.folder), *options]
    if ":" in launcher:  # hosts of a file
        words[1:3] = ["launch", run.job, "--to", launcher]
    elif launcher != "local":
        words += ["--launcher", launcher]
    return shlex.join(words)
