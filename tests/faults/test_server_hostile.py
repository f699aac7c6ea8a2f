"""Servers among strangers and liars: what one connection does ends that connection, and the run goes on as it would."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_server_faults import QUICK, job, of, run_of

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from phalanx.comm import Place
from phalanx.comm.frames import Connection, LostError, views
from phalanx.comm.handshake import CallerHandshake, Identity, Role, new_secret
from phalanx.comm.listener import Caller
from phalanx.errors import RunError
from phalanx.files import release, take
from phalanx.launch.local import launch
from phalanx.parallel.parameter_server import FrameKind, RunProgress, StalenessBound, WorkQueue, deal_ticket
from phalanx.parallel.parameter_server.protocol import (
    FROM_COORDINATOR,
    FROM_WORKER,
    TO_COORDINATOR,
    TO_SERVER,
    TO_WORKER,
)
from phalanx.train.launcher_link import LauncherLink
from phalanx.train.observer import Observer, Scene
from phalanx.train.parameter_server import take_part
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server import COORDINATOR, Server
from phalanx.train.parameter_server.server_group import Directory
from phalanx.train.parameter_server.shard_store import ShardStore

SERVER = Identity(Role.SERVER, 0)


class Attacker:
    """Does ``count`` bad things to a port, a few each time it is called; what it opened half stays open to the end."""

    def __init__(self, count: int) -> None:
        self.done, self.said = 0, 0
        self._count, self._draws, self._open = count, random.Random(7), list[socket.socket]()
        self.longest = 0  # bytes that any connection was told

    def __call__(self) -> None:
        if not Path("address").exists() or self.done >= self._count:
            return
        host, port = json.loads(Path("address").read_text())
        for _ in range(20):
            with suppress(OSError):
                plug = socket.create_connection((host, port), timeout=5.0)
                plug.settimeout(0.5)
                self._open.append(plug)
                with suppress(OSError):
                    self._strike(plug, self.done % 10)
            self.done += 1
        if self.done >= self._count:
            Path("attacked").touch()

    def _strike(self, plug: socket.socket, kind: int) -> None:
        draws = self._draws
        hello = CallerHandshake(b"\0" * 32, draws.choice([COORDINATOR, Identity(Role.WORKER, 0), SERVER]), SERVER)

        def frame(number: int, meta: bytes, size: int = 0) -> bytes:
            return struct.pack("<HHIQ", 0x5058, number, len(meta), size) + meta

        match kind:
            case 0:  # half open, for as long as the run goes on
                return
            case 1:  # a byte, and no more
                plug.sendall(b"P")
                return
            case 2:  # noise
                plug.sendall(draws.randbytes(draws.randrange(1, 4096)))
            case 3:  # as the coordinator of old, which asked for all there is
                plug.sendall(frame(1, b'{"rank": -1}') + frame(15, b'{"what": "everything"}'))
            case 4:  # as a worker of old, which pushed
                plug.sendall(
                    frame(1, b'{"rank": 0, "length": 64}') + frame(7, b'{"step": 9, "part": 0}', 8) + b"12345678"
                )
            case 5:  # a false proof
                plug.sendall(hello.hello)
                self._hear(plug, 64)
                plug.sendall(draws.randbytes(32))
            case 6:  # the server's own proof, given back
                plug.sendall(hello.hello)
                plug.sendall(self._hear(plug, 64)[32:])
            case 7:  # frames that are none
                bad = [
                    frame(1, b"{"),
                    frame(99, b"{}"),
                    frame(1, b"[" * 9000),
                    struct.pack("<HHIQ", 0x5058, 1, 1 << 31, 0),
                ]
                plug.sendall(draws.choice(bad))
            case 8:  # a flood
                plug.sendall(b"\xff" * (1 << 20))
            case _:  # here and gone
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                plug.close()
                return
        self._hear(plug, 4096)

    def _hear(self, plug: socket.socket, size: int) -> bytes:
        heard = b""
        while len(heard) < size and (data := plug.recv(size - len(heard))):
            heard += data
        self.longest = max(self.longest, len(heard))
        return heard

    def close(self) -> None:
        for plug in self._open:
            plug.close()


class Ending(Observer):
    """Keeps the values that the run ends with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def built(self, scene: Scene) -> None:
        self._scene = scene

    def ended(self) -> None:
        torch.save(dict(self._scene.values()), self._path)


def trained(folder: str, attacker: Attacker | None = None) -> dict[str, torch.Tensor]:
    """The values that ``server=1 dp=2`` ends with; under attack workers wait in step 5 until all of it was done."""
    run = run_of("dp=2 server=1", folder)
    publish = Directory.publish

    def published(self: Directory, index: int, address: Any) -> None:
        Path("address.new").write_text(json.dumps([address.host, address.port]))
        os.replace("address.new", "address")
        publish(self, index, address)

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        if place.rank == 2:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        def reported(step: int) -> None:
            report(step)
            while attacker and place.rank < 2 and step >= 5 and not Path("attacked").exists():
                time.sleep(0.02)

        observer = Ending(Path(f"{folder}.pt")) if place.rank == 2 else None
        return take_part(job(), run, place, LauncherLink(report=reported), observer=observer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Directory, "publish", published)
        launch(work, 3, watch=attacker)
    return torch.load(f"{folder}.pt", weights_only=True)


@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_hostile_connections_change_nothing(count: int) -> None:
    """More than a server of 256 open files could hold; a tenth of them stays open."""
    undisturbed, attacker = trained("alone"), Attacker(count)
    disturbed = trained("attacked-run", attacker)
    attacker.close()
    assert attacker.done >= count
    assert attacker.longest <= 64, "nobody heard more than a nonce and a proof"
    assert undisturbed.keys() == disturbed.keys()
    assert all(torch.equal(value, disturbed[name]) for name, value in undisturbed.items())
    events = list(px.Run(folder=Path("attacked-run")).events())
    assert events[-1]["event"] == "end"
    warnings = [event["message"] for event in of(events, "warning")]
    assert any("refused" in text for text in warnings)
    assert len(warnings) < 12
    assert {event["rank"] for event in of(events, "worker")} == {0, 1}


SECRET = new_secret()


@contextmanager
def serving() -> Iterator[Server]:
    """Server 0 of ``dp=2 server=1``, in this process, which has dealt nothing yet."""
    run = run_of("dp=2 server=1")
    store = ShardStore(job(), run.plan, 0, Path("run"))
    made = Server(store, Place(rank=2, world_size=3, secret=SECRET), 2)
    queue = WorkQueue(lambda step: [8, 8], first=0, limit=4, pace=StalenessBound())
    made.start(RequestHandler(queue, {"length": 64, "order": "", "files": ""}, store.statistics.form, QUICK, SECRET))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made
    assert made.trouble is None, "nothing that a connection says is the run's trouble"


def connected(server: Server, identity: Identity) -> Connection:
    forms = TO_COORDINATOR if identity == COORDINATOR else TO_WORKER
    caller = Caller(identity=identity, secret=SECRET)
    connection = caller.call(SERVER, "127.0.0.1", server.port, forms, patience=5.0)
    connection.send(FrameKind.HELLO, {} if identity == COORDINATOR else {"length": 64, "order": "", "files": ""})
    assert connection.receive().kind == FrameKind.WELCOME
    return connection


def refused(server: Server) -> str:
    """The one thing that was refused, once it is."""
    until = time.monotonic() + 5.0
    while not server.listener.refusals() and time.monotonic() < until:
        time.sleep(0.01)
    (text,) = server.listener.refusals()
    return text


WORKERS = [Identity(Role.WORKER, rank) for rank in range(2)]
DEALT = deal_ticket(SECRET, 0, "train", 0, 0, 0)
DONE: dict[str, Any] = {
    "step": 0,
    "part": 0,
    "term": 0,
    "ticket": DEALT,
    "what": "train",
    "version": 0,
    "sums": {"loss": [1.0, 8.0]},
    "samples": 8,
    "seconds": 1.0,
}
PUSH = {"step": 0, "part": 0, "term": 0, "ticket": "0" * 64, "version": 0, "count": 1.0, "without": []}
MEMORY = dict.fromkeys(("peak_bytes", "parameters", "gradients", "optimizer", "buffers", "activations"), 0)
TICKETS = {
    "of 64 other characters": "é" * 64,
    "that is longer": "0" * 65,
    "in capitals": "A" * 64,
    "of digits of another script": "٠" * 64,
    "that ends a line": "0" * 63 + "\n",
}
HUGE = 10**400  # an integer that no float can be
DONE_LIES: dict[str, dict[str, Any]] = {
    "a piece that was not dealt": {"part": 1},
    "sums of another form": {"sums": {"loss": 1.0}},
    "sums of three": {"sums": {"loss": [1.0, 8.0, 8.0]}},
    "no sums": {"sums": {}},
    "sums without a loss": {"sums": {"accuracy": [1.0, 8.0]}},
    "an evaluation without a loss": {
        "what": "evaluate",
        "ticket": deal_ticket(SECRET, 0, "evaluate", 0, 0, 0),
        "sums": {},
    },
    "a sum that is too large for a float": {"sums": {"loss": [HUGE, 8]}},
    "a count that is too small for a float": {"sums": {"loss": [1, -HUGE]}},
    "endless seconds": {"seconds": float("inf")},
    "seconds that are no number": {"seconds": float("nan")},
    "seconds back": {"seconds": -1.0},
    "seconds that are too many for a float": {"seconds": HUGE},
    "samples that are too many": {"samples": HUGE},
    **{f"done with a ticket {how}": {"ticket": ticket} for how, ticket in TICKETS.items()},
}
LIES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (FrameKind.ASK, {"done": DONE | change}) for name, change in DONE_LIES.items()},
    **{f"a gradient with a ticket {how}": (FrameKind.PUSH, PUSH | {"ticket": one}) for how, one in TICKETS.items()},
    "a count that is too large for a float": (FrameKind.PUSH, PUSH | {"ticket": DEALT, "count": HUGE}),
    "a rank": (FrameKind.HELLO, {"rank": -1, "length": 64, "order": "", "files": ""}),
    "a second hello": (FrameKind.HELLO, {"length": 64, "order": "", "files": ""}),
    "what the coordinator says": (FrameKind.GATHER, {"what": "everything"}),
    "an unknown kind": (99, {}),
    "a version that is none": (FrameKind.PULL, {"version": "1", "term": 0}),
    "a term below none": (FrameKind.PULL, {"version": 0, "term": -2}),
    "a version that is too large": (FrameKind.PULL, {"version": HUGE, "term": 0}),
    "no progress": (FrameKind.BEAT, {}),
    "memory that is no number": (FrameKind.END, {"memory": MEMORY | {"peak_bytes": "all"}}),
    "memory that is the name of an event": (FrameKind.END, {"memory": MEMORY | {"event": 1}}),
    "memory of nothing": (FrameKind.END, {"memory": {}}),
}


@pytest.mark.parametrize(("kind", "meta"), LIES.values(), ids=LIES)
def test_what_a_worker_may_not_say_ends_its_connection_alone(server: Server, kind: int, meta: dict[str, Any]) -> None:
    liar, other = (connected(server, one) for one in WORKERS)
    liar.send(kind, meta)
    with pytest.raises(LostError):
        liar.receive()
    other.send(FrameKind.PULL, {"version": -1, "term": -1})
    assert other.receive().kind == FrameKind.VALUES
    other.close()
    said = "a connection from worker 0 was ended: the peer does not keep to this protocol: "
    assert refused(server).startswith(said)


def test_what_a_worker_says_and_may_is_heard(server: Server) -> None:
    """The lies are departures from this."""
    honest = connected(server, WORKERS[0])
    honest.send(FrameKind.ASK, {"done": DONE})
    assert honest.receive().kind == FrameKind.DEAL
    honest.send(FrameKind.END, {"memory": MEMORY})
    with pytest.raises(LostError):
        honest.receive()
    assert not server.listener.refusals()


@pytest.mark.parametrize("error", [ValueError, TypeError, OverflowError, KeyError, IndexError])
def test_a_frame_that_cannot_be_taken_in_ends_its_connection_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Whatever the tables let through."""

    def failing(*_: Any) -> None:
        raise error("of some kind")

    liar, other = (connected(server, one) for one in WORKERS)
    monkeypatch.setattr(RequestHandler, "_take_in", failing)
    liar.send(FrameKind.ASK, {"done": DONE})
    with pytest.raises(LostError):
        liar.receive()
    other.send(FrameKind.ASK, {})
    assert other.receive().kind == FrameKind.DEAL
    other.close()
    assert f"ASK could not be taken in ({error.__name__} at test_server_hostile.py:" in refused(server)


@pytest.mark.parametrize(
    ("where", "error"),
    [("_take_in", AssertionError), ("_take_in", RuntimeError), ("answer", KeyError), ("connected", ValueError)],
)
def test_what_fails_in_the_server_itself_is_the_runs_trouble(
    monkeypatch: pytest.MonkeyPatch, where: str, error: type[Exception]
) -> None:
    def failing(*_: Any) -> None:
        raise error("a fault of the server")

    monkeypatch.setattr(RequestHandler, where, failing)
    with serving() as made:
        honest = connected(made, WORKERS[0])
        with suppress(LostError):
            honest.send(FrameKind.ASK, {"done": DONE})
            honest.receive()
    assert isinstance(made.trouble, error)


@pytest.mark.parametrize(
    ("change", "dealt"),
    [({}, False), ({"version": 7}, True), ({"without": [99]}, True), ({"step": 1}, True), ({"part": 1}, True)],
)
def test_a_gradient_that_is_not_of_a_dealt_piece_displaces_none(
    server: Server, change: dict[str, Any], dealt: bool
) -> None:
    """The gradient of the piece's own worker counts afterwards."""
    liar, honest = (connected(server, one) for one in WORKERS)
    gradient = [torch.full((sum(_sizes(server)),), 5.0)]
    rank = 0 if dealt else 1
    word = deal_ticket(SECRET, rank, "train", 0, 0, 0)
    liar.send(FrameKind.PUSH, {**PUSH, "ticket": word, **change}, views(gradient))
    with pytest.raises(LostError):
        liar.receive()
    word = deal_ticket(SECRET, 1, "train", 0, 0, 0)
    honest.send(FrameKind.PUSH, {**PUSH, "ticket": word}, views([torch.ones(sum(_sizes(server)))]))
    assert honest.receive().meta == {"new": True}
    assert server._store.shard.prepare(0, [0]) == sum(_sizes(server))
    honest.close()


def _sizes(server: Server) -> list[int]:
    return [shape.numel() for shape, _ in server._store.shard.form.values()]


def test_a_gradient_of_another_size_ends_its_connection_alone(server: Server) -> None:
    liar, other = (connected(server, one) for one in WORKERS)
    word = deal_ticket(SECRET, 0, "train", 0, 0, 0)
    liar.send(FrameKind.PUSH, {**PUSH, "ticket": word}, views([torch.ones(3)]))
    with pytest.raises(LostError):
        liar.receive()
    other.send(FrameKind.PULL, {"version": -1, "term": -1})
    assert other.receive().kind == FrameKind.VALUES
    other.close()


def test_a_worker_that_comes_again_replaces_itself(server: Server) -> None:
    first = connected(server, WORKERS[0])
    again = connected(server, WORKERS[0])
    with pytest.raises(LostError):
        first.receive()
    again.send(FrameKind.PULL, {"version": -1, "term": -1})
    assert again.receive().kind == FrameKind.VALUES
    again.close()
    assert threading.active_count() < 10


def test_snapshots_are_verified_for_the_coordinators_question_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for whoever connects: it reads every byte of them."""
    asked: list[int] = []
    monkeypatch.setattr(ShardStore, "snapshots", lambda self: asked.append(1) or [3, 6])
    open_ones = [connected(server, one) for one in (*WORKERS, WORKERS[0])]
    probe = Caller(identity=SERVER, secret=SECRET).call(SERVER, "127.0.0.1", server.port, TO_SERVER, patience=5.0)
    assert probe.receive().meta["index"] == 0
    coordinator = connected(server, COORDINATOR)
    assert not asked
    coordinator.send(FrameKind.HELLO)
    assert coordinator.receive().meta == {"term": 0, "snapshots": [3, 6]}
    assert len(asked) == 1
    for one in (*open_ones, probe, coordinator):
        one.close()


def test_every_kind_of_frame_has_its_table() -> None:
    assert set(FROM_WORKER) | set(TO_WORKER) | set(FROM_COORDINATOR) | set(TO_COORDINATOR) == set(FrameKind)


def test_snapshots_of_a_run_that_another_has_taken_are_left_alone() -> None:
    folder = Path("taken")
    store = ShardStore(job(), run_of("dp=2 server=1").plan, 0, folder)
    folder.mkdir()
    token = take(folder)
    store.snapshot(RunProgress(floor=0, done=[], samples=0, begun=0))
    there = sorted(path for path in folder.rglob("*") if path.name != "writer.json")
    (folder / "writer.json").write_text(json.dumps({"identity": "another"}))
    with pytest.raises(RunError, match="taken over"):
        store.clear()
    assert sorted(path for path in folder.rglob("*") if path.name != "writer.json") == there
    assert len(there) > 1
    release(token)
