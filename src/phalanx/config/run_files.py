"""All that a run reads and writes in its folder. No link there is followed; the page of the run folder lists these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RUN_TOML = "run.toml"
"""What was asked."""

EVENTS = "events.jsonl"
"""The log of what happened."""

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints."""

LEDGER = "ledger"
"""The folder that says which samples were seen in which step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A file of the run folder, or a folder in it.

    Attributes:
        what: is in it.
        written: when, and by whom where that is not the run.
        read: by whom.
    """

    what: str
    written: str
    read: str


RUN_FILES: Mapping[str, RunFile] = {
    RUN_TOML: RunFile(
        what="what was asked: job, plan, steps, where to",
        written="when the run has begun, each time it goes on",
        read="`phalanx worker`, `--resume`",
    ),
    "plan.toml": RunFile(
        what="the plan, as a TOML table",
        written="with it",
        read="`px.Run(...).plan`; a later start under torchrun, for the number of devices before it",
    ),
    "placement.json": RunFile(
        what="which part of which tensor each rank holds", written="with it", read="`phalanx show`"
    ),
    "writer.json": RunFile(
        what="who writes the folder: process, host, token",
        written="by each run that takes the folder, before anything else",
        read="the next run, and whatever publishes into the folder",
    ),
    EVENTS: RunFile(
        what="what happened, one JSON object a line",
        written="appended as things happen, by [several processes](#eventsjsonl)",
        read="progress bar, reports; see [events](events.md)",
    ),
    "forecast.json": RunFile(
        what="what was to be expected: seconds and bytes by part",
        written="when the run ends",
        read="the table at its end, `phalanx show`",
    ),
    "best.json": RunFile(
        what="of jobs that compare evaluations: each one's number, and the step of the best",
        written="after each evaluation, where the job has a `best`",
        read="whoever deletes checkpoints; `phalanx export --from best`",
    ),
    CHECKPOINTS: RunFile(
        what="parameters, optimizer state and where the run stood, after a step",
        written="whole or not at all: under a temporary name, renamed when complete",
        read="`phalanx train --resume`, under any plan",
    ),
    LEDGER: RunFile(
        what="which samples were seen in which step",
        written="appended by each data-parallel rank",
        read="`phalanx audit`",
    ),
    "accidents": RunFile(
        what="micro-batches that numbers were not finite with: tensors as safetensors, the rest as JSON",
        written="when a loss or gradient is not finite, or a loss jumps; at most 20 steps",
        read="`px.Run(...).accidents`; see [My loss is NaN](../how-to/nan.md)",
    ),
    "tensorboard": RunFile(
        what="event files of TensorBoard",
        written="with `phalanx train --tensorboard`, by the command that follows the run",
        read="TensorBoard",
    ),
    "launch": RunFile(
        what="of a launch elsewhere: [what was handed over, and what workers print](#launch)",
        written="by `phalanx launch`, and by what follows the run there",
        read="`phalanx status`, `logs` and `stop`; what the target starts",
    ),
    ".secret": RunFile(
        what="what keeps strangers from servers, 32 random bytes, which only the user may read",
        written="where torchrun starts workers of a plan with servers; removed once they have read it",
        read="those workers",
    ),
}
"""Name → what it is."""

LAUNCH_FILES: Mapping[str, str] = {
    "ticket.json": "where the run was handed to, and what it is called there",
    RUN_TOML: "by SSH, on Slurm and Ray what workers read; else a copy of what the target has of it",
    "job.*": "what a queue was given: on Slurm the batch script, by SkyPilot the task",
    "slurm-*.out": "on Slurm: what the batch script and all workers print",
    "kubernetes.json": "on Kubernetes: the objects",
    "asked-to-stop": "on Kubernetes: the name of the run that was asked to stop",
    "training-job.json": "on SageMaker: the request",
    "code.txt": "on SageMaker: number and size of the files of the job's code, and the largest",
    "output.log": "by SSH, on Ray and by SkyPilot: what all workers print",
    "rank-*.log": "what one rank prints: one file a rank",
    "*-*.log": "on SageMaker and Kubernetes: what all workers print, or one rank, as far as it was fetched",
}
"""Name in ``launch/``, with ``*`` for any text → what it is."""
