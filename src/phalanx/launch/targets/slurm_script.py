"""The batch script of a launch on Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import SpecError
from phalanx.launch.targets.slurm_request import SlurmRequest, as_slurm
from phalanx.launch.targets.target import Submission

_NOT_BEGUN = 3  # exit code of a job whose nodes are not as it needs them

SCRIPT = "job.sh"
"""The name of the file that ``sbatch`` takes."""

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


def batch_script(submission: Submission, request: SlurmRequest, saved_code: int) -> str:
    """The text of ``job.sh``.

    ``saved_code``: the exit code of a run that was asked to stop.
    """
    directives: dict[str, Any] = {
        "job-name": re.sub(r"[^\w.-]+", "-", submission.name),
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": request.cores,
        "gpus-per-node": request.gpus,
        "time": None if request.time is None else as_slurm(request.time),
        **request.words,
        "signal": f"B:USR1@{request.signal}",
        "chdir": Path.cwd(),
        "output": f"{str(submission.folder).replace('%', '%%')}/slurm-%j.out",
    }
    lines = [*_lines(directives), "--requeue", "--open-mode=append", *request.further]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        run=f"run={shlex.quote(str(submission.run.folder))}",
        setup="".join(map(_checked, request.setup)),
        saved_code=saved_code,
        wait=request.signal,
        python=shlex.quote(submission.python),
        runfile=submission.runfile.relative_to(submission.run.folder),
    )


def _checked(line: str) -> str:
    """A line of ``--setup``, without which nothing begins; what it sets stays set, and it may end in a comment."""
    said = shlex.quote(f"the run does not begin: this line of --setup failed: {line}")
    return f"{{ {line}\n}} || {{ echo {said} >&2; exit {_NOT_BEGUN}; }}\n"


def _lines(directives: Mapping[str, Any]) -> list[str]:
    given = {name: str(value) for name, value in directives.items() if value is not None}
    for name, value in given.items():
        if not value.isprintable():  # a directive ends with its line: what follows would be a command
            allowed = "values of a batch script in one line, of characters that can be printed"
            raise SpecError.of(
                f"--to slurm, {name}", ascii(value), allowed, "cd to a folder without line breaks in its name"
            )
    return [f"--{name}={shlex.quote(value)}" for name, value in given.items()]
