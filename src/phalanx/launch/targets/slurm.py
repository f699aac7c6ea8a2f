"""``--to slurm``: a batch job that starts torchrun's agent once on each node (``slurm_node.py``).

The job saves before its time limit and requeues itself until the run has ended. Options of ``sbatch`` that Phalanx does
not need to know itself go into the script by ``--sbatch``.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import Plan
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RunError, SpecError
from phalanx.hardware.catalog import find
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.launch_folder import FOLDER, LAST_WORDS, State, attached_log, last_word
from phalanx.launch.targets.offer import Offer, ask_program, misfit
from phalanx.launch.targets.option_checks import (
    SAVE_MARGIN,
    changing_devices,
    read_options,
    secrets_set,
    to_count,
    too_short,
    uneven_nodes,
    wrong_option,
)
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission, own_words

OPTIONS = {
    "nodes": Option(help="nodes, each with an equal part of the plan's processes [1]", example="2", kind="count"),
    "gpus-per-node": Option(
        help="GPUs of each node; one a device of the plan where the partition has any, 0: none",
        example="8",
        kind="count",
        least=0,
    ),
    "time": Option(help="time limit, in m, h or d; the run resumes after it", example="12h", kind="time"),
    "setup": Option(help="a line of shell that runs before; repeat it", example="'module load python'", between="\n"),
    "sbatch": Option(
        help="any other option of sbatch; repeat it",
        example="'--partition=gpu'",
        between="\n",
        through="--sbatch '{}'",
    ),
}

SCRIPT = "job.sh"
"""Name of the batch script."""

_FURTHER = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:[= ](?P<value>[^\s\"'\\#`$]+))?")
# Options of sbatch that the script sets itself, or that would keep the run from being followed
_OWN = {
    *("array", "chdir", "error", "input", "job-name", "no-requeue", "ntasks", "ntasks-per-node", "signal"),
    *("open-mode", "output", "parsable", "requeue", "test-only", "wait", "wrap"),
}
_ASKS_GPUS = {"gres", "gpus", "gpus-per-task", "gpus-per-socket", "tres-per-node"}
_NODES_OF_CHOICE = {"constraint", "nodelist", "exclude"}  # sinfo describes the partition's nodes, not these
_GPUS = re.compile(r"(?:gres/)?gpu(?::(?P<kind>[A-Za-z][\w.-]*))?(?::(?P<count>\d+))?(?:\(.*?\))?")
_GPU = "GPU"  # of an unknown kind
_COLUMNS = "%P|%c|%m|%G"  # partition (* marks the default), cores, MiB and generic resources of a node
_WAITING = "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
_RUNNING = "RUNNING COMPLETING SIGNALING STAGE_OUT SUSPENDED STOPPED RESIZING"
_STATES: Mapping[str, State] = {
    **dict.fromkeys(_WAITING.split(), "waiting"),
    **dict.fromkeys(_RUNNING.split(), "running"),
    "COMPLETED": "ended",
    "CANCELLED": "stopped",
}
# Variables of sbatch, after SBATCH_, that override a line of the script under another name
_ALSO = {
    "nodes": "ARRAY_INX WAIT",
    "time": "TIMELIMIT",
    "mem": "MEM_PER_NODE MEM_PER_CPU MEM_PER_GPU",
    "gpus-per-node": "GPUS GPUS_PER_SOCKET GPUS_PER_TASK",
    "cpus-per-task": "CPUS_PER_GPU",
    "output": "ERROR",
    "requeue": "NO_REQUEUE",
}
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # the other SLURM_ variables describe a job whose shell this may be
_REFUSES = "Slurm refuses it: "
_FORGOTTEN = "Invalid job id specified"
_NOT_BEGUN = 3  # exit code of a job whose setup failed


@final
class SlurmTarget(QueueTarget):
    """The cluster whose ``sbatch`` is on this machine."""

    name: ClassVar[str] = "slurm"
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def prepare(self, submission: Submission) -> Prepared:
        run, options = submission.run, submission.options
        values, problems = read_options(OPTIONS, options)
        further, wrong = _read_further(options)
        nodes, limit = values.get("nodes", 1), values.get("time")
        signal = math.ceil(run.grace) + SAVE_MARGIN
        minutes = None if limit is None else math.ceil(limit / 60)  # Slurm's unit
        said = f"{options.get('time')}, of which the last {signal} seconds are kept to save"
        problems += [*_wrong_setup(options), *wrong, *uneven_nodes(run.plan, nodes), *changing_devices(run, "Slurm")]
        problems += too_short(run, minutes and 60 * minutes, signal, said)
        if problems:
            raise SpecError(problems)
        count, known = values.get("gpus-per-node"), on_host(run.plan.device)
        rows = None if known or count is not None or "gres" in further else _sinfo(further.get("partition"))
        offer = None if known else offer_of(rows or [], options)
        if offer and (problem := misfit(run.plan, offer)):
            raise SpecError([problem])
        gpus, cores, notes = _each_node(run.plan, nodes, count, further, rows)
        directives = {
            "job-name": re.sub(r"[^\w.-]+", "-", submission.name),
            "nodes": nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": cores,
            "gpus-per-node": gpus,
            "time": minutes and f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00",
            "signal": f"B:USR1@{signal}",
            "chdir": Path.cwd(),
            "output": f"{str(submission.folder).replace('%', '%%')}/slurm-%j.out",
        }
        lines = [*_lines(directives), "--requeue", "--open-mode=append", *options.get("sbatch", "").splitlines()]
        script = submission.folder / SCRIPT
        return Prepared(
            submission=submission,
            files={submission.runfile: run.to_toml(), script: _script(submission, lines, signal)},
            commands=(("sbatch", "--parsable", str(script)),),
            notes=notes,
        )

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        further, _ = _read_further(options)
        said = "gres" in further or options.get("gpus-per-node") == "0"
        found = offer_of([] if said else _sinfo(further.get("partition")) or [], options)
        return found if found and found.device != _GPU else None

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            RunError: Slurm refuses it, or is not on this machine.
        """
        with prepared.written():
            (command,), script = prepared.commands, prepared.files[prepared.submission.folder / SCRIPT]
            number, _, cluster = _ask(*command, without=_overridden(script)).strip().partition(";")
        return {"job": int(number), **({"cluster": cluster} if cluster else {})}

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str:
        script = prepared.files[prepared.submission.folder / SCRIPT]
        try:
            _ask("sbatch", "--test-only", text=script, without=_overridden(script), patience=patience)
        except RunError as error:
            return own_words(error).removeprefix(_REFUSES)
        return ""

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        if (job := _job(ticket)) is None:
            return Standing(state=LAST_WORDS.get(last_word(folder), "unknown"), detail="Slurm has forgotten it")
        word, reason, code = job["JobState"], job.get("Reason", "None"), job.get("ExitCode", "")
        saved = code.partition(":")[0] == str(SAVED) and last_word(folder) != "error"
        state = _STATES.get(word, "stopped" if saved else "failed")
        again = f", after {job['Restarts']} earlier starts" if job.get("Restarts", "0") != "0" else ""
        details = {
            "waiting": f"{word}: {reason}{again}",
            "running": f"{word} on {job.get('NodeList', '')}",
            "failed": f"{word}: {reason}, exit code {code}",
        }
        return Standing(state=state, detail=details.get(state, word))

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        job, where, number = _job(ticket), _cluster(ticket), str(ticket["job"])
        if job is None or _STATES.get(job["JobState"]) not in ("waiting", "running"):
            return
        with suppress(RunError):  # it has ended meanwhile; or else no requeue where a node is lost as it saves
            _ask("scontrol", *where, "update", f"JobId={number}", "Requeue=0")
        if _STATES[job["JobState"]] == "running" and job["JobState"] != "COMPLETING":  # which may lead to a requeue
            with suppress(RunError):  # it has ended, or is queued again
                _ask("scancel", *where, "--signal=USR2", "--batch", number)
                return
        with suppress(RunError):
            _ask("scancel", *where, number)

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        return attached_log(folder, rank) if rank is not None else folder / FOLDER / f"slurm-{ticket['job']}.out"


def _cluster(ticket: Mapping[str, Any]) -> tuple[str, ...]:
    return ("-M", ticket["cluster"]) if "cluster" in ticket else ()


def _job(ticket: Mapping[str, Any]) -> dict[str, str] | None:
    try:
        told = _ask("scontrol", *_cluster(ticket), "show", "job", str(ticket["job"]), "--oneliner")
    except RunError as error:
        if _FORGOTTEN in str(error):
            return None
        raise
    words = [word.split("=", 1) for word in told.split() if "=" in word]
    return dict(reversed(words))  # of two the first: paths, which may hold anything, come last


def _ask(*words: str, text: str | None = None, without: Collection[str] = (), patience: float = 60.0) -> str:
    """Return the output of a command of Slurm. ``without``: variables of the environment it does not get.

    Raises:
        RunError: it is not on this machine, does not answer within ``patience`` seconds, or refuses.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if (name in _KEPT or not name.startswith("SLURM_")) and name not in without
    }
    given = {} if text is None else {"stdin": None, "input": text}
    lacking = "on a login node of the cluster; --dry-run shows the script to take there"
    done = ask_program(words, "Slurm", patience, lacking, "sinfo", env=environment, **given)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"{words[0]} ended with {done.returncode}"
        raise RunError(f"{_REFUSES}{said}\n    try: sinfo, which says what there is")
    return done.stdout


def _overridden(script: str) -> set[str]:
    """Return the variables of a shell that sbatch would take rather than a line of the script."""
    names = re.findall(r"^#SBATCH --([\w-]+)", script, flags=re.MULTILINE)
    others = [other for name in names for other in _ALSO.get(name, "").split()]
    return {f"SBATCH_{name.replace('-', '_').upper()}" for name in [*names, *others]}


def _read_further(options: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """Return the options of ``--sbatch`` by name, and the problems in them."""
    found: dict[str, str] = {}
    problems: list[Problem] = []

    def refuse(given: str, allowed: str, fix: str = "") -> None:
        problems.append(wrong_option(OPTIONS, "sbatch", given, allowed, fix))

    for line in options["sbatch"].split("\n") if "sbatch" in options else ():
        if not (matched := _FURTHER.fullmatch(line)):
            refuse(repr(line), "--NAME or --NAME=VALUE of sbatch, without spaces and quotes")
            continue
        name = matched["name"]
        if name in OPTIONS:
            refuse(line, "an option that launch does not have itself", f"--{name} {OPTIONS[name].example}")
        elif any(own.startswith(name) for own in (*_OWN, *OPTIONS)):  # sbatch takes beginnings of names
            refuse(line, "an option that the script does not set itself", f"without --sbatch {line!r}")
        elif name in found:
            refuse(f"--{name} twice", "once", f"--sbatch {line!r}")
        elif said := secrets_set(line):
            fix = f"{said[0]} of this shell, which sbatch hands on"
            refuse(f"{said[0]}, named as a secret", "text that all may read who may read the run folder", fix)
        found[name] = matched["value"] or ""
    return found, problems


def _wrong_setup(options: Mapping[str, str]) -> list[Problem]:
    lines = options.get("setup", "").split("\n")
    fix = "$(cat FILE) in place of its value, or a variable of this shell, which sbatch hands on"
    secret = [name for line in lines for name in secrets_set(line)]
    allowed = "text that all may read who may read the run folder"
    return [
        *(wrong_option(OPTIONS, "setup", repr(one), "a line of shell") for one in lines if not one.isprintable()),
        *(wrong_option(OPTIONS, "setup", f"{one}, named as a secret", allowed, fix) for one in secret),
    ]


def _sinfo(partition: str | None) -> list[tuple[str, str, str]] | None:
    """Return cores, MiB and resources of each kind of node in the partition, or the default one.

    ``None`` if Slurm does not answer.
    """
    named = [f"--partition={partition}"] if partition else []
    try:
        told = _ask("sinfo", "--noheader", "--exact", f"--format={_COLUMNS}", *named, patience=30)
    except (RunError, OSError):
        return None
    rows = [line.strip().split("|") for line in told.splitlines()]
    return [(row[1], row[2], row[3]) for row in rows if len(row) == 4 and (partition or row[0].endswith("*"))]


def offer_of(rows: Sequence[tuple[str, str, str]], options: Mapping[str, str]) -> Offer | None:
    """Return the nodes of a launch by its options and the rows of ``sinfo``; ``None`` if they do not tell.

    GPUs of an unknown kind are called ``GPU``.
    """
    (values, wrong), (further, _) = read_options(OPTIONS, options), _read_further(options)
    kinds = {(cores.rstrip("+"), memory.rstrip("+"), resources) for cores, memory, resources in rows}
    if wrong or len(kinds) > 1 or further.keys() & _NODES_OF_CHOICE:
        kinds = set()
    nodes, count, gres = values.get("nodes", 1), values.get("gpus-per-node"), further.get("gres", "")
    ((cores, memory, resources),) = kinds or {("", "", "")}
    found = [match for one in (gres or resources).split(",") if (match := _GPUS.fullmatch(one.strip()))]
    by = "--gres" if gres else "sinfo" if count is None else f"--gpus-per-node {count}"
    if count == 0 or (kinds and not gres and not found and count is None):
        share = to_count(further.get("cpus-per-task", "1"))
        room = int(min(1.0, share / (to_count(cores) or share or 1)) * to_count(memory) * 2**20)
        return Offer(nodes=nodes, devices=1, cores=share, memory=room, by=by) if share else None
    each = count or sum(to_count(match["count"] or "1") for match in found)
    known = find(found[0]["kind"] or "") if len(found) == 1 else None
    return Offer(nodes=nodes, devices=each, device=known.device.name if known else _GPU, by=by) if each else None


def _each_node(
    plan: Plan, nodes: int, gpus: int | None, further: Mapping[str, str], rows: Sequence[tuple[str, str, str]] | None
) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Return GPUs and cores to ask for on each node, and guesses."""
    workers, notes, asked = plan.processes // nodes * plan.threads, (), bool(further.keys() & _ASKS_GPUS)
    if gpus is None and not asked and not on_host(plan.device):
        if plan.device != "auto" or any("gpu" in resources for _, _, resources in rows or ()):
            gpus = workers
        elif rows is None:
            there = "does not answer" if shutil.which("sinfo") else "is not here"
            notes = (f"sinfo {there}: taken as nodes without GPUs; give --gpus-per-node",)
    cores = None if gpus or asked or "cpus-per-task" in further else workers
    return gpus or None, cores, notes


def _lines(directives: Mapping[str, Any]) -> list[str]:
    given = {name: str(value) for name, value in directives.items() if value is not None}
    for name, value in given.items():
        if not value.isprintable():  # a directive ends with its line; more would be a command
            allowed = "values of a batch script in one line, of characters that can be printed"
            fix = "cd to a folder without line breaks in its name"
            raise SpecError.of(f"--to slurm, {name}", ascii(value), allowed, fix)
    return [f"--{name}={shlex.quote(value)}" for name, value in given.items()]


_SCRIPT = """\
#!/bin/bash
{directives}

{run}
# SIGUSR1 comes when the time is nearly over. Other signals ask the run to stop, and not to be queued again.
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
node=(--wait={wait} --input=none {python} -m phalanx.launch.targets.slurm_node
    "$run/{runfile}" "${{host#NodeAddr=}}:$port")
srun "${{node[@]}}" &
step=$!
while kill -0 "$step" 2>/dev/null; do    # a signal may come between any two lines, and too early for srun
    [ -n "$asked" ] && kill -USR1 "$step"
    sleep 1 & wait $!    # which a signal ends
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
exit "$code"
"""


def _script(submission: Submission, lines: Sequence[str], wait: int) -> str:
    setup = [line for line in submission.options.get("setup", "").split("\n") if line.partition("#")[0].strip()]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        run=f"run={shlex.quote(str(submission.run.folder))}",
        setup="".join(map(_checked, setup)),
        saved_code=SAVED,
        wait=wait,
        python=shlex.quote(submission.python),
        runfile=submission.runfile.relative_to(submission.run.folder),
    )


def _checked(line: str) -> str:
    """Return a line of ``--setup`` that ends the job if it fails."""
    said = shlex.quote(f"the run does not begin: this line of --setup failed: {line}")
    return f"{{ {line}\n}} || {{ echo {said} >&2; exit {_NOT_BEGUN}; }}\n"
