"""The run folder, from before the first worker to the run's end: when a run may begin in it, and who writes it."""

from __future__ import annotations

import os
import re
import shlex
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import CHECKPOINTS, EVENTS, RUN_FILES, RUN_TOML
from phalanx.errors import CheckpointError, SpecError
from phalanx.events.log import RunLog, own_failure
from phalanx.files import read_text, refuse_links, refuse_taken, release, take, token_of
from phalanx.launch.jobfile import Reference

_STEP = re.compile(r"step-(\d+)")
_LONGEST = 200  # bytes of a folder's name, of 255 that most file systems allow


@final
class RunFolder:
    """The folder of a run that is about to begin. As a context: entering refuses it, leaving lets others write it.

    ``run.toml``, ``plan.toml`` and ``placement.json`` are written by the run itself once it has begun: until then those
    of an earlier part of it stand, since this one may yet be refused.
    """

    def __init__(self, run: RunSpec, *, job: Job | None = None, given: Path | None = None) -> None:
        """``job`` has the run's overrides; a checkpoint must be of it. ``given``: the file that ``run`` was read from.

        The folder's own ``run.toml`` may be that file as long as nothing has happened in the folder.
        """
        self.folder, self.run = run.folder, run
        self._job, self._given = job, given

    def __enter__(self) -> Self:
        """
        Raises:
            SpecError: another training goes on in the folder; it holds a run and this is none to resume, holds nothing
                to resume from, holds another job, holds links, or cannot be written; or the mirror cannot.
        """
        if self.run.mirror:
            from phalanx.checkpoint.mirror import ObjectStore

            ObjectStore(self.run.mirror).refuse_unusable()
        check_folder(self.run, job=self._job, given=self._given)
        if self.run.folder.is_dir():
            take(self.run.folder)
        return self

    def prepare(self) -> RunSpec:
        """Create the folder where it is missing, and be its one writer from now on. Raises as entering does.

        Returns the run as it begins: it goes on, or does not, and later checkpoints than the one it goes on from have
        been set aside.
        """
        folder = self.run.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise _unusable(folder, error) from None
        take(folder)
        check_folder(self.run, job=self._job, given=self._given)  # another may have come and gone in it meanwhile
        give_back(folder / CHECKPOINTS)
        _fetch(self.run)
        set_aside(self.run)
        return replace(settled(self.run), from_step=None)

    def again(self) -> RunSpec:
        """From now on the run is one whose workers are started again. Returns it as it begins.

        Raises:
            SpecError: those before have ended by an exception of the job's own code.
        """
        _refuse_what_would_come_again(self.folder)
        self.run = replace(self.run, resume="auto", from_step=None)
        give_back(self.folder / CHECKPOINTS)
        return settled(self.run)

    def __exit__(self, *_: object) -> None:
        if token := token_of(self.folder):
            release(token)


def _refuse_what_would_come_again(folder: Path) -> None:
    raised = ""
    with suppress(SpecError):
        raised = own_failure(RunLog(folder).events)
    if raised:
        raise SpecError.of(
            where="workers that are started again",
            given=f"an exception of the job's own code, which would come again: {raised}",
            allowed="those before were lost",
            fix="mend the job, and go on with resume = true",
        )


def absolute(run: RunSpec) -> RunSpec:
    """The run as ``run.toml`` has it: job and folder by their absolute paths, for workers in any working directory."""
    return replace(run, job=str(Reference.parse(run.job)), folder=run.folder.absolute())


def check_folder(run: RunSpec, *, job: Job | None = None, given: Path | None = None) -> None:
    """Refuse the folder of ``run`` if the run cannot begin in it; nothing is written. As of ``RunFolder``.

    Raises:
        SpecError: as of entering a ``RunFolder``.
    """
    folder, runfile = run.folder, run.folder / RUN_TOML
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise _wrong(f"{folder}, which is a file", "a folder", f'folder="{folder}-1"')
    except (FileNotFoundError, NotADirectoryError):
        pass  # it will be made, or that will be said then
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from None
    if folder.is_dir():
        refuse_links(folder, RUN_FILES)
        refuse_links(folder / "launch", [path.name for path in folder.glob("launch/*")])
        refuse_taken(folder)
    holds = os.path.exists(runfile)
    if holds and not _may_go_on(earlier := _job_in(runfile), run.job):
        raise _wrong(
            f"{folder}, which holds a run of {earlier}, for the job {run.job}",
            "a folder of the same job, or a new one",
            f'folder="{default_folder(Reference.parse(run.job).stem, folder.parent)}"',
        )
    newest = _newest(folder)
    step = newest_step(folder)
    events = folder / EVENTS
    unused = step is None and not (events.exists() and events.stat().st_size)
    own = given is not None and holds and runfile.samefile(given)
    if holds and not run.resume and not (own and unused):  # "auto" goes on, or begins anew
        at = f"at step {step}" if step is not None else "without a checkpoint"
        raise _wrong(
            f"{folder}, which holds a run of {_job_in(runfile)} {at}",
            "a new folder, or resume=True to go on (in a run file: resume = true)",
            "resume=True" if step is not None else f'folder="{next_free(folder)}"',
        )
    damaged = _damages(folder) if run.resume and newest is None else []
    if (run.resume is True or damaged) and newest is None and not (run.mirror and _mirrored(run.mirror)):
        none = "holds no whole checkpoint: " + "; ".join(damaged) if damaged else "holds no checkpoint"
        there = none if folder.is_dir() else "does not exist"
        raise _wrong(
            f"resume=True with {folder}, which {there}",
            "a run folder with a whole checkpoint in checkpoints/",
            f'folder="{next_free(folder)}"' if damaged else f'folder="{folder}", resume="auto"',
        )
    if run.resume and job and newest:
        _refuse_another_job(run, job, newest)


def _refuse_another_job(run: RunSpec, job: Job, newest: Path) -> None:
    """Refuse a job whose steps would mean other samples than those of the checkpoint ``newest`` did."""
    from phalanx.checkpoint import read_state
    from phalanx.train.state import identity

    saved, now = dict[str, Any](), identity(job)
    with suppress(CheckpointError, TypeError, ValueError):  # the workers say what is wrong with it
        saved.update(read_state(newest).get("identity") or {})
    other = [name for name in now if saved.get(name, now[name]) != now[name]]
    if other:
        differs = "; ".join(f"{name}: {saved[name]} there, {now[name]} now" for name in other)
        raise SpecError.of(
            where="run.resume",
            given=f"{newest}, which belongs to another job ({differs})",
            allowed="the job as it was: else a step would mean other samples",
            fix=("resume=True, " if other == ["batch"] else "in the job: ")
            + ", ".join(f"{name}={saved[name]!r}" for name in other),
        )


def _fetch(run: RunSpec) -> None:
    if not (run.mirror and run.resume):
        return
    from phalanx.checkpoint.mirror import fetch_newest, fetch_step

    if run.from_step is None:
        fetch_newest(run.mirror, run.folder / CHECKPOINTS)
    else:
        fetch_step(run.mirror, run.folder / CHECKPOINTS, run.from_step)


def give_back(folder: Path) -> None:
    """Where a process died as it replaced a checkpoint in ``folder``, give the older one, which is whole, its name."""
    if folder.is_dir():
        from phalanx.checkpoint.folder import give_back_replaced

        give_back_replaced(folder)


def settled(run: RunSpec) -> RunSpec:
    """``run`` with ``resume`` true or false where it was ``auto``: whether its folder holds a checkpoint.

    One that is damaged counts: the workers name it, and go on from one before it or not at all.
    """
    if run.resume != "auto":
        return run
    return replace(run, resume=_newest(run.folder) is not None or bool(_damages(run.folder)))


def set_aside(run: RunSpec) -> None:
    """Move checkpoints of later steps than ``run`` resumes from to ``set-aside-N``, beside it.

    No later resume then takes them for the newest.

    Raises:
        SpecError: there is no checkpoint of that step, or it is damaged, which is read to be sure.
    """
    if run.from_step is None:
        return
    from phalanx.checkpoint import verify
    from phalanx.checkpoint.folder import is_complete

    folder = run.folder / CHECKPOINTS
    steps = {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)}
    whole = [step for step, path in sorted(steps.items()) if is_complete(path)]
    problems = [f"of which {run.folder} holds no whole checkpoint"]
    if run.from_step in whole:
        problems = [f"whose checkpoint is damaged: {one}" for one in verify(steps[run.from_step])]
    if problems:
        others = [step for step in whole if step != run.from_step]
        allowed = f"one of {', '.join(map(str, others))}" if others else "a step of which there is one"
        fix = f"resume=True, from_step={others[-1]}" if others else "a new run, without from_step"
        raise SpecError.of("run.from_step", f"{run.from_step}, {problems[0]}", allowed, fix)
    later = [path for step, path in sorted(steps.items()) if step > run.from_step]
    aside = next_free(folder / "set-aside-0")
    for path in later:
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)


def default_folder(job_name: str, base: Path = Path("runs")) -> Path:
    """``runs/NAME-N`` with the first free N, counted from 1. Nothing is created."""
    name = re.sub(r"[^\w.-]+", "-", job_name).strip("-.") or "job"
    name = name.encode()[:_LONGEST].decode(errors="ignore")
    return next_free(base / f"{name}-0")


def next_free(folder: Path) -> Path:
    """``folder`` with the first number at its end, counted from 1, under which there is nothing."""
    stem = re.sub(r"-\d+$", "", folder.name)
    number = 1
    while os.path.lexists(candidate := folder.with_name(f"{stem}-{number}")):
        number += 1
    return candidate


def job_of(folder: Path, name: str) -> str:
    """Where the job of the run in ``folder`` is, if that may be the job ``name``, which no file was named for."""
    try:
        earlier = _job_in(folder / RUN_TOML) if (folder / RUN_TOML).is_file() else name
    except (SpecError, OSError):
        return name  # what is wrong with it is said when the folder is entered
    return earlier if _may_go_on(earlier, name) else name


def _may_go_on(earlier: str, job: str) -> bool:
    """Whether a run of ``earlier`` may be one of ``job``: the same, or no more than a name, which no file is known of.

    Of two names, ``job`` is that of a job that was given none.
    """
    two = Reference.parse(earlier), Reference.parse(job)
    if two[0] == two[1]:
        return True
    names = [one.module for one in two if one.is_name]
    return len(names) == 1 or "job" in names


def _job_in(runfile: Path) -> str:
    fix = f"mv {shlex.quote(str(runfile))} {shlex.quote(str(runfile))}.away"
    return RunSpec.from_toml(read_text(runfile, where="run.toml", fix=fix)).job


def _newest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    if not (folder / CHECKPOINTS).is_dir():
        return None
    from phalanx.checkpoint import latest  # needs torch

    return latest(folder / CHECKPOINTS)


def _damages(folder: Path) -> list[str]:
    """What is wrong with each checkpoint of the run in ``folder``; as of a run that has no whole one."""
    if not (folder / CHECKPOINTS).is_dir():
        return []
    from phalanx.checkpoint import checkpoints, verify

    found = [one.path for one in checkpoints(folder / CHECKPOINTS)]
    return [f"{path.name} is damaged: {'; '.join(verify(path)[:1])}" for path in found]


def newest_step(folder: Path) -> int | None:
    """Steps taken in the newest whole checkpoint of the run in ``folder``; ``None`` where it has none."""
    newest = _newest(folder)
    number = _STEP.fullmatch(newest.name) if newest else None
    return int(number[1]) if number else None


def how_to_go_on(run: RunSpec) -> str:
    """Return where a run stands that was stopped by hand, and what goes on with it."""
    step, mirror = newest_step(run.folder), f', mirror="{run.mirror}"' if run.mirror else ""
    if step is None:
        return f"run folder: {run.folder} (no checkpoint yet)"
    return (
        f'run folder: {run.folder}, newest checkpoint: step {step}\n    try: folder="{run.folder}", resume=True{mirror}'
    )


def _mirrored(url: str) -> bool:
    from phalanx.checkpoint.mirror import ObjectStore

    return bool(ObjectStore(url).steps())


def _wrong(given: str, allowed: str, fix: str) -> SpecError:
    return SpecError.of(where="run.folder", given=given, allowed=allowed, fix=fix)


def _unusable(folder: Path, error: OSError | ValueError) -> SpecError:
    said = getattr(error, "strerror", None) or error
    return _wrong(f"{folder}: {said}", "a folder that can be written", 'folder="/tmp/run-1"')
