"""When a launcher asks ranks where they stand, and when it ends a run in which nobody gives up."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.launch.hang_watch import HangWatch, WatchedRank

pytestmark = pytest.mark.quick

TIMEOUT = 0.2
ENDED = -1  # in place of a step
PID = 1 << 22  # above any number that the kernel gives
SILENT: Any = SimpleNamespace(answer=lambda since: (0, ()), read=lambda: (None, None))


def asked(steps: Callable[[int], list[int | None]], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often ranks were asked, of which ``steps`` says at each look in which step they are."""
    times, looks = list[float](), 0
    monkeypatch.setattr(HangWatch, "_ask", lambda self, ranks: times.append(time.monotonic()))

    def ranks() -> dict[int, WatchedRank]:
        files = lambda step: None if step == ENDED else SILENT  # noqa: E731
        return {rank: WatchedRank(PID, step, files(step)) for rank, step in enumerate(steps(looks))}

    watch = HangWatch(ranks, TIMEOUT)
    until = time.monotonic() + 2 * TIMEOUT
    while time.monotonic() < until:
        watch.look()
        looks += 1
        time.sleep(0.01)
    return len(times)


def test_a_server_without_steps_has_nobody_asked_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(lambda looks: [looks, looks // 2, None], monkeypatch) == 0


def test_where_others_wait_for_a_rank_that_never_begins_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(lambda looks: [0, 0, None], monkeypatch) > 0
    assert asked(lambda looks: [None, None, None], monkeypatch) > 0
    assert asked(lambda looks: [ENDED, ENDED, None], monkeypatch) > 0
