"""The files of a run folder, as listed on its page. Links there are not followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

RUN_TOML = "run.toml"
"""Settings of the run."""

EVENTS = "events.jsonl"
"""The log of events."""

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints."""

LEDGER = "ledger"
"""The folder with the samples of each step."""


class RunFile(NamedTuple):
    """A file of the run folder, or a folder in it: its content, its writer and its readers."""

    what: str
    written: str
    read: str


RUN_FILES: Mapping[str, RunFile] = {
    RUN_TOML: RunFile(
        "the settings: job, plan, steps, folder", "when the run begins or resumes", "`phalanx worker`, `--resume`"
    ),
    "plan.toml": RunFile(
        "the plan, as a TOML table",
        "with it",
        "`px.Run(...).plan`; a later start under torchrun, for the number of devices before it",
    ),
    "placement.json": RunFile("the part of each tensor on each rank", "with it", "`phalanx show`"),
    "writer.json": RunFile(
        "the writer of the folder: process, host, token",
        "first, by each run in the folder",
        "the next run, and whatever publishes into the folder",
    ),
    EVENTS: RunFile(
        "the log, one JSON object a line",
        "appended by [several processes](#eventsjsonl)",
        "progress bar, reports; see [events](events.md)",
    ),
    "forecast.json": RunFile(
        "the forecast: seconds and bytes by part", "when the run ends", "the table at its end, `phalanx show`"
    ),
    "best.json": RunFile(
        "the compared number of each evaluation, and the step of the best",
        "after each evaluation, if the job has a `best`",
        "deletion of checkpoints; `phalanx export --from best`",
    ),
    CHECKPOINTS: RunFile(
        "parameters, optimizer state and progress after a step",
        "whole or not at all: under a temporary name, renamed when complete",
        "`phalanx train --resume`, under any plan",
    ),
    LEDGER: RunFile("the samples of each step", "appended by each data-parallel rank", "`phalanx audit`"),
    "accidents": RunFile(
        "micro-batches with numbers that are not finite: tensors as safetensors, the rest as JSON",
        "when a loss or gradient is not finite, or a loss jumps; at most 20 steps",
        "`px.Run(...).accidents`; see [My loss is NaN](../how-to/nan.md)",
    ),
    "tensorboard": RunFile("event files of TensorBoard", "with `phalanx train --tensorboard`", "TensorBoard"),
    "launch": RunFile(
        "files of a launch elsewhere: [the request, and the workers' output](#launch)",
        "by `phalanx launch`, and while it follows the run",
        "`phalanx status`, `logs` and `stop`; the target",
    ),
    ".secret": RunFile(
        "32 random bytes that authenticate workers to servers; only the user may read it",
        "if torchrun starts workers of a plan with servers; removed after they have read it",
        "those workers",
    ),
}
"""Name → description."""

LAUNCH_FILES: Mapping[str, str] = {
    "ticket.json": "the target of the run, and its name there",
    RUN_TOML: "by SSH, on Slurm and Ray the settings that workers read; else a copy of them",
    "job.*": "what a queue was given: on Slurm the batch script, by SkyPilot the task",
    "slurm-*.out": "on Slurm: output of the batch script and all workers",
    "kubernetes.json": "on Kubernetes: the objects",
    "asked-to-stop": "on Kubernetes: the name of the run that was asked to stop",
    "training-job.json": "on SageMaker: the request",
    "code.txt": "on SageMaker: number and size of the files of the job's code, and the largest",
    "output.log": "by SSH, on Ray and by SkyPilot: output of all workers",
    "rank-*.log": "output of one rank",
    "*-*.log": "on SageMaker and Kubernetes: output of all workers, or of one rank, as far as it was fetched",
}
"""Name in ``launch/``, with ``*`` for any text → description."""
