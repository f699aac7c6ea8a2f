"""Servers among strangers and liars: what one connection does ends that connection, and the run goes on as it would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from test_server_faults import QUICK, job, run_of

from phalanx.comm import Place
from phalanx.comm.frames import Connection, LostError, views
from phalanx.comm.handshake import Identity, Role, new_secret
from phalanx.comm.listener import Caller
from phalanx.parallel.parameter_server import FrameKind, StalenessBound, WorkQueue, deal_ticket
from phalanx.parallel.parameter_server.protocol import TO_COORDINATOR, TO_WORKER
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server import COORDINATOR, Server
from phalanx.train.parameter_server.shard_store import ShardStore

SERVER = Identity(Role.SERVER, 0)


SECRET = new_secret()


@contextmanager
def serving() -> Iterator[Server]:
    """Server 0 of ``dp=2 server=1``, in this process, which has dealt nothing yet."""
    run = run_of("dp=2 server=1")
    store = ShardStore(job(), run.plan, 0)
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
    until = time.monotonic() + 5.0
    while sum(server.listener.refusals().values()) < many and time.monotonic() < until:
        time.sleep(0.002)
    return sum(server.listener.refusals().values()) == many


WORKERS = [Identity(Role.WORKER, rank) for rank in range(2)]
DEALT = deal_ticket(SECRET, 0, "train", 0, 0)
DONE: dict[str, Any] = {"step": 0, "part": 0, "ticket": DEALT, "what": "train", "version": 0}
DONE |= {"sums": {"loss": [1.0, 8.0]}, "samples": 8, "seconds": 1.0}
PUSH = {"step": 0, "part": 0, "ticket": "0" * 64, "without": []}
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
    "a path of its own": {"path": "accidents/x"},
    **{f"done with a ticket {how}": {"ticket": ticket} for how, ticket in TICKETS.items()},
}
LIES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (FrameKind.ASK, {"done": DONE | change}) for name, change in DONE_LIES.items()},
    **{f"a gradient with a ticket {how}": (FrameKind.PUSH, PUSH | {"ticket": one}) for how, one in TICKETS.items()},
    "a rank": (FrameKind.HELLO, {"rank": -1, "length": 64, "order": "", "files": ""}),
    "a second hello": (FrameKind.HELLO, {"length": 64, "order": "", "files": ""}),
    "what the coordinator says": (FrameKind.GATHER, {"what": "everything"}),
    "an unknown kind": (99, {}),
    "a version that is none": (FrameKind.PULL, {"version": "1"}),
    "a version below none": (FrameKind.PULL, {"version": -2}),
    "a version that is too large": (FrameKind.PULL, {"version": HUGE}),
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
    other.send(FrameKind.PULL, {"version": -1})
    assert other.receive().kind == FrameKind.VALUES
    other.close()
    said = "a connection from worker 0 was ended: the peer does not keep to this protocol: "
    assert any(text.startswith(said) for text in server.listener.refusals())


def test_what_a_worker_says_and_may_is_heard(server: Server) -> None:
    honest = connected(server, WORKERS[0])
    honest.send(FrameKind.ASK, {"done": DONE})
    assert honest.receive().kind == FrameKind.DEAL
    honest.send(FrameKind.END, {"memory": MEMORY})
    with pytest.raises(LostError):
        honest.receive()
    assert not server.listener.refusals()


@pytest.mark.parametrize(
    ("where", "error"), [("_take_in", AssertionError), ("answer", KeyError), ("connected", ValueError)]
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
    [({}, False), ({"without": [99]}, True), ({"step": 1}, True), ({"part": 1}, True)],
)
def test_a_gradient_of_no_dealt_piece_displaces_none(server: Server, change: dict[str, Any], dealt: bool) -> None:
    liar, honest = (connected(server, one) for one in WORKERS)
    gradient = [torch.full((sum(_sizes(server)),), 5.0)]
    rank = 0 if dealt else 1
    word = deal_ticket(SECRET, rank, "train", 0, 0)
    liar.send(FrameKind.PUSH, {**PUSH, "ticket": word, **change}, views(gradient))
    with pytest.raises(LostError):
        liar.receive()
    word = deal_ticket(SECRET, 1, "train", 0, 0)
    honest.send(FrameKind.PUSH, {**PUSH, "ticket": word}, views([torch.ones(sum(_sizes(server)))]))
    assert honest.receive().meta == {"new": True}
    assert server._store.shard.prepare(0, [0]) == sum(_sizes(server))
    honest.close()


def _sizes(server: Server) -> list[int]:
    return [shape.numel() for shape, _ in server._store.shard.form.values()]


def test_a_second_connection_of_a_worker_is_refused(server: Server) -> None:
    first = connected(server, WORKERS[0])
    caller = Caller(identity=WORKERS[0], secret=SECRET)
    second = caller.call(SERVER, "127.0.0.1", server.port, TO_WORKER, patience=5.0)
    with pytest.raises(LostError):
        second.receive()
    assert ended(server, 1)
    first.send(FrameKind.PULL, {"version": -1})
    assert first.receive().kind == FrameKind.VALUES
    first.close()
