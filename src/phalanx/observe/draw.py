"""Draws a plan as text: each rank a box with what it holds, and under them what passes between the boxes."""

from __future__ import annotations

from dataclasses import replace

from phalanx.data.shares import Lane, cuts, spans
from phalanx.spec import Plan
from phalanx.spec.keys import APART
from phalanx.spec.shares import weights

_MOST = 8  # boxes drawn; of more, the first and the last

Box = tuple[str, list[str]]  # title, lines


def draw(plan: Plan, *, batch: int, device: str, width: int = 80) -> str:
    """The plan as lines of at most ``width`` characters.

    Args:
        plan: what to draw.
        batch: samples in one optimizer step, of which every box shows its share as a slice.
        device: kind of device that each box is, such as ``cpu``.
        width: of the terminal.
    """
    rows = [*_rows(boxes(plan, batch), plan, width), *_rows(servers(plan), plan, width)]
    parts = [line for row in rows for line in _beside(row)]
    return "\n".join([_headline(plan, batch, device), *parts, *(f"  {line}" for line in _traffic(plan))])


def boxes(plan: Plan, batch: int) -> list[Box]:
    """Each rank's title and lines; of very many ranks those of the first and the last."""
    if plan.devices <= _MOST:
        return [_box(plan, box, batch) for box in range(plan.devices)]
    first = [_box(plan, box, batch) for box in range(_MOST - 2)]
    left_out = plan.devices - _MOST + 1
    return [*first, ("...", [f"{left_out} more"]), _box(plan, plan.devices - 1, batch)]


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
    lines: list[str] = []
    if plan.replicas // plan.fsdp > 1:
        lines.append(f"replica {part // plan.fsdp} of {plan.replicas // plan.fsdp}")
    lines += _split(plan, box)
    if plan.fsdp > 1:
        piece = f"shard {part % plan.fsdp} of {plan.fsdp}"
        for stage, what in ((3, "parameters"), (2, "gradients"), (1, "optimizer")):
            lines.append(f"{what:<10} {piece if plan.zero >= stage else 'whole'}")
    elif not plan.splits_model:
        lines.append("whole model")
    at_first = " at first" if plan.shares == "auto" else ""
    lines.append(f"{stop - start} samples a piece" if plan.server else f"samples {start}:{stop}{at_first}")
    if plan.micro and (many := _micros(plan, box, batch)) > 1:
        lines.append(f"in {many} micro-batches")
    return name, lines


def _micros(plan: Plan, box: int, batch: int) -> int:
    return len(cuts(batch, Lane.of(plan, 0 if plan.kind == "threads" else box), plan.micro)[0])


def _split(plan: Plan, rank: int) -> list[str]:
    """What of each replica a rank holds, where one is several ranks."""
    if not plan.splits_model:
        return []
    at, lines = plan.coordinate(rank), list[str]()
    if plan.pp > 1:
        v_shaped = plan.schedule in ("zbv", "dualpipev")
        every = [at["pp"] + turn * plan.pp for turn in range(plan.stages)]
        stages = [at["pp"], 2 * plan.pp - 1 - at["pp"]] if v_shaped else every
        lines.append(f"stage {', '.join(map(str, stages))} of {plan.pp * plan.stages}")
    for axis, what in (("tp", "weights"), ("ep", "experts"), ("cp", "tokens")):
        if plan.mesh[axis] > 1:
            lines.append(f"{what:<10} slice {at[axis]} of {plan.mesh[axis]}")
    return lines


def _rows(boxes: list[Box], plan: Plan, width: int) -> list[list[Box]]:
    """Boxes by rows: a row a replica where it is sharded, else as many as fit."""
    wide = max((_width(box) for box in boxes), default=0) + 1
    most = max(1, width // wide)
    if plan.kind == "shard" and plan.fsdp <= most and plan.replicas <= _MOST:
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
        drawn.append(
            [
                f"┌ {title} {'─' * (wide - len(title) - 4)}┐",
                *(f"│ {line:<{wide - 4}} │" for line in body),
                f"└{'─' * (wide - 2)}┘",
            ]
        )
    return [" ".join(cells) for cells in zip(*drawn, strict=True)]


def _traffic(plan: Plan) -> list[str]:
    """What passes between the boxes in one step, in order."""
    if plan.server:
        return _served(plan)
    if plan.sync != "each":
        return _averaged(plan)
    sent = [f"gradients are sent as {plan.compress}"] if plan.compress != "none" else []
    return [*_summed(plan), *sent]


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
    inner = replace(plan, dp=1, **{name: getattr(Plan(), name) for name in APART})
    what = "parameters are averaged over replicas"
    if plan.sync == "diloco":
        what = f"what replicas learnt is averaged and stepped ({plan.outer})"
    how = [f"    a part of {plan.fragments} at a time, in turn"] if plan.fragments > 1 else []
    how += [] if plan.compress == "none" else [f"    sent as {plan.compress}"]
    before = [f"the first {plan.after} steps: gradients are summed over replicas"] if plan.after else []
    each = "each step: every replica steps by itself" if plan.every > 1 else ""
    every = f"every {plan.every} steps" if plan.every > 1 else "each step"
    return [*_summed(inner), *before, *filter(None, [each]), f"{every}: {what}", *how]


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
