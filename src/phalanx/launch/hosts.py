"""Several hosts on one machine, with slow links and slow processors as asked: ``Hosts``."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self, final

from phalanx.device_kinds import interface_variables
from phalanx.errors import RunError, SpecError
from phalanx.launch.host_network import HostLink, HostNetwork, move_into, refuse
from phalanx.launch.host_process import Quotas

_DEVICE = "net0"
_MOST = 200
_MARKS = 6  # numbers that a host's worker notes: its first, second and last step, and bytes sent before each


@final
class Hosts:
    """Machines to put workers on, within this one: ``with Hosts(2, rate="100mbit", delay="20ms") as hosts``.

    Each host has a network stack, an address and a link of its own; files, processes and devices are this machine's.
    ``rank // per_host`` is the host of a rank, beginning again with the first host after the last, so that neighbours
    are together and servers, whose ranks come last, share the hosts of the first workers or have hosts of their own.

    Only within the block are the hosts there. Nothing of them is left after it; after ``kill -9`` nothing but empty
    control groups, which the next hosts remove.

    Attributes:
        link: of each host.
        per_host: ranks a host has.
    """

    def __init__(self, count: int, *, rate: str = "", delay: str = "", loss: str = "", per_host: int = 1) -> None:
        """Hosts with links of ``rate`` (``100mbit``), ``delay`` one way (``20ms``) and ``loss`` (``0.1%``).

        Raises:
            SpecError: if a word or a number is wrong.
        """
        if not 1 <= count <= _MOST:
            raise SpecError.of(where="hosts", given=str(count), allowed=f"1 to {_MOST}", fix="Hosts(2)")
        if per_host < 1:
            raise SpecError.of(where="per_host", given=str(per_host), allowed="1 or more", fix="per_host=1")
        self.count, self.per_host = count, per_host
        self.link = HostLink.parse(rate, delay, loss)
        self._marks = memoryview(mmap.mmap(-1, 8 * _MARKS * count)).cast("q")
        self._up = ExitStack()
        self._network: HostNetwork | None = None
        self._quotas: Quotas | None = None

    def __enter__(self) -> Self:
        """Make the hosts.

        Raises:
            RefusedError: if this machine or this process cannot; it says what is missing.
            RunError: if it went wrong all the same.
        """
        refuse(self.link)
        with ExitStack() as up:
            self._network = HostNetwork(self.count, self.link)
            up.callback(self._network.close)
            self._quotas = Quotas.find(self.count)
            if self._quotas:
                up.callback(self._quotas.close)
            self._up = up.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._up.close()
        self._network = self._quotas = None

    @property
    def meeting(self) -> str:
        """The launcher's address, which every host reaches."""
        return self._there.launcher

    @property
    def carrier(self) -> str:
        """What delays packets: ``kernel`` or ``process``, a process that takes some of a core's time for it."""
        return "process" if self._there.carried else "kernel"

    @property
    def brake(self) -> str:
        """What slows a host's processors: ``quota`` of the kernel, or ``stops`` by signals."""
        return "quota" if self._quotas else "stops"

    def host_of(self, rank: int) -> int:
        """The host that a rank is on."""
        return rank // self.per_host % self.count

    def address(self, host: int) -> str:
        return self._there.address(host)

    def enter(self, rank: int) -> str:
        """Move this process onto the host of ``rank``; its threads must not have been started yet. Returns its address.

        Collectives of every kind of device and torch's RPC go over the host's link from then on.

        Raises:
            RunError: if the kernel does not let it in.
        """
        host, network = self.host_of(rank), self._there
        names = {f"host{other}": network.address(other) for other in range(self.count)}
        move_into(network.namespace(host), {"launcher": network.launcher, **names})
        os.environ.update(dict.fromkeys((*interface_variables(), "TP_SOCKET_IFNAME"), _DEVICE))
        network.tell(f"join {host} {os.getpid()}")
        if self._quotas:
            self._quotas.join(host)
        network.let_go()
        return network.address(host)

    def cut(self, host: int) -> None:
        """Lose every packet to and from a host, in silence, until ``restore``."""
        self._there.cut(self._known(host))

    def restore(self, host: int) -> None:
        """Carry a host's packets again."""
        self._there.restore(self._known(host))

    def throttle(self, host: int, factor: float) -> None:
        """Let each of a host's workers compute ``factor`` times more slowly than one core does; 1: as fast as it can.

        Raises:
            SpecError: if the factor is below 1, or a hundred or more.
        """
        if not 1 <= factor < 100:
            raise SpecError.of(where="factor", given=f"{factor:g}", allowed="1 to 99", fix="hosts.throttle(1, 4)")
        if self._quotas:
            self._quotas.allow(self._known(host), self.per_host / factor if factor > 1 else None)
        else:
            self._there.ask(f"slow {self._known(host)} {factor}")

    def bytes_sent(self, host: int) -> int:
        """By a host since it was made, headers of the network included."""
        return self._there.sent(self._known(host))

    def counted(self, rank: int, report: Callable[[int], None]) -> Callable[[int], None]:
        """In a worker: ``report``, which takes each step's number as it begins, and notes the bytes sent so far too."""
        if rank != self.host_of(rank) * self.per_host:
            return report  # one of a host's workers notes for all
        first = self.host_of(rank) * _MARKS
        steps = 0

        def count(step: int) -> None:
            nonlocal steps
            mark = first + 2 * min(steps, 2)
            self._marks[mark], self._marks[mark + 1] = step, _sent_here()
            steps += 1
            report(step)

        for mark in range(first, first + _MARKS):
            self._marks[mark] = -1
        return count

    def sent_per_step(self, host: int) -> float | None:
        """Bytes that a host sent in each step of the last run, the first step left out; ``None`` after fewer than two.

        It goes by the workers' notes (``counted``), so it also holds after the block.
        """
        begin, end = host * _MARKS, (host + 1) * _MARKS
        marks = [(self._marks[at], self._marks[at + 1]) for at in range(begin, end, 2) if self._marks[at] >= 0]
        if len(marks) < 2:
            return None
        (early, before), (late, after) = marks[-2:]
        return (after - before) / (late - early) if late > early else None

    def _known(self, host: int) -> int:
        if not 0 <= host < self.count:
            allowed = f"0 to {self.count - 1}"
            raise SpecError.of(where="host", given=str(host), allowed=allowed, fix="hosts.throttle(1, 4)")
        return host

    @property
    def _there(self) -> HostNetwork:
        if self._network is None:
            raise RunError('these hosts are not there\n    try: with Hosts(2, rate="100mbit") as hosts: ...')
        return self._network


def _sent_here() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == _DEVICE:
            return int(numbers.split()[8])
    return 0
