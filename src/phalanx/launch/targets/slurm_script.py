"""The batch script of a launch on Slurm, of one run or of an array of them, and what its options say to ``sbatch``."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.node_agent import slowest_save
from phalanx.launch.targets.offer import Offer, misfit
from phalanx.launch.targets.target import FOLDER, Option, Submission
from phalanx.units import parse_duration

OPTIONS = {
    "nodes": Option(help="nodes, each with an equal part of the plan's processes; 1 where not given", example="2"),
    "time": Option(help="time limit, in m, h or d or as Slurm writes it; the run goes on after it", example="12h"),
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
    "setup": Option(help="a line of shell that runs before", example="'module load cuda'"),
    "signal": Option(help="seconds before the time limit at which the run saves", example="120"),
}

SCRIPT = "job.sh"
"""The name of the file that ``sbatch`` takes."""

_PASSED_ON = ("partition", "account", "qos", "constraint", "gres", "mem", "nodelist", "exclude")
_COUNTS = {"nodes": 1, "gpus-per-node": 0, "cpus-per-task": 1, "signal": 1}  # name → least
_WORD = re.compile(r"[^\s\"'\\#`$]+")  # nothing that sbatch, as it reads the script, takes for more than a word
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<clock>\d+(?::\d+){0,2}))")
_LONGEST = 65_535  # seconds that Slurm's --signal can say
_MARGIN = 30  # seconds beside grace, for what comes before the save and after it

_SCRIPT = """\
#!/bin/bash
{directives}

{run}
# SIGUSR1 comes when the time is nearly over. Whoever else asks the run to stop does not want it queued again.
trap 'asked=${{asked:-time}}' USR1
trap 'asked=stop' TERM USR2
saved() {{ ls "$run/checkpoints" 2>/dev/null; }}
before=$(saved)
{setup}
host=$(scontrol show node --oneliner "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*')
port=$((10000 + SLURM_JOB_ID % 20000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done    # another's
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

[ -n "$asked" ] && exit {saved_code}
srun {part}--wait={wait} --input=none {python} -m phalanx.launch.targets.slurm_node \\
    "$run/{runfile}" "${{host#NodeAddr=}}:$port" &
step=$!
wait "$step"; code=$?
while [ -n "$asked" ] && kill -0 "$step" 2>/dev/null; do    # a signal ended the wait, not the run
    kill -USR1 "$step"
    sleep 1
done
wait "$step"; code=$?
if [ "$asked" = time ] && [ "$code" -ne 0 ]; then
    if [ "$(saved)" = "$before" ]; then
        echo "the time limit came before anything was saved: not queued again" >&2
    else
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
[ "$asked" = stop ] && [ "$code" -gt 128 ] && code={saved_code}    # before its first step there was nothing to save
{after}exit "$code"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a job asks of Slurm.

    Attributes:
        nodes: how many.
        time: limit in seconds; ``None``: the partition's own.
        signal: seconds before the limit at which the run is asked to save.
        gpus: of each node; ``None``: none are asked for, or ``gres`` does.
        cores: of each node; ``None``: as Slurm gives them.
        words: further options of ``sbatch``, name → value.
        setup: a line of shell.
    """

    nodes: int
    time: int | None
    signal: int
    gpus: int | None
    cores: int | None
    words: Mapping[str, str]
    setup: str

    @classmethod
    def of(cls, submission: Submission) -> Request:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        problems = [*_wrong_words(options), *_wrong_counts(options)]
        counts = {name: int(options[name]) for name in _COUNTS if _is_count(name, options.get(name, ""))}
        time, wrong = _seconds(options.get("time"))
        nodes, signal = counts.get("nodes", 1), counts.get("signal", math.ceil(run.grace) + _MARGIN)
        problems += [*wrong, *_misfits(run, nodes, counts.get("gpus-per-node")), *_too_short(run, time, signal)]
        if "gres" in options and "gpus-per-node" in options:
            given = f"{options['gpus-per-node']} with --gres {options['gres']}"
            problems.append(_wrong("gpus-per-node", given, "one of the two", f"--gres {options['gres']}"))
        if problems:
            raise SpecError(problems)
        gpus = counts.get("gpus-per-node")
        if gpus is None and "gres" not in options and _has_gpus(options.get("partition")):
            gpus = max(1, run.plan.devices // nodes)
        cores = counts.get("cpus-per-task")
        if cores is None and not gpus and "gres" not in options:
            cores = run.plan.processes * run.plan.threads // nodes
        words = {name: options[name] for name in _PASSED_ON if name in options}
        setup = options.get("setup", "")
        return cls(nodes=nodes, time=time, signal=signal, gpus=gpus or None, cores=cores, words=words, setup=setup)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """Several runs as the tasks of one array, by their numbers.

    Attributes:
        folder: with the folder of each run in it, called by its number.
        nodes: that each has, of those that the array asks for.
        cores: of each node that each has; ``None``: as Slurm gives them.
        at_once: how many may run at a time.
    """

    folder: Path
    nodes: Sequence[int]
    cores: Sequence[int | None]
    at_once: int

    @property
    def shell(self) -> str:
        """Lines that say where this task's run is, and what it has."""
        each = '"${nodes[$SLURM_ARRAY_TASK_ID]}"'
        words = [f"--relative=0 --nodes={each} --ntasks={each}"]
        lines = [f"nodes=({' '.join(map(str, self.nodes))})    # of each plan"]
        if None not in self.cores:
            lines.append(f"cores=({' '.join(map(str, self.cores))})    # of each of them")
            words.append('--cpus-per-task="${cores[$SLURM_ARRAY_TASK_ID]}"')
        run = f'run={shlex.quote(str(self.folder))}/"$SLURM_ARRAY_TASK_ID"'
        return "\n".join([run, *lines, f"part=({' '.join(words)})"])


def batch_script(submission: Submission, request: Request, saved_code: int, tasks: Tasks | None = None) -> str:
    """The text of ``job.sh``: of one run, or of each of ``tasks``.

    ``saved_code``: the exit code of a run that was asked to stop.
    """
    folder = tasks.folder if tasks else submission.folder
    output = f"%a/{FOLDER}/slurm-%A_%a.out" if tasks else "slurm-%j.out"
    directives: dict[str, Any] = {
        "job-name": re.sub(r"[^\w.-]+", "-", submission.name),
        "array": f"0-{len(tasks.nodes) - 1}%{tasks.at_once}" if tasks else None,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": request.cores,
        "gpus-per-node": request.gpus,
        "time": None if request.time is None else _as_slurm(request.time),
        **request.words,
        "signal": f"B:USR1@{request.signal}",
        "chdir": Path.cwd(),
        "output": f"{str(folder).replace('%', '%%')}/{output}",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in directives.items() if value is not None]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", "--open-mode=append"]),
        run=tasks.shell if tasks else f"run={shlex.quote(str(submission.run.folder))}",
        part='"${part[@]}" ' if tasks else "",
        after='[ "$code" -eq 0 ] && rm -rf -- "$run/checkpoints"    # measured, not trained\n' if tasks else "",
        setup=f"{request.setup}\n" if request.setup else "",
        saved_code=saved_code,
        wait=request.signal,
        python=shlex.quote(submission.python),
        runfile=submission.runfile.relative_to(submission.run.folder),
    )


def laid_on_nodes(submission: Submission) -> Submission:
    """``submission`` on so many of its nodes as the plan's processes divide by, in equal parts."""
    nodes, processes = submission.options.get("nodes", "1"), submission.run.plan.processes
    if not _is_count("nodes", nodes):
        return submission
    return replace(submission, options={**submission.options, "nodes": str(_most_nodes(int(nodes), processes))})


def _most_nodes(nodes: int, processes: int) -> int:
    return max(number for number in range(1, min(nodes, processes) + 1) if processes % number == 0)


def _wrong_words(options: Mapping[str, str]) -> list[Problem]:
    allowed = "a word, without spaces and quotes"
    problems = [
        _wrong(name, repr(options[name]), allowed, f"--{name} {OPTIONS[name].example}")
        for name in _PASSED_ON
        if name in options and not _WORD.fullmatch(options[name])
    ]
    setup = options.get("setup", "")
    if not setup.isprintable():
        problems.append(_wrong("setup", repr(setup), "one line of shell", f"--setup {OPTIONS['setup'].example}"))
    return problems


def _wrong_counts(options: Mapping[str, str]) -> list[Problem]:
    return [
        _wrong(name, repr(options[name]), f"a whole number, {least} or more", f"--{name} {OPTIONS[name].example}")
        for name, least in _COUNTS.items()
        if name in options and not _is_count(name, options[name])
    ]


def _is_count(name: str, text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8 and int(text) >= _COUNTS[name]


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


def _as_slurm(seconds: int) -> str:
    minutes = math.ceil(seconds / 60)  # of which Slurm counts whole ones
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _misfits(run: RunSpec, nodes: int, gpus: int | None) -> list[Problem]:
    """What of the run cannot be laid on so many nodes, with so many GPUs each where that is said."""
    problems: list[Problem] = []
    offer = Offer(nodes=nodes, devices=gpus, device="GPU", by="--gpus-per-node") if gpus else None
    if offer and (problem := misfit(run.plan, offer)):
        problems.append(problem)
    processes = run.plan.processes
    if processes % nodes:
        given = f"{nodes}, for the {processes} processes of {run.plan}"
        allowed = "a number that divides them: each node has equally many"
        problems.append(_wrong("nodes", given, allowed, f"--nodes {_most_nodes(nodes, processes)}"))
    if run.devices:
        given, allowed = f"{run.devices}, on Slurm", "a number of devices that does not change"
        problems.append(Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}"))
    return problems


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
        given = f"{_as_slurm(time)}, of which the last {signal} seconds are kept to save (--signal)"
        least = math.ceil(max(signal, 1.5 * took + _MARGIN) / 60) + 5
        problems.append(_wrong("time", given, "more than that", f"--time {least}m"))
    elif time is not None and not run.grace and run.save_seconds >= time:
        given = f"{_as_slurm(time)}, with grace = 0 and a checkpoint every {run.checkpoint_every}"
        problems.append(_wrong("time", given, "more than that, or the run never goes on", "--grace 30"))
    return problems


def _has_gpus(partition: str | None) -> bool:
    """Whether a node of the partition, or of the one that jobs go to, has GPUs; Slurm alone knows."""
    words = ["sinfo", "--noheader", "--format=%P %G", *([f"--partition={partition}"] if partition else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return any("gpu" in words[-1] for words in lines if partition or words[0].endswith("*"))


def _wrong(name: str, given: str, allowed: str, fix: str) -> Problem:
    return Problem(where=f"--{name}", given=given, allowed=allowed, fix=fix)
