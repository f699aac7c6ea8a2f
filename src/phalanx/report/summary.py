"""What a run came to: numbers from its event log, averagings, servers and interruptions among them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.config import Plan
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, SpecError
from phalanx.events import EventReader
from phalanx.report.comparison import Compared, memory_beside, step_beside, stored
from phalanx.report.progress import Event, interruption_text, waited_share
from phalanx.units import show_bytes, show_count, show_names

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")  # of a rank's memory

Action = Sequence[Any]  # kind, stage, micro-batch, begin, end

WARM_UP = 3  # first steps that are not timed: allocation, first touch of the data, compilation


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run, or the part of it since it was resumed.

    Attributes:
        devices: that the plan uses: processes times threads.
        batch: samples in one optimizer step.
        parameters: elements of all parameters.
        first_step: the step it began with.
        step: optimizer steps taken so far, counted from the very beginning.
        step_seconds: median wall time of a step, the first few left out; ``None`` where none was taken.
        seconds: wall time from the first step to the last.
        evaluation: ``loss``, ``samples`` and ``metrics`` of the last evaluation.
        peak_bytes: largest memory of each rank: resident set on CPU, allocated on CUDA.
        memory: what each rank's memory holds, part → bytes; empty where the log is older than its schema 1.2.
        waited: the share of rank 0's time in which it waited for data; ``None`` where the log does not tell.
        load_workers: processes of each rank that load data.
        idle: the share of a pipeline's time in which its ranks wait or send, in the one step that was timed.
        averagings: of replicas that step by themselves; ``None`` where there were none.
        serving: of parameter servers; ``None`` where there were none.
        sent: bytes that each rank sent of compressed gradients; empty where they went whole.
        whole: bytes that each would have sent of whole ones.
        forecast: of the run, as ``forecast.json`` has it; or why it is ``missing``; ``None`` where none was asked for.
        beside: the forecast beside what was measured.
        shares: samples of a full batch that each rank of ``dp`` took at last; empty where all took the same.
        moves: how often they changed.
        checkpoint: the newest, relative to the folder.
        interruptions: of all of its parts: why it was started again, or went on with another number of devices.
    """

    folder: str
    job: str
    plan: str
    devices: int
    device: str
    batch: int
    parameters: int
    first_step: int
    step: int
    step_seconds: float | None
    samples_per_second: float | None
    seconds: float | None
    loss: float | None
    evaluation: dict[str, Any] | None
    peak_bytes: tuple[int, ...]
    memory: tuple[dict[str, int], ...]
    waited: float | None
    load_workers: int
    idle: float | None
    averagings: Averagings | None
    serving: Serving | None
    sent: tuple[int, ...]
    whole: tuple[int, ...]
    forecast: dict[str, Any] | None
    beside: tuple[Compared, ...]
    shares: tuple[int, ...]
    moves: int
    slowest: str  # rank of ``dp``, in words
    checkpoint: str | None
    interruptions: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    finished: bool

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "beside": [one.to_dict() for one in self.beside]}


def summarise(folder: Path) -> RunSummary:
    """The summary of the run in ``folder``, or of its last part where it was resumed.

    Raises:
        DataError: if its log holds no start.
    """
    log = run_log(folder)
    return summary_of(log.events, folder, skipped=log.skipped)


def summary_of(
    events: Iterable[Event], folder: Path, foretold: dict[str, Any] | None = None, *, skipped: int = 0
) -> RunSummary:
    """The summary of a run's events, or of its last part's; ``summarise`` reads them from its folder.

    ``foretold`` takes the place of what is stored of its forecast; ``skipped`` are lines that were no events.

    Raises:
        DataError: if there is no ``start`` among them.
    """
    events = list(events)
    part = _last_part(events, folder)
    start = part[0]
    by_name: dict[str, list[Event]] = {}
    for event in part:
        by_name.setdefault(event["event"], []).append(event)
    steps, shares, checks = (by_name.get(name, list[Event]()) for name in ("step", "shares", "check"))
    checked = (f"{one['message']}, in {one['seconds']:.1f} s" for one in checks if one["equal"] is not None)
    wrong = [*by_name.get("warning", []), *(one for one in checks if one["equal"] is False)]
    timed = [event for event in (steps[WARM_UP:] or steps[1:] or steps) if event["seconds"] > 0]
    end = by_name.get("end", [{}])[-1]
    evaluation = by_name.get("evaluate", [None])[-1]
    seconds = statistics.median(event["seconds"] for event in timed) if timed else None
    memory = list({event["rank"]: event for event in by_name.get("memory", [])}.values())
    by_part = all("parameters" in event for event in memory)
    held = tuple({part: event[part] for part in PARTS} for event in memory if by_part)
    foretold = foretold or stored(folder, start["plan"])
    traffic, timelines = by_name.get("traffic", []), by_name.get("timeline", [])
    return RunSummary(
        folder=str(folder),
        **{name: start[name] for name in ("job", "plan", "device", "batch", "parameters", "first_step")},
        devices=Plan.parse(start["plan"]).devices,
        step=end.get("step", steps[-1]["step"] + 1 if steps else start["first_step"]),
        step_seconds=seconds,
        samples_per_second=statistics.median(event["samples"] / event["seconds"] for event in timed) if timed else None,
        seconds=end.get("seconds"),
        loss=steps[-1]["loss"] if steps else None,
        evaluation=evaluation and {name: evaluation[name] for name in ("step", "loss", "samples", "metrics")},
        peak_bytes=tuple(event["peak_bytes"] for event in memory),
        memory=held,
        waited=waited_share(timed),
        load_workers=start.get("workers", 0),
        idle=idle_share([event["actions"] for event in timelines]),
        averagings=averagings(by_name.get("sync", []), steps, end.get("seconds")),
        serving=serving(by_name),
        sent=tuple(event["sent"] for event in traffic),
        whole=tuple(event["whole"] for event in traffic),
        forecast=foretold,
        beside=beside_of(foretold, part, held, seconds),
        shares=tuple(shares[-1]["shares"]) if shares else (),
        moves=max(0, len(shares) - 1),
        slowest=slowest_rank(shares[-1]["seconds"]) if shares else "",
        checkpoint=by_name["checkpoint"][-1]["path"] if "checkpoint" in by_name else None,
        interruptions=tuple(interruption_text(event) for event in events if event["event"] in ("restart", "resize")),
        notes=(*start["notes"], *checked),
        warnings=(*(one["message"] for one in wrong), *left_out(skipped)),
        finished="end" in by_name,
    )


def slowest_rank(seconds: Sequence[float | None]) -> str:
    """Name the rank that takes 1.2 times as long as its peers for a sample, or longer; "" if none does."""
    known = sorted((each, rank) for rank, each in enumerate(seconds) if each)
    factor = known[-1][0] / statistics.median(each for each, _ in known[:-1]) if known[1:] else 0.0
    return f"; rank {known[-1][1]} of dp takes {factor:.1f} times as long for each" if factor >= 1.2 else ""


def beside_of(
    foretold: dict[str, Any] | None, events: Sequence[Event], held: Sequence[dict[str, int]], seconds: float | None
) -> tuple[Compared, ...]:
    """A run's stored forecast beside what it measured: its events, each rank's memory by part, seconds of a step."""
    forecast = (foretold or {}).get("forecast")
    if not forecast:
        return ()
    if events[0].get("stretches") or events[0].get("batch_tokens"):  # the forecast's time is that of one kind of step
        return tuple(memory_beside(forecast, held))
    measured: dict[str, float] = {"whole": seconds} if seconds else {}
    for event in events:
        if event["event"] == "timing" and seconds:
            passes, update = event["passes"], event["update"]
            measured |= {"passes": passes, "update": update, "rest": max(0.0, seconds - passes - update)}
    ranks = [event["actions"] for event in events if event["event"] == "timeline"]
    if (idle := idle_share(ranks)) is not None:
        moments = [moment for actions in ranks for *_, begin, end in actions for moment in (begin, end)]
        whole = max(moments) - min(moments)
        measured |= {"computing": (1 - idle) * whole, "pipeline": idle * whole}
    return (*step_beside(forecast, measured), *memory_beside(forecast, held))


def idle_share(ranks: Sequence[Sequence[Action]]) -> float | None:
    """The share of the ranks' time, from the first's begin to the last's end, in which they do none of their actions.

    ``ranks``: for each its ``actions`` as a ``timeline`` event has them. ``None`` where there are none.
    """
    actions = [action for rank in ranks for action in rank]
    whole = max((end for *_, end in actions), default=0.0) - min((begin for *_, begin, _ in actions), default=0.0)
    busy = sum(end - begin for *_, begin, end in actions)
    return 1.0 - busy / (whole * len(ranks)) if whole > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The event log of a run.

    Attributes:
        events: all of them, over all parts of the run.
        part: those of its last part, since it was started last; the first is its ``start``.
        skipped: lines that were no events.
    """

    events: tuple[Event, ...]
    part: tuple[Event, ...]
    skipped: int


def run_log(folder: Path) -> RunLog:
    """The log of the run in ``folder``.

    Raises:
        SpecError: if it holds no start.
    """
    reader = EventReader(folder / EVENTS)
    events = tuple(reader.new())
    return RunLog(events=events, part=tuple(_last_part(events, folder)), skipped=reader.skipped)


def ended_since(folder: Path, began: float) -> bool:
    """Return True if the run in ``folder`` has come to its end since the time ``began``, in seconds since 1970."""
    try:
        return any(event["event"] == "end" and event["time"] >= began for event in run_log(folder).part)
    except (PhalanxError, OSError):
        return False


def left_out(skipped: int) -> list[str]:
    """What is to be said of so many lines of a log that were no events; nothing of none."""
    lines = "1 line of the log was" if skipped == 1 else f"{skipped} lines of the log were"
    return [f"{lines} not understood, and left out"] if skipped else []


def _last_part(events: Iterable[Event], folder: Path) -> list[Event]:
    part: list[Event] = []
    for event in events:
        if event["event"] == "start":
            part = []
        part.append(event)
    if not part or part[0]["event"] != "start":
        allowed = "the folder of a run, which holds its events.jsonl"
        fix = f"phalanx train JOB --run {folder}"
        raise SpecError.of("run", f"{folder}, which holds no log of a run", allowed, fix)
    return part


@dataclass(frozen=True, kw_only=True, slots=True)
class Averagings:
    """Of replicas that step by themselves.

    Attributes:
        count: averagings.
        bytes: that rank 0 sent for them.
        whole: bytes that those would have been without ``compress``.
        waited: the share of rank 0's time that they held it up.
    """

    count: int
    bytes: int
    whole: int
    waited: float | None

    def __str__(self) -> str:
        waited = "" if self.waited is None else f", {self.waited:.1%} of the time waited"
        of = f" in place of {show_bytes(self.whole)}" if self.whole > self.bytes else ""
        return f"{self.count}, {show_bytes(self.bytes)} sent by rank 0{of}{waited}"


def averagings(syncs: Sequence[Event], steps: Sequence[Event], seconds: float | None) -> Averagings | None:
    """Those of a run: its ``sync`` and ``step`` events, and its wall time once it has ended; ``None`` without any."""
    if not syncs:
        return None
    whole = seconds or sum(event["seconds"] for event in steps)
    waited = sum(event["seconds"] for event in syncs) / whole if whole else None
    sent, of = (sum(event[field] for event in syncs) for field in ("bytes", "whole"))
    return Averagings(count=len(syncs), bytes=sent, whole=of, waited=waited)


_MOST = 8  # workers that are named


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Of a run with parameter servers.

    Attributes:
        staleness: updates that gradients lacked → pieces of which that was so.
        rates: samples/s of each worker that was there at the end, by rank, since it came.
        pieces: how many pieces each of them computed that counted.
        dropped: pieces left out of their step, which backup workers did not wait for.
        lost_workers: how often a worker was lost.
    """

    staleness: Mapping[int, int]
    rates: Mapping[int, float]
    pieces: Mapping[int, int]
    dropped: int
    lost_workers: int

    @property
    def rows(self) -> list[tuple[str, str]]:
        found = [("staleness", _spread(self.staleness))]
        if self.dropped:
            found[0] = ("staleness", f"{found[0][1]}; {self.dropped} pieces left out")
        if self.rates:
            each = [f"{rank}: {show_count(rate)}" for rank, rate in self.rates.items()]
            found.append(("each worker", f"{show_names(each, _MOST)} samples/s"))
        if self.lost_workers:
            found.append(("workers lost", str(self.lost_workers)))
        return found


def serving(by_name: Mapping[str, Sequence[Event]]) -> Serving | None:
    """What the events of a run, by name, tell of its servers; ``None`` where it had none."""
    updates, worked = by_name.get("update", []), by_name.get("worked", [])
    if not updates:
        return None
    return Serving(
        staleness=dict(sorted(Counter(one for event in updates for one in event["staleness"]).items())),
        rates={event["rank"]: event["samples"] / event["seconds"] for event in worked if event["seconds"] > 0},
        pieces={event["rank"]: event["pieces"] for event in worked},
        dropped=sum(event["dropped"] for event in updates),
        lost_workers=sum(event["state"] == "lost" for event in by_name.get("worker", [])),
    )


def _spread(counts: Mapping[int, int]) -> str:
    """Least, median and most, and how the pieces spread."""
    every = sum(counts.values())
    passed, median = 0, 0
    for value, count in counts.items():
        passed += count
        if passed * 2 >= every:
            median = value
            break
    if len(counts) == 1:
        return f"{median} updates in every gradient" if median else "none: each gradient is of the newest parameters"
    shares = ", ".join(f"{value}: {count / every:.0%}" for value, count in counts.items())
    return f"{min(counts)} to {max(counts)} updates, median {median} ({shares})"
