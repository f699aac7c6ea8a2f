"""The run folder, from before the first worker: ``run.toml`` and ``plan.toml``."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from phalanx.config import RunSpec
from phalanx.errors import SpecError
from phalanx.launch.jobfile import Reference

_STEP = re.compile(r"step-(\d+)")


def prepare_run(run: RunSpec, *, given: Path | None = None) -> Path:
    """Create the run folder, or take the one to resume, and write ``run.toml`` and ``plan.toml`` into it.

    Job and folder are written with their absolute paths, so that workers find them from any working directory.

    Args:
        given: the file that ``run`` was read from, if any. The folder's own ``run.toml`` is no reason to refuse the
            folder as long as nothing has happened in it.

    Returns:
        The path of ``run.toml``.

    Raises:
        SpecError: the folder holds a run and this is none to resume, holds nothing to resume from, holds another job,
            or cannot be written.
    """
    runfile = run.folder / "run.toml"
    if run.folder.exists() and not run.folder.is_dir():
        raise _wrong(f"{run.folder}, which is a file", "a folder", f"--run {run.folder}-1")
    if runfile.exists() and Reference.parse(earlier := _job_in(runfile)) != Reference.parse(run.job):
        raise _wrong(
            f"{run.folder}, which holds a run of {earlier}, for the job {run.job}",
            "a folder of the same job, or a new one",
            f"--run {default_folder(Reference.parse(run.job).stem, run.folder.parent)}",
        )
    step = _last_step(run.folder)
    events = run.folder / "events.jsonl"
    unused = step is None and not (events.exists() and events.stat().st_size)
    own = given is not None and runfile.exists() and runfile.samefile(given)
    if runfile.exists() and not run.resume and not (own and unused):
        at = f"at step {step}" if step is not None else "without a checkpoint"
        raise _wrong(
            f"{run.folder}, which holds a run of {_job_in(runfile)} {at}",
            "a new folder, or --resume to go on (in a run file: resume = true)",
            "--resume" if step is not None else f"--run {_next_free(run.folder)}",
        )
    if run.resume and step is None:
        holds = "holds no checkpoint" if run.folder.exists() else "does not exist"
        raise _wrong(
            f"--resume with {run.folder}, which {holds}",
            "a run folder with a whole checkpoint in checkpoints/",
            f"--run {run.folder} without --resume",
        )
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        _write(run.folder / "plan.toml", run.plan.to_toml())
        absolute = dataclasses.replace(run, job=str(Reference.parse(run.job)), folder=run.folder.absolute())
        _write(runfile, absolute.to_toml())
    except OSError as error:
        raise _wrong(f"{run.folder}: {error.strerror}", "a folder that can be written", "--run /tmp/run-1") from None
    return runfile


def default_folder(job_name: str, base: Path = Path("runs")) -> Path:
    """``runs/NAME-N`` with the first free N, counted from 1. Nothing is created."""
    name = re.sub(r"[^\w.-]+", "-", job_name).strip("-.") or "job"
    return _next_free(base / f"{name}-0")


def _next_free(folder: Path) -> Path:
    stem = re.sub(r"-\d+$", "", folder.name)
    number = 1
    while (candidate := folder.with_name(f"{stem}-{number}")).exists():
        number += 1
    return candidate


def _job_in(runfile: Path) -> str:
    return RunSpec.from_toml(runfile.read_text(encoding="utf-8")).job


def _last_step(folder: Path) -> int | None:
    """The step of the newest whole checkpoint."""
    if not (folder / "checkpoints").is_dir():
        return None
    from phalanx.checkpoint import latest  # needs torch

    newest = latest(folder / "checkpoints")
    number = _STEP.fullmatch(newest.name) if newest else None
    return int(number[1]) if number else None


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _wrong(given: str, allowed: str, fix: str) -> SpecError:
    return SpecError.of(where="run.folder", given=given, allowed=allowed, fix=fix)
