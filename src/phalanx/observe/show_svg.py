"""What ``phalanx show --svg`` writes: one picture that loads nothing, of the mesh, the stages and the timelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape as xml_escape

from phalanx.observe.draw import boxes, servers
from phalanx.observe.gantt import COLOURS, GREY, LEFT, ROW, Timeline, svg_legend, svg_rows
from phalanx.observe.grouped import grouped
from phalanx.observe.show import Shown
from phalanx.parallel.survey import Survey
from phalanx.units import show_bytes, show_count, show_seconds

_WIDTH, _MARGIN, _LINE, _LETTER = 760, 10, 16, 6.6
_BOXES_A_ROW = 4


@dataclass(slots=True)
class _Page:
    """Parts of a picture, from the top down.

    Attributes:
        parts: so far.
        y: where the next begins.
    """

    parts: list[str] = field(default_factory=list[str])
    y: float = 8

    def say(self, text: str, *, bold: bool = False) -> None:
        """A line of text, cut to the width of the page."""
        most = int((_WIDTH - 2 * _MARGIN) / _LETTER)
        text = text if len(text) <= most else f"{text[: most - 3]}..."
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{_MARGIN}" y="{self.y + 12}" fill="{GREY}"{weight}>{xml_escape(text)}</text>')
        self.y += _LINE + 2


def shown_svg(shown: Shown) -> str:
    """The picture, as an SVG document."""
    page = _Page()
    page.say(f"{shown.name} under {shown.plan}: {shown.batch} samples a step", bold=True)
    page.say(f"exact: {shown.plan.exactness}")
    _draw_boxes(page, shown)
    if shown.survey and shown.survey.stages:
        _draw_stages(page, shown.survey)
    for title, timeline in _timelines(shown):
        _draw_timeline(page, title, timeline)
    if shown.planned:
        page.parts += svg_legend(page.y)
        page.y += _LINE + 6
    for note in (*(f"note: {note}" for note in shown.notes), *shown.missing):
        page.say(note)
    body = "\n".join(page.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {page.y + 6:.0f}" font-size="12"'
        f' font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


def _draw_boxes(page: _Page, shown: Shown) -> None:
    drawn = boxes(shown.plan, shown.batch)
    ranks = [*range(len(drawn) - 1), shown.plan.world_size - 1]
    filled = [
        (title, lines if title == "..." or shown.plan.threads > 1 else [*lines, *_bytes(shown.survey, rank)])
        for rank, (title, lines) in zip(ranks, drawn, strict=True)
    ]
    filled += servers(shown.plan)
    wide = (_WIDTH - 2 * _MARGIN) / _BOXES_A_ROW
    for first in range(0, len(filled), _BOXES_A_ROW):
        row = filled[first : first + _BOXES_A_ROW]
        tall = max(len(lines) for _, lines in row) + 1
        for at, (title, lines) in enumerate(row):
            x = _MARGIN + at * wide
            page.parts.append(
                f'<rect x="{x:.1f}" y="{page.y}" width="{wide - 8:.1f}" height="{tall * _LINE + 8}" rx="4" fill="none"'
                f' stroke="{COLOURS["F"]}"/>'
            )
            for line, text in enumerate([title, *lines]):
                weight, y = "" if line else ' font-weight="bold"', page.y + 15 + line * _LINE
                page.parts.append(f'<text x="{x + 8:.1f}" y="{y}" fill="{GREY}"{weight}>{xml_escape(text)}</text>')
        page.y += tall * _LINE + 16


def _bytes(survey: Survey | None, rank: int) -> list[str]:
    if survey is None:
        return []
    held = survey.held(rank)
    return [
        f"holds {show_bytes(sum(one.bytes for one in held))} of parameters",
        f"steps {show_count(sum(one.stepped_elements for one in held))} of them",
    ]


def _draw_stages(page: _Page, survey: Survey) -> None:
    """A strip as wide as the page, each stage as wide as its share of the work."""
    page.say("stages, each as wide as its share of the work", bold=True)
    x, whole = float(_MARGIN), sum(stage.cost for stage in survey.stages)
    for stage in survey.stages:
        wide = stage.cost / whole * (_WIDTH - 2 * _MARGIN)
        light = max(1 - 0.3 * (stage.index // survey.plan.pp), 0.25)
        page.parts.append(
            f'<rect x="{x:.1f}" y="{page.y}" width="{wide:.1f}" height="{_LINE + 6}" fill="{COLOURS["F"]}"'
            f' fill-opacity="{light:.2f}" stroke="#ffffff"><title>{xml_escape(", ".join(stage.units))}</title></rect>'
        )
        names = ", ".join(name for name, _ in grouped(dict.fromkeys(stage.units, 0)))
        label = f"{stage.index}: {names}, {stage.cost / whole:.0%}"
        most = int((wide - 8) / _LETTER)
        if most >= len(label):
            shown = label
        else:
            shown = f"{label[: most - 3]}..." if most > 6 else str(stage.index) if most > 1 else ""
        page.parts.append(f'<text x="{x + 4:.1f}" y="{page.y + 15}" fill="#ffffff">{xml_escape(shown)}</text>')
        x += wide
    page.y += _LINE + 16


def _timelines(shown: Shown) -> Iterator[tuple[str, Timeline]]:
    planned, measured = shown.planned, shown.measured
    if planned:
        idle = f"{planned.timeline.idle:.0%} idle, {planned.even:.0%} if all stages cost the same"
        yield f"{planned.timeline.title}: {idle}", planned.timeline
    if measured and measured.timeline:
        found = measured.timeline
        yield f"{found.title}, {show_seconds(found.length)}: {found.idle:.0%} idle", found


def _draw_timeline(page: _Page, title: str, timeline: Timeline) -> None:
    page.say(title, bold=True)
    unit = (_WIDTH - LEFT - _MARGIN) / timeline.length if timeline.length else 1.0
    begin = timeline.begin
    moved = [one._replace(begin=one.begin - begin, end=one.end - begin) for one in timeline.actions]
    labels = [f"rank {rank}" for rank in timeline.ranks]
    page.parts += svg_rows(moved, labels, page.y, unit)
    page.y += len(labels) * ROW + 10
