"""Where a run's processes listen, by the kernel's own table of sockets: on one machine, on loopback only."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_server_faults import job

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from phalanx.comm import Place
from phalanx.launch.addresses import own_address
from phalanx.launch.jobfile import load_job
from phalanx.launch.local import launch
from phalanx.train.launcher_link import LauncherLink
from phalanx.train.loop import train

_CLONE_NEWUTS = 0x04000000


def outside() -> str:
    """An address of this machine that others reach; empty where it has none."""
    every = (one for those in psutil.net_if_addrs().values() for one in those if one.family == socket.AF_INET)
    return next((one.address for one in every if not ip_address(one.address).is_loopback), "")


class Listeners:
    """Looks, while a run goes on, where its processes listen, this one among them."""

    def __init__(self, enough: int = 2) -> None:
        """``enough``: processes that listen, once which have been seen the run may go on."""
        self._enough = enough
        self.addresses: set[str] = set()
        self.processes: set[int] = set()
        self._before = set(psutil.Process().net_connections("inet"))

    def __call__(self) -> None:
        here = psutil.Process()
        for process in [here, *here.children(recursive=True)]:
            try:
                found = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            except psutil.Error:
                continue
            if process.pid == here.pid:
                found = [one for one in found if one not in self._before]
            self.addresses |= {one.laddr.ip for one in found}
            self.processes |= {process.pid} if found else set()
        if len(self.processes) >= self._enough:
            Path("looked").touch()


def name_elsewhere(address: str) -> None:
    """In a worker: let the machine's name resolve to an address that others reach, as servers' names do."""
    libc = ctypes.CDLL(None, use_errno=True)
    if address and not os.geteuid() and not libc.unshare(_CLONE_NEWUTS):
        libc.sethostname(address.encode(), len(address))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 server=1", "fsdp=2", "dp=4 fsdp=2 sync=local every=2"])
def test_on_one_machine_everything_listens_on_loopback(plan: str) -> None:
    """All groups there are: the default one, those of a mesh, those across replicas; and servers."""
    run = px.RunSpec(job="small", plan=px.Plan.parse(plan), folder=Path("run"), forecast="none")
    listeners, address = Listeners(), outside()
    run.folder.mkdir()

    def waiting(output: Any, batch: Any) -> Any:
        until = time.monotonic() + 20
        while not Path("looked").exists() and time.monotonic() < until:
            time.sleep(0.02)
        return px.cross_entropy(output, batch["y"])

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        name_elsewhere(address)
        return train(replace(job(), loss=waiting), run, place, LauncherLink(report=report))

    launch(work, run.plan.processes, watch=listeners)
    assert len(listeners.processes) > 1, "the launcher's store, and workers"
    assert {one for one in listeners.addresses if not ip_address(one).is_loopback} == set()


JOB = """
import time
from pathlib import Path
import torch
import phalanx as px

def loss(output, batch):
    until = time.monotonic() + 30
    while not Path("looked").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return output.square().mean()

def job():
    return px.Job(model=lambda: torch.nn.Linear(4, 2), data=lambda: list(torch.ones(16, 4)), loss=loss,
                  optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=4, epochs=1)
"""


def test_under_torchrun_too_and_the_secret_is_gone() -> None:
    """torchrun's own meeting point would listen on every address; servers' secret lies in the folder for a moment."""
    Path("waiting.py").write_text(JOB)
    run = px.RunSpec(job="waiting.py:job", plan=px.Plan.parse("dp=1 server=1"), folder=Path("run"), forecast="none")
    listeners = Listeners(enough=3)
    done = px.fit(load_job("waiting.py:job"), run=run, launcher="torchrun", watch=listeners)
    assert len(done.losses) == 4
    assert len(listeners.processes) >= 3, "the launcher's store, torchrun's, the server"
    assert {one for one in listeners.addresses if not ip_address(one).is_loopback} == set()
    assert not Path("run/.secret").exists()


def test_over_several_hosts_each_is_reached_by_the_address_towards_the_first() -> None:
    address = outside()
    if not address:
        pytest.skip("needs an address besides loopback")
    assert own_address("127.0.0.1", one_host=True) == "127.0.0.1"
    assert own_address(address, one_host=False) == address
    assert own_address("no.such.host.invalid", one_host=True) == "127.0.0.1"


def test_the_interface_that_the_user_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address("198.51.100.7", one_host=False) == "127.0.0.1"
