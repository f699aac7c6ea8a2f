"""Timelines of a pipeline, planned or measured: a row a stage, a box an action; as text and as parts of an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from phalanx.placement.schedules import Timed

MOST = 8  # ranks drawn; of more, the first and the last
LEFT, HEIGHT, ROW = 62, 20, 23  # of an SVG: where rows begin, how high a box is, from one row to the next
# Told apart on light and on dark pages.
COLOURS = {"F": "#3f6fb5", "B": "#b5652f", "I": "#b5652f", "W": "#8457a8"}
GREY = "#7d7d7d"
MEANINGS = {"F": "forward", "B": "backward", "I": "its half for inputs", "W": "its half for weights"}
_STYLES = {"F": "white on blue", "B": "white on dark_orange3", "I": "white on dark_orange3", "W": "white on purple4"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When the ranks of one pipeline do what.

    Attributes:
        title: what it shows.
        actions: each with its place along ``pp`` as rank, from 0.
        ranks: the rank of each place.
        seconds: whether times are seconds; else units of a stage's mean forward.
    """

    title: str
    actions: tuple[Timed, ...]
    ranks: tuple[int, ...]
    seconds: bool = False

    @property
    def begin(self) -> float:
        """Of the first action."""
        return min(one.begin for one in self.actions)

    @property
    def length(self) -> float:
        """From the first action to the end of the last."""
        return max(one.end for one in self.actions) - self.begin

    @property
    def idle(self) -> float:
        """The share of the ranks' time in which they do nothing of it, from 0 to 1."""
        if not self.length:
            return 0.0
        return 1.0 - sum(one.end - one.begin for one in self.actions) / (self.length * len(self.ranks))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "title": self.title,
            "seconds": self.seconds,
            "length": self.length,
            "idle": self.idle,
            "actions": [
                {"rank": self.ranks[one.rank], **one.action._asdict(), "begin": one.begin, "end": one.end}
                for one in self.actions
            ],
        }


def drawn_places(count: int) -> list[int | None]:
    """Which of so many are drawn; ``None`` stands for those left out."""
    return [*range(count)] if count <= MOST else [*range(MOST - 2), None, count - 1]


def lines(timeline: Timeline, width: int) -> Iterator[Text]:
    """The timeline as lines of ``width`` characters: a line a stage, in the order of ranks."""
    rows = list(_rows(timeline))
    names = [_name(timeline, place, stage, several=len(rows) > len(timeline.ranks)) for place, stage in rows]
    indent = max(len(name) for name in names) + 1
    columns = max(width - indent, 10)
    for name, (place, stage) in zip(names, rows, strict=True):
        if place is None:
            yield Text(name, style="dim")
            continue
        mine = [one for one in timeline.actions if one.rank == place and one.action.stage == stage]
        yield Text(name.ljust(indent)) + _line(timeline, mine, columns)


def lost(timeline: Timeline, width: int) -> int:
    """How many actions are too short to be seen in so many columns."""
    each = timeline.length / max(width, 1)
    begin = timeline.begin
    return sum(
        one.end > one.begin and round((one.begin - begin) / each) == round((one.end - begin) / each)
        for one in timeline.actions
    )


def svg_rows(actions: Sequence[Timed], labels: Sequence[str], top: float, unit: float) -> list[str]:
    """Parts of an SVG: a row a rank from ``top`` on, a box an action, ``unit`` wide for each unit of time.

    Paler boxes are of a rank's further stages. The place along ``pp`` stands for the rank in ``actions``.
    """
    parts: list[str] = []
    whole = max(one.end for one in actions)
    for rank, label in enumerate(labels):
        y = top + rank * ROW
        parts.append(f'<text x="4" y="{y + 14}" fill="{GREY}">{label}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{whole * unit:.1f}" height="{HEIGHT}" fill="none" stroke="{GREY}"'
            ' stroke-dasharray="3 3"/>'
        )
        for one in (one for one in actions if one.rank == rank and one.end > one.begin):
            kind, stage, micro = one.action
            x, width = LEFT + one.begin * unit, (one.end - one.begin) * unit
            light = f' fill-opacity="{max(1 - 0.3 * (stage // len(labels)), 0.25):.1f}"' if stage >= len(labels) else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{COLOURS[kind]}"{light}'
                ' stroke="#ffffff"/>'
            )
            if width >= 7 * len(str(micro)):
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 14}" fill="#ffffff" text-anchor="middle">{micro}</text>'
                )
    return parts


def svg_legend(top: float) -> list[str]:
    """Parts of an SVG that say what the colours mean."""
    parts: list[str] = []
    legend = (("F", "forward"), ("B", "backward, or its half for inputs"), ("W", "its half for weights"))
    for at, (kind, meaning) in zip((LEFT, LEFT + 110, LEFT + 350), legend, strict=True):
        parts.append(f'<rect x="{at}" y="{top}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{at + 20}" y="{top + 12}" fill="{GREY}">{meaning}</text>')
    return parts


def _rows(timeline: Timeline) -> Iterator[tuple[int | None, int]]:
    for place in drawn_places(len(timeline.ranks)):
        stages = sorted({one.action.stage for one in timeline.actions if one.rank == place})
        yield from ((place, stage) for stage in stages) if place is not None else [(None, 0)]


def _name(timeline: Timeline, place: int | None, stage: int, *, several: bool) -> str:
    if place is None:
        return f"... {len(timeline.ranks) - MOST + 1} more ranks"
    return f"rank {timeline.ranks[place]}" + (f" stage {stage}" if several else "")


def _line(timeline: Timeline, actions: Sequence[Timed], columns: int) -> Text:
    line = Text(no_wrap=True, end="")
    each, at = timeline.length / columns or 1.0, 0
    for one in sorted(actions, key=lambda one: one.begin):
        first = max(round((one.begin - timeline.begin) / each), at)
        last = round((one.end - timeline.begin) / each)
        if last <= first:
            continue
        line.append("·" * (first - at), style="dim")
        word = f"{one.action.kind}{one.action.micro}"
        word = word if len(word) <= last - first else one.action.kind
        line.append(word.ljust(last - first, "─"), style=_STYLES[one.action.kind])
        at = last
    line.append("·" * (columns - at), style="dim")
    return line
