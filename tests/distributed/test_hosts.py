"""Hosts within this machine: their links and processors are as slow as asked, and nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from small import job

import phalanx as px
from emulator import Hosts, train_between
from emulator.process import Quotas
from law_rows import longer
from phalanx.comm import Place
from phalanx.comm.process_group import meet
from phalanx.launch.reaper import fork

Make = Callable[..., Hosts]

MEGABYTES, TIMES, RATE = 2, 3, 40e6


def transfer(place: Place, report: Callable[[int], None]) -> dict[str, list[float]] | None:
    """Rank 0 sends rank 1 some megabytes, then a byte to and fro, each some times; what rank 0 saw."""
    store = meet(place)
    if place.rank == 1:
        with socket.create_server((place.host, 0)) as server:
            store.set("port", f"{place.host}:{server.getsockname()[1]}")
            peer, _ = server.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(TIMES):
                    left = MEGABYTES * 10**6
                    while left:
                        left -= len(peer.recv(min(left, 1 << 16)))
                    peer.send(b".")
                while data := peer.recv(1):
                    peer.send(data)
        return None
    host, _, port = store.get("port").decode().rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rates: list[float] = []
        trips: list[float] = []
        for _ in range(TIMES):
            began = time.monotonic()
            peer.sendall(bytes(MEGABYTES * 10**6))
            peer.recv(1)
            rates.append(MEGABYTES * 8e6 / (time.monotonic() - began))
        for _ in range(TIMES):
            began = time.monotonic()
            peer.send(b".")
            peer.recv(1)
            trips.append(time.monotonic() - began)
    return {"rates": rates, "trips": trips}


@pytest.mark.parametrize("delay", [0.02, *longer(0.0)])
@pytest.mark.realtime("what a link takes is measured")
def test_links_are_as_slow_as_asked(hosts: Make, delay: float) -> None:
    made = hosts(2, rate=RATE, delay=delay)
    seen = made.launch(transfer, 2)[0]
    # a process that is held up takes longer, and is not held up each time; nothing goes faster than the link
    assert 0.5 * RATE <= max(seen["rates"]) <= 1.2 * RATE
    assert min(seen["trips"]) >= (0.04 if delay else 0)
    assert MEGABYTES * TIMES * 1e6 < made.bytes_sent(0) < 1.2e6 * MEGABYTES * TIMES
    assert made.bytes_sent(1) < 1e6


def spin(place: Place, report: Callable[[int], None]) -> float:
    """The share of a core that this worker gets: the median of three windows, seconds of its time over seconds.

    Where processes are stopped and continued in turn, who is to stop them may wake late on a busy machine. What they
    have had too much they stand longer for, but that is in the next window.
    """
    meet(place).get(str(place.rank)) if place.rank else meet(place).set("1", "")
    shares: list[float] = []
    for _ in range(3):
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() < began + 0.25:
            pass
        shares.append((time.process_time() - used) / (time.monotonic() - began))
    return median(shares)


@pytest.mark.parametrize("brake", ["stops", *longer("quota")])
@pytest.mark.realtime("the share of a core is measured")
def test_a_throttled_host_gets_its_share_of_a_core(hosts: Make, brake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if brake == "stops":
        monkeypatch.setattr(Quotas, "find", lambda count: None)
    made = hosts(2)
    if made.brake != brake:
        pytest.skip("control groups cannot be written here")
    made.throttle(1, 10)
    held = made.launch(spin, 2)[1]
    assert held < 0.2
    made.throttle(1, 1)
    assert made.launch(spin, 2)[1] > 2 * held  # a whole core, which other processes use too


class Cut:
    """Cuts a host off while a run is in the middle of its steps, and restores it after a while.

    With ``loss`` ranks wait for that in their third step.
    """

    def __init__(self, hosts: Hosts, folder: Path, seconds: float) -> None:
        self.steps: list[int] = []  # that the log showed when it was cut and when it was restored
        self._hosts, self._log, self._seconds = hosts, folder / "events.jsonl", seconds
        self._until = 0.0
        self._cut = folder.with_name("cut-off")
        self._calls = 0

    def loss(self, output: torch.Tensor, batch: Any) -> px.Loss:
        self._calls += dist.is_initialized() and dist.get_backend() == "gloo"  # not of the look before the run
        while self._calls > 2 and not self._cut.exists():
            time.sleep(0.01)
        return px.cross_entropy(output, batch["y"])

    def __call__(self) -> None:
        steps = self._log.read_text().count('"event": "step"') if self._log.exists() else 0
        if not self.steps and steps >= 1:
            self._hosts.cut(1)
            self._cut.touch()
            self.steps, self._until = [steps], time.monotonic() + self._seconds
        elif len(self.steps) == 1 and time.monotonic() > self._until:
            self.steps.append(steps)
            self._hosts.restore(1)


@pytest.mark.parametrize(("seconds", "how"), [(1, {"rate": 1e6}), *longer((2, {"delay": 0.005}))])
@pytest.mark.realtime("a link is cut for some seconds")
def test_a_cut_that_ends_changes_nothing_but_time(
    hosts: Make, seconds: int, how: dict[str, float], tmp_path: Path
) -> None:
    made = hosts(2, **how)
    alone = px.fit(job(epochs=4), "dp=2", folder=tmp_path / "alone", forecast="none")
    cut = Cut(made, tmp_path / "cut", seconds)
    run = px.RunSpec(job="small", plan=px.Plan(dp=2), folder=tmp_path / "cut", forecast="none")
    train_between(made, job(epochs=4, loss=cut.loss), run, watch=cut)
    apart = px.load(run.folder)
    before, after = cut.steps
    assert after <= before + 2 < len(apart.losses)
    assert apart.losses == alone.losses


def left(pid: int) -> list[str]:
    """Links and control groups of the hosts that a process made."""
    links = [name for name in os.listdir("/sys/class/net") if name.startswith(f"phx{pid}.")]
    return links + [str(group) for group in Path("/sys/fs/cgroup").glob(f"**/phalanx-{pid}-*")]


def test_two_at_once_and_nothing_is_left(hosts: Make) -> None:
    hosts(1)
    before = left(os.getpid()), len(psutil.Process().children())
    with Hosts(2, rate=1e9) as one, Hosts(2, delay=0.001) as two:
        assert one.address(0) != two.address(0)
        assert len(left(os.getpid())) >= len(before[0]) + 2
    assert (left(os.getpid()), len(psutil.Process().children())) == before


@pytest.mark.parametrize("delay", [0.005, *longer(0.0)])
def test_what_a_killed_launcher_leaves_goes(hosts: Make, delay: float) -> None:
    hosts(1)
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        with Hosts(2, rate=1e8, delay=delay):
            processes = [child.pid for child in psutil.Process().children()]
            os.write(writing, json.dumps([processes, left(os.getpid())]).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (process,), there = json.loads(os.read(reading, 4096))
    os.close(reading)
    os.close(writing)
    assert there
    deadline = time.monotonic() + 10
    while (psutil.pid_exists(process) or any("phx" in one for one in left(pid))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(process)
    hosts(1)  # control groups outlive processes: the next start removes them
    assert left(pid) == []
