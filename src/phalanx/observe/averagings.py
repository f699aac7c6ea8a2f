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
        whole: bytes that those would have been without ``compress``.
        waited: the share of rank 0's time that they held it up.
    """

    count: int
    bytes: int
    whole: int
    waited: float | None

    def __str__(self) -> str:
        waited = "" if self.waited is None else f", {self.waited:.1%} of the time waited"
        of = f" in place of {show_bytes(self.whole)}" if self.whole > self.bytes else ""
        return f"{self.count}, {show_bytes(self.bytes)} sent by rank 0{of}{waited}"


def averagings(syncs: Sequence[Event], steps: Sequence[Event], seconds: float | None) -> Averagings | None:
    """Those of a run: its ``sync`` and ``step`` events, and its wall time once it has ended; ``None`` without any."""
    if not syncs:
        return None
    whole = seconds or sum(event["seconds"] for event in steps)
    waited = sum(event["seconds"] for event in syncs) / whole if whole else None
    sent, of = (sum(event[field] for event in syncs) for field in ("bytes", "whole"))
    return Averagings(count=len(syncs), bytes=sent, whole=of, waited=waited)
