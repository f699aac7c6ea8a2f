"""How ``phalanx checkpoint`` and ``check`` answer on a terminal; what is shown is what ``--json`` prints."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.report.tables import headed
from phalanx.units import show_bytes, show_count, show_seconds


def checkpoints_table(told: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> RenderableType:
    """A row for each checkpoint: ``step``, ``bytes``, ``time``, ``whole``; ``notes`` stand below."""
    table = headed(numbers=("step", "size"), after=("written", "files"))
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
    table = headed("tensor", "type", "shape", numbers=("size", "chunks"))
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


ALL = "all"


def host_table(answer: Mapping[str, Any]) -> RenderableType:
    """From the answer as JSON."""
    parts: list[RenderableType] = []
    if answer["hosts"]:
        parts += [_hosts(answer["hosts"])]
    if answer["links"]:
        parts += [Text(_links(answer["links"]), style="dim")]
    for one in answer["findings"]:
        word, style = ("fails", "bold red") if one["fails"] else ("warns", "yellow")
        parts += [Text.assemble("\n", (word, style), f"  {', '.join(one['hosts']) or ALL}: {one['what']}")]
        parts += [Text(f"       what to do: {one['fix']}", style="dim")]
    parts += [Text(f"\nnot looked at: {one}", style="dim") for one in answer["not_looked_at"]]
    return Group(*parts, Text.assemble("\n", _verdict(answer)))


def _verdict(answer: Mapping[str, Any]) -> tuple[str, str]:
    failing = sum(one["fails"] for one in answer["findings"])
    if failing:
        return f"training would fail: {failing} {'thing' if failing == 1 else 'things'} to put right", "bold red"
    if not answer["hosts"]:
        return "nothing that could be looked at would keep training from running", "bold"
    under = f" under {answer['plan']}" if answer["plan"] else ""
    return f"nothing found that would keep training from running there{under}", "bold green"


def _hosts(hosts: Sequence[Mapping[str, Any]]) -> Table:
    table = headed("host", "python", "torch", "devices", "memory", "disk", "data", "clock")
    for one in hosts:
        table.add_row(escape(one["name"]), *map(escape, _cells(one)))
    return table


def _cells(host: Mapping[str, Any]) -> list[str]:
    facts = host["facts"]
    if not facts:
        return ["-"] * 7
    devices, samples = facts["devices"], facts["samples"]
    kinds = sorted({device["name"] or "devices" for device in devices})
    read = "yes" if facts["data_read"] else "no" if facts["data_error"] else "-"
    ahead = host["ahead"]
    return [
        facts["python"],
        facts["versions"].get("torch", "-").partition("+")[0],
        f"{len(devices)} x {', '.join(kinds)}" if devices else f"{facts['cores']} cores",
        show_bytes(min((device["free"] for device in devices), default=facts["memory_free"])),
        show_bytes(facts["folder_free"]),
        f"{samples} samples" if samples >= 0 else read,
        "right" if abs(ahead) <= 1.0 else f"{'+' if ahead > 0 else '-'}{show_seconds(abs(ahead))}",
    ]


def _links(links: Sequence[Mapping[str, Any]]) -> str:
    measured = [one for one in links if not one["error"]]
    if not measured:
        return ""
    slowest = min(measured, key=lambda one: one["bandwidth"])
    fastest = max(measured, key=lambda one: one["bandwidth"])
    trip = max(measured, key=lambda one: one["latency"])
    return (
        f"links: {show_bytes(slowest['bandwidth'])}/s ({slowest['source']} to {slowest['target']}) to "
        f"{show_bytes(fastest['bandwidth'])}/s over TCP; round trips of up to {show_seconds(trip['latency'])}"
    )
