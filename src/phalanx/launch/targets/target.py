"""What a launch target offers.

A target is an engine that starts processes elsewhere: hosts reached by SSH, a queue. Whatever it is, each process of
the run is ``phalanx worker RUNFILE``, and finds its place in the environment as torchrun sets it. A new target is one
file with an ``AttachedTarget`` or a ``QueueTarget``, and a line in the table of ``find_target.py``.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import RUN_TOML
from phalanx.errors import RunError, SpecError
from phalanx.files import replace_text
from phalanx.launch.check_hosts import TargetHost
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, State
from phalanx.launch.targets.offer import Offer

_SHOWN = 10  # files of a job's code, in what a launch would do
_WARNS = re.compile(r"(^|: )warning:", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a target, ``--time 12h``: what it is, as ``--help`` says it, and an example.

    Attributes:
        between: what stands between its values where it is given several times; empty: it may be given once.
        dashes: its value may begin with two, as another option does.
    """

    help: str
    example: str
    between: str = ""
    dashes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What is handed over; the same for every target, and for the check before it.

    Attributes:
        run: as the workers read it, with absolute paths; it goes on where its folder holds a checkpoint, since a target
            may start workers again.
        name: the job's.
        python: the interpreter that workers run under, on the other side.
        options: the target's own, by their names without dashes.
        token: what no other launch has, for the names of what is made there: the time in UTC, and six digits by chance.
        key: 32 random bytes in hexadecimal, by which what this launch starts may know itself.
    """

    run: RunSpec
    name: str
    python: str
    options: Mapping[str, str] = field(default_factory=dict)
    token: str = field(
        default_factory=lambda: f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}", compare=False
    )
    key: str = field(default_factory=partial(secrets.token_hex, 32), compare=False, repr=False)

    @classmethod
    def of(cls, run: RunSpec, job: Job, target: Target | None, *, python: str = "", options: Mapping[str, str]) -> Self:
        """``run``, as it is asked for, as ``target`` is handed it; ``None``: as it would be here.

        ``python``: the interpreter there; the target's own where it is empty.

        Raises:
            SpecError: the run is to go on from an earlier checkpoint, which one that is started again would do each
                time.
        """
        from phalanx.launch.runfile import absolute

        run = absolute(run)
        if isinstance(target, QueueTarget):
            if run.from_step is not None:
                given, allowed = f"{run.from_step}, with {target.name}", "not of a target that may start workers again"
                went_on = f"phalanx train JOB --run {run.folder} --from {run.from_step}"
                raise SpecError.of("--from", given, allowed, f"phalanx checkpoint prune {run.folder}, or {went_on}")
            run = replace(run, resume="auto")  # started again, it goes on
        python = python or (target.python if target else sys.executable)
        return cls(run=run, name=job.name, python=python, options=options)

    def under(self, plan: Plan) -> Self:
        """The same under another plan."""
        return replace(self, run=replace(self.run, plan=plan))

    @property
    def folder(self) -> Path:
        """Where this launch's files go."""
        return self.run.folder / FOLDER

    @property
    def runfile(self) -> Path:
        """The run file that workers read; Kubernetes and SageMaker are sent a copy of it."""
        return self.folder / RUN_TOML


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """All that a target will write and run, in order: what ``--dry-run`` shows, and what ``submit`` does.

    Attributes:
        submission: what it is for.
        files: path → text.
        commands: each as its words.
        notes: what was taken for granted in it, a sentence each.
    """

    submission: Submission
    files: Mapping[Path, str]
    commands: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def write(self) -> None:
        """Write the files, and make their folders."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Within, the files are there; where it fails within, all is as it was before."""
        before = {path: path.read_text() if path.is_file() else None for path in self.files}
        made = {folder for path in self.files for folder in path.parents if not folder.exists()}
        try:
            self.write()
            yield
        except BaseException:
            for path, text in before.items():
                path.unlink(missing_ok=True) if text is None else path.write_text(text)
            for folder in sorted(made, reverse=True):
                with suppress(OSError):
                    folder.rmdir()
            raise

    def shown(self) -> str:
        """The files, commands and notes as text; of a list of the job's code the largest files."""
        parts = [f"# {path}\n{_largest(path, text.rstrip())}\n" for path, text in self.files.items()]
        commands = [f"$ {shlex.join(words)}" for words in self.commands]
        return "\n".join([*parts, *commands, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        files = {str(path): text for path, text in self.files.items()}
        return {"files": files, "commands": [list(words) for words in self.commands], "notes": list(self.notes)}


def _largest(path: Path, text: str) -> str:
    head, *lists = text.split("\n\n") if path.name == CODE_LIST else [text]
    if lists and len(files := lists[0].splitlines()) > _SHOWN:
        largest = sorted(files, reverse=True)[:_SHOWN]  # each line begins with the size, all as wide
        lists[0] = "\n".join(
            [*largest, f"and {len(files) - _SHOWN:,} smaller ones: all of them will stand in {path.name}"]
        )
    return "\n\n".join([head, *lists])


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a run stands there, and what the target says of it in its own words.

    Attributes:
        events: the last of the run's events, of a run whose folder is elsewhere.
    """

    state: State
    detail: str = ""
    events: Sequence[Mapping[str, Any]] = ()


class Target(ABC):
    """One place to hand runs to. Made with the text after the colon of ``--to``, which it refuses where it is wrong.

    Attributes:
        name: the word before the colon.
        options: those that it has of its own, by their names without dashes.
        python: the interpreter there, where ``--python`` names none.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Option]]
    python: ClassVar[str] = sys.executable

    @abstractmethod
    def __init__(self, address: str) -> None:
        """
        Raises:
            SpecError: with everything that is wrong in the address, and in what it leads to.
        """

    @abstractmethod
    def prepare(self, submission: Submission) -> Prepared:
        """What would be written and run. Nothing is written, and nothing runs but what only reads.

        Raises:
            SpecError: with everything in the submission that this target cannot do.
        """

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        """What a run with these ``options`` would have there; ``None`` where that cannot be said without its machines.

        It is asked for where no plan is given; a plan that does not fit there is refused by ``prepare``. Nothing runs
        for it but what only reads.

        Raises:
            MissingExtraError: a package is missing to ask with.
            RunError: who knows cannot be asked.
            SpecError: an option that it depends on is wrong.
        """
        return None

    @abstractmethod
    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        """How the run of that ticket stands, whose run folder is ``folder``."""

    @abstractmethod
    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        """Have it save and stop; returns at once. Nothing where it has ended.

        Raises:
            RunError: the target cannot be asked.
        """

    @abstractmethod
    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """The file with what ``rank`` printed, or what all did where that is ``None``; it may not be there yet.

        A target that keeps it elsewhere brings the file up to date with each call.

        Raises:
            SpecError: this target does not keep ranks apart.
        """


class AttachedTarget(Target):
    """A target whose runs live as long as the process that launched them."""

    @abstractmethod
    def hosts(self) -> Sequence[TargetHost]:
        """Return the machines of a run, rank 0's first. None is asked anything yet."""

    @abstractmethod
    def follow(
        self, prepared: Prepared, threads: int | None, watch: Callable[[], None], begun: Callable[[], None]
    ) -> None:
        """Start the run and return at its end; a ticket finds it meanwhile.

        ``threads``: of each worker; None: its share of the host's cores. ``watch`` is called about ten times a second,
        ``begun`` once nothing refuses the run any more.
        """


class QueueTarget(Target):
    """A target that takes a run, and runs it when and as often as it sees fit; a ticket finds it again."""

    def __init__(self, address: str) -> None:
        if address:
            allowed = "nothing after the colon: options say where"
            raise SpecError.of("--to", f"'{self.name}:{address}'", allowed, f"--to {self.name}")

    @abstractmethod
    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """Write the files and hand the run over. Returns its ticket, which can be JSON, at once.

        Raises:
            RunError: the target refuses it, in the target's own words; nothing of it is left.
        """

    def refuse_folder(self, run: RunSpec, job: Job) -> None:
        """Refuse the folder of ``run`` if the run cannot begin, or go on, in it; nothing is written.

        Another target's way where the run itself stands elsewhere.

        Raises:
            SpecError: it cannot.
        """
        from phalanx.launch.runfile import check_folder

        check_folder(run, job=job)

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str | None:
        """Why it would refuse the run, in its own words; empty where it would take it. Nothing is handed over.

        ``None`` where it cannot be asked that. ``patience``: seconds that asking may take.
        """
        return None

    def image(self, options: Mapping[str, str]) -> str:
        """The image that a run with these ``options`` finds its packages in, and data at paths of its own.

        Empty where its machines have the packages and the data of this one, at the same paths.
        """
        return ""


def own_words(error: RunError) -> str:
    """What an engine said of a refusal, in one line; without its warnings, where it said more than these."""
    lines = [line.strip() for line in str(error).partition("\n    try: ")[0].splitlines() if line.strip()]
    return "; ".join([line for line in lines if not _WARNS.search(line)] or lines)
