"""``--to kubernetes``: a JobSet of pods that each run torchrun's agent, through ``kubectl`` with the user's settings.

The pods are described in ``kubernetes_manifest.py``, and each runs ``kubernetes_node.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.errors import RunError
from phalanx.events import Outcome, RunLog
from phalanx.files import json_value, replace_text
from phalanx.launch.targets.kubernetes_manifest import (
    JOBSETS,
    NODE,
    OF_JOBSET,
    OPTIONS,
    OWN_FAILURE,
    PodRequest,
    config_name,
    manifests,
    part_of,
)
from phalanx.launch.targets.launch_folder import FOLDER, State, attached_log, fetched_log
from phalanx.launch.targets.offer import ask_program
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

_MANIFESTS = "kubernetes.json"
_ASKED = "asked-to-stop"
_CONDITIONS: Mapping[str, State] = {
    "Completed": "ended",
    "Complete": "ended",
    "Failed": "failed",
    "Suspended": "waiting",
}
_TIME_IS_OVER = "FailJobSetFailurePolicyAction"  # reason of a JobSet that its rule has failed


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

    def try_out(self, prepared: Prepared, patience: float) -> bool:
        submission = prepared.submission
        words = ("apply", "--dry-run=server", "--filename", "-")
        _ask(submission.options, *words, text=prepared.files[submission.folder / _MANIFESTS], patience=patience)
        return True

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        jobs = _objects(ticket, JOBSETS, ticket["jobset"])
        pods = _objects(ticket, "pods", "--selector", f"{OF_JOBSET}={ticket['jobset']}")
        job, asked = (jobs[0] if jobs else None), (folder / FOLDER / _ASKED).exists()
        nodes = (ticket.get("least", ticket["nodes"]), ticket["nodes"])
        return standing_of(job, pods, nodes=nodes, outcome=RunLog(folder).outcome, asked=asked)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        if self.standing(ticket, folder).state not in ("waiting", "running"):
            return
        name = ticket["jobset"]
        replace_text(folder / FOLDER / _ASKED, f"{name}\n")
        names = (f"{JOBSETS}/{name}", f"configmaps/{config_name(name)}")
        _ask(ticket, "delete", "--ignore-not-found", "--wait=false", *names)

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        """Return the file of a rank in the volume, if it is seen here; else the lines of ``kubectl logs``."""
        if rank is not None and (path := attached_log(folder, rank)).exists():
            return path
        words = ("--selector", f"{OF_JOBSET}={ticket['jobset']}", "--container", NODE, "--tail=-1")
        lines = list[str]()
        with suppress(RunError):  # no pod is there
            most = f"--max-log-requests={2 * ticket['nodes']}"
            lines = _ask(ticket, "logs", *words, "--ignore-errors", most).splitlines()
        return fetched_log(folder, ticket["jobset"], lines, rank)


def _kubectl(told: Mapping[str, Any], *words: str) -> tuple[str, ...]:
    """Return a command to the cluster of a launch's options, or of its ticket."""
    named = [word for name in ("context", "namespace") if told.get(name) for word in (f"--{name}", told[name])]
    return ("kubectl", *named, *words)


def _ask(told: Mapping[str, Any], *words: str, text: str | None = None, patience: float = 60.0) -> str:
    """Return the output of a ``kubectl`` command. ``text``: its input.

    Raises:
        RunError: it refuses, does not answer within ``patience`` seconds, or is not on this machine.
    """
    given = {} if text is None else {"input": text}
    lacking = "a machine that has it; --dry-run shows the manifests to take there"
    helps = "kubectl auth can-i create jobsets, in this --context and --namespace; JobSet has to be installed there"
    return ask_program(_kubectl(told, *words), "Kubernetes", patience, lacking, helps, **given)


def _objects(told: Mapping[str, Any], kind: str, *words: str) -> list[dict[str, Any]]:
    text = _ask(told, "get", kind, *words, "--ignore-not-found", "--output", "json")
    try:
        found = json_value(text) if text.strip() else {"items": []}
    except ValueError as error:
        raise RunError(f"kubectl gives no JSON of {kind}: {error}\n    try: kubectl get {kind} --output json") from None
    items = found.get("items", [found]) if isinstance(found, dict) else found
    return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []


def _settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return context and namespace for the ticket: the user's settings may name others later."""
    named = {name: options[name] for name in ("context", "namespace") if options.get(name)}
    with suppress(RunError):  # in a pod there are no settings
        named.setdefault("context", _ask({}, "config", "current-context").strip())
        view = ("config", "view", "--minify", "--output", "jsonpath={..namespace}")
        named.setdefault("namespace", _ask({"context": named["context"]}, *view).strip())
    return {name: value for name, value in named.items() if value}


def standing_of(
    job: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]],
    *,
    nodes: tuple[int, int],
    outcome: Outcome = "",
    asked: bool = False,
) -> Standing:
    """Return the state of a run by its JobSet, ``None`` if that is gone, and its pods.

    ``nodes``: fewest pods that it runs with, and most. ``outcome``: as its log tells it. ``asked``: True if it was
    asked to stop.
    """
    live = [pod for pod in pods if part_of(pod, "status").get("phase") not in ("Succeeded", "Failed")]
    if job is None:
        known = outcome if outcome in ("ended", "stopped", "failed") else "stopped" if asked else "unknown"
        state = "running" if live else known
        return Standing(state=state, detail="pods still to end" if live else "Kubernetes has forgotten it")
    told = {one["type"]: one for one in part_of(job, "status", "conditions") if part_of(one, "status") == "True"}
    if part_of(job, "spec", "suspend"):
        queue = part_of(job, "metadata", "labels").get("kueue.x-k8s.io/queue-name", "")
        told.setdefault(
            "Suspended", {"reason": "Suspended", "message": f"in queue {queue}: kubectl describe workloads says why"}
        )
    kind = next((one for one in _CONDITIONS if one in told), "")
    restarts = part_of(job, "status").get("restarts", 0)
    again = f", after {restarts} earlier starts" if restarts else ""
    if not kind:
        return _by_pods(live, *nodes, again)
    state, words = _CONDITIONS[kind], _words(told[kind])
    if live and state != "ended":
        return Standing(state="running", detail=f"pods still to end: {words}")
    states = [
        part_of(one, "state", "terminated") for pod in pods for one in part_of(pod, "status", "containerStatuses")
    ]
    if state == "failed" and any(one.get("exitCode") == OWN_FAILURE for one in states):
        words = f"an exception of the job's own code: {words}"
    elif state == "failed" and told[kind].get("reason") == _TIME_IS_OVER and outcome in ("stopped", ""):
        state = "stopped"
    return Standing(state=state, detail=words + again if state == "waiting" else words)


def _by_pods(pods: Sequence[Mapping[str, Any]], least: int, nodes: int, again: str) -> Standing:
    why = Counter(map(_why_waiting, pods))
    running = why.pop("", 0)
    if len(pods) < nodes:
        why["not made yet"] = nodes - len(pods)
    reasons = "; ".join(f"{reason} ({count})" for reason, count in why.most_common())
    state: State = "running" if running >= least else "waiting"
    return Standing(state=state, detail=f"{running} of {nodes} pods{': ' if reasons else ''}{reasons}{again}")


def _why_waiting(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run, in the words of the scheduler or of its node; "" if it does."""
    status = part_of(pod, "status")
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    waiting = [words for one in containers if (words := _words(part_of(one, "state", "waiting")))]
    unplaced = [
        _words(one)
        for one in status.get("conditions", [])
        if one.get("type") == "PodScheduled" and one.get("status") == "False"
    ]
    phase = status.get("phase", "Pending")
    return next(iter([*waiting, *unplaced]), "" if phase == "Running" else phase)


def _words(told: Mapping[str, str]) -> str:
    return ": ".join(part for part in (told.get("reason", ""), told.get("message", "")) if part)
