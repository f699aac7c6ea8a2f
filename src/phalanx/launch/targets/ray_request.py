"""What a run asks of a Ray cluster, by the options of its launch, and how it is laid on the nodes that are there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from phalanx.device_kinds import on_host
from phalanx.errors import RefusedError, SpecError
from phalanx.hardware.catalog import find
from phalanx.launch.jobfile import Reference
from phalanx.launch.targets.code_pack import CODE_OPTION, folder_and_problems, job_within
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.option_checks import changing_devices, is_count, uneven_nodes, wrong_counts, wrong_option
from phalanx.launch.targets.target import Option, Submission
from phalanx.units import show_counted

OPTIONS = {
    "nodes": Option(
        help="nodes, each with an equal part of the plan's processes; the fewest that do where not given", example="2"
    ),
    "cpus-per-worker": Option(help="CPUs that Ray keeps for each worker; one a device where not given", example="8"),
    "runtime-env": Option(
        help="a file in JSON with a runtime environment of Ray's: variables, packages", example="environment.json"
    ),
    "code": CODE_OPTION,
}

_KIND = "accelerator_type:"
_COUNTS = {"nodes": 1, "cpus-per-worker": 1}  # name → least


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """What a node of the cluster has in all, used or not."""

    name: str
    cpus: float
    gpus: float
    kind: str = ""  # of GPU, as Ray calls it
    memory: float = 0.0  # bytes that Ray gives to its processes

    def __str__(self) -> str:
        return f"{self.name} has {_devices(self.cpus, self.gpus)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRequest:
    """What a run asks for; as JSON in the run folder.

    Attributes:
        job: its name.
        plan: as text, for what is said of it.
        processes: of the run.
        devices: that each process has.
        computing: devices of all processes: servers have none.
        device: ``auto``, or their kind: whether they are GPUs.
        nodes: how many; 0: the fewest that do.
        cpus: for each process; 0: one a device, or one beside GPUs.
        runtime_env: a file in JSON with Ray's runtime environment; empty where there is none.
        python: the interpreter of the workers; empty: that of Ray's own there.
        folder: where the processes work.
        runfile: what they read.
        code: the folder that is packed, absolute.
        reference: the job as whoever works in that folder names it; empty where it is no file, but a module.
        sha256: of that folder, packed.
        patience: seconds within which the launcher leaves its ticket in the run folder: a shared file system may take a
            minute to show a file that was not there before.
    """

    job: str
    plan: str
    processes: int
    devices: int
    computing: int
    device: str
    nodes: int
    cpus: int
    runtime_env: str
    python: str
    folder: str
    runfile: str
    code: str
    reference: str
    sha256: str = ""
    patience: float = 120.0

    @classmethod
    def of(cls, submission: Submission) -> Self:
        """
        Raises:
            SpecError: with all that is wrong in the submission's options.
        """
        run, options = submission.run, submission.options
        problems = wrong_counts(OPTIONS, options, _COUNTS)
        nodes, cpus = (int(options.get(name, "0")) if not problems else 0 for name in _COUNTS)
        problems += [*(uneven_nodes(run.plan, nodes) if nodes else []), *changing_devices(run, "Ray")]
        environment = options.get("runtime-env", "")
        if "runtime-env" in options and (why := _no_environment(Path(environment))):
            allowed = "a file with an object in JSON"
            problems.append(wrong_option(OPTIONS, "runtime-env", f"{environment!r}, {why}", allowed))
        code, unpacked = folder_and_problems(run.job, options.get("code"))
        problems += unpacked
        if problems:
            raise SpecError(problems)
        return cls(
            job=submission.name,
            plan=str(run.plan),
            processes=run.plan.processes,
            devices=run.plan.threads,
            computing=run.plan.devices,
            device=run.plan.device,
            nodes=nodes,
            cpus=cpus,
            runtime_env=str(Path(environment).absolute()) if environment else "",
            python=submission.python,
            folder=str(Path.cwd()),
            runfile=str(submission.runfile),
            code=str(code),
            reference=job_within(run.job, code) if Reference.parse(run.job).file else "",
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def laid_on(self, there: Sequence[NodeOffer]) -> RayLayout:
        """How the run is laid on the nodes that are ``there``: on as few as do, each with equally many processes.

        Raises:
            RefusedError: they have too little, with what they have.
        """
        wants_gpus = not (self.device == "auto" or on_host(self.device)) or (
            self.device == "auto" and any(node.gpus for node in there)
        )
        cpus = self.cpus or (1 if wants_gpus else self.devices)
        for nodes in [self.nodes] if self.nodes else range(1, len(there) + 1):
            workers = self.processes // nodes
            # Servers compute on CPUs; which of several nodes they are on is not known before.
            gpus = (self.computing if nodes == 1 else workers * self.devices) if wants_gpus else 0
            layout = RayLayout(nodes=nodes, workers=workers, cpus=workers * cpus, gpus=gpus)
            if self.processes % nodes == 0 and sum(layout.fits(node) for node in there) >= nodes:
                return layout
        gpus = self.devices if wants_gpus else 0
        room = sorted((_room(node, cpus, gpus) for node in there), reverse=True)
        most = max((number * room[number - 1] for number in range(1, len(room) + 1)), default=0)
        on = f" on {show_counted(self.nodes, 'node')}" if self.nodes else ""
        raise RefusedError.of(
            where="--plan",
            given=f"{self.plan}: {show_counted(self.processes, 'process')} with {_devices(cpus, gpus)} each{on}",
            allowed=f"what the cluster has: {'; '.join(str(node) for node in there) or 'no node'}",
            fix=_fix(most, wants_gpus, asked=self.device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RayLayout:
    """Nodes, and of each of them workers, CPUs and GPUs."""

    nodes: int
    workers: int
    cpus: int
    gpus: int

    def fits(self, node: NodeOffer) -> bool:
        """Whether one of its nodes may be this one."""
        return node.cpus >= self.cpus and node.gpus >= self.gpus

    def bundle(self) -> dict[str, float]:
        """What a node is asked for, as Ray's placement groups have it."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    def __str__(self) -> str:
        each = _devices(self.cpus, self.gpus)
        return f"{self.nodes} nodes with {each} each" if self.nodes > 1 else f"a node with {each}"


def _devices(cpus: float, gpus: float) -> str:
    return show_counted(cpus, "CPU") + (f" and {show_counted(gpus, 'GPU')}" if gpus else "")


def _room(node: NodeOffer, cpus: int, gpus: int) -> int:
    """How many processes the node has room for."""
    return int(min(node.cpus // cpus, node.gpus // gpus if gpus else node.cpus // cpus))


def _fix(most: int, wants_gpus: bool, *, asked: str) -> str:
    if most:
        return f"--plan dp={most}"
    return "--plan with device=cpu" if wants_gpus and asked == "auto" else "ray status, which says what there is"


def _no_environment(file: Path) -> str:
    """Why it is no file with a runtime environment; empty where it is one."""
    try:
        return "" if isinstance(json.loads(file.read_text()), dict) else "which is no object in JSON"
    except OSError as error:
        return f"{error.strerror}".lower()
    except ValueError:
        return "which is no JSON"


def offers(nodes: Sequence[Mapping[str, Any]]) -> list[NodeOffer]:
    """The nodes that are up, of what ``ray.nodes()`` says."""
    return [
        NodeOffer(
            name=str(node["NodeManagerHostname"] if node.get("NodeManagerHostname") else node["NodeManagerAddress"]),
            cpus=float(node["Resources"].get("CPU", 0)),
            gpus=float(node["Resources"].get("GPU", 0)),
            kind=next((one.removeprefix(_KIND) for one in node["Resources"] if one.startswith(_KIND)), ""),
            memory=float(node["Resources"].get("memory", 0)),
        )
        for node in nodes
        if node["Alive"]
    ]


def offer_of(there: Sequence[NodeOffer], options: Mapping[str, str]) -> Offer | None:
    """What a run with the ``options`` of its launch would have on the nodes that are ``there``.

    On those with GPUs where there are any, else a process for each ``--cpus-per-worker`` of their CPUs. ``None`` where
    they differ, or have GPUs of no kind that the catalog knows.

    Options that are wrong offer nothing: what prepares the launch says so.
    """
    nodes, share = options.get("nodes", "1"), options.get("cpus-per-worker", "1")
    alike = [node for node in there if node.gpus] or list(there)
    known = len({(node.cpus, node.gpus, node.kind) for node in alike}) == 1
    if not (known and is_count(nodes, 1) and is_count(share, 1)):
        return None
    first, count = alike[0], int(nodes) if "nodes" in options else len(alike)
    if gpus := first.gpus:
        kind = find(first.kind) or find(f"{first.kind}B")  # Ray's A100-40G is the catalog's A100-40GB
        return Offer(nodes=count, devices=int(gpus), device=kind.device.name, by="Ray") if kind and gpus >= 1 else None
    places, memory = int(first.cpus // int(share)), int(min(node.memory for node in alike))
    return Offer(nodes=count, devices=places, cores=places * int(share), memory=memory, by="Ray") if places else None


def own_version() -> str:
    """Of Phalanx, where this is called."""
    return sys.modules["phalanx"].__version__
