"""``--to kubernetes``: a JobSet of pods that each run torchrun's agent, through ``kubectl`` with the user's settings.

The pods are described in ``kubernetes_manifest.py``, and each runs ``kubernetes_node.py``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import RUN_TOML
from phalanx.errors import RunError
from phalanx.files import replace_text
from phalanx.hardware.catalog import find
from phalanx.launch.runfile import check_folder
from phalanx.launch.targets.handed_over import earlier_ticket
from phalanx.launch.targets.kubernetes_manifest import (
    JOBSETS,
    NODE,
    OF_JOBSET,
    OPTIONS,
    OWN_FAILURE,
    PodRequest,
    asked_cores,
    config_name,
    manifests,
    part_of,
)
from phalanx.launch.targets.launch_folder import FOLDER, LAST_WORDS, State, append_new, attached_log, last_word
from phalanx.launch.targets.offer import Offer, ask_program
from phalanx.launch.targets.option_checks import read_options
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission, own_words

_MANIFESTS = "kubernetes.json"
_ASKED = "asked-to-stop"
_REFUSES = "Kubernetes refuses it: "
_CONDITIONS: Mapping[str, State] = {
    "Completed": "ended",
    "Complete": "ended",
    "Failed": "failed",
    "Suspended": "waiting",
}
_TIME_IS_OVER = "FailJobSetFailurePolicyAction"  # reason of a JobSet that its rule has failed
_BY_LABEL = re.compile(r"[^=]*(?:gpu|accelerator)[^=]*=(?:nvidia-)?(?P<kind>.+)", re.IGNORECASE)
_OF_CLOUDS = {"tesla-a100": "A100-40GB", "tesla-v100": "V100-16GB"}  # names of GKE


@final
class KubernetesTarget(QueueTarget):
    """The cluster that ``kubectl`` on this machine asks."""

    name: ClassVar[str] = "kubernetes"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = "python"

    def prepare(self, submission: Submission) -> Prepared:
        path = submission.folder / _MANIFESTS
        files = {submission.runfile: submission.run.to_toml(), path: manifests(submission)}
        command = _kubectl(submission.options, "apply", "--filename", str(path))
        return Prepared(submission=submission, files=files, commands=(command,))

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        """Return pods by ``--gpus-per-node`` and a node label of ``--patch`` that names a GPU, or by its cores."""
        values, problems = read_options(OPTIONS, options)
        nodes, gpus, patch = values.get("nodes", 1), values.get("gpus-per-node"), values.get("patch", {})
        if any(problem.where in ("--nodes", "--gpus-per-node", "--patch") for problem in problems):
            return None
        if gpus == 0:
            cores = asked_cores(patch)
            return Offer(nodes=nodes, devices=1, cores=cores, by="--patch") if cores else None
        labels = [f"{label}={value}" for label, value in dict(part_of(patch, "spec", "nodeSelector")).items()]
        names = [match["kind"].lower() for one in labels if (match := _BY_LABEL.fullmatch(one))]
        known = [find(_OF_CLOUDS.get(name, name)) or find(name.removeprefix("tesla-")) for name in names]
        found = [entry.device.name for entry in known if entry]
        if len(found) != 1 or not gpus:
            return None
        return Offer(nodes=nodes, devices=gpus, device=found[0], by="--gpus-per-node")

    def refuse_folder(self, run: RunSpec, job: Job) -> None:
        """Refuse a folder as any target does; of a run whose volume is not seen here it has only the ticket."""
        elsewhere = earlier_ticket(run.folder, self.name) is not None and not (run.folder / RUN_TOML).exists()
        check_folder(replace(run, resume="auto") if elsewhere and run.resume else run, job=job)

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            RunError: the cluster refuses it, or there is no kubectl on this machine.
        """
        submission = prepared.submission
        options, text = submission.options, prepared.files[submission.folder / _MANIFESTS]
        request, name = PodRequest.of(submission), json.loads(text)["items"][-1]["metadata"]["name"]
        with prepared.written():
            try:
                _ask(options, "apply", "--filename", "-", text=text)
                where = _settings(options)
                (submission.folder / _ASKED).unlink(missing_ok=True)
            except BaseException:
                with suppress(RunError):  # of several objects it may have taken some
                    _ask(options, "delete", "--ignore-not-found", "--wait=false", "--filename", "-", text=text)
                raise
        pods = {"nodes": request.nodes, **({"least": request.least} if request.least < request.nodes else {})}
        return {"jobset": name, **where, **pods}

    def image(self, options: Mapping[str, str]) -> str:
        return options.get("image", "not given")

    def why_not(self, prepared: Prepared, patience: float = 60.0) -> str:
        submission = prepared.submission
        words = ("apply", "--dry-run=server", "--filename", "-")
        try:
            _ask(submission.options, *words, text=prepared.files[submission.folder / _MANIFESTS], patience=patience)
        except RunError as error:
            return own_words(error).removeprefix(_REFUSES)
        return ""

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        jobs = _objects(ticket, JOBSETS, ticket["jobset"])
        pods = _objects(ticket, "pods", "--selector", f"{OF_JOBSET}={ticket['jobset']}")
        job, asked = (jobs[0] if jobs else None), (folder / FOLDER / _ASKED).exists()
        queued = _workload(ticket, job) if job and job["spec"].get("suspend") else None
        nodes = (ticket.get("least", ticket["nodes"]), ticket["nodes"])
        return standing_of(job, pods, nodes=nodes, last=last_word(folder), asked=asked, queued=queued)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        if self.standing(ticket, folder).state not in ("waiting", "running"):
            return
        name = ticket["jobset"]
        replace_text(folder / FOLDER / _ASKED, f"{name}\n")
        names = (f"{JOBSETS}/{name}", f"configmaps/{config_name(name)}")
        _ask(ticket, "delete", "--ignore-not-found", "--wait=false", *names)

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """Return the file of the volume, if it is seen here; else the lines that ``kubectl logs`` has shown so far."""
        path, everything = attached_log(folder, rank), attached_log(folder, None)
        if rank is not None and path.exists():
            return path
        words = ("--selector", f"{OF_JOBSET}={ticket['jobset']}", "--container", NODE, "--tail=-1", "--prefix")
        with suppress(RunError):  # no pod is there
            told = _ask(ticket, "logs", *words, "--ignore-errors", f"--max-log-requests={2 * ticket['nodes']}")
            append_new(everything, sorted(told.splitlines(), key=lambda line: _by_number(line.partition("]")[0])))
        if rank is None:
            kept = sorted(path.parent.glob("rank-*.log"), key=lambda one: _by_number(one.name))
            if kept and not path.exists():
                replace_text(path, "".join(one.read_text(errors="replace") for one in kept))
            return path
        if everything.exists():
            path, mark = path.with_name(f"pods-{path.name}"), f"] [rank {rank}] "
            lines = (line.partition(mark) for line in everything.read_text(errors="replace").splitlines(keepends=True))
            replace_text(path, "".join(text for _, found, text in lines if found))
        return path


def _kubectl(told: Mapping[str, Any], *words: str) -> tuple[str, ...]:
    """Return a command to the cluster of a launch's options, or of its ticket."""
    named = [word for name in ("context", "namespace") if told.get(name) for word in (f"--{name}", told[name])]
    return ("kubectl", *named, *words)


def _ask(told: Mapping[str, Any], *words: str, text: str | None = None, patience: float = 60.0) -> str:
    """Return the output of a ``kubectl`` command. ``text``: its input.

    Raises:
        RunError: it refuses, does not answer within ``patience`` seconds, or is not on this machine.
    """
    given = {} if text is None else {"stdin": None, "input": text}
    lacking = "a machine that has it; --dry-run shows the manifests to take there"
    done = ask_program(_kubectl(told, *words), "Kubernetes", patience, lacking, "kubectl cluster-info", **given)
    if not done.returncode:
        return done.stdout
    said = (done.stderr or done.stdout).strip() or f"kubectl ended with {done.returncode}"
    fix = "kubectl config get-contexts, which says what --context may be; kubectl cluster-info"
    if "no matches for kind" in said or "the server doesn't have a resource type" in said:
        fix = "a cluster where JobSet is installed (https://jobset.sigs.k8s.io)"
    elif "orbidden" in said or "nauthorized" in said:
        fix = "kubectl auth can-i create jobsets.jobset.x-k8s.io, in the namespace of --namespace"
    raise RunError(f"{_REFUSES}{said}\n    try: {fix}")


def _objects(told: Mapping[str, Any], kind: str, *words: str) -> list[dict[str, Any]]:
    text = _ask(told, "get", kind, *words, "--ignore-not-found", "--output", "json")
    found = json.loads(text) if text.strip() else {"items": []}
    return found.get("items", [found])


def _settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return context and namespace for the ticket: the user's settings may name others later."""
    named = {name: options[name] for name in ("context", "namespace") if options.get(name)}
    with suppress(RunError):  # in a pod there are no settings
        named.setdefault("context", _ask({}, "config", "current-context").strip())
        view = ("config", "view", "--minify", "--output", "jsonpath={..namespace}")
        named.setdefault("namespace", _ask({"context": named["context"]}, *view).strip())
    return {name: value for name, value in named.items() if value}


def _workload(told: Mapping[str, Any], job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return Kueue's object of a JobSet in its queue; ``None`` if there is none, or it may not be read."""
    with suppress(RunError):
        for one in _objects(told, "workloads.kueue.x-k8s.io"):
            if any(
                owner.get("uid") == job["metadata"].get("uid") for owner in one["metadata"].get("ownerReferences", [])
            ):
                return one
    return None


def standing_of(
    job: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]],
    *,
    nodes: tuple[int, int],
    last: str = "",
    asked: bool = False,
    queued: Mapping[str, Any] | None = None,
) -> Standing:
    """Return the state of a run by its JobSet, ``None`` if that is gone, and its pods.

    ``nodes``: fewest pods that it runs with, and most. ``last``: last word of its events. ``asked``: True if it was
    asked to stop. ``queued``: Kueue's object.
    """
    live = [pod for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
    if job is None:
        if live:
            return Standing(state="running", detail=f"{_pods(len(live))} still to end")
        state = LAST_WORDS.get(last, "stopped" if asked else "unknown")
        return Standing(state=state, detail="Kubernetes has forgotten it")
    told = {one["type"]: one for one in part_of(job, "status", "conditions") if one.get("status") == "True"}
    if job["spec"].get("suspend"):
        queue = part_of(job, "metadata", "labels").get("kueue.x-k8s.io/queue-name", "")
        told.setdefault("Suspended", {"reason": "Suspended", "message": queue and f"waits for the queue {queue}"})
    kind = next((one for one in _CONDITIONS if one in told), "")
    restarts = part_of(job, "status").get("restarts", 0)
    again = f", after {restarts} earlier starts" if restarts else ""
    if not kind:
        return _by_pods(live, *nodes, again)
    state, words = _CONDITIONS[kind], _words(told[kind])
    if live and state != "ended":
        return Standing(state="running", detail=f"{_pods(len(live))} still to end: {words}")
    if state == "failed" and OWN_FAILURE in _exit_codes(pods):
        words = f"an exception of the job's own code: {words}"
    elif state == "failed" and told[kind].get("reason") == _TIME_IS_OVER and last in ("stopped", ""):
        state = "stopped"
    elif state == "waiting":
        kept = {"type": "QuotaReserved", "status": "False"}.items()
        reasons = part_of(queued, "status", "conditions")
        words = next((_words(one) for one in reasons if kept <= one.items()), words) + again
    return Standing(state=state, detail=words)


def _exit_codes(pods: Sequence[Mapping[str, Any]]) -> list[int]:
    states = [one.get("state", {}) for pod in pods for one in part_of(pod, "status", "containerStatuses")]
    return [one["terminated"]["exitCode"] for one in states if one.get("terminated")]


def _by_pods(pods: Sequence[Mapping[str, Any]], least: int, nodes: int, again: str) -> Standing:
    running = [pod for pod in pods if not _why_waiting(pod)]
    reasons = Counter(reason for pod in pods if (reason := _why_waiting(pod)))
    where = ", ".join(sorted({part_of(pod, "spec").get("nodeName", "") for pod in running} - {""}))
    on = f" on {where}" if where else ""
    if len(running) >= nodes:
        return Standing(state="running", detail=f"{_pods(len(running))}{on}{again}")
    why = [f"{reason} ({_pods(count)})" for reason, count in reasons.most_common()]
    why += [f"{nodes - len(pods)} not made yet"] if len(pods) < nodes else []
    state: State = "running" if len(running) >= least else "waiting"
    return Standing(state=state, detail=f"{len(running)} of {_pods(nodes)} running{on}: {'; '.join(why)}{again}")


def _why_waiting(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run, in the words of the scheduler or of its node; "" if it does."""
    status = part_of(pod, "status")
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    waiting = [one["state"]["waiting"] for one in containers if one.get("state", {}).get("waiting")]
    common = ("ContainerCreating", "PodInitializing")
    if waiting:
        return _words(min(waiting, key=lambda one: one.get("reason") in common))
    unplaced = {"type": "PodScheduled", "status": "False"}.items()
    words = next((_words(one) for one in status.get("conditions", []) if unplaced <= one.items()), "")
    return words or ("" if status.get("phase") == "Running" else status.get("phase", "Pending"))


def _words(told: Mapping[str, str]) -> str:
    return ": ".join(part for part in (told.get("reason", ""), told.get("message", "")) if part)


def _pods(count: int) -> str:
    return f"{count} pod" if count == 1 else f"{count} pods"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
