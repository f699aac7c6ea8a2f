"""``--to ray:http://head:8265``: a run as one job of a Ray cluster, by Ray's own job submission.

Ray packs the folder of code, sends it over HTTP to its dashboard, starts ``ray_driver.py`` on the head and stops it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final
from unittest.mock import patch

from phalanx.config.run_files import EVENTS
from phalanx.errors import MissingExtraError, PhalanxError, RunError, SpecError
from phalanx.events import RunLog
from phalanx.launch.jobfile import Reference
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.code_pack import CODE_OPTION, NEVER_CODE, folder_and_problems, ignored_lines, job_within
from phalanx.launch.targets.launch_folder import State
from phalanx.launch.targets.offer import gpus_of_node
from phalanx.launch.targets.option_checks import (
    NODE_OPTIONS,
    changing_devices,
    merged,
    read_options,
    uneven_nodes,
)
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

OPTIONS = {
    **NODE_OPTIONS,
    "cpus-per-worker": Option(
        help="CPUs that Ray keeps for each worker [1; without GPUs one a device]", example="8", kind="count"
    ),
    "runtime-env": Option(
        help="JSON or TOML file with a runtime environment of Ray's: variables, packages",
        example="env.json",
        kind="file",
    ),
    "code": CODE_OPTION,
}
_LOCAL, _VARIABLES = "http://127.0.0.1:8265", ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's: the first wins
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:]+\])(:[1-9]\d{0,4})?(/[\w./-]*)?")
_TIMEOUT = (5.0, 60.0)  # seconds to connect, and for an answer
_STOP_MARGIN = 45  # seconds beside the grace until Ray ends a job by force that was asked to stop
_SAYS = ("phalanx: waiting", "phalanx: running")  # begin lines of the driver
_STATES: Mapping[str, State] = {"PENDING": "waiting", "STOPPED": "stopped", "SUCCEEDED": "ended", "FAILED": "failed"}


@final
class RayTarget(QueueTarget):
    """The cluster with the dashboard at an address: one given, Ray's own ``RAY_ADDRESS``, or that of this machine."""

    name: ClassVar[str] = "ray"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"

    def __init__(self, address: str) -> None:
        variable = next((name for name in _VARIABLES if os.environ.get(name)), "")
        found = address or os.environ.get(variable, _LOCAL)
        self.address = _LOCAL if found == "auto" else found.rstrip("/")
        if not _ADDRESS.fullmatch(self.address):  # Ray's other addresses lead to servers that answer with code
            given = f"'ray:{address}'" if address else f"ray, with {variable}={found}"
            raise SpecError.of("--to", given, "the address of Ray's dashboard", "--to ray:http://head:8265")

    def prepare(self, submission: Submission) -> Prepared:
        run = submission.run
        job = _ray_job(submission)
        words = ("ray", "job", "submit", "--address", self.address, "--submission-id", job["submission_id"])
        environment = ("--no-wait", "--runtime-env-json", json.dumps(job["runtime_env"]))
        return Prepared(
            submission=submission,
            files={submission.runfile: run.to_toml()},
            commands=((*words, *environment, "--", *shlex.split(job["entrypoint"])),),
            notes=("--runtime-env is merged into JSON",) if "runtime-env" in submission.options else (),
        )

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            RunError: Ray does not answer, or refuses.
        """
        job = _ray_job(prepared.submission)
        values, _ = read_options(OPTIONS, prepared.submission.options)
        job["runtime_env"] = merged(job["runtime_env"], values.get("runtime-env", {}))
        with prepared.written(), _client(self.address) as client:
            try:
                client.submit_job(**job)
            except BaseException:
                with suppress(Exception):  # it may have come to be
                    client.stop_job(job["submission_id"])
                raise
        return {"job": job["submission_id"], "address": self.address}

    def try_out(self, prepared: Prepared, patience: float) -> bool:
        """Ask if a dashboard answers: a run that needs more than the cluster has waits, perhaps for an autoscaler."""
        with _client(self.address):
            return True

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        try:
            with _client(ticket["address"]) as client:
                info = client.get_job_info(ticket["job"])
                said = client.get_job_logs(ticket["job"]) if info.status == "RUNNING" else info.message or ""
        except RunError as error:
            if "status code 404" in str(error):
                return Standing(state=RunLog(folder).outcome or "unknown", detail="Ray has no such job")
            return Standing(state="unknown", detail=str(error).partition("\n")[0])
        lines, outcome = [line for line in said.splitlines() if line.strip()] or [""], RunLog(folder).outcome
        state = _STATES.get(info.status, "running")
        if state == "running":
            step = next((line.removeprefix("phalanx: ") for line in reversed(lines) if line.startswith(_SAYS)), "")
            return Standing(state="waiting" if step.startswith("waiting") else state, detail=step.partition(" ")[2])
        if (state == "stopped" and outcome == "ended") or (state == "failed" and info.driver_exit_code == SAVED):
            return Standing(state=outcome if outcome in ("ended", "failed") else "stopped")
        return Standing(state=state, detail=lines[-1] if state in ("waiting", "failed") and outcome != "failed" else "")

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        with _client(ticket["address"]) as client:
            client.stop_job(ticket["job"])


def _layout(submission: Submission) -> tuple[tuple[int, int, int], Path]:
    """Return the number of nodes with CPUs and GPUs of each, and the folder of the code.

    Raises:
        SpecError: with all problems of the options.
    """
    run, options = submission.run, submission.options
    values, problems = read_options(OPTIONS, options)
    nodes = values.get("nodes", 1)
    gpus, few = gpus_of_node(run.plan, nodes, values.get("gpus-per-node"))
    code, wrong = folder_and_problems(run.job, options.get("code"))
    if problems := [*problems, *uneven_nodes(run.plan, nodes), *changing_devices(run, "Ray"), *few, *wrong]:
        raise SpecError(problems)
    each = values.get("cpus-per-worker", 1 if gpus else run.plan.threads)
    return (nodes, run.plan.processes // nodes * each, gpus), code


def _ray_job(submission: Submission) -> dict[str, Any]:
    """Return the arguments of Ray's ``submit_job``, without the user's own runtime environment."""
    run, (layout, code) = submission.run, _layout(submission)
    runs = {run.folder, *(path.parent for path in code.rglob(EVENTS))}
    inside = sorted(f"/{one.relative_to(code)}" for one in runs if one.is_relative_to(code) and one != code)
    job = job_within(run.job, code) if Reference.parse(run.job).file else ""
    words = [submission.python, "-m", "phalanx.launch.targets.ray_driver", str(submission.runfile), job]
    version = sys.modules["phalanx"].__version__
    return {
        "entrypoint": "exec " + shlex.join([*words, version, *map(str, layout)]),
        "submission_id": submission.job_name,
        "runtime_env": {
            "working_dir": str(code),
            "excludes": [*ignored_lines(code), *(pattern.rstrip("/") for pattern in NEVER_CODE), *inside],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(round(run.grace) + _STOP_MARGIN)},
        },
        "metadata": {"phalanx": version, "run": str(run.folder)},
    }


@contextmanager
def _client(address: str) -> Iterator[Any]:
    """Yield Ray's client of the dashboard at ``address``; raise in one line what goes wrong within."""
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    from ray.job_submission import JobSubmissionClient

    class TimedClient(JobSubmissionClient):
        def _do_request(self, *given: Any, **how: Any) -> Any:
            return super()._do_request(*given, timeout=_TIMEOUT, **how)

    try:
        with patch.dict(os.environ, {_VARIABLES[0]: address}):  # Ray takes its variables before an address given
            yield TimedClient(address)
    except PhalanxError:
        raise
    except Exception as error:  # of many kinds, some of them of Ray's HTTP library
        first = next(iter(str(error).splitlines()), type(error).__name__)
        what = f"no Ray dashboard answers at {address}" if isinstance(error, OSError) else f"Ray at {address} refuses"
        raise RunError(f"{what}: {first}\n    try: curl {address}/api/version, of the dashboard") from None
