"""``--to sky:gpus=H100:8,cloud=aws,spot``: a managed job of SkyPilot, by its program ``sky``.

SkyPilot finds machines, copies the job's code there, and starts the job again on others after a preemption. The run
folder is on a file system that all nodes share, or on the disk of the only node; then the run has to have a mirror.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import RunSpec
from phalanx.errors import Problem, RunError, SpecError
from phalanx.events import RunLog
from phalanx.files import json_value, replace_text
from phalanx.hardware.catalog import find, unknown
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets import option_checks as checks
from phalanx.launch.targets.code_pack import CODE_OPTION, CodePack, folder_and_problems, job_within
from phalanx.launch.targets.launch_folder import State, fetched_log
from phalanx.launch.targets.offer import Offer, ask_program, gpus_of_node
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

OPTIONS = {
    "nodes": Option(help="nodes, each with an equal part of the plan's processes [1]", example="2", kind="count"),
    "shared": Option(help="run folder there, on a file system that all nodes share", example="/data/runs/1"),
    "setup": Option(help="a line of shell that runs before; repeat it", example="'pip install phalanx'", between="\n"),
    "patch": Option(
        help="JSON or TOML file with more of a SkyPilot task, merged into it: image, disks, volumes, secrets",
        example="task.json",
        kind="file",
        through="--patch task.json",
    ),
    "code": CODE_OPTION,
}
TASK = "job.yaml"  # in JSON, which is YAML
_SAME = {name: name for name in ("cloud", "region", "zone", "cpus", "memory")}
_RESOURCES = {"gpus": "accelerators", "instance": "instance_type", "spot": "use_spot", **_SAME}
_OTHER_NAMES = {"A100": "A100-40GB", "RTX3090": "RTX-3090", "RTX4090": "RTX-4090", "RTXA6000": "RTX-A6000"}
_RUN = """\
echo $BASHPID > ~/.phalanx-agent
exec {agent} "$SKYPILOT_NODE_IPS" "$SKYPILOT_NODE_RANK" {port} "$SKYPILOT_TASK_ID" <<'RUN_TOML'
{run}RUN_TOML
"""
# SkyPilot takes machines away without a signal; the agent of one node has all ranks save
_STOP = "pid=$(cat ~/.phalanx-agent) && kill $pid && tail --pid=$pid -f /dev/null"
_SUBMIT = 3600.0  # seconds: the first launch starts SkyPilot's controller
_STATES: Mapping[str, State] = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING", "RECOVERING"), "waiting"),
    **dict.fromkeys(("RUNNING", "WINDING_DOWN", "CANCELLING"), "running"),
    "SUCCEEDED": "ended",
    "CANCELLED": "stopped",
}
_COLOUR, _OF_NODE = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"^\([^()]*\) (?=\[rank \d)")


@final
class SkyTarget(QueueTarget):
    """Machines of the clouds that SkyPilot reaches; ``--to`` has their resources."""

    name: ClassVar[str] = "sky"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"

    def __init__(self, address: str) -> None:
        words = [word.partition("=") for word in address.split(",") if word]
        given = {key: value for key, _, value in words}
        name, _, count = given.get("gpus", "").partition(":")
        wrong = [key for key, value in given.items() if key not in _RESOURCES or bool(value) == (key == "spot")]
        wrong += ["gpus"] if not re.fullmatch("[1-9][0-9]{0,4}", count or "1") else []
        if wrong or len(given) < len(words):
            what = f"'sky:{address}', with {', '.join(wrong) or 'a key twice'}"
            allowed = f"spot, and {', '.join(f'{key}=' for key in _RESOURCES if key != 'spot')}; more by --patch"
            raise SpecError.of("--to", what, allowed, "--to sky:gpus=H100:8,cloud=aws,spot")
        self.device, self.gpus = find(_OTHER_NAMES.get(name, name)), int(count or 1)
        if name and not self.device:
            problem = unknown(name)
            raise SpecError([replace(problem, where="--to", fix=f"--to sky:gpus={problem.fix}:{count or 1}")])
        self.resources = {_RESOURCES[key]: value or True for key, value in given.items()}

    def prepare(self, submission: Submission) -> Prepared:
        run, options = submission.run, submission.options
        values, problems = checks.read_options(OPTIONS, options)
        code, wrong = folder_and_problems(run.job, options.get("code"))
        nodes, patch, there = values.get("nodes", 1), values.get("patch", {}), options.get("shared") or "phalanx-run"
        problems += [*wrong, *checks.uneven_nodes(run.plan, nodes), *checks.changing_devices(run, "SkyPilot")]
        _, too_few = gpus_of_node(run.plan, nodes, self.gpus if self.device else 0)
        problems += [*_wrong_parts(run, nodes, options, patch), *too_few]
        if problems:
            raise SpecError(problems)
        path, text = submission.folder / TASK, replace(run, job=job_within(run.job, code), folder=Path(there)).to_toml()
        task = checks.merged(self._task(submission, nodes, text), {**patch, "workdir": str(code)})
        secret = [word for name in _table(patch, "secrets") if name.isidentifier() for word in ("--secret", name)]
        return Prepared(
            submission=submission,
            files={submission.runfile: text, path: json.dumps(task, indent=1) + "\n"},
            commands=(("sky", "jobs", "launch", "--yes", "--detach-run", *secret, str(path)),),
            notes=() if self.device else ("no gpus= in --to: the run computes on CPUs",),
        )

    def _task(self, submission: Submission, nodes: int, run: str) -> dict[str, Any]:
        agent = shlex.join([submission.python, "-m", "phalanx.launch.targets.node_agent"])
        patience = math.ceil(submission.run.grace) + checks.SAVE_MARGIN
        return {
            "name": submission.job_name,
            "num_nodes": nodes,
            "resources": {**self.resources, "job_recovery": {"recover_on_exit_codes": [SAVED]}},
            "setup": f"set -e\n{submission.options.get('setup', '')}\n",
            "run": _RUN.format(agent=agent, port=20_000 + int(submission.token[-4:], 16) % 12_000, run=run),
            "config": {"hooks": [{"run": _STOP, "events": ["down", "preemption"], "timeout": patience}]},
        }

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        nodes = checks.read_options(OPTIONS, options)[0].get("nodes", 1)
        return Offer(nodes=nodes, devices=self.gpus, device=self.device.device.name) if self.device else None

    def try_out(self, prepared: Prepared, patience: float) -> bool:
        with tempfile.TemporaryDirectory(prefix="phalanx-sky-") as folder:
            replace_text(path := Path(folder) / TASK, prepared.files[prepared.submission.folder / TASK])
            _ask("launch", "--dryrun", "--yes", str(path), patience=patience)
        return True

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        task = json.loads(prepared.files[prepared.submission.folder / TASK])
        job, (command,) = task["name"], prepared.commands
        with prepared.written(), tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
            code = CodePack.of(Path(task["workdir"]), without=prepared.submission.run.folder)
            code.copy(Path(folder))  # without secrets and run folders
            try:
                _ask(*command[1:], "--workdir", folder, patience=_SUBMIT)
            except BaseException:
                with suppress(RunError):  # it may have taken the job
                    _ask("jobs", "cancel", "--yes", "--name", job)
                raise
        return {"job": job}

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        try:
            told = _ask("jobs", "queue", "--all", "--verbose", "--output", "json")
            jobs, said = json_value(told[told.index("[") :]), "SkyPilot has forgotten it"
        except (RunError, ValueError) as error:
            jobs, said = [], str(error).partition("\n")[0]
        for job in jobs:
            if isinstance(job, dict) and job.get("job_name") == ticket["job"]:
                state, reason = str(job.get("status")), str(job.get("failure_reason") or "")
                words = [state, reason, f"recovered {job.get('recovery_count') or 0} times"]
                return Standing(state=_STATES.get(state, "failed"), detail=", ".join(filter(None, words)))
        return Standing(state=RunLog(folder).outcome or "unknown", detail=said)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        _ask("jobs", "cancel", "--yes", "--name", ticket["job"])

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        lines = list[str]()
        with suppress(RunError):  # no node is there
            lines = _ask("jobs", "logs", "--no-follow", "--name", ticket["job"]).splitlines()
        return fetched_log(folder, ticket["job"], [_OF_NODE.sub("", line) for line in lines], rank)


def _ask(*words: str, patience: float = 120.0) -> str:
    lacking = "pip install 'skypilot[aws]', or of another cloud; --dry-run shows the task to take elsewhere"
    helps = "sky check, which says what clouds there are"
    try:
        return _COLOUR.sub("", ask_program(("sky", *words), "SkyPilot", patience, lacking, helps))
    except RunError as error:
        raise RunError(_COLOUR.sub("", str(error))) from None


def _table(patch: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return found if isinstance(found := patch.get(name), dict) else {}


def _wrong_parts(run: RunSpec, nodes: int, options: Mapping[str, str], patch: Mapping[str, Any]) -> list[Problem]:
    setup, far = options.get("setup", ""), bool(options.get("shared"))
    own = sorted({"name", "num_nodes", "run", "workdir", setup and "setup"} & patch.keys())
    installs = setup or "setup" in patch or "image_id" in _table(patch, "resources")
    shares = "1, or --shared: all nodes need the run folder", "--shared /data/runs/1"
    keeps = "a bucket, or --shared: a disk goes with its machine", "--mirror s3://bucket/runs/1"
    found = [
        ("nodes", f"{nodes}" * (nodes > 1 and not far), *shares),
        ("mirror", "none" * (nodes == 1 and not far and not run.mirror), *keeps),
        ("patch", ", ".join(own), "parts of a task that a launch does not set itself", "--patch without them"),
        ("setup", "none" * (not installs), "lines that install Phalanx there", "--setup 'pip install phalanx'"),
    ]
    return [checks.wrong_option(OPTIONS, name, said, *allowed) for name, said, *allowed in found if said]
