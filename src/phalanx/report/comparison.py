"""A run's forecast beside what was measured, part by part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORECAST = "forecast.json"
"""The file of a run folder that holds its forecast, or says why there is none."""

LATE = "the run was over before its forecast was made"
"""Why short runs have none."""

COMPUTING = ("products", "attention", "memory", "recompute", "launches")
"""Parts of a forecast step in which a rank computes."""

_AFTER = ("update", "rest")  # forward and backward

_SMALL = 0.005  # of a step: parts that are forecast to be less are not told of unless they were measured
_HELD = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One quantity, forecast and measured.

    Attributes:
        what: ``step``, in seconds, or ``memory``, in bytes.
        part: of it; ``whole`` for all.
        forecast: number; ``None`` where nobody forecasts it.
        measured: number; ``None`` where it was not measured.
    """

    what: str
    part: str
    forecast: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Forecast over measured; ``None`` where one of them is missing or zero."""
        return self.forecast / self.measured if self.forecast and self.measured else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "what": self.what,
            "part": self.part,
            "forecast": self.forecast,
            "measured": self.measured,
            "ratio": self.ratio,
        }


def stored(folder: Path) -> dict[str, Any] | None:
    """What ``forecast.json`` of a run holds: a ``forecast``, or why it is ``missing``; ``None`` without the file."""
    try:
        found = json.loads((folder / FORECAST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def step_beside(forecast: Mapping[str, Any], measured: Mapping[str, float]) -> list[Compared]:
    """Seconds of a step by part.

    Args:
        forecast: of the run, as it is stored.
        measured: seconds of ``whole`` and of those parts that were timed: ``passes``, which is forward and backward
            with all that they wait for, ``computing`` and ``pipeline`` within them, ``update`` and ``rest``.
    """
    seconds = forecast["seconds"]
    computing = sum(seconds[name] for name in COMPUTING)
    waiting = {name: each for name, each in seconds.items() if name not in (*COMPUTING, *_AFTER)}
    within = {"computing": computing, **waiting}
    parts = {"whole": forecast["step"], "passes": sum(within.values()), **within}
    parts |= {name: seconds[name] for name in _AFTER}
    return [
        Compared(what="step", part=part, forecast=each, measured=measured.get(part))
        for part, each in parts.items()
        if part == "whole" or part in measured or each > _SMALL * forecast["step"]
    ]


def memory_beside(forecast: Mapping[str, Any], ranks: Sequence[Mapping[str, int]]) -> list[Compared]:
    """Bytes by part on the rank that needs most of each.

    Args:
        forecast: of the run, as it is stored.
        ranks: what each rank's memory held, by part, as ``memory`` events have it.
    """
    if not ranks:
        return []
    held = dict(forecast["parts"])  # each at its own peak, as it is measured
    held["parameters"] += held.get("gathered", 0.0)  # measured parameters are those that were gathered, too
    most = {part: max(rank[part] for rank in ranks) for part in _HELD}
    return [Compared(what="memory", part=part, forecast=held[part], measured=float(most[part])) for part in _HELD]


def under_forecast(rows: Sequence[Compared]) -> Compared | None:
    """The part of memory that most bytes were missed of; ``None`` where none was."""
    short = [one for one in rows if one.what == "memory" and (one.measured or 0.0) > (one.forecast or 0.0)]
    return max(short, key=lambda one: (one.measured or 0.0) - (one.forecast or 0.0), default=None)
