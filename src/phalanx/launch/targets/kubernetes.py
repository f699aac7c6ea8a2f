"""``--to kubernetes``: a JobSet of pods that each run torchrun's agent.

What pods are is in ``kubernetes_manifest.py``, and what each does in ``kubernetes_node.py``. The cluster is asked
through ``kubectl``, with the user's own settings.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import RUN_TOML
from phalanx.errors import RunError
from phalanx.files import replace_text
from phalanx.hardware.catalog import find
from phalanx.launch.runfile import check_folder
from phalanx.launch.targets.handed_over import earlier_ticket
from phalanx.launch.targets.kubectl import Kubectl
from phalanx.launch.targets.kubernetes_manifest import JOBSETS, OF_JOBSET, config_name, manifests, name_of
from phalanx.launch.targets.kubernetes_options import OPTIONS, PodRequest, asked_cores, part_of
from phalanx.launch.targets.kubernetes_standing import printed_by, standing_of, take_in
from phalanx.launch.targets.launch_folder import FOLDER, last_word
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.option_checks import is_count, read_patch
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission, own_words

_MANIFESTS = "kubernetes.json"
_ASKED = "asked-to-stop"
_REFUSES = "Kubernetes refuses it: "


@final
class KubernetesTarget(QueueTarget):
    """The cluster that ``kubectl`` on this machine asks."""

    name: ClassVar[str] = "kubernetes"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"

    def prepare(self, submission: Submission) -> Prepared:
        request = PodRequest.of(submission)
        path = submission.folder / _MANIFESTS
        text = manifests(submission, request, name_of(submission))
        command = _kubectl(submission.options).words("apply", "--filename", str(path))
        return Prepared(
            submission=submission, files={submission.runfile: submission.run.to_toml(), path: text}, commands=(command,)
        )

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        return pods_offered(options)

    def refuse_folder(self, run: RunSpec, job: Job) -> None:
        """The folder here has but the ticket of a run whose volume is not seen here."""
        elsewhere = earlier_ticket(run.folder, self.name) is not None and not (run.folder / RUN_TOML).exists()
        check_folder(replace(run, resume="auto") if elsewhere and run.resume else run, job=job)

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            RunError: the cluster refuses it, or there is no kubectl on this machine.
        """
        submission = prepared.submission
        kubectl, request = _kubectl(submission.options), PodRequest.of(submission)
        text = prepared.files[submission.folder / _MANIFESTS]
        with prepared.written():
            try:
                kubectl.ask("apply", "--filename", "-", text=text)
                asked = kubectl.settled()
                (submission.folder / _ASKED).unlink(missing_ok=True)
            except RunError:
                with suppress(RunError):  # of several objects it may have taken some
                    _take_back(kubectl, text)
                raise
            except BaseException:
                _take_back(kubectl, text)
                raise
        where = {"namespace": asked.namespace, "context": asked.context}
        named = {name: value for name, value in where.items() if value}
        pods = {"nodes": request.nodes, **({"least": request.least} if request.least < request.nodes else {})}
        return {"jobset": _name_in(text), **named, **pods}

    def image(self, options: Mapping[str, str]) -> str:
        return options.get("image", "not given")

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str:
        submission = prepared.submission
        text = prepared.files[submission.folder / _MANIFESTS]
        try:
            _kubectl(submission.options).ask(
                *("apply", "--dry-run=server", "--filename", "-"), text=text, patience=patience
            )
        except RunError as error:
            return own_words(error).removeprefix(_REFUSES)
        return ""

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        handed = _Handed.of(ticket)
        jobs = handed.kubectl.objects(JOBSETS, handed.name)
        pods = handed.kubectl.objects("pods", "--selector", handed.selector)
        job, asked = (jobs[0] if jobs else None), (folder / FOLDER / _ASKED).exists()
        queued = _workload(handed.kubectl, job) if job else None
        return standing_of(job, pods, nodes=handed.nodes, last=last_word(folder), asked=asked, queued=queued)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        handed = _Handed.of(ticket)
        if self.standing(ticket, folder).state not in ("waiting", "running"):
            return
        replace_text(folder / FOLDER / _ASKED, f"{handed.name}\n")
        names = (f"{JOBSETS}/{handed.name}", f"configmaps/{config_name(handed.name)}")
        handed.kubectl.ask("delete", "--ignore-not-found", "--wait=false", *names)

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """As the volume has it, where that is to be seen from here; else what pods have printed."""
        handed = _Handed.of(ticket)
        return take_in(folder / FOLDER, rank, lambda: printed_by(handed.kubectl, handed.selector, handed.nodes[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handed:
    """What a ticket says: the name of the JobSet, and the fewest and the most pods that it has."""

    kubectl: Kubectl
    name: str
    nodes: tuple[int, int]

    @classmethod
    def of(cls, ticket: Mapping[str, Any]) -> Self:
        """Return where ``ticket`` leads."""
        most = ticket["nodes"]
        return cls(kubectl=_kubectl(ticket), name=ticket["jobset"], nodes=(ticket.get("least", most), most))

    @property
    def selector(self) -> str:
        """Of its pods."""
        return f"{OF_JOBSET}={self.name}"


def _kubectl(told: Mapping[str, Any]) -> Kubectl:
    """To the cluster that the options of a launch, or its ticket, name."""
    return Kubectl(context=told.get("context", ""), namespace=told.get("namespace", ""))


def _take_back(kubectl: Kubectl, text: str) -> None:
    """Take away what was just handed over.

    Raises:
        RunError: it may be there still.
    """
    try:
        kubectl.ask("delete", "--ignore-not-found", "--wait=false", "--filename", "-", text=text)
    except RunError as error:
        name, said = _name_in(text), own_words(error)
        words = shlex.join(kubectl.words("delete", "jobset,configmap", f"--selector={_BY_NAME}={name}"))
        raise RunError(f"{name} may still be in the cluster: {said}\n    try: {words}") from None


_BY_NAME = "app.kubernetes.io/instance"


def _workload(kubectl: Kubectl, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """By what Kueue knows a job that waits in its queue; ``None`` where none does, or nobody may look."""
    if not job["spec"].get("suspend"):
        return None
    uid = job["metadata"].get("uid")
    with suppress(RunError):
        for one in kubectl.objects("workloads.kueue.x-k8s.io"):
            if any(owner.get("uid") == uid for owner in one["metadata"].get("ownerReferences", [])):
                return one
    return None


def _name_in(text: str) -> str:
    return json.loads(text)["items"][-1]["metadata"]["name"]


_BY_LABEL = re.compile(r"[^=]*(?:gpu|accelerator)[^=]*=(?:nvidia-)?(?P<kind>.+)", re.IGNORECASE)
_OF_CLOUDS = {"tesla-a100": "A100-40GB", "tesla-v100": "V100-16GB"}  # as GKE calls them


def pods_offered(options: Mapping[str, str]) -> Offer | None:
    """What so many pods have by ``--gpus-per-node`` and a node label of ``--patch`` that names the kind of GPU.

    Of pods without GPUs by the cores that the patch asks for, a process each. ``None`` where the options do not say it;
    options that are wrong offer nothing: what prepares the launch says so.
    """
    nodes, gpus = options.get("nodes", "1"), options.get("gpus-per-node", "")
    patch, _ = read_patch(OPTIONS, options)
    if not is_count(nodes, 1):
        return None
    if gpus == "0":
        cores = asked_cores(patch)
        return Offer(nodes=int(nodes), devices=1, cores=cores, by="--patch") if cores else None
    selector = dict(part_of(patch, "spec", "nodeSelector"))
    labels = [_BY_LABEL.fullmatch(f"{label}={value}") for label, value in selector.items()]
    names = [label["kind"].lower() for label in labels if label]
    found = [
        entry for name in names if (entry := find(_OF_CLOUDS.get(name, name)) or find(name.removeprefix("tesla-")))
    ]
    if len(found) != 1 or not is_count(gpus, 1):
        return None
    return Offer(nodes=int(nodes), devices=int(gpus), device=found[0].device.name, by="--gpus-per-node")
