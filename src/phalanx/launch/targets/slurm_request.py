"""What the options of a launch on Slurm say, and what is wrong in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from phalanx.config import RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.option_checks import (
    changing_devices,
    is_count,
    most_nodes,
    secrets_set,
    wrong_counts,
    wrong_option,
)
from phalanx.launch.targets.slurm_kinds import (
    NODE_OPTIONS,
    NodeKind,
    also_options,
    node_problems,
    too_few_gpus,
    workers_of,
)
from phalanx.launch.targets.target import Option, Submission
from phalanx.launch.targets.time_limit import SAVE_MARGIN, TimeLimit
from phalanx.units import parse_duration

OPTIONS = {
    **NODE_OPTIONS,
    "also": Option(
        help="other nodes beside these, by the same options and processes=N on each", example="'nodes=2 partition=old'"
    ),
    "time": Option(help="time limit, in m, h or d or as Slurm writes it; the run goes on after it", example="12h"),
    "setup": Option(help="a line of shell that runs before; repeat it", example="'module load python'", between="\n"),
    "signal": Option(help="seconds before the time limit at which the run saves", example="120"),
    "sbatch": Option(
        help="another option of sbatch, as a line of the script; repeat it",
        example="'--exclusive'",
        between="\n",
        dashes=True,
    ),
}
"""All that a launch on Slurm may be asked for."""
_wrong = partial(wrong_option, OPTIONS)

_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<clock>\d+(?::\d+){0,2}))")
_LONGEST = 65_535  # seconds that Slurm's --signal can say
_FURTHER = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:[= ](?P<value>[^\s\"'\\#`$]+))?")
# Of sbatch's options those that the script says itself, or that would keep the run from being followed
_OWN = {
    *("array", "chdir", "error", "hetjob", "input", "job-name", "no-requeue", "ntasks", "ntasks-per-node"),
    *("open-mode", "output", "parsable", "requeue", "test-only", "wait", "wrap"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmRequest:
    """What a job asks of Slurm.

    Attributes:
        kinds: of nodes, those first that have the run's first ranks.
        time: limit in seconds; ``None``: the partition's own.
        signal: seconds before the limit at which the run is asked to save.
        setup: lines of shell.
        further: options of ``sbatch`` as they are, for nodes of each kind.
    """

    kinds: tuple[NodeKind, ...]
    time: int | None
    signal: int
    setup: tuple[str, ...]
    further: tuple[str, ...]

    @classmethod
    def of(cls, submission: Submission) -> SlurmRequest:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        also, wrong = also_options(options.get("also"))
        astray = [*node_problems(options), *wrong]
        problems = [*astray, *_wrong_lines(options), *_wrong_further(options)]
        time, wrong = _seconds(options.get("time"))
        problems += wrong
        told = options.get("signal", "")
        signal = int(told) if is_count(told, 1) else math.ceil(run.grace) + SAVE_MARGIN
        workers, unlaid = workers_of(run, options, also)
        problems += [*([] if also and problems else unlaid), *([] if astray else too_few_gpus(run.plan, options, also))]
        problems += [*changing_devices(run, "Slurm"), *_too_short(run, time, signal)]
        if problems:
            raise SpecError(problems)
        kinds = zip((options, also), workers, strict=False)
        return cls(
            kinds=tuple(NodeKind.of(one, each, run.plan) for one, each in kinds),
            time=time,
            signal=signal,
            setup=tuple(line for line in options.get("setup", "").split("\n") if line.partition("#")[0].strip()),
            further=tuple(options["sbatch"].split("\n")) if "sbatch" in options else (),
        )

    @property
    def nodes(self) -> int:
        """Of all kinds."""
        return sum(kind.nodes for kind in self.kinds)

    @property
    def guessed(self) -> tuple[str, ...]:
        """What was taken for granted of its nodes, a sentence each."""
        return tuple(dict.fromkeys(kind.guessed for kind in self.kinds if kind.guessed))


def laid_on_nodes(submission: Submission) -> Submission:
    """``submission`` on so many of its nodes as the plan's processes divide by, in equal parts."""
    nodes = submission.options.get("nodes", "1")
    if not is_count(nodes, 1):
        return submission
    fits = most_nodes(int(nodes), submission.run.plan.processes)
    return replace(submission, options={**submission.options, "nodes": str(fits)})


def _wrong_lines(options: Mapping[str, str]) -> list[Problem]:
    lines = options.get("setup", "").split("\n")
    problems = [_wrong("setup", repr(line), "a line of shell") for line in lines if not line.isprintable()]
    allowed = "what all may read who may read the run folder; a secret that the line looks up as it runs"
    fix = "$(cat FILE) in place of its value, or a variable of this shell, which sbatch hands on"
    for name in (name for line in lines for name in secrets_set(line)):
        problems.append(_wrong("setup", f"{name}, which is called as a secret is", allowed, fix))
    return [*problems, *wrong_counts(OPTIONS, options, {"signal": 1})]


def _wrong_further(options: Mapping[str, str]) -> list[Problem]:
    """What is wrong in further options of ``sbatch``: each is one line of the script, and says what no other does."""
    problems: list[Problem] = []
    names: list[str] = []
    for line in options["sbatch"].split("\n") if "sbatch" in options else ():
        matched = _FURTHER.fullmatch(line)
        if not matched:
            problems.append(_wrong("sbatch", repr(line), "--NAME or --NAME=VALUE of sbatch, without spaces and quotes"))
            continue
        name = matched["name"]
        if name in OPTIONS:
            problems.append(_wrong("sbatch", line, "what no other option says", f"--{name} {OPTIONS[name].example}"))
        elif name in _OWN:
            problems.append(_wrong("sbatch", line, "what the script does not say itself", f"without --sbatch {line!r}"))
        elif name in names:
            problems.append(_wrong("sbatch", f"--{name} twice", "once", f"--sbatch {line!r}"))
        elif said := secrets_set(line):
            given, fix = f"{said[0]}, which is called as a secret is", f"{said[0]} of this shell, which sbatch hands on"
            problems.append(_wrong("sbatch", given, "what all may read who may read the run folder", fix))
        names.append(name)
    return problems


def _seconds(text: str | None) -> tuple[int | None, list[Problem]]:
    """The time limit in seconds, and what is wrong with it."""
    if text is None:
        return None, []
    if matched := _TIME.fullmatch(text.strip()):
        parts = [int(part) for part in (matched["of_day"] or matched["clock"]).split(":")]
        if matched["days"]:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        else:  # Slurm's own: minutes, minutes:seconds, hours:minutes:seconds
            hours, minutes, seconds = [0, *parts, 0][:3] if len(parts) < 3 else parts
        total = ((int(matched["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        if total:
            return total, []
    else:
        try:
            return math.ceil(parse_duration(text)), []
        except ValueError:
            pass
    return None, [_wrong("time", repr(text), "a time such as 30m, 12h, 2d or 1-00:00:00", "--time 12h")]


def as_slurm(seconds: int) -> str:
    """A time limit as ``sbatch`` takes it."""
    minutes = math.ceil(seconds / 60)  # of which Slurm counts whole ones
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _too_short(run: RunSpec, time: int | None, signal: int) -> list[Problem]:
    """Whether the time is over before the run can save."""
    problems: list[Problem] = []
    if signal > _LONGEST:
        problems.append(_wrong("signal", f"{signal}", f"at most {_LONGEST} seconds", "--signal 600"))
    if signal < run.grace:
        given = f"{signal}, with a grace of {run.grace:g} seconds"
        problems.append(_wrong("signal", given, "grace, or more", f"--signal {math.ceil(run.grace) + SAVE_MARGIN}"))
    said = f"{as_slurm(time)}, of which the last {signal} seconds are kept to save (--signal)" if time else ""
    whole = math.ceil(time / 60) * 60 if time else None
    return [*problems, *TimeLimit(seconds=whole, kept=signal, said=said).problems(run)]
