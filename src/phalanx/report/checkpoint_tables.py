"""How ``phalanx checkpoint`` answers on a terminal; what is shown is what ``--json`` prints."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.units import show_bytes, show_count


def checkpoints_table(told: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> RenderableType:
    """A row for each checkpoint: ``step``, ``bytes``, ``time``, ``whole``; ``notes`` stand below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in (("step", True), ("size", True), ("written", False), ("files", False)):
        table.add_column(name, justify="right" if right else "left")
    for one in told:
        written = datetime.datetime.fromtimestamp(one["time"]).isoformat(" ", "seconds") if one["time"] else "unknown"
        state = Text("complete") if one["whole"] else Text("not complete", style="bold red")
        table.add_row(str(one["step"]), show_bytes(one["bytes"]), written, state)
    return Group(table, *(Text(note) for note in notes)) if notes else table


def pruned_notes(deleted: int, damaged: Mapping[str, Sequence[str]], kept: str | None) -> list[str]:
    """What a pruning has done, and why one stays that is older: ``damaged`` are newer than ``kept``, the whole one."""
    notes = [f"{deleted} deleted"] if deleted else []
    notes += [f"{name} is damaged: {wrong[0]}" for name, wrong in damaged.items()]
    if damaged:
        notes.append(f"{kept} stays as the newest whole one" if kept else "none is whole")
    return notes


def contents_table(told: Mapping[str, Any]) -> RenderableType:
    """What one checkpoint holds: its facts, then a row for each tensor."""
    facts = Table.grid(padding=(0, 2))
    for name in ("path", "step", "samples", "files", "bytes"):
        value = told[name]
        facts.add_row(name, escape(show_bytes(value) if name == "bytes" else str(value)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tensor", "type", "shape", "size", "chunks"):
        table.add_column(name, justify="right" if name in ("size", "chunks") else "left", overflow="fold")
    for name, one in told["tensors"].items():
        shape = " x ".join(map(str, one["shape"])) or "one number"
        table.add_row(escape(name), one["dtype"], shape, show_bytes(one["bytes"]), show_count(one["chunks"]))
    return Group(facts, table)


def verified_table(problems: Mapping[str, Sequence[str]]) -> RenderableType:
    """Checkpoint → what is wrong with it."""
    lines: list[Text] = []
    for name, wrong in problems.items():
        whole = Text("whole", style="green") if not wrong else Text("damaged", style="bold red")
        lines.append(Text.assemble(f"{name}: ", whole))
        lines += [Text(f"    {one}") for one in wrong]
    return Group(*lines)
