"""The text of ``phalanx show``: the mesh, the shards of each rank, the stages and the timelines."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.placement.ownership import ParameterShard, Survey, TensorPiece
from phalanx.report import drawing
from phalanx.report.comparison import beside_table
from phalanx.report.drawing import MEANINGS, Timeline, drawn_places
from phalanx.report.render import table
from phalanx.report.show import MeasuredRun, Planned, Shown, described
from phalanx.report.tables import memory_table
from phalanx.units import show_bytes, show_count, show_counted, show_seconds

_MOST_CAUSES = 8  # of interruptions, the last
_NUMBERS = ("bytes", "elements", "stepped", "parameters", "gradients", "share of work")

Place = tuple[list[int], Mapping[str, ParameterShard]]  # ranks that hold the same, and what


def shown_text(shown: Shown, width: int) -> RenderableType:
    """Return everything about a plan or a run, in lines of at most ``width`` characters."""
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
    places, rows, steps = _places(survey), list[dict[str, str]](), survey.plan.zero in (1, 2)
    told = {tensor.name: (tensor.shape, tensor.dtype, _parts(tensor.name, places)) for tensor in survey.parameters}
    for name, members in grouped(told):
        shape, _, parts = told[members[0]]
        for at, ((one, stepped), (ranks, size)) in enumerate(parts):
            cells = {"tensor": "" if at else name, "shape": "" if at else "x".join(map(str, shape)) or "one"}
            cells["part"] = described(one, shape)
            cells |= {"optimizer steps": described(stepped, shape) if stepped else "nothing"} if steps else {}
            rows.append(cells | {"ranks": _ranks(ranks, survey), "bytes": show_bytes(size * len(members))})
    if survey.buffers:
        count, size = len(survey.buffers), sum(one.bytes for one in survey.buffers)
        found = {"tensor": show_counted(count, "buffer"), "part": "whole", "ranks": "all", "bytes": show_bytes(size)}
        rows.append({name: found.get(name, "") for name in rows[0]})
    yield _table(rows)
    yield _totals(survey, places)
    if survey.whole:
        names = ", ".join(name for name, _ in grouped(dict.fromkeys(survey.whole, 0)))
        yield Text(f"kept whole: {names} (tp found no other weight that goes with it)")
    for name, stages in survey.tied.items():
        yield Text(f"tied: {name} is held by stages {', '.join(map(str, stages))}, which add its gradients up")


Part = tuple[tuple[TensorPiece, TensorPiece | None], tuple[tuple[int, ...], int]]  # values and stepped; ranks and bytes


def _parts(name: str, places: Sequence[Place]) -> tuple[Part, ...]:
    """Return the different parts of a tensor, with the ranks that hold each."""
    found: dict[tuple[TensorPiece, TensorPiece | None], tuple[tuple[int, ...], int]] = {}
    for ranks, held in places:
        if (one := held.get(name)) is not None:
            holders, _ = found.get((one.parameter, one.stepped), ((), 0))
            found[one.parameter, one.stepped] = ((*holders, *ranks), one.bytes)
    return tuple(found.items())


def _ranks(ranks: Sequence[int], survey: Survey) -> str:
    return "all" if len(ranks) == survey.plan.world_size else runs(ranks)


def _places(survey: Survey) -> list[Place]:
    """Return groups of ranks that hold the same; of very many groups in one stage, the first and the last."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank in range(survey.plan.world_size):
        ranks.setdefault(survey.place(rank), []).append(rank)
    by_pipe: dict[int, list[list[int]]] = {}
    for place, its in ranks.items():
        by_pipe.setdefault(place[0], []).append(its)
    kept = [its[at] for its in by_pipe.values() for at in drawn_places(len(its)) if at is not None]
    return [(its, {one.tensor.name: one for one in survey.shards_of(its[0])}) for its in kept]


def _totals(survey: Survey, places: Sequence[Place]) -> RenderableType:
    rows: list[dict[str, str]] = []
    for at in drawn_places(len(places)):
        if at is None:
            continue
        ranks, held = places[at]
        axes = survey.plan.coordinate(ranks[0])
        where = " ".join(f"{axis}={axes[axis]}" for axis in ("pp", "fsdp", "ep", "tp") if survey.plan.mesh[axis] > 1)
        sizes = {
            "elements": show_count(sum(one.parameter.elements for one in held.values())),
            "parameters": show_bytes(sum(one.bytes for one in held.values())),
            "gradients": show_bytes(sum(one.gradient_bytes for one in held.values())),
            "stepped": show_count(sum(one.stepped_elements for one in held.values())),
        }
        rows.append({"rank": _ranks(ranks, survey), "mesh": where or "-", **sizes})
    made, several = _table(rows), len({survey.place(rank) for rank in range(survey.plan.world_size)})
    if several > len(rows):
        made.caption = f"the first and the last of {several} places; --json has all"
    return made


def _stages(survey: Survey) -> RenderableType:
    whole, plan, rows = sum(stage.cost for stage in survey.stages), survey.plan, list[dict[str, str]]()
    for at in drawn_places(len(survey.stages)):
        if at is None:
            rows.append({**dict.fromkeys(rows[0], ""), "stage": "..."})
            continue
        stage = survey.stages[at]
        ranks = [rank for rank in range(plan.world_size) if plan.coordinate(rank)["pp"] == stage.rank]
        units = ", ".join(name for name, _ in grouped(dict.fromkeys(stage.units, 0)))
        told = {"stage": str(stage.index), "ranks": runs(ranks), "units": units}
        rows.append({**told, "elements": show_count(stage.elements), "share of work": f"{stage.cost / whole:.0%}"})
    return _table(rows)


def _table(rows: Sequence[dict[str, str]]) -> Table:
    return table(rows, numbers=_NUMBERS, narrow=True)


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


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def grouped(names: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Return groups of names that differ only by numbers, with equal values, each as (one name for all, its names)."""
    families: dict[Hashable, list[str]] = {}
    for name, told in names.items():
        families.setdefault((_NUMBER.sub("{}", name), told), []).append(name)
    return [pair for members in families.values() for pair in _named(members)]


def runs(numbers: Iterable[int], most: int = 4) -> str:
    """Return ``0-3, 8`` for 0, 1, 2, 3, 8; of more runs than ``most`` the first and the last."""
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
