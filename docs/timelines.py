"""Draws the timelines of the page on pipelines, from the orders that the code runs: ``python docs/timelines.py``."""

from __future__ import annotations

from pathlib import Path

from phalanx.parallel.pipeline.order import bubble, order, timed
from phalanx.spec.plan import Schedule

PICTURE = Path(__file__).resolve().parent / "explanation" / "pipeline.svg"
DRAWN: tuple[tuple[Schedule, int, int], ...] = (
    ("1f1b", 1, 1),
    ("gpipe", 1, 4),
    ("1f1b", 1, 4),
    ("interleaved", 2, 4),
    ("zero-bubble", 2, 4),
)
RANKS = 2
WIDTH, LEFT, HEIGHT, GAP = 720, 62, 20, 34
# Told apart on light and on dark pages.
COLOURS = {"F": "#3f6fb5", "B": "#b5652f", "I": "#b5652f", "W": "#8457a8"}
TEXT = "#7d7d7d"


def timeline(schedule: Schedule, stages: int, micros: int, top: int) -> list[str]:
    """One schedule: a row a rank, a box an action."""
    laid = order(schedule, RANKS, stages, micros)
    found = timed(laid)
    whole = max(one.end for one in found)
    longest = max(max(one.end for one in timed(order(s, RANKS, k, m))) / (k * m) for s, k, m in DRAWN)
    # The same batch and the same model everywhere: more micro-batches and more stages are as much shorter.
    unit = (WIDTH - LEFT - 10) / longest / (stages * micros)
    title = f"{schedule}, {micros} micro-batch{'es' if micros > 1 else ''}: {100 * bubble(laid):.0f} % idle"
    parts = [f'<text x="{LEFT}" y="{top + 12}" fill="{TEXT}" font-weight="bold">{title}</text>']
    for rank in range(RANKS):
        y = top + 20 + rank * (HEIGHT + 3)
        parts.append(f'<text x="4" y="{y + 14}" fill="{TEXT}">rank {rank}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{whole * unit:.1f}" height="{HEIGHT}" fill="none" stroke="{TEXT}"'
            ' stroke-dasharray="3 3"/>'
        )
        for one in (one for one in found if one.rank == rank):
            kind, stage, micro = one.action
            x, width = LEFT + one.begin * unit, (one.end - one.begin) * unit
            light = ' fill-opacity="0.7"' if stage >= RANKS else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{COLOURS[kind]}"{light}'
                ' stroke="#ffffff"/>'
            )
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 14}" fill="#ffffff" text-anchor="middle">{micro}</text>'
            )
    return parts


def drawn() -> str:
    """All of them, one below the other."""
    each = 20 + RANKS * (HEIGHT + 3) + GAP - 20
    parts: list[str] = []
    for index, (schedule, stages, micros) in enumerate(DRAWN):
        parts += timeline(schedule, stages, micros, 6 + index * each)
    bottom = 6 + len(DRAWN) * each
    legend = (("F", "forward"), ("B", "backward, or its half for inputs"), ("W", "its half for weights"))
    for at, (kind, meaning) in zip((LEFT, LEFT + 110, LEFT + 350), legend, strict=True):
        parts.append(f'<rect x="{at}" y="{bottom}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{at + 20}" y="{bottom + 12}" fill="{TEXT}">{meaning}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" font-size="12"'
        f' font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn())
