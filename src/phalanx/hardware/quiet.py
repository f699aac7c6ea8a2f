"""Whether other processes are busy on this machine: what is timed meanwhile would say little."""

from __future__ import annotations

import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK = 0.4  # seconds


def busy_share(path: Path = _STAT, seconds: float = _LOOK) -> float:
    """The share of the machine's cores that works while this process waits for ``seconds``; 0 where nobody says."""
    idle, whole = _ticks(path)
    time.sleep(seconds)
    idle_then, whole_then = _ticks(path)
    return 1 - (idle_then - idle) / (whole_then - whole) if whole_then > whole else 0.0


def wait_until_quiet(patience: float, most: float = 0.15) -> float:
    """Wait until at most that share of the cores is busy, for ``patience`` seconds; the share that is."""
    end = time.monotonic() + patience
    while (share := busy_share()) > most and time.monotonic() < end:
        pass
    return share


def _ticks(path: Path) -> tuple[int, int]:
    """Ticks of all cores in which they waited, and all."""
    try:
        fields = [int(word) for word in path.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(fields[3:5]), sum(fields)
