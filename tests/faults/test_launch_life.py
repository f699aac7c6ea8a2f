"""A launch that goes well: results, output, threads, start-up; and the launcher's own end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from inject import LIMIT, alive, hang_on, note, noted, start_child, wait_until
from test_server_faults import job

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from law_rows import longer
from phalanx.comm import Place, default_process_group
from phalanx.launch import worker_process
from phalanx.launch.addresses import own_address
from phalanx.launch.local import launch
from phalanx.launch.torchrun import place_from_environment
from phalanx.train.interruptions import LauncherLink
from phalanx.train.loop import train


def forked_launcher(folder: Path) -> int:
    """The number of a process forked from this one that launches two workers, each with a child, which all hang."""

    def target(place: Place, report: Callable[[int], None]) -> None:
        note(folder, os.getpid())
        start_child(folder)
        (folder / f"ready-{place.rank}").touch()
        hang_on()

    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        launch(target, 2)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def test_launcher_is_ended(tmp_path: Path) -> None:
    """By each signal: three launchers that start side by side, and are ended one after the other."""
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    launchers: dict[int, int] = {}
    for number in codes:
        (tmp_path / f"{number}").mkdir()
        launchers[number] = forked_launcher(tmp_path / f"{number}")
    assert wait_until(lambda: len(list(tmp_path.glob("*/ready-*"))) == 2 * len(codes), 60)
    for number, code in codes.items():
        folder, launcher = tmp_path / f"{number}", launchers[number]
        everyone = [*noted(folder), *(one.pid for one in psutil.Process(launcher).children(recursive=True))]
        assert len(noted(folder)) == 4
        os.kill(launcher, number)
        status = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        assert status in (code, -number), number
        assert wait_until(lambda everyone=everyone: alive(everyone) == [], LIMIT)


def test_results_come_in_rank_order_and_workers_meet() -> None:
    def target(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        with default_process_group(place, torch.device("cpu")):
            total = torch.tensor(float(place.rank))
            dist.all_reduce(total)
        where = {"rank": place.rank, "local": place.local_rank, "here": place.local_world_size}
        return {**where, "total": float(total), "typed": sys.stdin.read(), "large": "x" * 500_000 * place.rank}

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = launch(target, 3)
    assert [one.pop("large") for one in found] == ["x" * 500_000 * rank for rank in range(3)]
    assert found == [{"rank": rank, "local": rank, "here": 3, "total": 3.0, "typed": ""} for rank in range(3)]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_workers_have_the_variables_of_torchrun() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        assert place_from_environment() is None  # px.fit in a child process trains by itself
        return [*(os.environ[name] for name in names), f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"]

    found = launch(work, 2)
    assert [row[:4] for row in found] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
    assert found[0][4] == found[1][4]
    assert not set(names) & os.environ.keys()


def test_output_of_other_ranks_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        print(f"one {place.rank}\ntwo", end="")
        print("trouble", file=sys.stderr)
        os.write(1, "näm\n".encode())

    launch(target, 1)
    assert capsys.readouterr() == ("one 0\ntwonäm\n", "trouble\n")
    launch(target, 2)
    output, errors = capsys.readouterr()
    assert "[rank 1] one 1\n[rank 1] twonäm\n" in output
    assert "[rank 1] trouble\n" in errors


def test_watch_is_called_while_workers_run_and_once_more() -> None:
    calls, enough = list[int](), Path("enough")

    def watch() -> None:
        calls.append(1)
        if len(calls) == 2:
            enough.touch()

    launch(lambda place, report: wait_until(enough.exists, LIMIT), 1, watch=watch)
    assert len(calls) >= 3


def test_workers_compute_on_threads_after_the_launcher_did() -> None:
    # GNU OpenMP hangs here where a worker is forked from the thread that computed
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.nn.Linear(400, 400)(torch.randn(400, 400)).sum().backward()

        def target(place: Place, report: Callable[[int], None]) -> list[object]:
            default = torch.get_num_threads()
            torch.set_num_threads(2)
            torch.nn.Linear(400, 400)(torch.randn(400, 400)).sum().backward()
            return [default, isinstance(threading.current_thread(), threading._MainThread)]

        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // 2) if "OMP_NUM_THREADS" not in os.environ else 2  # then as the launcher has it
        assert launch(target, 2) == [[share, True]] * 2
    finally:
        torch.set_num_threads(before)


def test_data_loading_processes_work_in_a_worker() -> None:
    def target(place: Place, report: Callable[[int], None]) -> float:
        data = torch.utils.data.TensorDataset(torch.arange(32.0))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
        return float(sum(batch[0].sum() for batch in loader))

    assert launch(target, 2) == [496.0, 496.0]


def test_a_worker_has_its_own_engine_before_it_starts_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        worker_process, "renew_autograd", lambda: order.append(f"renewed beside {threading.active_count() - 1}")
    )

    def target(place: Place, report: Callable[[int], None]) -> list[str]:
        return [*order, "target"]

    assert launch(target, 1) == [["renewed beside 0", "target"]]


_CLONE_NEWUTS = 0x04000000


def outside() -> str:
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


@pytest.mark.parametrize("plan", ["dp=2 server=1", *longer("dp=2", "fsdp=2", "dp=4 fsdp=2 sync=local every=2")])
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
