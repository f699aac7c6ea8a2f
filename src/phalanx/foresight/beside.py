"""Where memory ran out in earnest: which part of it the forecast had too small."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.errors import WorkerError
from phalanx.events import read
from phalanx.observe.beside import memory_beside, stored, under_forecast
from phalanx.units import show_bytes

_OUT_OF_MEMORY = re.compile(
    r"out of memory|allocate memory|not enough memory|memory ran out|MemoryError", re.IGNORECASE
)


def too_little(error: WorkerError, folder: Path) -> str | None:
    """What the forecast of the run in ``folder`` says to ``error``; ``None`` where that is not about memory."""
    if error.kind not in ("MemoryError", "OutOfMemoryError") and not _OUT_OF_MEMORY.search(str(error)):
        return None
    forecast = (stored(folder) or {}).get("forecast")
    if not forecast:
        return None
    whole = f"the forecast was {show_bytes(forecast['reserved'])} of {show_bytes(forecast['room'])} on each device"
    seen = [event for event in read(folder / "events.jsonl") if event["event"] == "memory"]
    mine = [event for event in seen if event["rank"] == error.rank][-1:]
    rows = memory_beside(forecast, mine)
    if not rows:
        return f"{whole}; nothing was measured before memory ran out"
    worst = under_forecast(rows)
    if worst is None:
        reached = ", ".join(
            f"{one.part} {show_bytes(one.measured or 0)} of {show_bytes(one.forecast or 0)}" for one in rows
        )
        return f"{whole}; no part had grown beyond it when memory ran out ({reached}): something else takes the rest"
    missed = show_bytes((worst.measured or 0.0) - (worst.forecast or 0.0))
    told, held = show_bytes(worst.forecast or 0.0), show_bytes(worst.measured or 0.0)
    return (
        f"{whole}; too small was its part for {worst.part}: {told}, where rank {error.rank} held {held} when memory "
        f"ran out, {missed} more"
    )
