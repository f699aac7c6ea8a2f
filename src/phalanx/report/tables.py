"""Tables of a run, its settings, a scaling measurement, a proof, checkpoints and hosts."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.report.progress import WAITED_MUCH, result_text
from phalanx.report.render import facts, table
from phalanx.report.samples_seen import SamplesSeen
from phalanx.report.summary import PARTS, RunSummary
from phalanx.units import show_bytes, show_count, show_counted, show_names, show_seconds

_MOST_ROWS = 8  # of ranks beside each other
_MOST_INTERRUPTIONS = 3
_MOST_DIFFERING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value that a run uses.

    Attributes:
        source: ``argument``, ``run file``, ``job``, ``planner`` or ``default``.
        why: a sentence, or empty.
    """

    name: str
    value: str
    source: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """One plan of a scaling measurement; times are medians, ``speed_up`` is by samples/s over the first plan."""

    plan: str
    devices: int
    device: str
    step_seconds: float
    samples_per_second: float
    speed_up: float
    efficiency: float
    peak_bytes: int  # of the rank with most


def scaled(summary: RunSummary, base: RunSummary) -> Scaled:
    """Return the row of ``summary`` beside the run ``base``; both must have taken steps."""
    rate, reference = summary.samples_per_second or 0.0, base.samples_per_second or 0.0
    speed_up = rate / reference if reference else 0.0
    return Scaled(
        plan=summary.plan,
        devices=summary.devices,
        device=summary.device,
        step_seconds=summary.step_seconds or 0.0,
        samples_per_second=rate,
        speed_up=speed_up,
        efficiency=speed_up * base.devices / summary.devices,
        peak_bytes=max(summary.peak_bytes, default=0),
    )


def summary_table(summary: RunSummary, seen: SamplesSeen | None = None) -> RenderableType:
    """Return a finished run, one line a fact; with the answer of its ledger, if given."""
    groups, evaluation, rate = _alike(summary), summary.evaluation, summary.samples_per_second
    rows: dict[str, Any] = {
        "plan": f"{summary.plan} ({summary.devices} x {summary.device})",
        "steps": _steps(summary),
        "time per step": "" if summary.step_seconds is None else f"{show_seconds(summary.step_seconds)} (median)",
        "samples/s": "" if rate is None else show_count(rate),
        "waiting for data": _waited(summary),
        "pipeline": "" if summary.idle is None else f"{summary.idle:.0%} of its ranks' time idle, in the timed step",
        "averagings": summary.averagings,
        **(summary.serving.rows if summary.serving else {}),
        "gradients sent": _sent(summary),
        "shares": _shares(summary),
        "last loss": "" if summary.loss is None else f"{summary.loss:.6g}",
        "evaluation": evaluation and f"{result_text(evaluation)}  ({evaluation['samples']} samples)",
        "peak memory": _by_rank(summary.peak_bytes),
    }
    if len(groups) == 1:
        held = ", ".join(f"{part} {show_bytes(size)}" for part, size in summary.memory[0].items() if size)
        rows["in it"] = f"{held}{'  (each rank)' if len(summary.memory) > 1 else ''}"
    often, last = len(summary.interruptions), "\n".join(summary.interruptions[-_MOST_INTERRUPTIONS:])
    many = f"{often} times, at last:\n" if often > _MOST_INTERRUPTIONS else ""
    rows |= {"checkpoint": summary.checkpoint, "interrupted": many + last, "run folder": summary.folder}
    if seen:
        rows["ledger"] = Text(f"{seen.question}: {seen.answer}", style="" if seen.once else "red")
    return Group(facts(rows), memory_table(summary)) if len(groups) > 1 else facts(rows)


def _steps(summary: RunSummary) -> str:
    taken = summary.step - summary.first_step
    if summary.first_step and not taken:
        return f"none left: all {summary.step} had been taken before (--steps or --epochs allows more)"
    return f"{taken} (from {summary.first_step} to {summary.step})" if summary.first_step else str(taken)


def _waited(summary: RunSummary) -> str:
    if summary.waited is None or summary.waited < WAITED_MUCH:
        return ""
    more = f"workers={summary.load_workers + 2} in the job loads ahead in processes of their own"
    more += f"; there are {summary.load_workers}" if summary.load_workers else ""
    return f"{summary.waited:.0%} of rank 0's time ({more})"


def _sent(summary: RunSummary) -> str:
    if not sum(summary.sent):
        return ""
    sent, whole = (sum(each) / len(each) for each in (summary.sent, summary.whole))
    return f"{show_bytes(sent)} by each rank in place of {show_bytes(whole)} ({whole / sent:.1f}x less)"


def _shares(summary: RunSummary) -> str:
    if not summary.shares:
        return ""
    moved = f", after {show_counted(summary.moves, 'change')}" if summary.moves else ""
    return f"{show_names(list(map(str, summary.shares)), _MOST_ROWS)} samples of a batch{moved}{summary.slowest}"


def _by_rank(peaks: Sequence[int]) -> str:
    if len(peaks) <= _MOST_ROWS:
        return ", ".join(map(show_bytes, peaks)) + "  (by rank)" * (len(peaks) > 1)
    return f"{show_bytes(min(peaks))} to {show_bytes(max(peaks))} on {len(peaks)} ranks"


def _alike(summary: RunSummary) -> list[tuple[int, int]]:
    """Return first and last of neighbouring ranks with the same memory by part."""
    groups: list[tuple[int, int]] = []
    for rank, parts in enumerate(summary.memory):
        if groups and parts == summary.memory[rank - 1]:
            groups[-1] = (groups[-1][0], rank)
        else:
            groups.append((rank, rank))
    return groups


def memory_table(summary: RunSummary) -> RenderableType:
    """Return each rank's memory by part: a row for neighbours that hold the same, or the least and the most."""
    groups = {f"{first}" if first == last else f"{first} to {last}": (first, last) for first, last in _alike(summary)}
    if not groups:
        return Text("This run's log does not say what its memory held.", style="dim")
    held = [{**parts, "peak": peak} for parts, peak in zip(summary.memory, summary.peak_bytes, strict=True)]
    parts = [part for part in (*PARTS, "peak") if part == "peak" or any(each[part] for each in held)]
    chosen: dict[str, Mapping[str, int]] = {}
    if len(groups) <= _MOST_ROWS:
        for name, (first, last) in groups.items():
            chosen[name] = {**held[first], "peak": max(each["peak"] for each in held[first : last + 1])}
    else:
        for name, choose in (("least", min), ("most", max)):
            chosen[name] = {part: choose(each[part] for each in held) for part in parts}
    rows = [{"rank": name, **{part: show_bytes(row[part]) for part in parts}} for name, row in chosen.items()]
    return table(rows, numbers=parts)


def seen_table(result: SamplesSeen) -> RenderableType:
    """Return the answer of a ledger, and everything that is wrong."""
    data = "a stream" if result.samples is None else f"{result.samples} samples"
    over = f"{data}, {result.batch} a step, {result.steps} steps recorded in {result.folder}"
    answer = (result.answer, "bold green") if result.once else ("no", "bold red")
    return Group(
        Text.assemble(f"{result.question}: ", answer),
        *(Text(f"  {sentence}") for sentence in result.wrong),
        Text(over, style="dim"),
        *(Text(note, style="yellow") for note in result.notes),
    )


def settings_table(settings: Sequence[Setting]) -> RenderableType:
    """Return each value and its source."""
    rows = [{"setting": one.name, "value": one.value, "from": one.source} for one in settings]
    return table(rows, styles=[None if one.source == "argument" else "dim" for one in settings])


def scaling_table(rows: Sequence[Scaled]) -> RenderableType:
    """Return plans beside each other."""
    numbers = ("devices", "time\nper step", "samples/s", "speed-up", "efficiency", "peak memory\nof a rank")
    told = [
        {"plan": row.plan, **dict(zip(numbers, (f"{row.devices} {row.device}", *scaled_cells(row)), strict=True))}
        for row in rows
    ]
    return table(told, numbers=numbers, narrow=True)


def scaled_cells(row: Scaled) -> tuple[str, str, str, str, str]:
    """Return time, pace, speed-up, efficiency and memory as text."""
    peak = f"{row.peak_bytes / 2**20:.0f} MiB" if row.peak_bytes < 10 * 2**30 else show_bytes(row.peak_bytes)
    speed = f"{row.speed_up:.2f}", f"{row.efficiency:.0%}"
    return show_seconds(row.step_seconds), show_count(row.samples_per_second), *speed, peak


_COMPARED = {
    "copies": "copies of tensors on other ranks",
    "initial": "parameters and buffers before the first step",
    "loss": "loss of each step",
    "scale": "all gradients together, in the first steps",
    "gradient": "gradients, reduced",
    "used": "gradients that the optimizer was given",
    "parameter": "parameters, after the first and the last update",
    "average": "the average of the weights",
    "buffer": "buffers",
    "state": "optimizer state",
    "exact": "learning rates, counts, options, what ranks tell",
    "evaluation": "evaluations",
    "checkpoint": "tensors of the checkpoint, read back and loaded",
}


def proof_table(proof: dict[str, Any]) -> RenderableType:
    """Return a proof, from ``to_dict``: the answer, each comparison with its bound, and the cause of a difference."""
    rows, styles = list[dict[str, str]](), list[str | None]()
    for kind in dict.fromkeys((*_COMPARED, *(check["kind"] for check in proof["checks"]))):
        checks = [check for check in proof["checks"] if check["kind"] == kind]
        if checks:
            worst = max(checks, key=lambda one: one["largest"] / (one["allowed"] or 1.0))
            many, largest = str(sum(check["many"] for check in checks)), f"{worst['largest']:.1e}"
            told = {"compared": _COMPARED.get(kind, kind), "how many": many}
            told["largest difference"] = "" if kind == "exact" else largest
            rows.append(told | {"allowed": f"{worst['allowed']:.1e}" if worst["allowed"] else "the same"})
            styles.append("red" if any(check["first"] for check in checks) else None)
    numbers = ("how many", "largest difference", "allowed")
    parts: list[RenderableType] = [*_verdict(proof), table(rows, numbers=numbers, styles=styles), *_differing(proof)]
    if late := proof.get("late"):
        more = f"{proof['asked']} steps were asked for, {proof['steps']} taken: the first gradient of {late[0]} came"
        parts.append(Text(f"{more} in step {late[1]}", style="dim"))
    if silent := proof["not_compared"]:
        many = show_counted(len(silent), "parameter")
        text = f"not compared: {many} whose gradient is zero but for rounding ({show_names(silent, 4)})"
        parts.append(Text(text, style="dim"))
    if never := proof["never"]:
        text = f"never had a gradient in {proof['steps']} steps, so not compared: {show_names(never, 4)}"
        parts.append(Text(f"{text}; --steps {2 * proof['steps']} may reach a first one", style="yellow"))
    return Group(*parts)


def _differing(proof: dict[str, Any]) -> list[RenderableType]:
    """Return the tensors that differ, the largest first: gradients, or parameters if all gradients are equal."""
    for kind, field in (("gradient", "gradients"), ("parameter", "parameters")):
        wrong = [one for one in proof[field] if not one.get("relative", 0.0) <= one.get("allowed", 0.0)]
        if not wrong:
            continue
        rows = [
            {
                f"{kind} of": one["name"],
                "differs by": f"{one['relative']:.1e}",
                "× one device's": f"{one['ratio']:.4g}",
                "where": one["where"] or "everywhere",
            }
            for one in sorted(wrong, key=lambda one: -one["relative"])[:_MOST_DIFFERING]
        ]
        more = len(wrong) - _MOST_DIFFERING
        rest = [Text(f"and {more} more; --json lists all", style="dim")] if more > 0 else []
        return [table(rows, numbers=("differs by", "× one device's")), *rest]
    return []


def _verdict(proof: dict[str, Any]) -> list[RenderableType]:
    over = f"{proof['plan']} and {proof['reference'] or 'one device'}, over {proof['steps']} steps"
    if proof["equal"]:
        return [Text.assemble(("equal", "bold green"), f": {over}")]
    said = Text.assemble(("not equal", "bold red"), f": {over}")
    return [said, facts({"first": proof["first"], "likely cause": proof["cause"]})]


def checkpoints_table(told: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> RenderableType:
    """Return a row for each checkpoint: ``step``, ``bytes``, ``time``, ``whole``; ``notes`` follow."""
    rows: list[dict[str, Any]] = []
    for one in told:
        written = datetime.datetime.fromtimestamp(one["time"]).isoformat(" ", "seconds") if one["time"] else "unknown"
        state = Text("complete") if one["whole"] else Text("not complete", style="bold red")
        rows.append({"step": one["step"], "size": show_bytes(one["bytes"]), "written": written, "files": state})
    return Group(table(rows, numbers=("step", "size")), *map(Text, notes))


def pruned_notes(deleted: int, damaged: Mapping[str, Sequence[str]], kept: str | None) -> list[str]:
    """Return sentences about a pruning: deletions, and ``damaged`` checkpoints newer than ``kept``, the whole one."""
    notes = [f"{deleted} deleted"] if deleted else []
    notes += [f"{name} is damaged: {wrong[0]}" for name, wrong in damaged.items()]
    if damaged:
        notes.append(f"{kept} stays as the newest whole one" if kept else "none is whole")
    return notes


def contents_table(told: Mapping[str, Any]) -> RenderableType:
    """Return the contents of one checkpoint: its facts, then a row for each tensor."""
    rows = [
        {
            "tensor": name,
            "type": one["dtype"],
            "shape": " x ".join(map(str, one["shape"])) or "one number",
            "size": show_bytes(one["bytes"]),
            "chunks": show_count(one["chunks"]),
        }
        for name, one in told["tensors"].items()
    ]
    head = {name: told[name] for name in ("path", "step", "samples", "files")}
    return Group(facts(head | {"bytes": show_bytes(told["bytes"])}), table(rows, numbers=("size", "chunks")))


def verified_table(problems: Mapping[str, Sequence[str]]) -> RenderableType:
    """Return each checkpoint with its faults."""
    lines: list[Text] = []
    for name, wrong in problems.items():
        lines.append(Text.assemble(f"{name}: ", ("damaged", "bold red") if wrong else ("whole", "green")))
        lines += [Text(f"    {one}") for one in wrong]
    return Group(*lines)


def host_table(answer: Mapping[str, Any]) -> RenderableType:
    """Return a check of hosts, from its answer as JSON."""
    parts: list[RenderableType] = [table([_host(one) for one in answer["hosts"]])] if answer["hosts"] else []
    if measured := [one for one in answer["links"] if not one["error"]]:
        slowest = min(measured, key=lambda one: one["bandwidth"])
        fastest = max(one["bandwidth"] for one in measured)
        trip = show_seconds(max(one["latency"] for one in measured))
        between = f"{show_bytes(slowest['bandwidth'])}/s ({slowest['source']} to {slowest['target']})"
        said = f"links: {between} to {show_bytes(fastest)}/s over TCP; round trips of up to {trip}"
        parts.append(Text(said, style="dim"))
    for one in answer["findings"]:
        word, style = ("fails", "bold red") if one["fails"] else ("warns", "yellow")
        parts.append(Text.assemble("\n", (word, style), f"  {', '.join(one['hosts']) or 'all'}: {one['what']}"))
        parts.append(Text(f"       what to do: {one['fix']}", style="dim"))
    parts += [Text(f"\nnot looked at: {one}", style="dim") for one in answer["not_looked_at"]]
    if failing := sum(one["fails"] for one in answer["findings"]):
        end = f"training would fail: {show_counted(failing, 'thing')} to put right", "bold red"
    elif not answer["hosts"]:
        end = "nothing that could be looked at would keep training from running", "bold"
    else:
        under = f" under {answer['plan']}" if answer["plan"] else ""
        end = f"nothing found that would keep training from running there{under}", "bold green"
    return Group(*parts, Text.assemble("\n", end))


def _host(host: Mapping[str, Any]) -> dict[str, str]:
    headings, known = ("python", "torch", "devices", "memory", "disk", "data", "clock"), host["facts"]
    if not known:
        return {"host": host["name"], **dict.fromkeys(headings, "-")}
    devices, samples = known["devices"], known["samples"]
    kinds = sorted({device["name"] or "devices" for device in devices})
    read = "yes" if known["data_read"] else "no" if known["data_error"] else "-"
    ahead = host["ahead"]
    cells = (
        known["python"],
        known["versions"].get("torch", "-").partition("+")[0],
        f"{len(devices)} x {', '.join(kinds)}" if devices else f"{known['cores']} cores",
        show_bytes(min((device["free"] for device in devices), default=known["memory_free"])),
        show_bytes(known["folder_free"]),
        f"{samples} samples" if samples >= 0 else read,
        "right" if abs(ahead) <= 1.0 else f"{'+' if ahead > 0 else '-'}{show_seconds(abs(ahead))}",
    )
    return {"host": host["name"], **dict(zip(headings, cells, strict=True))}
