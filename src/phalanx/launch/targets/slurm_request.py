"""What the options of a launch on Slurm say, and what is wrong in them."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from phalanx.config import Plan, RunSpec
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.offer import Offer, gpus_offered, misfit
from phalanx.launch.targets.option_checks import (
    SAVE_MARGIN,
    TimeLimit,
    changing_devices,
    is_count,
    secrets_set,
    uneven_nodes,
    wrong_counts,
    wrong_option,
)
from phalanx.launch.targets.slurm_offer import gpus_in, has_gpus, slurm_offer
from phalanx.launch.targets.target import Option, Submission
from phalanx.units import parse_duration

OPTIONS = {
    "nodes": Option(help="nodes, each with an equal part of the plan's processes; 1 where not given", example="2"),
    "partition": Option(help="partition, or several with commas", example="gpu"),
    "account": Option(help="account that pays", example="vision"),
    "qos": Option(help="quality of service", example="long"),
    "constraint": Option(help="features that nodes must have", example="a100"),
    "gres": Option(help="generic resources of each node, in place of --gpus-per-node", example="gpu:a100:8"),
    "gpus-per-node": Option(
        help="GPUs of each node; one a device of the plan where the partition has any, 0: none", example="8"
    ),
    "cpus-per-task": Option(help="cores of each node; without GPUs one a worker where not given", example="32"),
    "mem": Option(help="memory of each node, 0: all that it has", example="256G"),
    "nodelist": Option(help="nodes that the job must have", example="n[1-2]"),
    "exclude": Option(help="nodes that it must not have", example="n7"),
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

_WORDS = ("partition", "account", "qos", "constraint", "gres", "mem", "nodelist", "exclude")  # as sbatch has them
_WORD = re.compile(r"[^\s\"'\\#`$]+")  # nothing that sbatch, as it reads the script, takes for more than a word
_COUNTS = {"nodes": 1, "gpus-per-node": 0, "cpus-per-task": 1, "signal": 1}  # name → least
_GUESSED = "sinfo {}: taken as nodes without GPUs; give --gpus-per-node"
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<clock>\d+(?::\d+){0,2}))")
_LONGEST = 65_535  # seconds that Slurm's --signal can say
_FURTHER = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:[= ](?P<value>[^\s\"'\\#`$]+))?")
# Of sbatch's options those that the script says itself, or that would keep the run from being followed
_OWN = {
    *("array", "chdir", "error", "input", "job-name", "no-requeue", "ntasks", "ntasks-per-node"),
    *("open-mode", "output", "parsable", "requeue", "test-only", "wait", "wrap"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmRequest:
    """What a job asks of Slurm.

    Attributes:
        nodes: how many.
        gpus: of each node; ``None``: none are asked for, or ``gres`` does.
        cores: of each node; ``None``: as Slurm gives them.
        words: further options of ``sbatch``, name → value.
        guessed: what was taken for granted of the nodes, in a sentence each.
        time: limit in seconds; ``None``: the partition's own.
        signal: seconds before the limit at which the run is asked to save.
        setup: lines of shell.
        further: options of ``sbatch`` as they are.
    """

    nodes: int
    gpus: int | None
    cores: int | None
    words: Mapping[str, str]
    guessed: tuple[str, ...]
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
        astray = _wrong_nodes(options)
        problems = [*astray, *_wrong_lines(options), *_wrong_further(options)]
        time, wrong = _seconds(options.get("time"))
        signal = _count(options, "signal") or math.ceil(run.grace) + SAVE_MARGIN
        nodes = _count(options, "nodes") or 1
        problems += [*wrong, *uneven_nodes(run.plan, nodes), *([] if astray else _too_few_gpus(run.plan, options))]
        problems += [*changing_devices(run, "Slurm"), *_too_short(run, time, signal)]
        if problems:
            raise SpecError(problems)
        gpus, cores, guessed = _of_each_node(options, run.plan, run.plan.processes // nodes)
        return cls(
            nodes=nodes,
            gpus=gpus,
            cores=cores,
            words={name: options[name] for name in _WORDS if name in options},
            guessed=guessed,
            time=time,
            signal=signal,
            setup=tuple(line for line in options.get("setup", "").split("\n") if line.partition("#")[0].strip()),
            further=tuple(options["sbatch"].split("\n")) if "sbatch" in options else (),
        )


def _of_each_node(
    options: Mapping[str, str], plan: Plan, workers: int
) -> tuple[int | None, int | None, tuple[str, ...]]:
    """GPUs and cores to ask for on a node with so many ``workers``, and what was taken for granted."""
    gpus, cores, guessed = _count(options, "gpus-per-node"), _count(options, "cpus-per-task"), ()
    if gpus is None and "gres" not in options and not on_host(plan.device):
        there = plan.device != "auto" or has_gpus(options.get("partition"))
        gpus = workers * plan.threads if there else None
        if there is None:
            guessed = (_GUESSED.format("does not answer" if shutil.which("sinfo") else "is not here"),)
    if cores is None and not gpus and "gres" not in options:
        cores = workers * plan.threads
    return gpus or None, cores, guessed


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name, "")
    return int(text) if is_count(text, _COUNTS[name]) else None


def _wrong_nodes(options: Mapping[str, str]) -> list[Problem]:
    """What is wrong in options that are words or counts, each by itself."""
    problems = [
        _wrong(name, repr(options[name]), "a word, without spaces and quotes")
        for name in _WORDS
        if name in options and not _WORD.fullmatch(options[name])
    ]
    problems += (counts := wrong_counts(OPTIONS, options, _COUNTS))
    if not counts and "gres" in options and "gpus-per-node" in options:
        fix = f"--gres {options['gres']}"
        problems.append(_wrong("gpus-per-node", f"{options['gpus-per-node']} with {fix}", "one of the two", fix))
    return problems


def _too_few_gpus(plan: Plan, options: Mapping[str, str]) -> list[Problem]:
    """Whether ``plan`` needs more GPUs than the nodes have. The options are without fault."""
    offer = None if on_host(plan.device) else _offered(options)
    problem = misfit(plan, offer) if offer else None
    return [problem] if problem else []


def _offered(options: Mapping[str, str]) -> Offer | None:
    """The GPUs that the options ask for, else what ``sinfo`` says; ``None`` where neither says how many."""
    gpus, by = _count(options, "gpus-per-node"), "--gpus-per-node"
    if gpus is None and "gres" not in options:
        return slurm_offer(options)
    if gpus is None:
        gpus, by = gpus_in(options["gres"]), "--gres"
    return None if gpus is None else gpus_offered(_count(options, "nodes") or 1, gpus, by)


def _wrong_lines(options: Mapping[str, str]) -> list[Problem]:
    lines = options.get("setup", "").split("\n")
    problems = [_wrong("setup", repr(line), "a line of shell") for line in lines if not line.isprintable()]
    allowed = "what all may read who may read the run folder; a secret that the line looks up as it runs"
    fix = "$(cat FILE) in place of its value, or a variable of this shell, which sbatch hands on"
    for name in (name for line in lines for name in secrets_set(line)):
        problems.append(_wrong("setup", f"{name}, which is called as a secret is", allowed, fix))
    return problems


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
