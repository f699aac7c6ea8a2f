"""How fast one server process takes gradients in and gives parameters out, beside torch's own means.

One server, two workers, 40 MB of fp32 parameters; in each round each worker pushes its gradient, which the server adds
to a sum, and pulls the parameters. Nobody updates anything. Counted are the bytes of tensors, both ways, of both
workers, over the time from when both begin to when both are done.

- ``ours``: ``phalanx.train.parameter_server``'s own server and links, as training uses them.
- ``rpc``: the parameter-server pattern on torch.distributed.rpc (TensorPipe): one call brings the gradient and returns
  the parameters.
- ``gloo``: nothing but send and recv of the same bytes; the server adds nothing up.

Contestants take turns; medians over the rounds of turns are compared.

    python bench/server_transport.py [--turns 7] [--rounds 12] [--megabytes 40] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.handshake import new_secret

WORKERS, WARM_UP = 2, 2
MP = multiprocessing.get_context("fork")


@dataclass
class Trial:
    """What the processes of one turn share.

    Attributes:
        elements: of the parameters.
        rounds: that are timed.
        begin: all processes wait here before the timed rounds, and after them.
        times: when each worker began and ended.
        port: where the server listens.
        secret: of the run, by which server and workers know each other.
    """

    elements: int
    rounds: int
    begin: Any = field(default_factory=lambda: MP.Barrier(WORKERS + 1))
    times: Any = field(default_factory=lambda: MP.SimpleQueue())
    port: Any = field(default_factory=lambda: MP.Value("i", 0))
    folder: str = field(default_factory=tempfile.mkdtemp)
    secret: bytes = field(default_factory=new_secret, repr=False)

    def measure(self, rank: int, once: Callable[[int], None]) -> None:
        """In a worker: warm up, wait for the others, take the time."""
        for index in range(WARM_UP):
            once(index)
        self.begin.wait()
        began = time.perf_counter()
        for index in range(WARM_UP, WARM_UP + self.rounds):
            once(index)
        self.times.put((began, time.perf_counter()))
        self.begin.wait()


class _Fixed:
    """Stands in for the directory: the server is where it is."""

    over = False

    def __init__(self, port: int) -> None:
        self._port = port

    def find(self, index: int) -> Any:
        from phalanx.train.parameter_server.server_group import Address

        return Address("127.0.0.1", self._port, 0)


@dataclass
class _Kept:
    """Stands in for the store: a shard without a job."""

    shard: Any
    statistics: Any  # of no layers
    index: int = 0

    @property
    def held(self) -> list[list[Any]]:
        return [["flat", 0, self.shard.form["flat"][0][0], True]]


class _Summed:
    """What the server does with pushed gradients: adds up a round's, and reuses the memory."""

    def __init__(self, shard: Any) -> None:
        self._shard, self._push, self._lock = shard, shard.push, threading.Lock()
        self._in: dict[int, int] = {}

    def push(self, pushed: Any, gradient: Any) -> bool:
        new = self._push(pushed, gradient)
        with self._lock:
            self._in[pushed.step] = self._in.get(pushed.step, 0) + 1
            if self._in[pushed.step] == WORKERS:
                with self._shard._news:
                    self._shard._keep(self._shard._open.pop(pushed.step).total)
        return new


def ours_server(trial: Trial) -> None:
    """The real server, whose shard forgets a round's sum when it is complete; nobody coordinates it."""
    from phalanx.comm import Place
    from phalanx.parallel.parameter_server import Flat, Rule, Shard
    from phalanx.train.parameter_server.server import Server

    shard = Shard({"flat": torch.zeros(trial.elements)}, lambda named: torch.optim.SGD(named.values(), lr=0.1), Rule())
    shard.push = _Summed(shard).push
    place = Place(rank=WORKERS, world_size=WORKERS + 1, secret=trial.secret)
    server = Server(_Kept(shard, Flat({})), place, WORKERS)
    server.start()
    trial.port.value = server.port
    trial.begin.wait()
    trial.begin.wait()
    server.close()
    if server.trouble:
        raise server.trouble


def ours_worker(trial: Trial, rank: int) -> None:
    """The real links. What would be dealt is known here, and so are the coordinator's tickets for it."""
    from phalanx.comm.handshake import Identity, Role
    from phalanx.comm.listener import Caller
    from phalanx.parallel.parameter_server import deal_ticket
    from phalanx.train.parameter_server.server_group import Patience
    from phalanx.train.parameter_server.server_links import ServerLinks

    while not trial.port.value:
        time.sleep(0.01)
    caller = Caller(identity=Identity(Role.WORKER, rank), secret=trial.secret)
    links = ServerLinks(caller, 1, 1, _Fixed(trial.port.value), Patience(), None)
    links.connect()
    (link,) = links._links
    gradient, values = torch.ones(trial.elements), torch.zeros(trial.elements)

    def once(index: int) -> None:
        piece = {"step": index, "part": rank, "term": 0}
        ticket = deal_ticket(trial.secret, rank, "train", **piece)
        links.push({"flat": gradient}, {"flat": values}, {**piece, "ticket": ticket, "count": 1.0})
        link.version = -1  # as if there had been an update
        links.pull({"flat": values}, [])

    links.pull({"flat": values}, [])
    trial.measure(rank, once)
    links.close()


def _gloo(trial: Trial, rank: int) -> None:
    store = dist.FileStore(str(Path(trial.folder) / "gloo"), WORKERS + 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS + 1, timeout=timedelta(seconds=60))


def gloo_server(trial: Trial) -> None:
    """A thread for each worker."""
    _gloo(trial, 0)
    values = torch.zeros(trial.elements)

    def serve(rank: int) -> None:
        gradient = torch.zeros(trial.elements)
        for _ in range(WARM_UP + trial.rounds):
            dist.recv(gradient, rank)
            dist.send(values, rank)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(1, WORKERS + 1)]
    for thread in threads:
        thread.start()
    trial.begin.wait()
    trial.begin.wait()
    for thread in threads:
        thread.join()


def gloo_worker(trial: Trial, rank: int) -> None:
    """Sends and receives."""
    _gloo(trial, rank + 1)
    gradient, values = torch.ones(trial.elements), torch.zeros(trial.elements)

    def once(index: int) -> None:
        dist.send(gradient, 0)
        dist.recv(values, 0)

    trial.measure(rank, once)


class _Server:
    """The rpc pattern's state, in the server's process."""

    values: torch.Tensor
    total: torch.Tensor
    lock = threading.Lock()


def _exchange(gradient: torch.Tensor) -> torch.Tensor:
    with _Server.lock:
        _Server.total.add_(gradient)
    return _Server.values


def _rpc(trial: Trial, rank: int) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, init_method=f"file://{trial.folder}/rpc", rpc_timeout=60
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)


def rpc_server(trial: Trial) -> None:
    """Answers calls."""
    from torch.distributed import rpc

    _Server.values, _Server.total = torch.zeros(trial.elements), torch.zeros(trial.elements)
    _rpc(trial, 0)
    trial.begin.wait()
    trial.begin.wait()
    rpc.shutdown()


def rpc_worker(trial: Trial, rank: int) -> None:
    """Calls."""
    from torch.distributed import rpc

    _rpc(trial, rank + 1)
    gradient, values = torch.ones(trial.elements), torch.zeros(trial.elements)

    def once(index: int) -> None:
        values.copy_(rpc.rpc_sync("rank0", _exchange, args=(gradient,)))

    trial.measure(rank, once)
    rpc.shutdown()


CONTESTANTS = {
    "ours": (ours_server, ours_worker),
    "rpc": (rpc_server, rpc_worker),
    "gloo": (gloo_server, gloo_worker),
}


def _child(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work(*arguments)
    sys.stdout.flush()
    os._exit(0)


def turn(name: str, elements: int, rounds: int) -> float:
    """Bytes a second of one turn of a contestant."""
    server, worker = CONTESTANTS[name]
    trial = Trial(elements, rounds)
    processes = [MP.Process(target=_child, args=(server, trial))]
    processes += [MP.Process(target=_child, args=(worker, trial, rank)) for rank in range(WORKERS)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        time.sleep(0.01)
    failed = [process.exitcode for process in processes if process.exitcode]
    for process in processes:
        if failed:  # the others would wait for it
            process.kill()
        process.join()
    shutil.rmtree(trial.folder)
    assert not failed, f"{name}: a process ended with {failed[0]}"
    times = [trial.times.get() for _ in range(WORKERS)]
    seconds = max(end for _, end in times) - min(began for began, _ in times)
    return 2 * WORKERS * rounds * elements * 4 / seconds


def main() -> None:
    """Take the turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(given.turns):
        for name, rates in found.items():
            rates.append(turn(name, int(given.megabytes * 1e6 / 4), given.rounds))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    ratios = {name: medians["ours"] / rate for name, rate in medians.items() if name != "ours"}
    if given.json:
        print(json.dumps({"bytes_per_second": found, "medians": medians, "ours_over": ratios}))
        return
    for name, rates in found.items():
        print(f"{name:5} {medians[name] / 1e6:7.0f} MB/s   {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f}")
    print(f"ours is {ratios['rpc']:.2f} x rpc (bar 1.3) and {ratios['gloo']:.2f} x gloo (bar 0.9)")


if __name__ == "__main__":
    main()
