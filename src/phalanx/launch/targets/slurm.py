"""``--to slurm``: a batch job that starts torchrun's agent once on each node, saves before its time is over, and is
queued again by itself until the run has come to its end.

What the job does is in ``slurm_script.py``, and on each node in ``slurm_node.py``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.errors import RunError
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.launch_folder import FOLDER, LAST_WORDS, attached_log, last_word
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.slurm_offer import PATIENCE, REFUSES, ask_slurm, slurm_offer
from phalanx.launch.targets.slurm_request import OPTIONS, SlurmRequest
from phalanx.launch.targets.slurm_script import SCRIPT, batch_script
from phalanx.launch.targets.target import (
    Option,
    Prepared,
    QueueTarget,
    Standing,
    Submission,
    own_words,
)

_LOOKS = 5
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING")
_NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")
_COMMAND = re.compile(r" Command=(/.*?) (?:SubmitLine|WorkDir)=")
_FORGOTTEN = "Invalid job id specified"
# Variables of sbatch that change what a line of the script says, and are not named as it is; of nodes: how many jobs.
_ALSO = {
    "nodes": ("SBATCH_ARRAY_INX", "SBATCH_WAIT"),
    "time": ("SBATCH_TIMELIMIT",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "gpus-per-node": ("SBATCH_GPUS", "SBATCH_GPUS_PER_SOCKET", "SBATCH_GPUS_PER_TASK"),
    "cpus-per-task": ("SBATCH_CPUS_PER_GPU",),
    "output": ("SBATCH_ERROR",),
    "requeue": ("SBATCH_NO_REQUEUE",),
}


@final
class SlurmTarget(QueueTarget):
    """The cluster whose ``sbatch`` is on this machine."""

    name: ClassVar[str] = "slurm"
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def prepare(self, submission: Submission) -> Prepared:
        request = SlurmRequest.of(submission)
        script = submission.folder / SCRIPT
        return Prepared(
            submission=submission,
            files={submission.runfile: submission.run.to_toml(), script: batch_script(submission, request, SAVED)},
            commands=(("sbatch", "--parsable", str(script)),),
            notes=request.guessed,
        )

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        return slurm_offer(options)

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            RunError: Slurm refuses it, or is not on this machine.
        """
        with prepared.written():
            (command,) = prepared.commands
            number, _, cluster = ask_slurm(*command, without=_set_in(prepared)).strip().partition(";")
            ticket = {"job": int(number), **({"cluster": cluster} if cluster else {})}
            try:
                _refuse_what_never_starts(ticket, prepared.submission.run.folder)
            except BaseException:
                _take_out(ticket)
                raise
        return ticket

    def why_not(self, prepared: Prepared, patience: float = PATIENCE) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(_script_in(prepared))
            file.flush()
            try:
                ask_slurm("sbatch", "--test-only", file.name, without=_set_in(prepared), patience=patience)
            except RunError as error:
                return own_words(error).removeprefix(REFUSES)
        return ""

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        job = _job(ticket, folder)
        if job is None:
            return Standing(state=LAST_WORDS.get(last_word(folder), "unknown"), detail="Slurm has forgotten it")
        state, reason = job["JobState"], job.get("Reason", "None")
        if state in _WAITING:
            again = f", after {job['Restarts']} earlier starts" if job.get("Restarts", "0") != "0" else ""
            return Standing(state="waiting", detail=f"{state}: {reason}{again}")
        if state in _RUNNING:
            return Standing(state="running", detail=f"{state} on {job.get('NodeList', '')}")
        if state == "COMPLETED":
            return Standing(state="ended", detail=state)
        code = job.get("ExitCode", "").partition(":")[0]
        if state == "CANCELLED" or (code == str(SAVED) and last_word(folder) != "error"):  # as it was to save
            return Standing(state="stopped", detail=state)
        return Standing(state="failed", detail=f"{state}: {reason}, exit code {job.get('ExitCode', '')}")

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        number, there = _number(ticket), _cluster(ticket)
        if _job(ticket, folder) is None:
            return
        with suppress(RunError):  # it has ended; nor is it to be queued again where a node is lost as it saves
            ask_slurm("scontrol", *there, "update", f"JobId={number}", "Requeue=0")
        for _ in range(_LOOKS):  # between two words it may begin, or come to an end
            state = (_job(ticket, folder) or {"JobState": "none"})["JobState"]
            with suppress(RunError):
                if state == "PENDING":
                    ask_slurm("scancel", *there, "--state=PENDING", number)
                elif state in (*_WAITING, "COMPLETING"):  # which may be on its way into the queue
                    ask_slurm("scancel", *there, number)
                    return
                elif state in _RUNNING:
                    ask_slurm("scancel", *there, "--signal=USR2", "--batch", number)
                    return
                else:
                    return

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        if rank is None:
            return folder / FOLDER / f"slurm-{_number(ticket)}.out"
        return attached_log(folder, rank)


def _number(ticket: Mapping[str, Any]) -> str:
    """Return what Slurm's commands call a job."""
    return str(ticket["job"])


def _cluster(ticket: Mapping[str, Any]) -> tuple[str, ...]:
    """Return words that lead a command to the cluster that has the job; none where that is Slurm's own."""
    return ("-M", ticket["cluster"]) if "cluster" in ticket else ()


def _job(ticket: Mapping[str, Any], folder: Path) -> dict[str, str] | None:
    """What Slurm knows of the job; ``None`` where it has forgotten it, or has another of that number.

    Raises:
        RunError: Slurm cannot be asked.
    """
    try:
        told = ask_slurm("scontrol", *_cluster(ticket), "show", "job", _number(ticket), "--oneliner")
    except RunError as error:
        if _FORGOTTEN in str(error):
            return None
        raise
    script = _COMMAND.search(told)
    if script and Path(script[1]).resolve() != (folder / FOLDER / SCRIPT).resolve():
        return None
    words = [word.split("=", 1) for word in told.split() if "=" in word]
    return dict(reversed(words))  # of two the first: paths, which may hold anything, come last


def _refuse_what_never_starts(ticket: Mapping[str, Any], folder: Path) -> None:
    """Many a Slurm takes what its partition never serves, and keeps it in its queue for ever."""
    job: Mapping[str, str] = {}
    with suppress(RunError):  # it has taken the job, and does not say more
        job = _job(ticket, folder) or {}
    if (reason := job.get("Reason", "")) in _NEVER:
        raise RunError(f"Slurm would keep it waiting for ever: {reason}\n    try: sinfo, which says what there is")


def _take_out(ticket: Mapping[str, Any]) -> None:
    """Take out of the queue what was just put in.

    Raises:
        RunError: it may be there still.
    """
    words = ("scancel", *_cluster(ticket), str(ticket["job"]))
    try:
        ask_slurm(*words)
    except RunError as error:
        said = own_words(error)
        raise RunError(f"job {ticket['job']} may still be in the queue: {said}\n    try: {' '.join(words)}") from None


def _script_in(prepared: Prepared) -> str:
    (script,) = (text for path, text in prepared.files.items() if path.suffix == ".sh")
    return script


def _set_in(prepared: Prepared) -> set[str]:
    """The variables of a user's shell that would say to ``sbatch`` otherwise than the script does."""
    names = re.findall(r"^#SBATCH --([\w-]+)", _script_in(prepared), flags=re.MULTILINE)
    own = {f"SBATCH_{name.replace('-', '_').upper()}" for name in names}
    return own.union(*(_ALSO.get(name, ()) for name in names))
