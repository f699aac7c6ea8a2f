"""The process that holds the hosts and carries their packets; CPU time by quota of the kernel's control groups.

Run as a script with the standard library alone. A namespace, what is in it and both ends of its links vanish when the
last process that holds it ends, so nothing has to be cleaned up: not after ``kill -9`` of the launcher, which this
process watches, and not after its own.

It takes lines on standard input, and answers ``cut``, ``restore`` and ``slow`` with a line:

    cut HOST            drop every packet to and from the host
    restore HOST        carry them again
    slow HOST FACTOR    let the host's processes run 1/FACTOR of the time
    join HOST PID       the process has entered the host
    end                 let go of everything
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Self, final

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LAUNCHER = -1  # in place of the number of a host
_NAP = 0.1, 0.0003, 0.002  # of the delay, between looks at the senders while packets are under way; least, most
_PATIENCE = 1.0  # seconds between looks at whether the launcher is still there
_DUTY = 0.04  # seconds in which a slowed process runs once and stands once
_BATCH = 64  # packets taken from one sender before the others get their turn
_WINDOW = "4096 131072 67108864"  # bytes that a connection may hold: least, at first, most
FIRST_HOST = 10  # last number of the first host's address; the launcher has 1


class Carrier:
    """Takes packets from each host's TUN device and puts each into its receiver's, later."""

    def __init__(self, tuns: dict[int, int], delay: float, rate: float, room: float) -> None:
        self.cut: set[int] = set()
        self._tuns = tuns
        self._delay = delay
        part, least, most = _NAP
        self._nap = min(most, max(least, part * delay))
        self._seconds_per_byte = 8 / rate if rate else 0.0
        self._room = room  # seconds of packets that may wait for a receiver's link
        self._free = dict.fromkeys(tuns, 0.0)
        self._under_way: list[tuple[float, int, int, int, bytes]] = []
        self._count = 0

    def collect(self) -> None:
        """Take in what the senders have given."""
        now = time.monotonic()
        for source, tun in self._tuns.items():
            with suppress(OSError):  # nothing more, or the device is down
                for _ in range(_BATCH):
                    self._take(source, os.read(tun, 65536), now)

    def deliver(self) -> float:
        """Hand over what is due. Returns the seconds until something is to be done, at most."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, source, receiver, packet = heapq.heappop(self._under_way)
            if source not in self.cut and receiver not in self.cut:
                with suppress(OSError):
                    os.write(self._tuns[receiver], packet)
        if not self._under_way:
            return _PATIENCE
        return max(self._nap / 2, min(self._nap, self._under_way[0][0] - now))

    @property
    def idle(self) -> bool:
        return not self._under_way

    def _take(self, source: int, packet: bytes, now: float) -> None:
        last = packet[19] if len(packet) >= 20 and packet[0] >> 4 == 4 else 0
        receiver = _LAUNCHER if last == 1 else last - FIRST_HOST
        if receiver not in self._tuns or source in self.cut:
            return
        arrival = now if source == _LAUNCHER else now + self._delay
        if receiver != _LAUNCHER and self._seconds_per_byte:
            arrival = max(arrival, self._free[receiver])
            if arrival - now - self._delay > self._room:
                return
            self._free[receiver] = arrival + len(packet) * self._seconds_per_byte
        self._count += 1
        heapq.heappush(self._under_way, (arrival, self._count, source, receiver, packet))


class Brakes:
    """Stops and continues the processes of slowed hosts in turn, for want of a quota kept by the kernel."""

    def __init__(self) -> None:
        self._processes: dict[int, set[int]] = {}
        self._factors: dict[int, float] = {}
        self._changed = threading.Event()
        self._ending = False

    def join(self, host: int, pid: int) -> None:
        """This process is the host's from now on."""
        self._processes.setdefault(host, set()).add(pid)

    def slow(self, host: int, factor: float) -> None:
        """Let the host's processes run ``1 / factor`` of the time."""
        known = host in self._factors
        self._factors[host] = factor
        if not known:
            threading.Thread(target=self._pump, args=(host,), daemon=True).start()

    def release(self) -> None:
        self._ending = True
        for host in self._factors:
            self._signal(host, signal.SIGCONT)

    def _pump(self, host: int) -> None:
        while not self._ending:
            began = time.monotonic()
            time.sleep(_DUTY / self._factors[host])
            standing = (time.monotonic() - began) * (self._factors[host] - 1)  # a busy machine wakes this thread late
            if standing > 0 and not self._ending:
                self._signal(host, signal.SIGSTOP)
                time.sleep(standing)
                self._signal(host, signal.SIGCONT)

    def _signal(self, host: int, number: int) -> None:
        for pid in tuple(self._processes.get(host, ())):
            try:
                os.killpg(pid, number)
            except OSError:
                self._processes[host].discard(pid)


class HostProcess:
    """All hosts of one launcher."""

    def __init__(self, launcher: int, hosts: int, tun: str, carrying: dict[str, float] | None) -> None:
        self._launcher = launcher
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.namespaces: list[int] = []  # of each host, then of the switch between them
        tuns = {_LAUNCHER: _tun(tun)} if carrying else {}
        for host in range(hosts + 1):
            if libc.unshare(_CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
            self.namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
            _widen_windows()
            if carrying and host < hosts:
                tuns[host] = _tun("net0")
        libc.setns(home, _CLONE_NEWNET)
        self._carrier = Carrier(tuns, **carrying) if carrying else None
        self._listened = [0, *tuns.values()]
        self._brakes = Brakes()
        self._words = b""

    def run(self) -> None:
        wait = _PATIENCE
        while os.getppid() == self._launcher:
            # while packets are under way the senders are looked at in turns: to wake for each packet costs more
            hurried = self._carrier is not None and not self._carrier.idle
            if hurried:
                time.sleep(wait)
            ready = select.select([0] if hurried else self._listened, [], [], 0 if hurried else wait)[0]
            if 0 in ready and not self._listen():
                break
            if self._carrier:
                self._carrier.collect()
                wait = self._carrier.deliver()
        self._brakes.release()

    def _listen(self) -> bool:
        data = os.read(0, 4096)
        *lines, self._words = (self._words + data).split(b"\n")
        for line in lines:
            if line == b"end":
                return False
            verb, host, *rest = line.decode().split()
            self._obey(verb, int(host), rest)
        return bool(data)

    def _obey(self, verb: str, host: int, rest: list[str]) -> None:
        if verb == "join":
            self._brakes.join(host, int(rest[0]))
            return
        if verb == "slow":
            self._brakes.slow(host, float(rest[0]))
        elif self._carrier:
            self._carrier.cut.add(host) if verb == "cut" else self._carrier.cut.discard(host)
        print("ok", flush=True)


def _widen_windows() -> None:
    """What is under way on a fast link with a long delay is more than a connection may hold by default."""
    for name in ("tcp_rmem", "tcp_wmem"):
        with suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(_WINDOW)


def _tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def main(given: dict[str, Any]) -> None:
    """Make the hosts, say where they are, and keep them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, whose end is this one's
    process = HostProcess(**given)
    print(json.dumps(process.namespaces), flush=True)
    with suppress(BrokenPipeError):
        process.run()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        print(json.dumps({"errno": error.errno, "error": str(error)}), flush=True)
        sys.exit(1)


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
