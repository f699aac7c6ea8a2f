"""``--to ray:http://head:8265``: a run as one job of a Ray cluster, by Ray's own job submission.

Ray packs the folder of code, sends it over HTTP to its dashboard, starts ``ray_driver.py`` on the head and stops it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final
from unittest.mock import patch

from phalanx.config import Plan
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import on_host
from phalanx.errors import MissingExtraError, PhalanxError, RefusedError, RunError, SpecError
from phalanx.files import read_text
from phalanx.hardware.catalog import find
from phalanx.launch.jobfile import Reference
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.code_pack import CODE_OPTION, IGNORE_FILE, NEVER_CODE, folder_and_problems, job_within
from phalanx.launch.targets.launch_folder import LAST_WORDS, State, attached_log, last_word
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.option_checks import (
    changing_devices,
    merged,
    read_options,
    uneven_nodes,
)
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

OPTIONS = {
    "nodes": Option(
        help="nodes, each with an equal part of the plan's processes [the fewest possible]", example="2", kind="count"
    ),
    "cpus-per-worker": Option(help="CPUs that Ray keeps for each worker [one a device]", example="8", kind="count"),
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

Nodes = Sequence[tuple[str, Mapping[str, float]]]


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
        run, options = submission.run, submission.options
        values, problems = read_options(OPTIONS, options)
        problems += [*uneven_nodes(run.plan, values.get("nodes", 1)), *changing_devices(run, "Ray")]
        code, wrong = folder_and_problems(run.job, options.get("code"))
        if problems or wrong:
            raise SpecError([*problems, *wrong])
        job = _ray_job(submission, code, "NODES CPUS GPUS")
        words = ("ray", "job", "submit", "--address", self.address, "--submission-id", job["submission_id"])
        environment = ("--no-wait", "--runtime-env-json", json.dumps(job["runtime_env"]))
        return Prepared(
            submission=submission,
            files={submission.runfile: run.to_toml()},
            commands=((*words, *environment, "--", *shlex.split(job["entrypoint"])),),
            notes=("what the cluster has decides NODES, and CPUS and GPUS of each; --runtime-env is merged into JSON",),
        )

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        return offer_of(_nodes(self.address), options)

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        submission = prepared.submission
        code, _ = folder_and_problems(submission.run.job, submission.options.get("code"))
        job = _ray_job(submission, code, " ".join(map(str, self._layout(submission))))
        values, _ = read_options(OPTIONS, submission.options)
        job["runtime_env"] = merged(job["runtime_env"], values.get("runtime-env", {}))
        with prepared.written(), _client(self.address) as client:
            try:
                client.submit_job(**job)
            except BaseException:
                with suppress(Exception):  # it may have come to be
                    client.stop_job(job["submission_id"])
                raise
        return {"job": job["submission_id"], "address": self.address}

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str:
        try:
            self._layout(prepared.submission)
        except (RunError, SpecError) as error:
            return str(error).partition("\n")[0]
        return ""

    def _layout(self, submission: Submission) -> tuple[int, int, int]:
        values, _ = read_options(OPTIONS, submission.options)
        how = values.get("nodes", 0), values.get("cpus-per-worker", 0)
        return laid_on(_nodes(self.address), submission.run.plan, *how)

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        try:
            with _client(ticket["address"]) as client:
                info = client.get_job_info(ticket["job"])
                said = client.get_job_logs(ticket["job"]) if info.status == "RUNNING" else info.message or ""
        except RunError as error:
            if "status code 404" in str(error):
                return Standing(state=LAST_WORDS.get(last_word(folder), "unknown"), detail="Ray has no such job")
            return Standing(state="unknown", detail=str(error).partition("\n")[0])
        lines, word = [line for line in said.splitlines() if line.strip()] or [""], last_word(folder)
        state = _STATES.get(info.status, "running")
        if state == "running":
            said = next((line[9:] for line in reversed(lines) if line.startswith(_SAYS)), "")
            return Standing(state="waiting" if said.startswith("waiting") else state, detail=said.partition(" ")[2])
        if (state == "stopped" and word == "end") or (state == "failed" and info.driver_exit_code == SAVED):
            return Standing(state=LAST_WORDS.get(word, "stopped"))
        return Standing(state=state, detail="" if state in ("ended", "stopped") or word == "error" else lines[-1])

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        with _client(ticket["address"]) as client:
            client.stop_job(ticket["job"])

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        return attached_log(folder, rank)


def _ray_job(submission: Submission, code: Path, layout: str) -> dict[str, Any]:
    """Return the arguments of Ray's ``submit_job``, without the user's own runtime environment."""
    run, own = submission.run, code / IGNORE_FILE
    lines = read_text(own, where=IGNORE_FILE, fix=f"rm {own}").splitlines() if own.is_file() else []
    runs = {run.folder, *(path.parent for path in code.rglob(EVENTS))}
    inside = sorted(f"/{one.relative_to(code)}" for one in runs if one.is_relative_to(code) and one != code)
    job = job_within(run.job, code) if Reference.parse(run.job).file else ""
    words = [submission.python, "-m", "phalanx.launch.targets.ray_driver", str(submission.runfile), job]
    version = sys.modules["phalanx"].__version__
    return {
        "entrypoint": "exec " + shlex.join([*words, version, *layout.split()]),
        "submission_id": f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', submission.name)}-{submission.token}",
        "runtime_env": {
            "working_dir": str(code),
            "excludes": [*(pattern.rstrip("/") for pattern in NEVER_CODE), *inside, *lines],
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


def _nodes(address: str) -> Nodes:
    """Return name and resources of the cluster's nodes that are up."""
    with _client(address):
        from ray.util.state import list_nodes

        found: Any = list_nodes(address, limit=10_000, timeout=round(_TIMEOUT[1]))
        return [(node["node_name"], node["resources_total"] or {}) for node in found if node["state"] == "ALIVE"]


def laid_on(there: Nodes, plan: Plan, nodes: int, cpus: int) -> tuple[int, int, int]:
    """Return on how many nodes ``plan`` is laid, the fewest possible if not ``nodes``, and CPUs and GPUs of each.

    ``cpus``: of each process; 0: one a device, or one beside GPUs.

    Raises:
        RefusedError: the nodes have too few, used or not.
    """
    gpu = any(node.get("GPU") for _, node in there) if plan.device == "auto" else not on_host(plan.device)

    def layout(plan: Plan) -> tuple[int, int, int] | None:
        for count in [nodes] if nodes else range(1, len(there) + 1):
            workers, rest = divmod(plan.processes, count)
            cores = workers * (cpus or (1 if gpu else plan.threads))
            # Servers compute on CPUs; which of several nodes they are on is not known before.
            gpus = (plan.devices if count == 1 else workers * plan.threads) if gpu else 0
            room = sum(node.get("CPU", 0) >= cores and node.get("GPU", 0) >= gpus for _, node in there)
            if not rest and room >= count:
                return count, cores, gpus
        return None

    if found := layout(plan):
        return found
    smaller = (number for number in range(plan.processes - 1, 0, -1) if layout(Plan(dp=number)))
    fix = next((f"--plan dp={number}" for number in smaller), "ray status")
    shown = "; ".join(f"{name} has {node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for name, node in there)
    given = f"{plan}, with {plan.processes} processes on {'GPUs' if gpu else 'CPUs'}"
    raise RefusedError.of("--plan", given, f"nodes with room for it: {shown or 'there is none'}", fix)


def offer_of(there: Nodes, options: Mapping[str, str]) -> Offer | None:
    """Return what a run has on nodes with GPUs if there are any, else a process for each ``--cpus-per-worker``.

    ``None`` if nodes differ or the catalog does not know their GPUs. Wrong options offer nothing: ``prepare`` refuses.
    """
    alike = [node for _, node in there if node.get("GPU")] or [node for _, node in there]
    shapes = {(node.get("CPU", 0), node.get("GPU", 0), _gpu_of(node)) for node in alike}
    values, problems = read_options(OPTIONS, options)
    nodes, share = values.get("nodes", len(alike)), values.get("cpus-per-worker", 1)
    if len(shapes) != 1 or problems:
        return None
    ((cpus, gpus, name),) = shapes
    if gpus:
        kind = find(name) or find(f"{name}B")  # Ray's A100-40G is the catalog's A100-40GB
        device = kind.device.name if kind else ""
        return Offer(nodes=nodes, devices=int(gpus), device=device, by="Ray") if kind and gpus >= 1 else None
    places, memory = int(cpus // share), int(min(node.get("memory", 0) for node in alike))
    cores = places * share
    return Offer(nodes=nodes, devices=places, cores=cores, memory=memory, by="Ray") if places else None


def _gpu_of(node: Mapping[str, float]) -> str:
    return next((word.partition(":")[2] for word in node if word.startswith("accelerator_type:")), "")
