"""What ``phalanx show`` prints and ``--svg`` writes: the mesh, who holds what, the stages and the timelines."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from xml.sax.saxutils import escape as markup_escape

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.config import Plan
from phalanx.placement.ownership import ParameterShard, Survey
from phalanx.report import drawing
from phalanx.report.comparison import beside_table
from phalanx.report.drawing import COLOURS, GREY, LEFT, MEANINGS, ROW, Timeline, boxes, drawn_places
from phalanx.report.show import MeasuredRun, Planned, Shown, described
from phalanx.report.tables import memory_table
from phalanx.units import show_bytes, show_count, show_seconds, visible

_MOST_CAUSES = 8  # of interruptions, the last
_NUMBERS = ("bytes", "elements", "stepped", "parameters", "gradients", "share of work")

Place = tuple[list[int], Mapping[str, ParameterShard]]  # ranks that hold the same, and what


def shown_text(shown: Shown, width: int) -> RenderableType:
    """Everything, in lines of at most ``width`` characters."""
    drawn = drawing.draw(shown.plan, batch=shown.batch, device=shown.device, width=width)
    parts: list[RenderableType] = [Text(f"{shown.name} under {drawn}"), Text(f"exact: {shown.plan.exactness}")]
    if shown.survey:
        parts += ["", *_holdings(shown.survey)]
        if shown.survey.stages:
            parts += ["", _stages(shown.survey)]
    if shown.measured and shown.measured.summary.memory:
        parts += ["", Text("measured memory, each part at its own peak", style="bold")]
        parts.append(memory_table(shown.measured.summary))
    if shown.measured and (beside := list(beside_table(shown.measured.summary))):
        parts += ["", Text("forecast beside measurement", style="bold"), *beside]
    if shown.planned:
        parts += ["", *_schedule(shown.planned, shown.measured, known=shown.survey is not None, width=width)]
    if shown.measured and (came_between := shown.measured.summary.interruptions):
        parts += ["", Text("interrupted", style="bold"), *(Text(f"  {one}") for one in came_between[-_MOST_CAUSES:])]
        parts += [Text(f"  and {len(came_between) - _MOST_CAUSES} times before")] * (len(came_between) > _MOST_CAUSES)
    said = [*(f"note: {note}" for note in shown.notes), *shown.missing]
    return Group(*parts, *([""] if said else []), *(Text(one, style="yellow") for one in said))


def _holdings(survey: Survey) -> Iterator[RenderableType]:
    plan, places = survey.plan, _places(survey)
    steps = plan.zero in (1, 2)
    table = _table("tensor", "shape", *(("part", "optimizer steps") if steps else ("part",)), "ranks", "bytes")
    alike: dict[Hashable, list[str]] = {}
    for name, told in _told(survey, places).items():
        alike.setdefault(told, []).append(name)
    whole = {tensor.name: tensor for tensor in survey.parameters}
    for members in alike.values():
        names = [escape(name) for name, _ in grouped(dict.fromkeys(members, 0))]
        shapes = ["x".join(map(str, whole[members[0]].shape)) or "one"]
        parts = list(_parts(members, places, plan, steps))
        nothing = ("",) * len(parts[0])
        for name, shape, cells in zip_longest(names, shapes, parts, fillvalue=None):
            table.add_row(name or "", shape or "", *(cells or nothing))
    if survey.buffers:
        count, size = len(survey.buffers), sum(one.bytes for one in survey.buffers)
        cells = ("", "whole", *([""] if steps else []), "all", show_bytes(size))
        table.add_row(f"{count} buffer{'s' if count > 1 else ''}", *cells)
    yield table
    yield _totals(survey, places)
    if survey.whole:
        names = ", ".join(name for name, _ in grouped(dict.fromkeys(survey.whole, 0)))
        yield Text(f"kept whole: {names} (tp found no other weight that goes with it)")
    for name, stages in survey.tied.items():
        yield Text(f"tied: {name} is held by stages {', '.join(map(str, stages))}, which add its gradients up")


def _places(survey: Survey) -> list[Place]:
    """Ranks that hold the same together; of very many such places of one stage, the first and the last."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank in range(survey.plan.world_size):
        ranks.setdefault(survey.place(rank), []).append(rank)
    by_pipe: dict[int, list[list[int]]] = {}
    for place, its in ranks.items():
        by_pipe.setdefault(place[0], []).append(its)
    kept = [its[at] for its in by_pipe.values() for at in drawn_places(len(its)) if at is not None]
    return [(its, {one.tensor.name: one for one in survey.shards_of(its[0])}) for its in kept]


def _told(survey: Survey, places: Sequence[Place]) -> dict[str, Hashable]:
    """What tensors that are listed as one have in common."""
    return {
        tensor.name: (
            tensor.shape,
            tensor.dtype,
            tuple(
                (held[tensor.name].parameter, held[tensor.name].stepped) for _, held in places if tensor.name in held
            ),
            tuple(tensor.name in held for _, held in places),
        )
        for tensor in survey.parameters
    }


def _parts(names: Sequence[str], places: Sequence[Place], plan: Plan, steps: bool) -> Iterator[tuple[str, ...]]:
    """For each different part of a tensor: what it is, who holds it, and its bytes in all tensors of these names."""
    by_part: dict[tuple[str, ...], tuple[list[int], int]] = {}
    for ranks, held in places:
        if names[0] not in held:
            continue
        one = held[names[0]]
        told = [described(one.parameter, one.tensor.shape)]
        if steps:
            told.append(described(one.stepped, one.tensor.shape) if one.stepped else "nothing")
        holders, _ = by_part.setdefault(tuple(told), ([], one.bytes * len(names)))
        holders += ranks
    for told, (ranks, size) in by_part.items():
        yield (*told, "all" if len(ranks) == plan.world_size else runs(ranks), show_bytes(size))


def _totals(survey: Survey, places: Sequence[Place]) -> RenderableType:
    table = _table("rank", "mesh", "elements", "parameters", "gradients", "stepped")
    listed = [places[at] for at in drawn_places(len(places)) if at is not None]
    for ranks, held in listed:
        at = survey.plan.coordinate(ranks[0])
        where = " ".join(f"{axis}={at[axis]}" for axis in ("pp", "fsdp", "ep", "tp") if survey.plan.mesh[axis] > 1)
        table.add_row(
            "all" if len(ranks) == survey.plan.world_size else runs(ranks),
            where or "-",
            show_count(sum(one.parameter.elements for one in held.values())),
            show_bytes(sum(one.bytes for one in held.values())),
            show_bytes(sum(one.gradient_bytes for one in held.values())),
            show_count(sum(one.stepped_elements for one in held.values())),
        )
    several = len({survey.place(rank) for rank in range(survey.plan.world_size)})
    if several > len(listed):
        table.caption = f"the first and the last of {several} places; --json has all"
    return table


def _stages(survey: Survey) -> RenderableType:
    table = _table("stage", "ranks", "units", "elements", "share of work")
    whole = sum(stage.cost for stage in survey.stages)
    plan = survey.plan
    for at in drawn_places(len(survey.stages)):
        if at is None:
            table.add_row("...", "", "", "", "")
            continue
        stage = survey.stages[at]
        ranks = [rank for rank in range(plan.world_size) if plan.coordinate(rank)["pp"] == stage.rank]
        units = ", ".join(name for name, _ in grouped(dict.fromkeys(stage.units, 0)))
        share = f"{stage.cost / whole:.0%}"
        table.add_row(str(stage.index), runs(ranks), escape(units), show_count(stage.elements), share)
    return table


def _schedule(planned: Planned, measured: MeasuredRun | None, *, known: bool, width: int) -> Iterator[RenderableType]:
    even = f"{planned.even:.0%} if all stages cost the same"
    idle = f"{planned.timeline.idle:.0%} idle, {even}" if known else f"idle {even}"
    yield from _drawn(planned.timeline, f"{planned.timeline.title}: {idle}, messages taking no time", width)
    if measured and measured.timeline:
        found = measured.timeline
        free = f", {measured.free:.0%} if messages took no time" if measured.free is not None else ""
        yield ""
        yield from _drawn(found, f"{found.title}, {show_seconds(found.length)}: {found.idle:.0%} idle{free}", width)
    kinds = {one.action.kind for one in planned.timeline.actions}
    meant = ", ".join(f"{kind} {meaning}" for kind, meaning in MEANINGS.items() if kind in kinds)
    yield Text(f"{meant}, each with its micro-batch; · idle", style="dim")


def _drawn(timeline: Timeline, title: str, width: int) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    yield from drawing.lines(timeline, width)
    if unseen := drawing.lost(timeline, width):
        yield Text(f"{unseen} of {len(timeline.actions)} actions are too short to be drawn here", style="dim")


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        right = heading in _NUMBERS
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def grouped(names: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Names that differ only by numbers and of which the same is told, each group as (one name for all, its names)."""
    families: dict[Hashable, list[str]] = {}
    for name, told in names.items():
        families.setdefault((_NUMBER.sub("{}", name), told), []).append(name)
    return [pair for members in families.values() for pair in _named(members)]


def runs(numbers: Iterable[int], most: int = 4) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8; of more runs than ``most`` the first and the last."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    words = ["-".join(map(str, run)) for run in found]
    return ", ".join(words if len(words) <= most else [*words[: most - 1], "...", words[-1]])


def _named(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    numbers = [tuple(int(digits) for digits in _NUMBER.findall(name)) for name in names]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if prod(len(column) for column in columns) == len(names):
        holes = iter(columns)
        return [(_NUMBER.sub(lambda _: _braced(next(holes)), names[0]), list(names))]
    at = next(index for index, column in enumerate(columns) if len(column) > 1)
    apart: dict[int, list[str]] = {}
    for name, row in zip(names, numbers, strict=True):
        apart.setdefault(row[at], []).append(name)
    return [pair for members in apart.values() for pair in _named(members)]


def _braced(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    whole_run = list(values) == list(range(values[0], values[-1] + 1))
    return "{" + (f"{values[0]}..{values[-1]}" if whole_run else ",".join(map(str, values))) + "}"


_WIDTH, _MARGIN, _LINE, _LETTER = 760, 10, 16, 6.6
_BOXES_A_ROW = 4


@dataclass(slots=True)
class _Page:
    """Parts of a picture, from the top down; the next begins at ``y``."""

    parts: list[str] = field(default_factory=list[str])
    y: float = 8

    def say(self, text: str, *, bold: bool = False) -> None:
        most = int((_WIDTH - 2 * _MARGIN) / _LETTER)
        text = text if len(text) <= most else f"{text[: most - 3]}..."
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{_MARGIN}" y="{self.y + 12}" fill="{GREY}"{weight}>{_xml(text)}</text>')
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
        page.parts += drawing.svg_legend(page.y)
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
    filled += drawing.servers(shown.plan)
    wide = (_WIDTH - 2 * _MARGIN) / _BOXES_A_ROW
    for first in range(0, len(filled), _BOXES_A_ROW):
        row = filled[first : first + _BOXES_A_ROW]
        tall = max(len(lines) for _, lines in row) + 1
        for at, (title, texts) in enumerate(row):
            x = _MARGIN + at * wide
            page.parts.append(
                f'<rect x="{x:.1f}" y="{page.y}" width="{wide - 8:.1f}" height="{tall * _LINE + 8}" rx="4" fill="none"'
                f' stroke="{COLOURS["F"]}"/>'
            )
            for line, text in enumerate([title, *texts]):
                weight, y = "" if line else ' font-weight="bold"', page.y + 15 + line * _LINE
                page.parts.append(f'<text x="{x + 8:.1f}" y="{y}" fill="{GREY}"{weight}>{_xml(text)}</text>')
        page.y += tall * _LINE + 16


def _bytes(survey: Survey | None, rank: int) -> list[str]:
    if survey is None:
        return []
    held = survey.shards_of(rank)
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
            f' fill-opacity="{light:.2f}" stroke="#ffffff"><title>{_xml(", ".join(stage.units))}</title></rect>'
        )
        names = ", ".join(name for name, _ in grouped(dict.fromkeys(stage.units, 0)))
        label = f"{stage.index}: {names}, {stage.cost / whole:.0%}"
        most = int((wide - 8) / _LETTER)
        if most >= len(label):
            shown = label
        else:
            shown = f"{label[: most - 3]}..." if most > 6 else str(stage.index) if most > 1 else ""
        page.parts.append(f'<text x="{x + 4:.1f}" y="{page.y + 15}" fill="#ffffff">{_xml(shown)}</text>')
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
    page.parts += drawing.svg_rows(moved, labels, page.y, unit)
    page.y += len(labels) * ROW + 10


def _xml(text: str) -> str:
    """``text`` as it stands in XML, which knows no control characters."""
    return markup_escape(visible(text))
