"""Draws the timelines of the page on pipelines, from the orders that the code runs: ``python tools/timelines.py``."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.plan import Schedule
from phalanx.placement.schedules import bubble, order, timed
from phalanx.report.drawing import GREY, LEFT, ROW, svg_legend, svg_rows

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "pipeline.svg"
DRAWN: tuple[tuple[Schedule, int, int], ...] = (
    ("1f1b", 1, 1),
    ("gpipe", 1, 4),
    ("1f1b", 1, 4),
    ("interleaved", 2, 4),
    ("zero-bubble", 2, 4),
)
RANKS = 2
WIDTH, GAP = 720, 34


def timeline(schedule: Schedule, stages: int, micros: int, top: int) -> list[str]:
    """One schedule under its title."""
    laid = order(schedule, RANKS, stages, micros)
    longest = max(max(one.end for one in timed(order(s, RANKS, k, m))) / (k * m) for s, k, m in DRAWN)
    # The same batch and the same model everywhere: more micro-batches and more stages are as much shorter.
    unit = (WIDTH - LEFT - 10) / longest / (stages * micros)
    title = f"{schedule}, {micros} micro-batch{'es' if micros > 1 else ''}: {100 * bubble(laid):.0f} % idle"
    head = f'<text x="{LEFT}" y="{top + 12}" fill="{GREY}" font-weight="bold">{title}</text>'
    return [head, *svg_rows(timed(laid), [f"rank {rank}" for rank in range(RANKS)], top + 20, unit)]


def drawn() -> str:
    """All of them, one below the other."""
    each = 20 + RANKS * ROW + GAP - 20
    parts: list[str] = []
    for index, (schedule, stages, micros) in enumerate(DRAWN):
        parts += timeline(schedule, stages, micros, 6 + index * each)
    bottom = 6 + len(DRAWN) * each
    body = "\n".join([*parts, *svg_legend(bottom)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" font-size="12"'
        f' font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn())
