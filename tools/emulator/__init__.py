"""Several hosts on one machine, with slow links and slow processors as asked, for tests and bench."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self, final
from unittest.mock import patch

from emulator.network import HostLink, HostNetwork, move_into
from emulator.process import Quotas
from phalanx.comm import Place
from phalanx.config import Job, RunSpec
from phalanx.device_kinds import interface_variables
from phalanx.launch import worker_pool
from phalanx.launch.local import launch
from phalanx.launch.runfile import RunFolder
from phalanx.launch.worker_process import run_worker
from phalanx.train.interruptions import LauncherLink
from phalanx.train.loop import train

_DEVICE = "net0"


@final
class Hosts:
    """Machines to put workers on, within this one: ``with Hosts(2, rate=1e8, delay=0.02) as hosts``.

    Each host has a network stack, an address and a link of its own; files, processes and devices are this machine's.
    ``rank // per_host`` is the host of a rank, beginning again with the first host after the last, so that neighbours
    are together and servers, whose ranks come last, share the hosts of the first workers or have hosts of their own.

    Only within the block are the hosts there. Nothing of them is left after it; after ``kill -9`` nothing but empty
    control groups, which the next hosts remove.

    Attributes:
        link: of each host.
        per_host: ranks a host has.
    """

    _network: HostNetwork

    def __init__(self, count: int, *, rate: float = 0.0, delay: float = 0.0, per_host: int = 1) -> None:
        """Hosts with links of ``rate`` bit/s and ``delay`` seconds one way; 0: no limit."""
        self.count, self.per_host = count, per_host
        self.link = HostLink(rate=rate, delay=delay)
        self._up = ExitStack()
        self._quotas: Quotas | None = None

    def __enter__(self) -> Self:
        """Make the hosts; ``lacking`` says why that cannot be.

        Raises:
            RunError: if it went wrong.
        """
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
        self._quotas = None

    @property
    def brake(self) -> str:
        """What slows a host's processors: ``quota`` of the kernel, or ``stops`` by signals."""
        return "quota" if self._quotas else "stops"

    def host_of(self, rank: int) -> int:
        """The host that a rank is on."""
        return rank // self.per_host % self.count

    def address(self, host: int) -> str:
        return self._network.address(host)

    def launch(self, function: Any, world_size: int, watch: Callable[[], None] | None = None) -> list[Any]:
        """Run ``function(place, report_step)`` in workers on the hosts, as ``phalanx.launch.launch`` does here."""

        def there(work: Any, place: Place, *others: Any) -> None:
            try:
                place = replace(place, host=self.enter(place.rank))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            run_worker(work, place, *others)

        meets = patch.object(worker_pool, "LOOPBACK", self._network.launcher)
        with meets, patch.object(worker_pool, "run_worker", there):
            return launch(function, world_size, watch=watch)

    def enter(self, rank: int) -> str:
        """Move this process onto the host of ``rank``; its threads must not have been started yet. Returns its address.

        Collectives of every kind of device and torch's RPC go over the host's link from then on.

        Raises:
            RunError: if the kernel does not let it in.
        """
        host, network = self.host_of(rank), self._network
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
        self._network.cut(host)

    def restore(self, host: int) -> None:
        """Carry a host's packets again."""
        self._network.restore(host)

    def throttle(self, host: int, factor: float) -> None:
        """Let each of a host's workers compute ``factor`` times more slowly than one core does."""
        if self._quotas:
            self._quotas.allow(host, self.per_host / factor if factor > 1 else None)
        else:
            self._network.ask(f"slow {host} {factor}")

    def bytes_sent(self, host: int) -> int:
        """By a host since it was made, headers of the network included."""
        return self._network.sent(host)


def train_between(hosts: Hosts, job: Job, run: RunSpec, watch: Callable[[], None] | None = None) -> None:
    """Train ``job`` as ``run`` says, its workers on the hosts."""
    with RunFolder(run, job=job) as folder:
        begun = folder.prepare()

        def work(place: Place, report: Any) -> Any:
            return train(job, begun, place, LauncherLink(report=report))

        hosts.launch(work, run.plan.processes, watch)
