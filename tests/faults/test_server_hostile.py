"""Servers among strangers and liars: what one connection does ends that connection, and the run goes on as it would."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_server_faults import QUICK, job, run_of

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from phalanx.comm import Place
from phalanx.comm.frames import Connection, FrameForm, FrameForms, LostError, views
from phalanx.comm.handshake import HELLO, CallerHandshake, Identity, Role, new_secret
from phalanx.comm.listener import Caller
from phalanx.config import Job, RunSpec
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
from phalanx.train.parameter_server.shard_store import ShardStore

SERVER = Identity(Role.SERVER, 0)


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


def ended(server: Server, many: int) -> bool:
    """Wait until so many connections were refused or ended."""
    until = time.monotonic() + 5.0
    while sum(server.listener.refusals().values()) < many and time.monotonic() < until:
        time.sleep(0.002)
    return sum(server.listener.refusals().values()) == many


WORKERS = [Identity(Role.WORKER, rank) for rank in range(2)]
DEALT = deal_ticket(SECRET, 0, "train", 0, 0, 0)
DONE: dict[str, Any] = {"step": 0, "part": 0, "term": 0, "ticket": DEALT, "what": "train", "version": 0}
DONE |= {"sums": {"loss": [1.0, 8.0]}, "samples": 8, "seconds": 1.0}
PUSH = {"step": 0, "part": 0, "term": 0, "ticket": "0" * 64, "version": 0, "count": 1.0, "without": []}
MEMORY = dict.fromkeys(("peak_bytes", "parameters", "gradients", "optimizer", "buffers", "activations"), 0)
TICKETS = {"that is longer": "0" * 65, "of other digits": "٠" * 64, "that ends a line": "0" * 63 + "\n"}
HUGE = 10**400  # an integer that no float can be
DONE_LIES: dict[str, dict[str, Any]] = {
    "a piece that was not dealt": {"part": 1},
    "sums of another form": {"sums": {"loss": 1.0}},
    "sums of three": {"sums": {"loss": [1.0, 8.0, 8.0]}},
    "no sums": {"sums": {}},
    "sums without a loss": {"sums": {"accuracy": [1.0, 8.0]}},
    "a sum that is too large for a float": {"sums": {"loss": [HUGE, 8]}},
    "a count that is too small for a float": {"sums": {"loss": [1, -HUGE]}},
    "endless seconds": {"seconds": float("inf")},
    "seconds back": {"seconds": -1.0},
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


def test_what_a_worker_may_not_say_ends_its_connection_alone(server: Server) -> None:
    other = connected(server, WORKERS[1])
    for number, (kind, meta) in enumerate(LIES.values(), 1):
        liar = connected(server, WORKERS[0])
        liar.send(kind, meta)
        with pytest.raises(LostError):
            liar.receive()
        assert ended(server, number), (kind, meta)
    other.send(FrameKind.PULL, {"version": -1, "term": -1})
    assert other.receive().kind == FrameKind.VALUES
    other.close()
    said = "a connection from worker 0 was ended: the peer does not keep to this protocol: "
    assert any(text.startswith(said) for text in server.listener.refusals())


def strangers(draws: random.Random) -> list[list[Any]]:
    """What each of some connections says, in turn; a function is given what came since."""

    def hello() -> bytes:
        return CallerHandshake(b"\0" * 32, draws.choice([COORDINATOR, WORKERS[0], SERVER]), SERVER).hello

    def frame(number: int, meta: bytes, size: int = 0) -> bytes:
        return (struct.pack("<HHIQ", 0x5058, number, len(meta), size) + meta).ljust(HELLO)

    return [
        *([], [b"P"]),  # half open; a byte, and no more
        [draws.randbytes(4000)],
        [b"\xff" * (1 << 20)],
        [frame(1, b'{"rank": -1}') + frame(15, b'{"what": "everything"}')],  # as one without a handshake did
        [hello(), draws.randbytes(32)],  # a false proof
        [hello(), lambda heard: heard[32:]],  # the server's own proof, given back
        *([frame(1, b"{")], [frame(99, b"{}")], [frame(1, b"[" * 9000)]),
        [struct.pack("<HHIQ", 0x5058, 1, 1 << 31, 0).ljust(HELLO)],
    ]


def test_hostile_connections_change_nothing(server: Server) -> None:
    worker, plugs, longest = connected(server, WORKERS[1]), list[socket.socket](), 0
    for said in 10 * strangers(random.Random(7)):
        plugs.append(socket.create_connection(("127.0.0.1", server.port), timeout=5.0))
        heard = b""
        with suppress(OSError):
            for part in said:
                plugs[-1].sendall(part(heard) if callable(part) else part)
                while part != b"P" and len(heard) < 64 and (data := plugs[-1].recv(4096)):
                    heard += data
        longest = max(longest, len(heard))
        if said == [b"P"]:
            worker.send(FrameKind.PULL, {"version": -1, "term": -1})
            frame = worker.receive()
            assert frame.kind == FrameKind.VALUES
            worker.fill(frame, views([torch.zeros(sum(_sizes(server)))]))
    assert longest == 64, "nobody heard more than a nonce and a proof"
    assert 0 < len(server.listener.refusals()) < 12
    for one in (worker, connected(server, WORKERS[0])):
        one.close()
    for plug in plugs:
        plug.close()


def test_what_a_worker_says_and_may_is_heard(server: Server) -> None:
    """The lies are departures from this."""
    honest = connected(server, WORKERS[0])
    honest.send(FrameKind.ASK, {"done": DONE})
    assert honest.receive().kind == FrameKind.DEAL
    honest.send(FrameKind.END, {"memory": MEMORY})
    with pytest.raises(LostError):
        honest.receive()
    assert not server.listener.refusals()


@pytest.mark.parametrize("error", [OverflowError, KeyError])
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
    assert ended(server, 1)
    (text,) = server.listener.refusals()
    assert f"ASK could not be taken in ({error.__name__} at " in text


@pytest.mark.parametrize(
    ("where", "error"),
    [("_take_in", AssertionError), ("answer", KeyError), ("connected", ValueError)],
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
def test_a_gradient_of_no_dealt_piece_displaces_none(server: Server, change: dict[str, Any], dealt: bool) -> None:
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


def test_snapshots_are_verified_for_the_coordinator_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


# what one end takes → what it may send: the table of the other end
ANSWERED: list[tuple[FrameForms, FrameForms]] = [
    (FROM_WORKER, TO_WORKER),
    (TO_WORKER, FROM_WORKER),
    (FROM_COORDINATOR, TO_COORDINATOR),
    (TO_COORDINATOR, FROM_COORDINATOR),
]
NAMES = {"to a worker": TO_WORKER, "from a worker": FROM_WORKER}
NAMES |= {"to the coordinator": TO_COORDINATOR, "from the coordinator": FROM_COORDINATOR}


def judged(monkeypatch: pytest.MonkeyPatch, said: Path) -> None:
    """From now on, in processes forked from here as well, a frame that the other end would refuse fails its sender.

    What was sent is written to ``said``.
    """
    send = Connection.send

    def judging(self: Connection, kind: int, meta: dict[str, Any] | None = None, payload: Sequence[memoryview] = ()):
        forms = next(table for takes, table in ANSWERED if takes is self._forms)
        direction = next(name for name, table in NAMES.items() if table is forms)
        form: FrameForm | None = forms.get(kind)
        assert form is not None, f"a {FrameKind(kind).name} {direction}, which its table has not"
        came = json.loads(json.dumps(meta or {}))
        assert not (fault := form.fault(came)), f"a {FrameKind(kind).name} {direction} with {fault}"
        assert form.tensors or not payload, f"a {FrameKind(kind).name} {direction} with tensors"
        with said.open("a") as file:
            file.write(f"{direction}: {FrameKind(kind).name}\n")
        send(self, kind, meta, payload)

    monkeypatch.setattr(Connection, "send", judging)


class Onlooker(Observer):
    """Looks at the gradients that updates were made with, which servers are then asked for."""

    listens = True

    def built(self, scene: Scene) -> None:
        self._scene = scene

    def steps(self, batch: object) -> None:
        self._scene.gradients()


def obeyed_run(
    plan: str = "dp=2 server=2",
    *,
    change: Callable[[Job, RunSpec], tuple[Job, RunSpec]] = lambda job, run: (job, run),
    strike: Callable[[Place, int], None] = lambda place, step: None,
    reserves: int = 0,
) -> None:
    small, run = change(job(), run_of(plan))

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        if place.rank == 3 and place.generation == 0:
            Path("pid").write_text(str(os.getpid()))

        def reported(step: int) -> None:
            report(step)
            strike(place, step)

        observer = Onlooker() if place.rank == 2 else Observer()
        return take_part(small, run, place, LauncherLink(report=reported), patience=QUICK, observer=observer)

    launch(work, run.plan.processes, reserves=reserves)


def test_every_frame_is_one_that_the_other_end_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run with all that servers do: saves, snapshots, an evaluation, a server that is killed and comes back."""
    said = tmp_path / "said"
    judged(monkeypatch, said)

    def strike(place: Place, step: int) -> None:
        # whoever comes first: one that is held up may come to none of these steps
        if place.rank < 2 and step >= 8 and not Path("struck").exists():
            with suppress(ProcessLookupError):
                os.kill(int(Path("pid").read_text()), signal.SIGKILL)
            Path("struck").touch()

    def change(job: Job, run: RunSpec) -> tuple[Job, RunSpec]:
        return replace(job, evaluate=job.data), replace(run, checkpoint_every=10)

    obeyed_run(change=change, strike=strike, reserves=1)
    assert list(px.Run(folder=Path("run")).events())[-1]["event"] == "end"
    sent = set(said.read_text().splitlines())
    unsaid = {f"{name}: {FrameKind(kind).name}" for name, table in NAMES.items() for kind in table} - sent
    # what the coordinator's first word is answered with is a WELCOME
    assert unsaid == set()
    assert TO_SERVER.keys() == {FrameKind.WELCOME}


def test_a_server_that_is_lost_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs up on every order to update, and says nothing of it."""

    obey = Server.obey

    def unwilling(self: Server, kind: FrameKind, meta: dict[str, Any]) -> dict[str, Any]:
        if kind == FrameKind.APPLY and self._store.index == 1:
            raise LostError("it hangs up")
        return obey(self, kind, meta)

    monkeypatch.setattr(Server, "obey", unwilling)
    with pytest.raises(RunError, match=r"server 1 was lost 3 times with no update between: it has ended") as raised:
        obeyed_run()
    assert "rank 2" in str(raised.value)
