"""What the options of a launch on Slurm say, and what is wrong in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from phalanx.config import RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.node_agent import slowest_save
from phalanx.launch.targets.offer import Offer, misfit
from phalanx.launch.targets.option_checks import changing_devices, is_count, most_nodes, wrong_counts, wrong_option
from phalanx.launch.targets.slurm_kinds import (
    NODE_OPTIONS,
    Kind,
    also_options,
    node_problems,
    workers_of,
)
from phalanx.launch.targets.target import Option, Submission
from phalanx.units import parse_duration

OPTIONS = {
    **NODE_OPTIONS,
    "also": Option(
        help="other nodes beside these, by the same options and processes=N on each", example="'nodes=2 partition=old'"
    ),
    "time": Option(help="time limit, in m, h or d or as Slurm writes it; the run goes on after it", example="12h"),
    "setup": Option(help="a line of shell that runs before", example="'module load python'"),
    "signal": Option(help="seconds before the time limit at which the run saves", example="120"),
}
"""All that a launch on Slurm may be asked for."""
_wrong = partial(wrong_option, OPTIONS)

_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<clock>\d+(?::\d+){0,2}))")
_LONGEST = 65_535  # seconds that Slurm's --signal can say
_MARGIN = 30  # seconds beside grace, for what comes before the save and after it


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a job asks of Slurm.

    Attributes:
        kinds: of nodes, those first that have the run's first ranks.
        time: limit in seconds; ``None``: the partition's own.
        signal: seconds before the limit at which the run is asked to save.
        setup: a line of shell.
    """

    kinds: tuple[Kind, ...]
    time: int | None
    signal: int
    setup: str

    @classmethod
    def of(cls, submission: Submission) -> Request:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        also, wrong = also_options(options.get("also"))
        problems = [*node_problems(options), *wrong, *_wrong_lines(options)]
        time, wrong = _seconds(options.get("time"))
        problems += wrong
        told = options.get("signal", "")
        signal = int(told) if is_count(told, 1) else math.ceil(run.grace) + _MARGIN
        workers, unlaid = workers_of(run, options, also)
        problems += [*([] if also and problems else unlaid), *_misfits(run, options), *_too_short(run, time, signal)]
        if problems:
            raise SpecError(problems)
        kinds = zip((options, also), workers, strict=False)
        return cls(
            kinds=tuple(Kind.of(one, each, run.plan.threads) for one, each in kinds),
            time=time,
            signal=signal,
            setup=options.get("setup", ""),
        )

    @property
    def nodes(self) -> int:
        """Of all kinds."""
        return sum(kind.nodes for kind in self.kinds)


def laid_on_nodes(submission: Submission) -> Submission:
    """``submission`` on so many of its nodes as the plan's processes divide by, in equal parts."""
    nodes = submission.options.get("nodes", "1")
    if not is_count(nodes, 1):
        return submission
    fits = most_nodes(int(nodes), submission.run.plan.processes)
    return replace(submission, options={**submission.options, "nodes": str(fits)})


def _wrong_lines(options: Mapping[str, str]) -> list[Problem]:
    setup = options.get("setup", "")
    problems = [] if setup.isprintable() else [_wrong("setup", repr(setup), "one line of shell")]
    return [*problems, *wrong_counts(OPTIONS, options, {"signal": 1})]


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


def _misfits(run: RunSpec, options: Mapping[str, str]) -> list[Problem]:
    """What of the run cannot be had on Slurm, or not with so many GPUs where that is said of all nodes."""
    problems: list[Problem] = []
    nodes, gpus = options.get("nodes", "1"), options.get("gpus-per-node", "")
    if is_count(nodes, 1) and is_count(gpus, 1) and "also" not in options:
        offer = Offer(nodes=int(nodes), devices=int(gpus), device="GPU", by="--gpus-per-node")
        problems += [problem] if (problem := misfit(run.plan, offer)) else []
    return [*problems, *changing_devices(run, "Slurm")]


def _too_short(run: RunSpec, time: int | None, signal: int) -> list[Problem]:
    """Whether the time is over before the run can save."""
    problems: list[Problem] = []
    if signal > _LONGEST:
        problems.append(_wrong("signal", f"{signal}", f"at most {_LONGEST} seconds", "--signal 600"))
    if signal < run.grace:
        given = f"{signal}, with a grace of {run.grace:g} seconds"
        problems.append(_wrong("signal", given, "grace, or more", f"--signal {math.ceil(run.grace) + _MARGIN}"))
    took = slowest_save(run.folder)
    if 0 < run.grace < took:
        given = f"{run.grace:g} seconds, in which no checkpoint is whole: the slowest of this run took {took:.0f}"
        problems.append(_wrong("grace", given, "more than that", f"--grace {math.ceil(1.5 * took)}"))
    if time is not None and math.ceil(time / 60) * 60 <= max(signal, took):
        given = f"{as_slurm(time)}, of which the last {signal} seconds are kept to save (--signal)"
        least = math.ceil(max(signal, 1.5 * took + _MARGIN) / 60) + 5
        problems.append(_wrong("time", given, "more than that", f"--time {least}m"))
    elif time is not None and not run.grace and run.save_seconds >= time:
        given = f"{as_slurm(time)}, with grace = 0 and a checkpoint every {run.checkpoint_every}"
        problems.append(_wrong("time", given, "more than that, or the run never goes on", "--grace 30"))
    return problems
