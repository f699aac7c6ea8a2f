"""``phalanx bench --to slurm``: every plan is measured on the nodes of a queue, as a task of one array of jobs."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, RunError, SpecError

if TYPE_CHECKING:
    from phalanx.launch.targets import ArrayTarget, Prepared, Standing, Submission
    from phalanx.report.summary import RunSummary

QUEUE_OPTIONS = ("to", "folder", "at_once", "dry_run")
"""The fields of ``QueueOptions``, which ``queue_options`` fill."""

_LOOK, _LATER = 1.0, 10.0  # seconds between looks at the queue, at first and at last
_UNANSWERED = 30  # looks at all plans that the queue may leave unanswered, one after the other
_JOB_FILE = "measured.py"
_JOB = '''\
"""The job that is measured: {steps} steps of another, and nothing beside them."""

from phalanx.launch import load_job
from phalanx.train.measured_job import steps_alone


def job():
    return steps_alone(load_job({reference!r}), {steps})
'''


class BenchCommand(click.Command):
    """With ``--to`` it takes the options of that target, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        elsewhere = any(word == "--to" or word.startswith("--to=") for word in args)
        ctx.ignore_unknown_options = ctx.allow_extra_args = elsewhere
        return super().parse_args(ctx, args)


def queue_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a ``QueueOptions``, each by its field's name."""
    for option in (
        click.option("--dry-run", is_flag=True, help="With --to: show in full what would be written and run."),
        click.option(
            "--at-once", type=click.IntRange(min=1), help="With --to: plans at a time, which disturb each other [1]."
        ),
        click.option(
            "--run",
            "folder",
            type=click.Path(path_type=Path, file_okay=False),
            help="With --to: folder, at the same path there [runs/JOB-bench-N].",
        ),
        click.option("--to", metavar="TARGET", help="Measure there, each plan as a task of an array: slurm."),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOptions:
    """Where else than here is measured.

    Attributes:
        to: the target; ``None``: here.
        at_once: how many plans at a time; ``None``: one.
    """

    to: str | None
    folder: Path | None
    at_once: int | None
    dry_run: bool

    def target(self, hosts: Mapping[str, Any]) -> ArrayTarget | None:
        """The target that was asked for. ``hosts``: what is said of hosts within this machine, by option.

        Raises:
            SpecError: it takes no arrays, or an option does not apply.
        """
        if self.to is None:
            given = {"--run": self.folder, "--at-once": self.at_once, "--dry-run": self.dry_run}
            for option in (name for name, value in given.items() if value):
                raise SpecError.of(option, "without --to", "with --to", fix=f"--to slurm {option} ...")
            return None
        from phalanx.launch.targets import TARGETS, ArrayTarget, find_target, target_class

        target = find_target(self.to)
        for option in (name for name, value in hosts.items() if value):
            given, allowed = f"together with --to {self.to}", "without --to: hosts within this machine"
            raise SpecError.of(option, given, allowed, fix="phalanx bench JOB --hosts 2")
        if not isinstance(target, ArrayTarget):
            able = [name for name in TARGETS if issubclass(target_class(name), ArrayTarget)]
            given = f"{self.to}, which takes no arrays of jobs"
            raise SpecError.of("--to", given, ", ".join(able), fix=f"--to {able[0]}")
        return target

    def place(self, stem: str) -> Path:
        """The folder, absolute."""
        from phalanx.launch import default_folder

        return (self.folder or default_folder(f"{stem}-bench")).absolute()


def devices_there(target: ArrayTarget, options: Mapping[str, str]) -> int:
    """Devices, or processes, of the nodes that the target's ``options`` ask for.

    Raises:
        SpecError: the target cannot say.
    """
    offer = target.offer(options)
    if offer is None:
        allowed = "plans, or numbers of devices: which there are is not known here"
        raise SpecError.of("--plan", "none", allowed, fix="-n 1,2,4")
    return offer.nodes * offer.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueBench:
    """Plans to be measured there.

    Attributes:
        options: the target's own.
        folder: with the folder of each plan's run in it, called by its number.
        reference: of the job, absolute.
        job: as it is measured, with ``job.steps`` steps.
    """

    target: ArrayTarget
    to: str
    options: Mapping[str, str]
    folder: Path
    reference: str
    job: Job
    plans: Sequence[Plan]
    at_once: int

    def prepared(self) -> Prepared:
        """All that would be written and run.

        Raises:
            SpecError: with what the target cannot do.
        """
        text = _JOB.format(reference=self.reference, steps=self.job.steps)
        prepared = self.target.prepare_array(self._submissions(), self.at_once)
        return replace(prepared, files={self._job_file: text, **prepared.files})

    def earlier(self) -> list[Mapping[str, Any]]:
        """The tickets of the same plans, where they were handed over by the same command in the same folder.

        Raises:
            SpecError: there is something else in it.
        """
        from phalanx.launch.targets import is_handed_over, ticket_of
        from phalanx.sweep import sweep_folder

        runs = [one.run.folder for one in self._submissions()]
        same = all(path.is_file() and path.read_text() == text for path, text in self.prepared().files.items())
        if same and all(map(is_handed_over, runs)):
            return [ticket_of(run)[1] for run in runs]
        sweep_folder("", self.folder, "--run")
        return []

    def measure(self, tickets: Sequence[Mapping[str, Any]]) -> Measured:
        """Hand the plans over, or find again those of ``tickets``, and wait until each has come to its end.

        Ctrl-C and SIGTERM stop what waits or runs there.

        Raises:
            RunError: the target refuses them, or cannot be asked any more.
            SystemExit: after SIGTERM.
        """
        from phalanx.launch.targets import write_ticket

        with _ended_by_sigterm():
            tickets = tickets or self.target.submit_array(self.prepared(), len(self.plans))
            try:
                for submission, ticket in zip(self._submissions(), tickets, strict=True):
                    write_ticket(submission, self.to, ticket)
                click.echo(f"handed to {self.target.name}: job {tickets[0]['job']}, in {self.folder}", err=True)
                over = self._followed(tickets)
            except (KeyboardInterrupt, SystemExit, OSError):
                self._stop(tickets)
                raise
        return Measured.of(self, over)

    @property
    def _job_file(self) -> Path:
        from phalanx.launch.targets import FOLDER

        return self.folder / FOLDER / _JOB_FILE

    def _submissions(self) -> list[Submission]:
        from phalanx.launch.targets import Submission

        how: dict[str, Any] = {"restarts": 0, "forecast": "none"}
        job, file = replace(self.job, name=f"{self.job.name}-bench"), str(self._job_file)
        runs = [
            RunSpec(job=file, plan=plan, folder=self.folder / str(number), **how)
            for number, plan in enumerate(self.plans)
        ]
        return [Submission.of(run, job, self.target, options=self.options) for run in runs]

    def _followed(self, tickets: Sequence[Mapping[str, Any]]) -> list[Standing]:
        """How each stands at its end.

        Raises:
            RunError: the target has not answered for long; what it has goes on.
        """
        over: dict[int, Standing] = {}
        said: dict[int, str] = {}
        pause, unanswered = _LOOK, 0
        while len(over) < len(tickets):
            time.sleep(pause)
            pause = min(1.2 * pause, _LATER)
            answered, refusal = False, RunError("")
            for number in [one for one in range(len(tickets)) if one not in over]:
                try:
                    standing = self.target.standing(tickets[number], self.folder / str(number))
                except RunError as error:
                    refusal = error
                    continue
                answered = True
                line = f"{self.plans[number]}: {standing.state} {standing.detail}"
                if said.get(number) != line:
                    said[number], pause = line, _LOOK
                    click.echo(line.rstrip(), err=True)
                if standing.state not in ("waiting", "running"):
                    over[number] = standing
            unanswered = 0 if answered else unanswered + 1
            if unanswered > _UNANSWERED:
                raise self._given_up(refusal)
        return [over[number] for number in range(len(tickets))]

    def _given_up(self, refusal: RunError) -> RunError:
        from phalanx.launch.targets import own_words

        what = f"{self.target.name} has not answered {_UNANSWERED + 1} times: {own_words(refusal)}"
        again = f"the same command with --run {self.folder}, which finds it again"
        ends = f"phalanx stop {self.folder}/0, which ends the first plan"
        return RunError(f"{what}; what it has goes on there\n    try: {again}; or {ends}")

    def _stop(self, tickets: Sequence[Mapping[str, Any]]) -> None:
        """Those first that wait: they would begin in the place of others. Says of which that could not be asked."""
        from phalanx.launch.targets import own_words

        for number in reversed(range(len(tickets))):
            folder = self.folder / str(number)
            try:
                self.target.stop(tickets[number], folder)
            except RunError as error:
                what = f"{self.plans[number]} may still wait or run there: {own_words(error)}"
                click.echo(f"{what}\n    try: phalanx stop {folder}", err=True)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends this process as an exception does, with the code that a shell expects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A plan that could not be measured: why, and the file with what it printed."""

    plan: str
    why: str
    log: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was measured there, in the order of the plans, and what failed."""

    summaries: Sequence[RunSummary]
    failed: Sequence[Failed]

    @classmethod
    def of(cls, bench: QueueBench, over: Sequence[Standing]) -> Measured:
        """By the log of each run."""
        from phalanx.launch.targets import log_of
        from phalanx.report.summary import summarise

        summaries: list[RunSummary] = []
        failed: list[Failed] = []
        for number, standing in enumerate(over):
            folder = bench.folder / str(number)
            why = "" if standing.state == "ended" else _why(folder, standing)
            try:
                summary = summarise(folder)
                why = why or ("" if summary.finished and summary.samples_per_second else "it took no step")
            except PhalanxError as error:
                summary, why = None, why or str(error).partition("\n")[0]
            if summary and not why:
                summaries.append(summary)
            else:
                failed.append(Failed(plan=str(bench.plans[number]), why=why, log=str(log_of(folder, None))))
        return cls(summaries=summaries, failed=failed)


def _why(folder: Path, standing: Standing) -> str:
    """Why a run did not come to its end: by its own last error, else by what the target says."""
    from phalanx.events.log import read

    try:
        errors = [event for event in read(folder / EVENTS) if event["event"] == "error"]
    except SpecError:
        errors = []
    if errors:
        last = errors[-1]
        return f"rank {last['rank']}: {last['kind']}: {last['message'].strip().partition(chr(10))[0]}"
    return f"{standing.state}: {standing.detail}"
