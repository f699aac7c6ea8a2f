"""Draws the timelines of the page on pipelines, from the orders that the code runs: ``python tools/timelines.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from phalanx.config.plan import Schedule
from phalanx.placement.schedules import bubble, order, timed
from phalanx.report.drawing import Timeline, lines
from phalanx.report.render import as_svg

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "pipeline.svg"
DRAWN: tuple[tuple[Schedule, int, int], ...] = (
    ("1f1b", 1, 1),
    ("gpipe", 1, 4),
    ("1f1b", 1, 4),
    ("interleaved", 2, 4),
    ("zero-bubble", 2, 4),
)
RANKS, WIDTH, NAMES = 2, 110, 15  # columns of the picture, and of a line's name


def timelines() -> Iterator[RenderableType]:
    """Yield each schedule under its title, all on one scale: more micro-batches and stages are as much shorter."""
    longest = max(max(one.end for one in timed(order(s, RANKS, k, m))) / (k * m) for s, k, m in DRAWN)
    for schedule, stages, micros in DRAWN:
        laid = order(schedule, RANKS, stages, micros)
        one = Timeline(title="", actions=tuple(timed(laid)), ranks=tuple(range(RANKS)))
        many = f"{micros} micro-batch{'es' if micros > 1 else ''}"
        yield Text(f"{schedule}, {many}: {100 * bubble(laid):.0f} % idle", style="bold")
        yield from lines(one, NAMES + round((WIDTH - NAMES) * one.length / longest / (stages * micros)))
        yield ""
    yield Text(
        "F forward, B backward, I its half for inputs, W its half for weights, each with its micro-batch; · idle"
    )


def drawn() -> str:
    """Return all of them, one below the other, as an SVG document."""
    return as_svg("two ranks, the same model and the same batch", *timelines(), width=WIDTH)


if __name__ == "__main__":
    PICTURE.write_text(drawn())
