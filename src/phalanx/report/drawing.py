"""Drawings of a plan: each rank a box with what it holds, and timelines of a pipeline, planned or measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from phalanx.config import Plan
from phalanx.config.sync import weights, within
from phalanx.placement.batch_split import Lane, cuts, spans
from phalanx.placement.ownership import keeps_whole_gradients
from phalanx.placement.schedules import Timed, holders

MOST = 8  # boxes or ranks drawn; of more, the first and the last
Box = tuple[str, list[str]]  # title, lines


def draw(plan: Plan, *, batch: int, device: str, width: int = 80) -> str:
    """The plan as lines of at most ``width`` characters.

    Args:
        batch: samples in one optimizer step, of which every box shows its share as a slice.
        device: kind of device that each box is, such as ``cpu``.
    """
    rows = [*_box_rows(boxes(plan, batch), plan, width), *_box_rows(servers(plan), plan, width)]
    parts = [line for row in rows for line in _beside(row)]
    return "\n".join([_headline(plan, batch, device), *parts, *(f"  {line}" for line in _traffic(plan))])


def boxes(plan: Plan, batch: int) -> list[Box]:
    """Each rank's title and lines; of very many ranks those of the first and the last."""
    if plan.devices <= MOST:
        return [_box(plan, box, batch) for box in range(plan.devices)]
    first = [_box(plan, box, batch) for box in range(MOST - 2)]
    return [*first, ("...", [f"{plan.devices - MOST + 1} more"]), _box(plan, plan.devices - 1, batch)]


def servers(plan: Plan) -> list[Box]:
    """Each parameter server's title and lines."""
    part = "all parameters" if plan.server == 1 else f"1/{plan.server} of the parameters"
    lines = [part, "with their optimizer"]
    return [
        (f"server {index}", [*lines, *(["deals pieces out"] if index == 0 else [])]) for index in range(plan.server)
    ]


def samples_of(plan: Plan, batch: int, part: int) -> tuple[int, int]:
    """The range of the global batch that ``part`` takes; at first, where shares follow speeds."""
    return spans(batch, plan.replicas, weights(plan.shares))[part]


def _headline(plan: Plan, batch: int, device: str) -> str:
    if plan.kind == "threads":
        who = f"1 process with {plan.threads} threads"
    else:
        who = f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
        who += f" and {plan.server} server{'s' if plan.server > 1 else ''}" if plan.server else ""
    return f"{plan}: {who} on {device}, {batch} samples a step"


def _box(plan: Plan, box: int, batch: int) -> Box:
    part = box if plan.kind == "threads" else plan.part(box)
    start, stop = samples_of(plan, batch, part)
    name = f"thread {box}" if plan.kind == "threads" else f"rank {box}"
    many = len(cuts(batch, Lane.of(plan, 0 if plan.kind == "threads" else box), plan.micro)[0])
    lines: list[str] = []
    if plan.replicas // plan.fsdp > 1:
        lines.append(f"replica {part // plan.fsdp} of {plan.replicas // plan.fsdp}")
    lines += _split(plan, box)
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


def _box_rows(boxes: list[Box], plan: Plan, width: int) -> list[list[Box]]:
    """Boxes by rows: a row a replica where it is sharded, else as many as fit."""
    most = max(1, width // (max((_width(box) for box in boxes), default=0) + 1))
    if plan.kind == "shard" and plan.fsdp <= most and plan.replicas <= MOST:
        most = plan.fsdp
    return [boxes[first : first + most] for first in range(0, len(boxes), most)]


def _width(box: Box) -> int:
    title, lines = box
    return max(len(title) + 5, *(len(line) + 4 for line in lines))


def _beside(row: list[Box]) -> list[str]:
    """The lines of several boxes side by side, all of one size."""
    wide = max(_width(box) for box in row)
    tall = max(len(lines) for _, lines in row)
    drawn: list[list[str]] = []
    for title, lines in row:
        body = [*lines, *[""] * (tall - len(lines))]
        top, bottom = f"┌ {title} {'─' * (wide - len(title) - 4)}┐", f"└{'─' * (wide - 2)}┘"
        drawn.append([top, *(f"│ {line:<{wide - 4}} │" for line in body), bottom])
    return [" ".join(cells) for cells in zip(*drawn, strict=True)]


def _traffic(plan: Plan) -> list[str]:
    if plan.server:
        return _served(plan)
    if plan.sync != "each":
        return _averaged(plan)
    return [*_summed(plan), *([f"gradients are sent as {plan.compress}"] if plan.compress != "none" else [])]


def _served(plan: Plan) -> list[str]:
    late = "any number of" if plan.staleness == float("inf") else f"{plan.staleness:g}"
    sent = "" if plan.compress == "none" else f" as {plan.compress}"
    waits = f"may lack {late} updates" if plan.staleness else "lack no update"
    ends = f"{plan.dp - plan.backup} of its {plan.dp} pieces" if plan.backup else f"its {plan.dp} pieces"
    return [
        f"each piece: its gradient goes to all servers{sent},",
        f"            parameters come back, which {waits}",
        f"each step:  once {ends} are in, servers add them up and step",
    ]


def _averaged(plan: Plan) -> list[str]:
    what = "parameters are averaged over replicas"
    if plan.sync == "diloco":
        what = f"what replicas learnt is averaged and stepped ({plan.outer})"
    how = [] if plan.compress == "none" else [f"    sent as {plan.compress}"]
    before = [f"the first {plan.after} steps: gradients are summed over replicas"] if plan.after else []
    each = "each step: every replica steps by itself" if plan.every > 1 else ""
    every = f"every {plan.every} steps" if plan.every > 1 else "each step"
    return [*_summed(within(plan)), *before, *filter(None, [each]), f"{every}: {what}", *how]


def _summed(plan: Plan) -> list[str]:
    if plan.kind == "threads":
        return ["each step: gradients are added on the first device, which steps for all"]
    if plan.kind == "replicate":
        return ["each step: gradients are summed over ranks, divided once by the global count"]
    if plan.kind == "single":
        return []
    lines = {
        0: ["each step: gradients are summed over the replicas"] if plan.replicas * plan.cp > 1 else [],
        1: [
            "each step: gradients are summed over ranks, each rank steps its shard,",
            "           parameters are gathered",
        ],
        2: [
            "each step: each gradient is summed where its shard is kept and stepped,",
            "           parameters are gathered",
        ],
        3: [
            "each block: parameters are gathered when needed and let go after,",
            "            gradients are summed where their shard is kept",
        ],
    }[plan.zero]
    if plan.dp > 1 and plan.zero:
        lines = [*lines, "between replicas: each shard's gradients are summed"]
    return [*(line for axis, line in _WITHIN.items() if plan.mesh[axis] > 1), *lines]


_WITHIN = {
    "pp": "each micro-batch: activations pass from stage to stage, their gradients back",
    "tp": "each block: sums over the slices of its weights, twice forward and twice backward",
    "ep": "each block of experts: tokens go to the rank of their expert and back",
    "cp": "each attention: keys and values meet the queries of all ranks",
}


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
    rows: list[tuple[int | None, int]] = []
    for place in drawn_places(len(timeline.ranks)):
        stages = sorted({one.action.stage for one in timeline.actions if one.rank == place})
        rows += [(place, stage) for stage in stages] if place is not None else [(None, 0)]
    several, left_out = len(rows) > len(timeline.ranks), f"... {len(timeline.ranks) - MOST + 1} more ranks"
    names = [
        left_out if place is None else f"rank {timeline.ranks[place]}{f' stage {stage}' if several else ''}"
        for place, stage in rows
    ]
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
