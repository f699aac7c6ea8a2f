"""What servers did in a run, from its ``update``, ``worker``, ``server`` and ``worked`` events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.observe.follow import Event
from phalanx.units import show_count, show_names

_MOST = 8  # workers that are named


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Of a run with parameter servers.

    Attributes:
        staleness: updates that gradients lacked → pieces of which that was so.
        rates: samples/s of each worker that was there at the end, by rank, since it came.
        pieces: how many pieces each of them computed that counted.
        dropped: pieces left out of their step, which backup workers did not wait for.
        lost_workers: how often a worker was lost.
        restarts: how often a server was lost and came back.
        lost_updates: updates lost with them, and made again.
    """

    staleness: Mapping[int, int]
    rates: Mapping[int, float]
    pieces: Mapping[int, int]
    dropped: int
    lost_workers: int
    restarts: int
    lost_updates: int

    @property
    def rows(self) -> list[tuple[str, str]]:
        """A name and a text for each line of a summary."""
        found = [("staleness", _spread(self.staleness))]
        if self.dropped:
            found[0] = ("staleness", f"{found[0][1]}; {self.dropped} pieces left out")
        if self.rates:
            each = [f"{rank}: {show_count(rate)}" for rank, rate in self.rates.items()]
            found.append(("each worker", f"{show_names(each, _MOST)} samples/s"))
        if self.lost_workers:
            found.append(("workers lost", str(self.lost_workers)))
        if self.restarts:
            found.append(("servers lost", f"{self.restarts}, and {self.lost_updates} updates with them, made again"))
        return found


def serving(by_name: Mapping[str, Sequence[Event]]) -> Serving | None:
    """What the events of a run, by name, tell of its servers; ``None`` where it had none."""
    updates, worked = by_name.get("update", []), by_name.get("worked", [])
    servers = by_name.get("server", [])
    if not updates:
        return None
    return Serving(
        staleness=dict(sorted(Counter(one for event in updates for one in event["staleness"]).items())),
        rates={event["rank"]: event["samples"] / event["seconds"] for event in worked if event["seconds"] > 0},
        pieces={event["rank"]: event["pieces"] for event in worked},
        dropped=sum(event["dropped"] for event in updates),
        lost_workers=sum(event["state"] == "lost" for event in by_name.get("worker", [])),
        restarts=sum(event["restarted"] for event in servers),
        lost_updates=sum(event["lost_updates"] for event in servers),
    )


def _spread(counts: Mapping[int, int]) -> str:
    """Least, median and most, and how the pieces spread."""
    every = sum(counts.values())
    passed, median = 0, 0
    for value, count in counts.items():
        passed += count
        if passed * 2 >= every:
            median = value
            break
    if len(counts) == 1:
        return f"{median} updates in every gradient" if median else "none: each gradient is of the newest parameters"
    shares = ", ".join(f"{value}: {count / every:.0%}" for value, count in counts.items())
    return f"{min(counts)} to {max(counts)} updates, median {median} ({shares})"
