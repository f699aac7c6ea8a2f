"""What bringing replicas together came to in a run, from its ``sync`` events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.observe.follow import Event
from phalanx.units import show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Averagings:
    """Of replicas that step by themselves.

    Attributes:
        count: averagings, of one fragment each.
        bytes: that rank 0 sent for them.
        waited: the share of rank 0's time that they held it up.
    """

    count: int
    bytes: int
    waited: float | None

    def __str__(self) -> str:
        waited = "" if self.waited is None else f", {self.waited:.1%} of the time waited"
        return f"{self.count}, {show_bytes(self.bytes)} sent by rank 0{waited}"


def averagings(syncs: Sequence[Event], steps: Sequence[Event], seconds: float | None) -> Averagings | None:
    """Those of a run: its ``sync`` and ``step`` events, and its wall time once it has ended; ``None`` without any."""
    if not syncs:
        return None
    whole = seconds or sum(event["seconds"] for event in steps)
    waited = sum(event["seconds"] for event in syncs) / whole if whole else None
    return Averagings(count=len(syncs), bytes=sum(event["bytes"] for event in syncs), waited=waited)
