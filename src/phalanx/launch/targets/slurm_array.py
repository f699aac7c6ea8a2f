"""Several runs that Slurm takes as one array: a task each, on as many of the nodes as its plan divides by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.launch_folder import FOLDER
from phalanx.launch.targets.slurm_request import SlurmRequest, laid_on_nodes
from phalanx.launch.targets.slurm_script import SCRIPT, Tasks, batch_script
from phalanx.launch.targets.target import Submission


def array_files(submissions: Sequence[Submission], at_once: int, saved_code: int) -> dict[Path, str]:
    """Path → text of the runs' files and of the script, which asks for what the largest of them needs.

    ``saved_code``: as of ``batch_script``.

    Raises:
        SpecError: with all that is wrong in their options.
    """
    requests: list[SlurmRequest] = []
    problems: list[Problem] = []
    for submission in submissions:
        try:
            requests.append(SlurmRequest.of(laid_on_nodes(submission)))
        except SpecError as error:
            problems += [one for one in error.problems if one not in problems]
    if problems:
        raise SpecError(problems)
    first, folder = submissions[0], submissions[0].run.folder.parent
    whole = _whole(requests)
    if (asked := int(first.options.get("nodes", "1"))) != whole.nodes:
        plans = ", ".join(str(one.run.plan) for one in submissions)
        given, allowed = f"{asked}, for the plans {plans}", "as many as the processes of one of them divide by"
        raise SpecError.of("--nodes", given, allowed, f"--nodes {whole.nodes}")
    tasks = Tasks(
        folder=folder,
        nodes=[one.nodes for one in requests],
        cores=[one.cores for one in requests],
        at_once=at_once,
    )
    return {
        **{one.runfile: one.run.to_toml() for one in submissions},
        folder / FOLDER / SCRIPT: batch_script(first, whole, saved_code, tasks),
    }


def _whole(requests: Sequence[SlurmRequest]) -> SlurmRequest:
    """What has room for each of them."""
    return replace(
        requests[0],
        nodes=max(one.nodes for one in requests),
        gpus=max(one.gpus or 0 for one in requests) or None,
        cores=max(one.cores or 0 for one in requests) or None,
        signal=max(one.signal for one in requests),
    )
