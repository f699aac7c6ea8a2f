"""CPU time by quota of the kernel's control groups, one group a host; version 2 where it rules the CPU, else 1."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self, final

_PERIOD = 20_000  # microseconds in which a slowed host has its share: well below the time of a step
_MOUNTS = Path("/proc/mounts")
_numbers = count()


@final
class Quotas:
    """A control group for each host. Groups that a killed launcher left behind go with the next start."""

    def __init__(self, root: Path, hosts: int, *, version: int) -> None:
        """Raises OSError where groups with a quota cannot be made under ``root``."""
        self._version = version
        _sweep(root)
        name = f"phalanx-{os.getpid()}-{next(_numbers)}"
        self._groups = [root / f"{name}-{host}" for host in range(hosts)]
        try:
            if version == 2:
                (root / "cgroup.subtree_control").write_text("+cpu")
            for host, group in enumerate(self._groups):
                group.mkdir()
                self.allow(host, None)
        except OSError:
            self.close()
            raise

    @classmethod
    def find(cls, hosts: int) -> Self | None:
        """Groups for so many hosts, or ``None`` where the kernel or our rights have none."""
        for line in _MOUNTS.read_text().splitlines():
            _, where, kind, options, *_ = line.split()
            version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "cpu" in options.split(",") else 0
            if version:
                with suppress(OSError):
                    return cls(Path(where), hosts, version=version)
        return None

    def join(self, host: int) -> None:
        """Put this process, and what it starts, under the host's quota."""
        (self._groups[host] / "cgroup.procs").write_text(str(os.getpid()))

    def allow(self, host: int, cores: float | None) -> None:
        """Let a host's processes use so many cores' time together; ``None``: all there is."""
        group, share = self._groups[host], None if cores is None else max(1000, int(cores * _PERIOD))
        if self._version == 2:
            (group / "cpu.max").write_text(f"{'max' if share is None else share} {_PERIOD}")
            return
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(-1 if share is None else share))

    def close(self) -> None:
        """Remove the groups."""
        deadline = time.monotonic() + 1
        for group in self._groups:
            while group.exists() and time.monotonic() < deadline:  # busy until its last process is reaped
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.01)


def _sweep(root: Path) -> None:
    for group in root.glob("phalanx-*-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                group.rmdir()
