"""How a run on Kubernetes stands, by what its objects say of themselves, and what its ranks have printed.

Pods are asked again and again, and are gone one day. What they have said so far stays in ``output.log``, to which more
is only ever added.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import RunError
from phalanx.files import replace_text
from phalanx.launch.targets.kubectl import Kubectl
from phalanx.launch.targets.kubernetes_manifest import OWN_FAILURE
from phalanx.launch.targets.kubernetes_options import NODE
from phalanx.launch.targets.launch_folder import LAST_WORDS, OUTPUT, State, append, log_name
from phalanx.launch.targets.target import Standing

_OVER = ("Succeeded", "Failed")
_TIME_IS_OVER = "FailJobSetFailurePolicyAction"  # a JobSet says so by its rule
_COMMON = ("ContainerCreating", "PodInitializing")


def standing_of(
    job: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]],
    *,
    nodes: tuple[int, int],
    last: str,
    asked: bool,
    queued: Mapping[str, Any] | None = None,
) -> Standing:
    """How it stands.

    ``job``: the JobSet; ``None`` where it is gone. ``nodes``: the fewest pods that it goes on with, and the
    most. ``last``: the last of the run's events that says how it stands, empty where they are not to be seen from here.
    ``asked``: the run was asked to stop. ``queued``: the Workload by which Kueue knows the job, if it does.
    """
    there = [pod for pod in pods if pod.get("status", {}).get("phase") not in _OVER]
    if job is None:
        if there:
            return Standing(state="running", detail=f"{_pods(len(there))} still to end")
        forgotten: State = "stopped" if asked else "unknown"
        return Standing(state=LAST_WORDS.get(last, forgotten), detail="Kubernetes has forgotten it")
    told = {one["type"]: one for one in job.get("status", {}).get("conditions", []) if one.get("status") == "True"}
    if done := told.get("Completed") or told.get("Complete"):
        return Standing(state="ended", detail=_words(done))
    if failed := told.get("Failed"):
        if there:
            return Standing(state="running", detail=f"{_pods(len(there))} still to end: {_words(failed)}")
        if any(OWN_FAILURE in _exit_codes(pod) for pod in pods):
            return Standing(state="failed", detail=f"an exception of the job's own code: {_words(failed)}")
        saved = failed.get("reason") == _TIME_IS_OVER and last in ("stopped", "")
        return Standing(state="stopped" if saved else "failed", detail=_words(failed))
    again = _again(job)
    if suspended := told.get("Suspended") or _is_suspended(job):
        if there:
            return Standing(state="running", detail=f"{_pods(len(there))} still to end: {_words(suspended)}")
        kept = {"type": "QuotaReserved", "status": "False"}.items()  # by Kueue, where it says why
        said = (queued or {}).get("status", {}).get("conditions", [])
        why = next((one for one in said if kept <= one.items()), suspended)
        return Standing(state="waiting", detail=_words(why) + again)
    return _by_pods(there, *nodes, again)


def _exit_codes(pod: Mapping[str, Any]) -> list[int]:
    """Of those of its containers that have ended."""
    states = [one.get("state", {}) for one in pod.get("status", {}).get("containerStatuses", [])]
    return [one["terminated"]["exitCode"] for one in states if one.get("terminated")]


def _by_pods(pods: Sequence[Mapping[str, Any]], least: int, nodes: int, again: str) -> Standing:
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running" and not _why_waiting(pod)]
    where = ", ".join(sorted({pod.get("spec", {}).get("nodeName", "") for pod in running} - {""}))
    on = f" on {where}" if where else ""
    if len(running) >= nodes:
        return Standing(state="running", detail=f"{_pods(len(running))}{on}{again}")
    reasons = Counter(reason for pod in pods if (reason := _why_waiting(pod)))
    if not pods:
        return Standing(state="waiting", detail=f"no pod yet{again}")
    why = "; ".join(f"{reason} ({_pods(count)})" for reason, count in reasons.most_common())
    missing = [f"{nodes - len(pods)} not made yet"] if len(pods) < nodes else []
    detail = "; ".join([*([why] if why else []), *missing])
    if len(running) >= least:
        return Standing(state="running", detail=f"{len(running)} of {_pods(nodes)}{on}: {detail}{again}")
    return Standing(state="waiting", detail=f"{len(running)} of {_pods(nodes)} running: {detail}{again}")


def _why_waiting(pod: Mapping[str, Any]) -> str:
    """Why a pod does not run, in the words of the scheduler or of its node; empty where it does."""
    status = pod.get("status", {})
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    waiting = [one["state"]["waiting"] for one in containers if one.get("state", {}).get("waiting")]
    for one in sorted(waiting, key=lambda one: one.get("reason") in _COMMON):
        return _words(one)
    for one in status.get("conditions", []):
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return _words(one)
    return "" if status.get("phase") == "Running" else status.get("phase", "Pending")


def _is_suspended(job: Mapping[str, Any]) -> dict[str, str] | None:
    """What is said of a job that waits for its queue and that no controller has looked at."""
    if not job.get("spec", {}).get("suspend"):
        return None
    queue = job.get("metadata", {}).get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
    return {"reason": "Suspended", "message": f"waits for the queue {queue}" if queue else ""}


def _again(job: Mapping[str, Any]) -> str:
    restarts = job.get("status", {}).get("restarts", 0)
    return f", after {restarts} earlier starts" if restarts else ""


def _words(told: Mapping[str, str]) -> str:
    return ": ".join(part for part in (told.get("reason", ""), told.get("message", "")) if part)


def _pods(count: int) -> str:
    return f"{count} pod" if count == 1 else f"{count} pods"


_TAKEN = "pods.json"
_PREFIXED = re.compile(r"\[pod/([^/\]]+)/[^\]]+\] ?(.*\n)")


def printed_by(kubectl: Kubectl, selector: str, pods: int) -> dict[str, list[str]]:
    """Lines of each pod that is there; none where they are gone, have not begun, or nobody answers."""
    words = ("--selector", selector, "--container", NODE, "--tail=-1", "--prefix", "--ignore-errors")
    lines: dict[str, list[str]] = {}
    with suppress(RunError):
        for pod, line in _PREFIXED.findall(kubectl.ask("logs", *words, f"--max-log-requests={2 * pods}")):
            lines.setdefault(pod, []).append(line)
    return lines


def take_in(folder: Path, rank: int | None, printed: Callable[[], dict[str, list[str]]]) -> Path:
    """The file in ``folder`` with what ``rank`` has printed, or all did, up to date; it may not be there yet."""
    path = folder / log_name(rank)
    own = path.with_name(f"pods-{path.name}")  # beside that of the volume, which is a worker's
    if rank is not None and path.exists() and not own.exists():
        return path
    _add(folder, printed())
    if rank is not None:
        mark, lines = f"[rank {rank}] ", _lines(folder / OUTPUT)
        if lines:
            replace_text(own, "".join(line.removeprefix(mark) for line in lines if line.startswith(mark)))
        return own if lines else path
    if not path.exists() and (kept := sorted(folder.glob("rank-*.log"), key=lambda one: _by_number(one.name))):
        replace_text(path, "".join(one.read_text(errors="replace") for one in kept))
    return path


def _add(folder: Path, printed: dict[str, list[str]]) -> None:
    """Add what is new of each pod, pods by name: kubectl's own order is another each time."""
    if not printed:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _TAKEN).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another may look as well
        file.seek(0)
        taken: dict[str, int] = {}
        with suppress(ValueError):
            taken = dict(json.loads(file.read() or "{}"))
        for pod, lines in sorted(printed.items(), key=lambda one: _by_number(one[0])):
            append(folder / OUTPUT, "".join(lines[taken.get(pod, 0) :]).encode())
        file.truncate(0)
        file.write(json.dumps({**taken, **{pod: len(lines) for pod, lines in printed.items()}}))


def _by_number(name: str) -> list[tuple[int, str]]:
    """What names are sorted by, so that 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
