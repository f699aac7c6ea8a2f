"""What server 0 makes of workers by the signs that it has of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.comm.frames import Frame
from phalanx.parallel.parameter_server import Form, FrameKind, StalenessBound, WorkQueue
from phalanx.train.parameter_server import requests
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server_group import Patience

pytestmark = pytest.mark.quick

DATA = {"length": 64, "order": "", "files": ""}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(requests, "time", made)
    return made


def looked(clock: SimpleNamespace, *pauses: float) -> list[str]:
    """What becomes of a worker that has a piece and is not heard of, by looks after each of these pauses."""
    queue = WorkQueue(lambda step: [8], first=0, limit=4, pace=StalenessBound())
    handler = RequestHandler(queue, DATA, Form(), Patience(silent=5.0, pieces=0.0, stuck=60.0), b"")
    worker: Any = SimpleNamespace(heard=clock.now, close=lambda: None)
    handler.connected(0, worker, DATA)
    queue.ask(0)
    for pause in pauses:
        clock.now += pause
        handler.look()
    return [told["state"] for told in handler.happened]


def test_who_is_not_heard_of_is_silent_and_then_lost(clock: SimpleNamespace) -> None:
    assert looked(clock, *[0.2] * 20) == ["joined"]
    assert looked(clock, *[0.2] * 30) == ["joined", "silent"]
    assert looked(clock, *[0.2] * 310) == ["joined", "silent", "lost"]


def test_nothing_is_dealt_while_servers_go_back(clock: SimpleNamespace) -> None:
    queue, dealt = WorkQueue(lambda step: [8], first=0, limit=4, pace=StalenessBound()), list[dict[str, Any]]()
    handler = RequestHandler(queue, DATA, Form(), Patience(), b"")
    worker: Any = SimpleNamespace(heard=clock.now, send=lambda kind, meta: dealt.append(meta))
    handler.connected(0, worker, DATA)
    handler.restart(1)
    handler.asked(0, worker, Frame(FrameKind.ASK, {}, 0))
    handler.answer(0)
    assert dealt == []
    handler.turn_to("train", queue)
    assert [(one["step"], one["part"], one["term"]) for one in dealt] == [(0, 0, 1)]


def test_after_a_stop_of_its_own_it_reads_first_what_came(clock: SimpleNamespace) -> None:
    assert looked(clock, 0.2, 100.0) == ["joined"]
    assert looked(clock, 0.2, 6.0, 0.2) == ["joined", "silent"]
    assert looked(clock, 6.0, 6.0) == ["joined", "silent"], "one that is always late looks all the same"
