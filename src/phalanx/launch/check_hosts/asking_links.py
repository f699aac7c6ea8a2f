"""What a check asks of the links between hosts: of two at a time, where no other link disturbs theirs, then of all at
once whether they reach the one that all workers meet at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from phalanx.errors import RunError
from phalanx.launch.check_hosts.started_program import CheckTime
from phalanx.launch.check_hosts.target_host import TargetHost

_RING = 8  # hosts; where there are more, each is asked for its links to two others, not to all
LEAST = 3.0
"""Seconds that two hosts have at least to answer for one link."""
_ALWAYS = 2  # rounds that there are in any case, so that each host has a link, and most have two

Ask = Callable[[TargetHost, dict[str, Any]], dict[str, Any]]
"""Gives what ``link_probe`` answers on a host to a question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAnswer:
    """One way between two hosts.

    Attributes:
        source: the host that opened a connection.
        target: the host that listened.
        port: where.
        error: why there was no connection; empty where there was.
        latency: seconds of a round trip of one byte; 0 where not measured.
        bandwidth: bytes per second from ``source`` to ``target``; 0 where not measured.
    """

    source: str
    target: str
    port: int
    error: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSurvey:
    """What hosts said of their links; ``unasked``: pairs that no time was left for."""

    links: tuple[LinkAnswer, ...] = ()
    unasked: int = 0


def ask_links(
    hosts: Sequence[TargetHost], told: Mapping[str, Mapping[str, Any]], ask: Ask, pool: Executor, limit: CheckTime
) -> LinkSurvey:
    """Ask ``hosts``, the first of which all workers meet at, each for one link at a time, by what each ``told``.

    No further round begins with less than ``LEAST`` left of ``limit``; the first two begin in any case.
    """
    found: list[LinkAnswer] = []
    unasked = 0
    for number, pairs in enumerate(rounds(len(hosts))):
        if number >= _ALWAYS and limit.left <= LEAST:
            unasked += len(pairs)
            continue
        rows = [(hosts[one], hosts[other], told, ask) for one, other in pairs]
        found += chain.from_iterable(pool.map(lambda row: _both_ways(*row), rows))
    others = hosts[2:-1] if len(hosts) > _RING else ()  # its neighbours in the ring have tried
    if others and limit.left > LEAST:
        found += _all_reach(hosts[0], others, told, ask, pool)
    else:
        unasked += len(others)
    return LinkSurvey(links=tuple(found), unasked=unasked)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of ``count`` hosts, in rounds in which none stands twice: all pairs, of many hosts those of a ring."""
    if count > _RING:
        ring = [(one, (one + 1) % count) for one in range(count)]
        even, odd = ring[: count - count % 2 : 2], ring[1::2]
        return [even, odd, ring[-1:]] if count % 2 else [even, odd]
    seats = [*range(count), *([-1] if count % 2 else [])]
    found: list[list[tuple[int, int]]] = []
    for _ in range(max(0, len(seats) - 1)):  # the circle method: one stays, the others move on by a seat
        half = len(seats) // 2
        pairs = [(min(pair), max(pair)) for pair in zip(seats[:half], reversed(seats[half:]), strict=True)]
        found.append([pair for pair in pairs if pair[0] >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _both_ways(one: TargetHost, other: TargetHost, told: Mapping[str, Mapping[str, Any]], ask: Ask) -> list[LinkAnswer]:
    def answer(host: TargetHost, peer: TargetHost) -> LinkAnswer:
        question = {"port": told[host.name]["free_port"], "first": host is one}
        return _way(host, peer, told, question, ask)

    with ThreadPoolExecutor(2) as pair:
        return list(pair.map(answer, (one, other), (other, one)))


def _all_reach(
    meeting: TargetHost, others: Sequence[TargetHost], told: Mapping[str, Mapping[str, Any]], ask: Ask, pool: Executor
) -> list[LinkAnswer]:
    """Whether each of ``others`` reaches ``meeting``, all at once; how fast is not measured."""
    listens = {"port": told[meeting.name]["free_port"], "comers": len(others)}
    listening = pool.submit(ask, meeting, listens)
    found = [*pool.map(lambda host: _way(host, meeting, told, {"comes": True}, ask), others)]
    with suppress(RunError):  # of which those that came in vain say enough
        listening.result()
    return found


def _way(
    host: TargetHost, peer: TargetHost, told: Mapping[str, Mapping[str, Any]], question: Mapping[str, Any], ask: Ask
) -> LinkAnswer:
    port = told[peer.name]["free_port"]
    known: dict[str, Any] = {"source": host.name, "target": peer.name, "port": port}
    try:
        return LinkAnswer(**known, **ask(host, {**question, "peer": [told[peer.name]["address"], port]}))
    except RunError as error:
        return LinkAnswer(**known, error=str(error))
