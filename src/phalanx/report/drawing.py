"""Drawings of a plan: a box a rank, and timelines of a pipeline, planned or measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Self

from rich import box
from rich.columns import Columns
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from phalanx.config import Plan
from phalanx.config.sync import weights, within
from phalanx.placement.batch_split import Lane, cuts, spans
from phalanx.placement.ownership import keeps_whole_gradients
from phalanx.placement.schedules import Action, Timed, holders
from phalanx.report.render import as_text
from phalanx.units import show_counted

MOST = 8  # boxes or ranks drawn; of more, the first and the last
Box = tuple[str, list[str]]  # title, lines


def draw(plan: Plan, *, batch: int, device: str, width: int = 80) -> str:
    """Return the plan as lines of at most ``width`` characters.

    Args:
        batch: samples in one optimizer step; every box shows its share as a slice.
        device: kind of device that each box is, such as ``cpu``.
    """
    ranks = [None if at is None else _box(plan, at, batch) for at in drawn_places(plan.devices)]
    boxes = [one or ("...", [f"{plan.devices - MOST + 1} more"]) for one in ranks]
    part = "all parameters" if plan.server == 1 else f"1/{plan.server} of the parameters"
    servers = [(f"server {index}", [part, "with their optimizer"]) for index in range(plan.server)]
    sharded = plan.kind == "shard" and plan.replicas <= MOST  # a row a replica
    drawn = as_text(*_rows(boxes, plan.fsdp if sharded else MOST), *_rows(servers, MOST), width=width)
    traffic = (fill(line, width, initial_indent="  ", subsequent_indent="    ") for line in _traffic(plan))
    return "\n".join([_headline(plan, batch, device), drawn, *traffic])


def _rows(boxes: Sequence[Box], a_row: int) -> Iterator[RenderableType]:
    tall = max((len(lines) for _, lines in boxes), default=0) + 2
    for first in range(0, len(boxes), a_row):
        panels = [
            Panel(Text("\n".join(lines)), box=box.SQUARE, title=title, title_align="left", height=tall)
            for title, lines in boxes[first : first + a_row]
        ]
        yield Columns(panels, equal=True)


def samples_of(plan: Plan, batch: int, part: int) -> tuple[int, int]:
    """Return the range of the global batch that ``part`` takes; with ``shares=auto``, in the first step."""
    return spans(batch, plan.replicas, weights(plan.shares))[part]


def _headline(plan: Plan, batch: int, device: str) -> str:
    who = show_counted(plan.world_size, "process")
    who += f" with {plan.threads} threads" if plan.kind == "threads" else ""
    who += f" and {show_counted(plan.server, 'server')}" if plan.server else ""
    return f"{plan}: {who} on {device}, {batch} samples a step"


def _box(plan: Plan, at: int, batch: int) -> Box:
    part = at if plan.kind == "threads" else plan.part(at)
    start, stop = samples_of(plan, batch, part)
    name = f"thread {at}" if plan.kind == "threads" else f"rank {at}"
    many = len(cuts(batch, Lane.of(plan, 0 if plan.kind == "threads" else at), plan.micro)[0])
    lines: list[str] = []
    if plan.replicas // plan.fsdp > 1:
        lines.append(f"replica {part // plan.fsdp} of {plan.replicas // plan.fsdp}")
    lines += _split(plan, at)
    if plan.fsdp > 1:
        piece = f"shard {part % plan.fsdp} of {plan.fsdp}"
        summed = not keeps_whole_gradients(plan.zero, many, plan.pp)
        for cut, what in ((plan.zero == 3, "parameters"), (summed, "gradients"), (True, "optimizer")):
            lines.append(f"{what:<10} {piece if cut else 'whole'}")
    elif not plan.splits_model:
        lines.append("whole model")
    at_first = " at first" if plan.shares == "auto" else ""
    lines.append(f"{stop - start} samples a piece" if plan.server else f"samples {start}:{stop}{at_first}")
    if many > 1:
        lines.append(f"in {many} micro-batches")
    return name, lines


def _split(plan: Plan, rank: int) -> list[str]:
    if not plan.splits_model:
        return []
    at, lines = plan.coordinate(rank), list[str]()
    if plan.pp > 1:
        ranks = holders(plan.schedule, plan.pp, plan.pp * plan.stages)
        stages = [stage for stage, holder in enumerate(ranks) if holder == at["pp"]]
        lines.append(f"stage {', '.join(map(str, stages))} of {plan.pp * plan.stages}")
    for axis, what in (("tp", "weights"), ("ep", "experts"), ("cp", "tokens")):
        if plan.mesh[axis] > 1:
            lines.append(f"{what:<10} slice {at[axis]} of {plan.mesh[axis]}")
    return lines


def _traffic(plan: Plan) -> list[str]:
    """Return a sentence for each exchange of data between ranks."""
    sent = "" if plan.compress == "none" else f", sent as {plan.compress}"
    if plan.server:
        late = "any number of" if plan.staleness == float("inf") else f"{plan.staleness:g}"
        waits = f"may lack {late} updates" if plan.staleness else "lack no update"
        pieces = f"{plan.dp - plan.backup} of its {plan.dp} pieces" if plan.backup else f"its {plan.dp} pieces"
        piece = f"each piece: its gradient goes to all servers{sent}; parameters come back"
        return [piece, f"these {waits}", f"each step: once {pieces} are in, servers add them up and step"]
    if plan.sync == "each":
        return [*_summed(plan), *([f"gradients are{sent.removeprefix(',')}"] if sent else [])]
    averaged = "parameters are averaged over replicas"
    if plan.sync == "diloco":
        averaged = f"changes of replicas are averaged and stepped ({plan.outer})"
    first = f"the first {plan.after} steps: gradients are summed over replicas" if plan.after else ""
    alone = "each step: every replica steps by itself" if plan.every > 1 else ""
    every = f"every {plan.every} steps" if plan.every > 1 else "each step"
    return [*_summed(within(plan)), *filter(None, (first, alone)), f"{every}: {averaged}{sent}"]


def _summed(plan: Plan) -> list[str]:
    if plan.kind in _SUMMED:
        return _SUMMED[plan.kind]
    lines = [line for axis, line in _WITHIN.items() if plan.mesh[axis] > 1]
    lines += [_BY_ZERO[plan.zero]] if plan.zero or plan.replicas * plan.cp > 1 else []
    return [*lines, *(["between replicas: each shard's gradients are summed"] if plan.dp > 1 and plan.zero else [])]


_SUMMED = {
    "threads": ["each step: gradients are added on the first device, which steps for all"],
    "replicate": ["each step: gradients are summed over ranks, divided once by the global count"],
    "single": [],
}
_WITHIN = {
    "pp": "each micro-batch: activations pass from stage to stage, their gradients back",
    "tp": "each block: sums over the slices of its weights, twice forward and twice backward",
    "ep": "each block of experts: tokens go to the rank of their expert and back",
    "cp": "each attention: keys and values meet the queries of all ranks",
}
_BY_ZERO = {
    0: "each step: gradients are summed over the replicas",
    1: "each step: gradients are summed over ranks, each rank steps its shard, parameters are gathered",
    2: "each step: each gradient is summed where its shard is kept and stepped, parameters are gathered",
    3: "each block: parameters are gathered when needed, then freed; gradients are summed where their shard is kept",
}

MEANINGS = {"F": "forward", "B": "backward", "I": "its half for inputs", "W": "its half for weights"}
_STYLES = {"F": "white on blue", "B": "white on dark_orange3", "I": "white on dark_orange3", "W": "white on purple4"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The actions of the ranks of one pipeline, with their times.

    Attributes:
        actions: each with its place along ``pp`` as rank, from 0.
        ranks: the rank of each place.
        seconds: True if times are seconds; else they are units of a stage's mean forward.
    """

    title: str
    actions: tuple[Timed, ...]
    ranks: tuple[int, ...]
    seconds: bool = False

    @classmethod
    def from_events(cls, events: Sequence[Mapping[str, Any]]) -> Self | None:
        """Return the timeline that the ``timeline`` events of a run hold; ``None`` without any action."""
        of_ranks = {event["rank"]: event for event in sorted(events, key=lambda event: event["rank"])}
        actions = [
            Timed(place, Action(kind, stage, micro), begin, end)
            for place, event in enumerate(of_ranks.values())
            for kind, stage, micro, begin, end in event["actions"]
        ]
        if not actions:
            return None
        title, in_order = f"measured: step {events[0]['step']}", sorted(actions, key=lambda one: (one.begin, one.rank))
        return cls(title=title, actions=tuple(in_order), ranks=tuple(of_ranks), seconds=True)

    @property
    def begin(self) -> float:
        return min(one.begin for one in self.actions)

    @property
    def micros(self) -> int:
        return 1 + max(one.action.micro for one in self.actions)

    @property
    def length(self) -> float:
        return max(one.end for one in self.actions) - self.begin

    @property
    def idle(self) -> float:
        """The share of the ranks' time without any of the actions, from 0 to 1."""
        busy = sum(one.end - one.begin for one in self.actions)
        return 1.0 - busy / (self.length * len(self.ranks)) if self.length else 0.0

    def to_dict(self) -> dict[str, Any]:
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
    """Return the numbers below ``count`` that are drawn; ``None`` stands for those left out."""
    return [*range(count)] if count <= MOST else [*range(MOST - 2), None, count - 1]


def lines(timeline: Timeline, width: int) -> Iterator[Text]:
    """Yield the timeline as lines of ``width`` characters: a line a stage, in the order of ranks."""
    rows: dict[str, list[Timed]] = {}
    stages = {(one.rank, one.action.stage) for one in timeline.actions}
    several = len(stages) > len(timeline.ranks)
    for place in drawn_places(len(timeline.ranks)):
        if place is None:
            rows[f"... {len(timeline.ranks) - MOST + 1} more ranks"] = []
        for stage in sorted(stage for rank, stage in stages if rank == place):
            name = f"rank {timeline.ranks[place or 0]}{f' stage {stage}' if several else ''}"
            rows[name] = [one for one in timeline.actions if one.rank == place and one.action.stage == stage]
    indent = max(map(len, rows)) + 1
    for name, mine in rows.items():
        line = _line(timeline, mine, max(width - indent, 10)) if mine else Text()
        yield Text(name.ljust(indent), style="" if mine else "dim") + line


def lost(timeline: Timeline, width: int) -> int:
    """Return the number of actions too short to be seen in ``width`` columns."""
    each, begin = timeline.length / max(width, 1), timeline.begin
    return sum(
        one.end > one.begin and round((one.begin - begin) / each) == round((one.end - begin) / each)
        for one in timeline.actions
    )


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
