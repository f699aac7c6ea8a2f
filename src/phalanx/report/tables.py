"""The tables and short texts that the command line ends with, and the console that shows them.

What they show is what ``--json`` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from phalanx.report.progress import WAITED_MUCH, result_text
from phalanx.report.samples_seen import SamplesSeen
from phalanx.report.summary import PARTS, RunSummary, run_log
from phalanx.units import show_bytes, show_count, show_names, show_seconds, visible

_MOST_ROWS = 8  # of ranks beside each other
_MOST_INTERRUPTIONS = 3


@final
class PlainConsole(Console):
    """A rich console on stdout, or with ``stderr=True`` on stderr.

    Control characters in a name or a message that somebody else wrote are shown as text; colours are the console's own.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """What rich renders, with control characters shown as escapes."""
        for segment in super().render(renderable, options):
            if segment.control or (text := visible(segment.text)) is segment.text:
                yield segment
            else:
                yield Segment(text, segment.style)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value that a run uses, and who gave it.

    Attributes:
        source: ``argument``, ``run file``, ``job``, ``planner`` or ``default``.
        why: in a sentence; empty where there is nothing to say.
    """

    name: str
    value: str
    source: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """One plan of a scaling measurement; times are medians, ``speed_up`` is that of samples/s over the first plan's.

    Attributes:
        peak_bytes: largest memory of any rank.
    """

    plan: str
    devices: int
    device: str
    step_seconds: float
    samples_per_second: float
    speed_up: float
    efficiency: float
    peak_bytes: int


def scaled(summary: RunSummary, base: RunSummary) -> Scaled:
    """The row of ``summary`` beside the run ``base``; both must have taken steps."""
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
    """A finished run, one line a fact; with what its ledger shows, if given."""
    rows = [("plan", f"{summary.plan} ({summary.devices} x {summary.device})"), ("steps", _steps(summary))]
    if summary.step_seconds is not None and summary.samples_per_second is not None:
        rows += [
            ("time per step", f"{show_seconds(summary.step_seconds)} (median)"),
            ("samples/s", show_count(summary.samples_per_second)),
        ]
    if summary.waited is not None and summary.waited >= WAITED_MUCH:
        more = f"workers={summary.load_workers + 2} in the job loads ahead in processes of their own"
        more += f"; there are {summary.load_workers}" if summary.load_workers else ""
        rows.append(("waiting for data", f"{summary.waited:.0%} of rank 0's time ({more})"))
    if summary.idle is not None:
        rows.append(("pipeline", f"{summary.idle:.0%} of its ranks' time idle, in the step that was timed"))
    if summary.averagings is not None:
        rows.append(("averagings", str(summary.averagings)))
    if summary.serving is not None:
        rows += summary.serving.rows
    if sum(summary.sent):
        sent, whole = (sum(each) / len(each) for each in (summary.sent, summary.whole))
        text = f"{show_bytes(sent)} by each rank in place of {show_bytes(whole)} ({whole / sent:.1f}x less)"
        rows.append(("gradients sent", text))
    if summary.shares:
        moved = f", after {summary.moves} change{'s' if summary.moves > 1 else ''}" if summary.moves else ""
        samples = f"{show_names(list(map(str, summary.shares)), _MOST_ROWS)} samples of a batch"
        rows.append(("shares", samples + moved + summary.slowest))
    if summary.loss is not None:
        rows.append(("last loss", f"{summary.loss:.6g}"))
    if summary.evaluation:
        rows.append(("evaluation", f"{result_text(summary.evaluation)}  ({summary.evaluation['samples']} samples)"))
    if summary.peak_bytes:
        rows.append(("peak memory", _by_rank(summary.peak_bytes)))
    if len(_alike(summary)) == 1:
        held = ", ".join(f"{part} {show_bytes(size)}" for part, size in summary.memory[0].items() if size)
        rows.append(("in it", f"{held}{'  (each rank)' if len(summary.memory) > 1 else ''}"))
    if summary.checkpoint:
        rows.append(("checkpoint", summary.checkpoint))
    if summary.interruptions:
        last = "\n".join(summary.interruptions[-_MOST_INTERRUPTIONS:])
        often = f"{len(summary.interruptions)} times, at last:\n" * (len(summary.interruptions) > _MOST_INTERRUPTIONS)
        rows.append(("interrupted", often + last))
    rows.append(("run folder", summary.folder))
    table = _grid()
    for name, value in rows:
        table.add_row(name, escape(value))
    if seen:
        table.add_row("ledger", escape(f"{seen.question}: {seen.answer}"), style=None if seen.once else "red")
    return Group(table, memory_table(summary)) if len(_alike(summary)) > 1 else table


def memory_table(summary: RunSummary) -> RenderableType:
    """What each rank's memory held, by part: a row for neighbours that hold the same, or the least and the most."""
    groups = _alike(summary)
    parts = [part for part in PARTS if any(each[part] for each in summary.memory)]
    table = headed("rank", numbers=(*parts, "peak"))
    if not groups:
        return Text("This run's log does not say what its memory held.", style="dim")
    if len(groups) <= _MOST_ROWS:
        for first, last in groups:
            cells = [show_bytes(summary.memory[first][part]) for part in parts]
            name = f"{first}" if first == last else f"{first} to {last}"
            table.add_row(name, *cells, show_bytes(max(summary.peak_bytes[first : last + 1])))
        return table
    for name, choose in (("least", min), ("most", max)):
        cells = [show_bytes(choose(each[part] for each in summary.memory)) for part in parts]
        table.add_row(name, *cells, show_bytes(choose(summary.peak_bytes)))
    return table


def troubles(folder: Path) -> list[str]:
    """What the log of the run in ``folder`` says went wrong in its last part, in words; empty where nothing did."""
    part = run_log(folder).part
    found = [f"{event['event']}: {event['message']}" for event in part if event["event"] == "error"]
    found += [event["message"] for event in part if event["event"] == "warning" and "drifted apart" in event["message"]]
    return found if part[-1]["event"] == "end" or found else ["the run has not ended, or was ended from outside"]


def seen_table(result: SamplesSeen) -> RenderableType:
    """The answer, and everything that is wrong."""
    data = "a stream" if result.samples is None else f"{result.samples} samples"
    over = f"{data}, {result.batch} a step, {result.steps} steps recorded in {result.folder}"
    answer = ("bold green", result.answer) if result.once else ("bold red", "no")
    return Group(
        Text.assemble(f"{result.question}: ", (answer[1], answer[0])),
        *(Text(f"  {sentence}") for sentence in result.wrong),
        Text(over, style="dim"),
        *(Text(note, style="yellow") for note in result.notes),
    )


def settings_table(settings: Sequence[Setting]) -> RenderableType:
    """Where each value came from."""
    table = headed("setting", "value", "from")
    for one in settings:
        table.add_row(one.name, escape(one.value), one.source, style=None if one.source == "argument" else "dim")
    return table


def scaling_table(rows: Sequence[Scaled]) -> RenderableType:
    """Plans beside each other."""
    numbers = ("devices", "time\nper step", "samples/s", "speed-up", "efficiency", "peak memory\nof a rank")
    table = headed("plan", numbers=numbers, narrow=True)
    for row in rows:
        table.add_row(row.plan, f"{row.devices} {row.device}", *scaled_cells(row))
    return table


def scaled_cells(row: Scaled) -> tuple[str, str, str, str, str]:
    """Time, pace, speed-up, efficiency and memory as text."""
    peak = f"{row.peak_bytes / 2**20:.0f} MiB" if row.peak_bytes < 10 * 2**30 else show_bytes(row.peak_bytes)
    speed = f"{row.speed_up:.2f}", f"{row.efficiency:.0%}"
    return show_seconds(row.step_seconds), show_count(row.samples_per_second), *speed, peak


def proof_table(proof: dict[str, Any]) -> RenderableType:
    """A proof, from ``to_dict``: the answer, what was compared with what was allowed, and the cause where it is no."""
    table = headed("compared", numbers=("how many", "largest difference", "allowed"))
    for kind in dict.fromkeys((*_COMPARED, *(check["kind"] for check in proof["checks"]))):
        label = _COMPARED.get(kind, kind)
        checks = [check for check in proof["checks"] if check["kind"] == kind]
        if checks:
            worst = max(checks, key=lambda one: one["largest"] / (one["allowed"] or 1.0))
            style = "red" if any(check["first"] for check in checks) else None
            largest = "" if kind == "exact" else f"{worst['largest']:.1e}"
            allowed = "the same" if not worst["allowed"] else f"{worst['allowed']:.1e}"
            table.add_row(label, str(sum(check["many"] for check in checks)), largest, allowed, style=style)
    parts: list[RenderableType] = [_verdict(proof), table, *_differing(proof)]
    if late := proof.get("late"):
        more = f"{proof['asked']} steps were asked for, {proof['steps']} taken: the first gradient of {late[0]} came"
        parts.append(Text(f"{more} in step {late[1]}", style="dim"))
    if silent := proof["not_compared"]:
        many = f"{len(silent)} parameter{'s' if len(silent) > 1 else ''}"
        text = f"not compared: {many} whose gradient is zero but for rounding ({show_names(silent, 4)})"
        parts.append(Text(text, style="dim"))
    if never := proof["never"]:
        text = f"never had a gradient in {proof['steps']} steps, so not compared: {show_names(never, 4)}"
        parts.append(Text(f"{text}; --steps {2 * proof['steps']} may reach a first one", style="yellow"))
    return Group(*parts)


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


_MOST_DIFFERING = 8


def _differing(proof: dict[str, Any]) -> list[RenderableType]:
    """The tensors that differ, the largest first: gradients, or parameters where all gradients are equal."""
    for kind, field in (("gradient", "gradients"), ("parameter", "parameters")):
        wrong = [one for one in proof[field] if not one.get("relative", 0.0) <= one.get("allowed", 0.0)]
        if not wrong:
            continue
        table = headed(f"{kind} of", numbers=("differs by", "× one device's"), after=("where",))
        for one in sorted(wrong, key=lambda one: -one["relative"])[:_MOST_DIFFERING]:
            where = one["where"] or "everywhere"
            table.add_row(escape(one["name"]), f"{one['relative']:.1e}", f"{one['ratio']:.4g}", escape(where))
        more = len(wrong) - _MOST_DIFFERING
        return [table, *([Text(f"and {more} more; --json lists all", style="dim")] if more > 0 else [])]
    return []


def _verdict(proof: dict[str, Any]) -> RenderableType:
    over = f"{proof['plan']} and {proof['reference'] or 'one device'}, over {proof['steps']} steps"
    if proof["equal"]:
        return Text.assemble(("equal", "bold green"), f": {over}")
    table = _grid()
    table.add_row("first", escape(proof["first"]))
    table.add_row("likely cause", escape(proof["cause"]))
    return Group(Text.assemble(("not equal", "bold red"), f": {over}"), table)


def _steps(summary: RunSummary) -> str:
    taken = summary.step - summary.first_step
    if summary.first_step and not taken:
        return f"none left: all {summary.step} had been taken before (--steps or --epochs allows more)"
    return f"{taken} (from {summary.first_step} to {summary.step})" if summary.first_step else str(taken)


def _by_rank(peaks: Sequence[int]) -> str:
    if len(peaks) <= 8:
        return ", ".join(show_bytes(peak) for peak in peaks) + "  (by rank)" * (len(peaks) > 1)
    return f"{show_bytes(min(peaks))} to {show_bytes(max(peaks))} on {len(peaks)} ranks"


def _alike(summary: RunSummary) -> list[tuple[int, int]]:
    """First and last of neighbouring ranks whose memory holds the same."""
    groups: list[tuple[int, int]] = []
    for rank, parts in enumerate(summary.memory):
        if groups and parts == summary.memory[rank - 1]:
            groups[-1] = (groups[-1][0], rank)
        else:
            groups.append((rank, rank))
    return groups


def headed(*texts: str, numbers: Sequence[str] = (), after: Sequence[str] = (), narrow: bool = False) -> Table:
    """Return an empty table with columns of texts, of numbers, and of texts again."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for heading in (*texts, *numbers, *after):
        right = heading in numbers
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table
