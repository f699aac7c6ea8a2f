"""What ranks of a run on Kubernetes have printed: as the volume has it, or as pods say.

Pods are asked again and again, and are gone one day. What they have said so far stays in ``output.log``, to which more
is only ever added.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.errors import RunError
from phalanx.files import replace_text
from phalanx.launch.targets.kubectl import Kubectl
from phalanx.launch.targets.kubernetes_manifest import NODE
from phalanx.launch.targets.launch_folder import OUTPUT, append, log_name

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
