"""``--to slurm``: a batch job that starts torchrun's agent once on each node (``slurm_node.py``).

The job saves before its time limit and requeues itself until the run has ended. Options of ``sbatch`` that Phalanx does
not need to know itself go into the script by ``--sbatch``.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.errors import Problem, RunError, SpecError
from phalanx.events import RunLog
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.launch_folder import FOLDER, State, attached_log
from phalanx.launch.targets.offer import ask_program, gpus_of_node
from phalanx.launch.targets.option_checks import (
    NODE_OPTIONS,
    SAVE_MARGIN,
    changing_devices,
    read_options,
    too_short,
    uneven_nodes,
    wrong_option,
)
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

OPTIONS = {
    **NODE_OPTIONS,
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

_FURTHER = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:[= ][^\s\"'\\#`$]+)?")
# Options of sbatch that the script sets itself, or that would keep the run from being followed
_OWN = {
    *("array", "chdir", "error", "input", "job-name", "no-requeue", "ntasks", "ntasks-per-node", "signal"),
    *("open-mode", "output", "parsable", "requeue", "test-only", "wait", "wrap"),
}
_ASKS_GPUS = {"gres", "gpus", "gpus-per-task", "gpus-per-socket", "tres-per-node"}
_WAITING = "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
_RUNNING = "RUNNING COMPLETING SIGNALING STAGE_OUT SUSPENDED STOPPED RESIZING"
_STATES: Mapping[str, State] = {
    **dict.fromkeys(_WAITING.split(), "waiting"),
    **dict.fromkeys(_RUNNING.split(), "running"),
    "COMPLETED": "ended",
    "CANCELLED": "stopped",
}
# Variables that commands of Slurm get: others override the script, or describe a job whose shell this may be
_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"}
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
        nodes, limit = values.get("nodes", 1), values.get("time")
        gpus, few = gpus_of_node(run.plan, nodes, values.get("gpus-per-node"))
        further, wrong = _read_further(options)
        signal = math.ceil(run.grace) + SAVE_MARGIN
        minutes = None if limit is None else math.ceil(limit / 60)  # Slurm's unit
        said = f"{options.get('time')}, of which the last {signal} seconds are kept to save"
        problems += [*wrong, *uneven_nodes(run.plan, nodes), *changing_devices(run, "Slurm"), *few]
        problems += too_short(run, minutes and 60 * minutes, signal, said)
        if problems:
            raise SpecError(problems)
        own = "gpus-per-node" not in values and further & _ASKS_GPUS  # as the user asks for them
        cores = run.plan.processes // nodes * run.plan.threads
        directives = {
            "job-name": submission.job_name,
            "nodes": nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": None if own or not gpus else gpus,
            "cpus-per-task": None if own or gpus or "cpus-per-task" in further else cores,
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
        )

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            RunError: Slurm refuses it, or is not on this machine.
        """
        with prepared.written():
            (command,), script = prepared.commands, prepared.files[prepared.submission.folder / SCRIPT]
            number, _, cluster = _ask(*command, script=script).strip().partition(";")
        return {"job": int(number), **({"cluster": cluster} if cluster else {})}

    def try_out(self, prepared: Prepared, patience: float) -> bool:
        script = prepared.files[prepared.submission.folder / SCRIPT]
        _ask("sbatch", "--test-only", text=script, script=script, patience=patience)
        return True

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        try:
            job, detail = _job(ticket), "Slurm has forgotten it"
        except RunError as error:  # the run's own log may say it
            job, detail = None, str(error).partition("\n")[0]
        if job is None:
            return Standing(state=RunLog(folder).outcome or "unknown", detail=detail)
        word, reason, code = job["JobState"], job.get("Reason", "None"), job.get("ExitCode", "")
        saved = code.partition(":")[0] == str(SAVED) and RunLog(folder).outcome != "failed"
        state = _STATES.get(word, "stopped" if saved else "failed")
        again = f", after {job['Restarts']} earlier starts" if job.get("Restarts", "0") != "0" else ""
        details = {
            "waiting": f"{word}: {reason}{again}",
            "running": f"{word} on {job.get('NodeList', '')}",
            "failed": f"{word}: {reason}, exit code {code}",
        }
        return Standing(state=state, detail=details.get(state, "" if saved else word))

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


def _ask(*words: str, text: str | None = None, script: str = "", patience: float = 60.0) -> str:
    """Return the output of a command of Slurm. ``script``: its lines hold rather than variables of the shell.

    Raises:
        RunError: it is not on this machine, does not answer within ``patience`` seconds, or refuses.
    """
    kept = _KEPT - {f"SBATCH_{name.upper()}" for name in re.findall(r"^#SBATCH --([\w-]+)", script, flags=re.MULTILINE)}
    environment = {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith(("SLURM_", "SBATCH_"))
    }
    given: dict[str, Any] = {"env": environment, **({} if text is None else {"input": text})}
    lacking = "on a login node of the cluster; --dry-run shows the script to take there"
    helps = "sinfo, which says what there is; --gpus-per-node 0 without GPUs"
    return ask_program(words, "Slurm", patience, lacking, helps, **given)


def _read_further(options: Mapping[str, str]) -> tuple[set[str], list[Problem]]:
    """Return the names of the options of ``--sbatch``, and the problems in them."""
    names, problems = set[str](), list[Problem]()
    for line in options.get("sbatch", "").splitlines():
        matched = _FURTHER.fullmatch(line)
        name, fix = (matched["name"], f"without --sbatch {line!r}") if matched else ("", "")
        if not name or name in names or any(own.startswith(name) for own in (*_OWN, *OPTIONS)):  # as sbatch takes them
            allowed = "--NAME or --NAME=VALUE without blanks and quotes, which the script does not have already"
            problems.append(wrong_option(OPTIONS, "sbatch", repr(line), allowed, fix))
        names.add(name)
    return names, problems


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
