"""Which hosts a check asks for their links, by hosts that answer at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from phalanx.errors import RunError
from phalanx.launch.check_hosts import CheckTime, TargetHost
from phalanx.launch.check_hosts.asking_links import LinkSurvey, ask_links

pytestmark = pytest.mark.quick

CUT_OFF = "n5"
"""A host that does not reach the first."""


class Named(TargetHost):
    def __init__(self, number: int) -> None:
        self.name = f"n{number}"

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        raise NotImplementedError


class Hosts:
    """So many, each of whose answers takes ``seconds``; ``most``: that were asked at a time, by the host's name."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.all = [Named(number) for number in range(count)]
        self.most: Counter[str] = Counter()
        self._seconds, self._busy, self._lock = seconds, Counter[str](), threading.Lock()

    def ask(self, host: TargetHost, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._busy[host.name] += 1
            self.most[host.name] = max(self.most[host.name], self._busy[host.name])
        time.sleep(self._seconds)
        with self._lock:
            self._busy[host.name] -= 1
        if "comers" in question:
            return {}
        if question["peer"] == ["at n0", 1000] and host.name == CUT_OFF:
            raise RunError("Connection refused")
        return {"error": "", "latency": 1e-4, **({} if "comes" in question else {"bandwidth": 1e9})}

    def asked(self, seconds: float) -> LinkSurvey:
        told = {one.name: {"address": f"at {one.name}", "free_port": 1000} for one in self.all}
        with ThreadPoolExecutor(len(self.all)) as pool:
            return ask_links(self.all, told, self.ask, pool, CheckTime(seconds))


def test_of_many_hosts_each_tries_the_first() -> None:
    hosts = Hosts(12)
    said = hosts.asked(60.0)
    tried = {one.source: one.error for one in said.links if one.target == "n0"}
    assert tried == {f"n{number}": "Connection refused" if f"n{number}" == CUT_OFF else "" for number in range(1, 12)}
    assert said.unasked == 0
    assert set(hosts.most.values()) == {1}, "no host was asked for two links at once"


@pytest.mark.parametrize(("count", "pairs", "unasked"), [(2, 1, 0), (5, 4, 6), (8, 8, 20), (11, 10, 9), (12, 12, 9)])
def test_without_time_there_are_two_rounds_and_other_pairs_are_counted(count: int, pairs: int, unasked: int) -> None:
    said = Hosts(count).asked(0.0)
    assert (len(said.links), said.unasked) == (2 * pairs, unasked)


def test_a_link_has_some_time_unless_the_check_was_ended() -> None:
    limit = CheckTime(0.0)
    assert (limit.left, limit.at_least(3.0)) == (0.0, 3.0)
    assert CheckTime(60.0).at_least(3.0) > 50.0
    limit.end()
    assert limit.at_least(3.0) == 0.0


def test_rounds_end_with_the_time() -> None:
    said = Hosts(8, seconds=0.5).asked(4.0)
    assert 0 < len(said.links) < 56
    assert len(said.links) // 2 + said.unasked == 28
