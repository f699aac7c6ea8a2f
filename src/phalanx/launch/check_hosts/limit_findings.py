"""What the limits of a host's users and containers are too little for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.launch.check_hosts.asking import HostAnswer
from phalanx.launch.check_hosts.finding import HostFinding
from phalanx.units import show_bytes

_FILES = 1024  # open files that are always enough; below it they may not be
_FILES_OF = 128, 4  # that a worker has at least, and for each other worker
_PROCESSES = 1024  # processes and threads of a user that are enough; below it they may not be
_THREADS_OF = 4  # that a worker has at least
_SHARED_MEMORY = 128 * 2**20, 16 * 2**20  # bytes of /dev/shm that may be too little, and that are


def limit_findings(there: Sequence[HostAnswer], workers: int) -> Iterator[HostFinding]:
    """Open files, locked memory and shared memory that are few for a run of so many ``workers``."""
    for one in there:
        files = one.told["limits"].get("open_files", -1)
        if 0 <= files < _FILES:
            least = _FILES_OF[0] + _FILES_OF[1] * workers
            what = f"a process may open {files} files"
            fix = "ulimit -n 65536 there, in /etc/security/limits.conf for good"
            yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix=fix, fails=files < least)
        locked = one.told["limits"].get("memlock", -1)
        if one.told.get("infiniband") and locked >= 0:
            what = f"a process may lock {show_bytes(locked)} of memory, which InfiniBand needs more of"
            yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix="ulimit -l unlimited there", fails=False)
        loads = (one.told.get("data") or {}).get("workers", 0)
        if one.told["shm"]["total"] and (loads or len(one.devices) > 1):
            free = one.told["shm"]["free"]
            if free < _SHARED_MEMORY[0]:
                by = f"{loads} loader processes" if loads else "its devices"
                what = f"/dev/shm has {show_bytes(free)} free, over which {by} hand on tensors"
                fix = "mount -o remount,size=8G /dev/shm there; of a container --shm-size=8g"
                fails = bool(loads) and free < _SHARED_MEMORY[1]
                yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix=fix, fails=fails)


def few_processes(there: Sequence[HostAnswer], counts: Mapping[str, int]) -> Iterator[HostFinding]:
    """Of a user, to which threads count: fewer than its workers and what loads their data begin with, or few.

    ``counts``: workers by the name of each host; 1 where it is not there.
    """
    for one in there:
        most = one.told["limits"].get("processes", -1)
        loads = (one.told.get("data") or {}).get("workers", 0)
        least = counts.get(one.name, 1) * (_THREADS_OF + loads)
        if 0 <= most < max(_PROCESSES, least):
            what = f"its user may have {most} processes and threads"
            fix = "ulimit -u 65536 there, in /etc/security/limits.conf for good"
            yield HostFinding(kind="limits", hosts=(one.name,), what=what, fix=fix, fails=most < least)
