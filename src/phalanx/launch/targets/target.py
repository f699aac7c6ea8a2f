"""The protocol of a launch target: an engine that starts processes elsewhere, such as hosts by SSH or a queue.

Each process of a run is ``phalanx worker RUNFILE`` with the environment that torchrun sets. A new target is one file
with an ``AttachedTarget`` or a ``QueueTarget``, and a line in the table of ``find_target.py``.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import RUN_TOML
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.events import RunLog
from phalanx.files import replace_text
from phalanx.files.single_writer import is_running
from phalanx.launch.check import TargetHost
from phalanx.launch.targets.launch_folder import FOLDER, State, attached_log
from phalanx.launch.targets.offer import Offer


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a target, such as ``--time 12h``.

    Attributes:
        help: its line in ``--help``.
        kind: how ``read_options`` reads it; ``file``: a JSON or TOML file with a table.
        least: smallest ``count``.
        needed: True if a launch has to give it.
        between: separator of repeated values; empty: it may be given once.
        through: how it carries an option that the target does not have itself; ``{}``: that option.
    """

    help: str
    example: str
    kind: Literal["text", "count", "time", "file"] = "text"
    least: int = 1
    needed: bool = False
    between: str = ""
    through: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A launch, the same for every target and for the check before it.

    Attributes:
        run: as workers read it, with absolute paths.
        name: of the job.
        python: interpreter of the workers.
        options: of the target, by their names without dashes.
        token: unique part of the names that this launch makes: the time in UTC and six random digits.
        key: 32 random bytes in hexadecimal, shared by the processes of this launch.
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
        """Build the submission of ``run`` to ``target``, or to this machine if that is ``None``.

        Raises:
            SpecError: a queue would resume from the same earlier checkpoint at each start.
        """
        from phalanx.launch.runfile import absolute

        run = absolute(run)
        if isinstance(target, QueueTarget):
            if run.from_step is not None:
                given, allowed = f"{run.from_step}, with {target.name}", "not of a target that may start workers again"
                went_on = f"phalanx train JOB --run {run.folder} --from {run.from_step}"
                raise SpecError.of("--from", given, allowed, f"phalanx checkpoint prune {run.folder}, or {went_on}")
            run = replace(run, resume="auto")
        python = python or (target.python if target else sys.executable)
        return cls(run=run, name=job.name, python=python, options=options)

    def under(self, plan: Plan) -> Self:
        """Return the same submission under another plan."""
        return replace(self, run=replace(self.run, plan=plan))

    @property
    def job_name(self) -> str:
        """Name of this launch's job, as every engine takes it: a letter, and 50 letters, digits and dashes."""
        stem = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{(stem if stem[:1].isalpha() else f'run-{stem}')[:28].strip('-')}-{self.token}"

    @property
    def folder(self) -> Path:
        """Folder of this launch's files."""
        return self.run.folder / FOLDER

    @property
    def runfile(self) -> Path:
        """Path of the run file; on Kubernetes and SageMaker a copy of it is sent."""
        return self.folder / RUN_TOML


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Files and commands of a launch: ``--dry-run`` shows them, ``submit`` writes and runs them.

    Attributes:
        files: path → text.
        commands: words of each command.
        notes: sentences about guesses in it.
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
        """Write the files; restore the earlier state if the block raises."""
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
        """Return files, commands and notes as text."""
        parts = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        commands = [f"$ {shlex.join(words)}" for words in self.commands]
        return "\n".join([*parts, *commands, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON."""
        files = {str(path): text for path, text in self.files.items()}
        return {"files": files, "commands": [list(words) for words in self.commands], "notes": list(self.notes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """State of a run on its target.

    Attributes:
        detail: in the target's words.
        events: newest events of a run whose folder is elsewhere.
    """

    state: State
    detail: str = ""
    events: Sequence[Mapping[str, Any]] = ()


class Target(ABC):
    """A place to launch runs.

    Attributes:
        name: the word before the colon of ``--to``.
        options: by their names without dashes.
        python: interpreter there, unless ``--python`` names one.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Option]]
    python: ClassVar[str] = sys.executable

    @abstractmethod
    def __init__(self, address: str) -> None:
        """Read the text after the colon of ``--to``.

        Raises:
            SpecError: with all problems of the address.
        """

    @abstractmethod
    def prepare(self, submission: Submission) -> Prepared:
        """Return the files and commands of a launch; nothing is written, and only queries run.

        Raises:
            SpecError: with all problems of the submission.
        """

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        """Return the GPUs for a run with ``options`` and no plan; ``None`` if they are not known.

        Raises:
            SpecError: an option is wrong.
        """
        return Offer.from_options(options)

    @abstractmethod
    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        """How the run of that ticket stands, whose run folder is ``folder``."""

    @abstractmethod
    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        """Have it save and stop; returns at once. Nothing where it has ended.

        Raises:
            RunError: the target cannot be asked.
        """

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """Return the file with what ``rank`` printed, or all ranks if that is ``None``; it may not exist yet.

        A target that keeps it elsewhere brings the file up to date with each call.

        Raises:
            SpecError: this target does not keep ranks apart.
        """
        return attached_log(folder, rank)


class AttachedTarget(Target):
    """A target whose runs live as long as the process that launched them, which the ticket names."""

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

    def ticket(self) -> Mapping[str, Any]:
        """Return the ticket of a run that this process follows."""
        return {"host": socket.gethostname(), "pid": os.getpid(), "since": _began(os.getpid())}

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        pid, host = ticket["pid"], ticket["host"]
        if host != socket.gethostname():
            return Standing(state="unknown", detail=f"launched by process {pid} on {host}")
        if is_running(pid) and _began(pid) == ticket["since"]:
            return Standing(state="running", detail=f"followed by process {pid}")
        return Standing(state=RunLog(folder).outcome or "unknown", detail="the process that launched it ended")

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        found = self.standing(ticket, folder)
        if ticket["host"] != socket.gethostname():
            raise RunError(f"{folder} was {found.detail}\n    try: there, phalanx stop {shlex.quote(str(folder))}")
        if found.state == "running":
            with suppress(ProcessLookupError):
                os.kill(ticket["pid"], signal.SIGTERM)


class QueueTarget(Target):
    """A target that runs a submission when it sees fit, and perhaps again; a ticket finds the run."""

    def __init__(self, address: str) -> None:
        if address:
            allowed = "nothing after the colon: options say where"
            raise SpecError.of("--to", f"'{self.name}:{address}'", allowed, f"--to {self.name}")

    @abstractmethod
    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """Write the files and submit the run. Returns its ticket, as JSON values, at once.

        Raises:
            RunError: the target refuses it, in its own words; nothing is left behind.
        """

    def refuse_folder(self, run: RunSpec, job: Job) -> None:
        """Refuse the folder of ``run`` if the run cannot begin or resume in it.

        A run whose folder is elsewhere has only its ticket here.

        Raises:
            SpecError: it cannot.
        """
        from phalanx.launch.runfile import check_folder
        from phalanx.launch.targets.handed_over import earlier_ticket

        elsewhere = earlier_ticket(run.folder, self.name) is not None and not (run.folder / RUN_TOML).exists()
        if elsewhere and not run.resume and self.image({}):  # as machines of an image have other folders
            given, allowed = f"{run.folder}, whose run {self.name} has", "a new folder, or --resume to go on"
            raise SpecError.of("run.folder", given, allowed, "--resume")
        check_folder(replace(run, resume="auto") if elsewhere else run, job=job)

    def try_out(self, prepared: Prepared, patience: float) -> bool:
        """Ask the target if it would take the run. Returns False if it cannot be asked.

        Raises:
            PhalanxError: it would not.
        """
        return False

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str | None:
        """Return why the target would refuse the run and what to do, "" if it would not, ``None`` if it does not say.

        ``patience``: seconds for the answer.
        """
        try:
            return "" if self.try_out(prepared, patience) else None
        except PhalanxError as error:
            return str(error)

    def image(self, options: Mapping[str, str]) -> str:
        """Return the container image of a run; "" if its machines have the packages and paths of this one."""
        return ""


def _began(pid: int) -> str:
    """Return when a process began, in ticks of the kernel: numbers of processes are used again."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
