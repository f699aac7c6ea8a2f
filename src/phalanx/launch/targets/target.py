"""What a launch target offers, and the table of those there are.

A target is an engine that starts processes elsewhere: hosts reached by SSH, a queue. Whatever it is, each process of
the run is ``phalanx worker RUNFILE``, and finds its place in the environment as torchrun sets it. A new target is one
file with an ``AttachedTarget`` or a ``QueueTarget``, and a line in ``TARGETS``.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.config import RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.files import read_text, replace_text
from phalanx.launch.check_hosts import TargetHost

if TYPE_CHECKING:
    from phalanx.launch.launcher import Launcher

# A text each, so that what one target needs is imported only where that one is asked for.
TARGETS = {"ssh": "phalanx.launch.targets.ssh:SshTarget", "slurm": "phalanx.launch.targets.slurm:SlurmTarget"}
"""Every target: the word before the colon in ``--to``, and its class."""

FOLDER = "launch"
"""What a launch writes in the run folder stands in a folder of this name."""

_TICKET = "ticket.json"

State = Literal["waiting", "running", "ended", "stopped", "failed", "unknown"]
"""How a run that was handed over stands: ``unknown`` where the target has forgotten it or cannot be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a target, ``--time 12h``: what it is, as ``--help`` says it, and an example."""

    help: str
    example: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What is handed over; the same for every target.

    Attributes:
        run: as the workers read it, with absolute paths; it goes on where its folder holds a checkpoint, since a target
            may start workers again.
        name: the job's.
        python: the interpreter that workers run under, on the other side.
        options: the target's own, by their names without dashes.
    """

    run: RunSpec
    name: str
    python: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where this launch's files go."""
        return self.run.folder / FOLDER

    @property
    def runfile(self) -> Path:
        """What workers read."""
        return self.folder / "run.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """All that a target will write and run, in order: what ``--dry-run`` shows, and what ``submit`` does.

    Attributes:
        submission: what it is for.
        files: path → text.
        commands: each as its words.
    """

    submission: Submission
    files: Mapping[Path, str]
    commands: tuple[tuple[str, ...], ...]

    def write(self) -> None:
        """Write the files, and make their folders."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)

    def shown(self) -> str:
        """The files and commands as text."""
        parts = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        return "\n".join([*parts, *(f"$ {shlex.join(words)}" for words in self.commands)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a run stands there, and what the target says of it in its own words."""

    state: State
    detail: str = ""


class Target(ABC):
    """One place to hand runs to. Made with the text after the colon of ``--to``, which it refuses where it is wrong."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Option]]

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


class AttachedTarget(Target):
    """A target whose runs live as long as the process that launched them, which supervises their workers."""

    @abstractmethod
    def hosts(self) -> Sequence[TargetHost]:
        """The machines that a run would be on, that where all workers meet first. None is asked anything yet."""

    @abstractmethod
    def reach(self) -> None:
        """Begin to reach what is there, while this process loads what it needs; the launcher then has it."""

    @abstractmethod
    def launcher(self) -> Launcher:
        """What starts the workers there. Its ``release`` lets go of what has been reached."""

    @abstractmethod
    def leave(self) -> None:
        """Let go of what has been reached, where no launcher has it."""


class QueueTarget(Target):
    """A target that takes a run, and runs it when and as often as it sees fit; a ticket finds it again."""

    @abstractmethod
    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """Write the files and hand the run over. Returns its ticket, which can be JSON, at once.

        Raises:
            RunError: the target refuses it, in the target's own words; nothing of it is left.
        """

    def why_not(self, prepared: Prepared) -> str | None:
        """Why it would refuse the run, in its own words; empty where it would take it. Nothing is handed over.

        ``None`` where it cannot be asked that.
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

        Raises:
            SpecError: this target does not keep ranks apart.
        """


def target_class(name: str) -> type[Target]:
    """The class of the target of that name, which there is."""
    module, _, kind = TARGETS[name].partition(":")
    return getattr(import_module(module), kind)


def find_target(text: str) -> Target:
    """The target that ``--to`` names: ``ssh:hosts.toml``, ``slurm``.

    Raises:
        SpecError: there is none of that name, or what follows the colon is wrong.
    """
    name, _, address = text.partition(":")
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.4)
        allowed = ", ".join(TARGETS)
        raise SpecError.of(where="--to", given=repr(text), allowed=allowed, fix=f"--to {(near or ['slurm'])[0]}")
    return target_class(name)(address)


def settled_options(target: Target, words: list[str]) -> dict[str, str]:
    """The target's own options out of the ``words`` of a command line, by their names without dashes.

    Raises:
        SpecError: with every word that is none, and the nearest there is.
    """
    found: dict[str, str] = {}
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        name = word.removeprefix("--")
        option = target.options.get(name)
        if not word.startswith("--") or option is None:
            problems.append(_unknown(target, word))
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                allowed, fix = option.help, f"--{name} {option.example}"
                problems.append(Problem(where=word, given="no value", allowed=allowed, fix=fix))
                continue
            value = rest.pop(0)
        found[name] = value
    if problems:
        raise SpecError(problems)
    return found


def _unknown(target: Target, word: str) -> Problem:
    names = [f"--{name}" for name in target.options]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    fix = f"{near[0]} {target.options[near[0][2:]].example}" if near else "phalanx launch --help"
    allowed = f"options of {target.name}: {', '.join(names) or 'it has none'}"
    return Problem(where="--to", given=f"{target.name}, with {word}", allowed=allowed, fix=fix)


def write_ticket(submission: Submission, to: str, ticket: Mapping[str, Any]) -> None:
    """Leave in the run folder what finds the run again."""
    replace_text(submission.folder / _TICKET, json.dumps({"to": to, **ticket}) + "\n")


def refuse_handed_over(folder: Path) -> None:
    """Refuse a folder whose run was handed over before and still waits or runs.

    Raises:
        SpecError: it does, with what its target says.
    """
    if not os.path.exists(folder / FOLDER / _TICKET):
        return
    target, ticket = ticket_of(folder)
    if isinstance(target, QueueTarget):
        standing = target.standing(ticket, folder)
        if standing.state in ("waiting", "running"):
            given = f"{folder}, whose run {target.name} has already: {standing.state} {standing.detail}".rstrip()
            raise SpecError.of("run.folder", given, "one launch of a folder at a time", f"phalanx stop {folder}")


def forget_handed_over(folder: Path) -> None:
    """The run in ``folder`` is no more its target's, which had ended it: whoever calls this goes on with it."""
    (folder / FOLDER / _TICKET).unlink(missing_ok=True)


def attached_log(folder: Path, rank: int | None) -> Path:
    """The file in the run folder with what ``rank`` has printed, or all, under a launcher that has followed the run."""
    return folder / FOLDER / ("output.log" if rank is None else f"rank-{rank}.log")


def log_of(folder: Path, rank: int | None) -> Path:
    """The file with what ``rank`` of the run in ``folder`` has printed, or all did; it may not be there yet.

    Raises:
        SpecError: its target does not keep ranks apart.
    """
    if os.path.exists(folder / FOLDER / _TICKET):
        target, ticket = ticket_of(folder)
        if isinstance(target, QueueTarget):
            return target.log(ticket, folder, rank)
    return attached_log(folder, rank)


def ticket_of(folder: Path) -> tuple[Target, Mapping[str, Any]]:
    """Where the run in ``folder`` was handed to, and its ticket.

    Raises:
        SpecError: it was not launched, or what says so is damaged.
    """
    path = folder / FOLDER / _TICKET
    if not path.is_file():
        given, fix = f"{folder}, which no phalanx launch handed over", "phalanx launch JOB --to slurm"
        raise SpecError.of(where="RUN", given=given, allowed="the folder of a launched run", fix=fix)
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        told = json.loads(read_text(path, where="ticket", fix=f"rm {shlex.quote(str(path))}"))
        if told["to"].partition(":")[0] in TARGETS:
            return find_target(told["to"]), told
    raise damaged_ticket(folder)


def damaged_ticket(folder: Path) -> SpecError:
    """What to raise where the ticket in the run folder is not as it was written."""
    path = folder / FOLDER / _TICKET
    fix = f"rm {shlex.quote(str(path))}"
    return SpecError.of(where="RUN", given=f"{path}, which is damaged", allowed="what phalanx launch wrote", fix=fix)
