"""The summary of a run: numbers from its event log, averagings, parameter servers and interruptions among them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.config import Plan
from phalanx.events import RunLog
from phalanx.report.comparison import Compared, memory_beside, step_beside, stored
from phalanx.report.drawing import Timeline
from phalanx.report.progress import Event, interruption_text, waited_share
from phalanx.units import show_bytes, show_count, show_names

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")  # of a rank's memory

WARM_UP = 3  # first steps that are not timed: allocation, first touch of the data, compilation

_MOST = 8  # workers that are named


@dataclass(frozen=True, kw_only=True, slots=True)
class Averagings:
    """Averagings of replicas that step by themselves.

    Attributes:
        bytes: sent by rank 0.
        whole: bytes that rank 0 would have sent without ``compress``.
        waited: share of rank 0's time; ``None`` if no time was measured.
    """

    count: int
    bytes: int
    whole: int
    waited: float | None

    def __str__(self) -> str:
        waited = "" if self.waited is None else f", {self.waited:.1%} of the time waited"
        of = f" in place of {show_bytes(self.whole)}" if self.whole > self.bytes else ""
        return f"{self.count}, {show_bytes(self.bytes)} sent by rank 0{of}{waited}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Numbers of a run with parameter servers.

    Attributes:
        staleness: updates that a gradient lacked → number of pieces.
        rates: samples/s by worker, of those at the end.
        pieces: pieces that counted, by worker.
        dropped: pieces left out of their step, because backup workers had done enough.
        lost_workers: number of losses.
    """

    staleness: Mapping[int, int]
    rates: Mapping[int, float]
    pieces: Mapping[int, int]
    dropped: int
    lost_workers: int

    @property
    def rows(self) -> dict[str, str]:
        """Names and values for a table; empty values are to be left out."""
        each = [f"{rank}: {show_count(rate)}" for rank, rate in self.rates.items()]
        left_out = f"; {self.dropped} pieces left out" if self.dropped else ""
        return {
            "staleness": self._spread() + left_out,
            "each worker": f"{show_names(each, _MOST)} samples/s" if each else "",
            "workers lost": str(self.lost_workers or ""),
        }

    def _spread(self) -> str:
        counts, every = self.staleness, sum(self.staleness.values())
        median = statistics.median_low(Counter(counts).elements()) if counts else 0
        if len(counts) <= 1:
            return (
                f"{median} updates in every gradient" if median else "none: each gradient is of the newest parameters"
            )
        shares = ", ".join(f"{value}: {count / every:.0%}" for value, count in counts.items())
        return f"{min(counts)} to {max(counts)} updates, median {median} ({shares})"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run, or its part since the last resume.

    Attributes:
        devices: processes times threads.
        batch: samples in one optimizer step.
        parameters: elements of all parameters.
        step: optimizer steps taken so far, over all parts.
        step_seconds: median, without the first few steps.
        seconds: from the first step to the last.
        evaluation: the last: ``step``, ``loss``, ``samples``, ``metrics``.
        peak_bytes: largest memory of each rank: resident set on CPU, allocated on CUDA.
        memory: part → bytes, by rank; empty if the log is older than its schema 1.2.
        waited: share of rank 0's time in which it waited for data; ``None`` if the log does not tell.
        idle: share of a pipeline's time in which its ranks wait or send, in the timed step.
        sent: bytes of compressed gradients, by rank; empty without ``compress``.
        whole: bytes that each rank would have sent without ``compress``.
        forecast: content of ``forecast.json``; ``None`` if no forecast was asked for.
        beside: the forecast beside the measurement.
        shares: last samples of a full batch, by rank of ``dp``; empty if all took the same.
        moves: number of changes of ``shares``.
        checkpoint: the newest, relative to the folder.
        interruptions: restarts and resizes of all parts.
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


def summarise(folder: Path, foretold: dict[str, Any] | None = None) -> RunSummary:
    """Return the summary of the run in ``folder``, or of its last part if it was resumed.

    ``foretold`` takes the place of the stored forecast.

    Raises:
        SpecError: its log holds no start.
    """
    log = RunLog(folder)
    part = log.part
    start, by_name = part[0], dict[str, list[Event]]()
    for event in part:
        by_name.setdefault(event["event"], []).append(event)
    steps, shares, checks, saved = (by_name.get(name, []) for name in ("step", "shares", "check", "checkpoint"))
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
    timeline = Timeline.from_events(by_name.get("timeline", []))
    traffic = by_name.get("traffic", [])
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
        idle=timeline.idle if timeline else None,
        averagings=_averagings(by_name.get("sync", []), steps, end.get("seconds")),
        serving=_serving(by_name),
        sent=tuple(event["sent"] for event in traffic),
        whole=tuple(event["whole"] for event in traffic),
        forecast=foretold,
        beside=_beside(foretold, by_name, timeline, held, seconds),
        shares=tuple(shares[-1]["shares"]) if shares else (),
        moves=max(0, len(shares) - 1),
        slowest=slowest_rank(shares[-1]["seconds"]) if shares else "",
        checkpoint=saved[-1]["path"] if saved else None,
        interruptions=tuple(interruption_text(one) for one in log.events if one["event"] in ("restart", "resize")),
        notes=(*start["notes"], *checked),
        warnings=(*(one["message"] for one in wrong), *left_out(log)),
        finished="end" in by_name,
    )


def left_out(log: RunLog) -> list[str]:
    """Return a sentence about lines of the log that were no events; no sentence without any."""
    lines = "1 line of the log was" if log.skipped == 1 else f"{log.skipped} lines of the log were"
    return [f"{lines} not understood, and left out"] if log.skipped else []


def slowest_rank(seconds: Sequence[float | None]) -> str:
    """Name the rank that takes 1.2 times as long as its peers for a sample, or longer; "" if none does."""
    known = sorted((each, rank) for rank, each in enumerate(seconds) if each)
    factor = known[-1][0] / statistics.median(each for each, _ in known[:-1]) if known[1:] else 0.0
    return f"; rank {known[-1][1]} of dp takes {factor:.1f} times as long for each" if factor >= 1.2 else ""


def _beside(
    foretold: dict[str, Any] | None,
    by_name: Mapping[str, Sequence[Event]],
    timeline: Timeline | None,
    held: Sequence[dict[str, int]],
    seconds: float | None,
) -> tuple[Compared, ...]:
    forecast, start = (foretold or {}).get("forecast"), by_name["start"][0]
    if not forecast:
        return ()
    if start.get("stretches") or start.get("batch_tokens"):  # the forecast's time is that of one kind of step
        return tuple(memory_beside(forecast, held))
    measured: dict[str, float] = {"whole": seconds} if seconds else {}
    for event in by_name.get("timing", []) if seconds else []:
        passes, update = event["passes"], event["update"]
        measured |= {"passes": passes, "update": update, "rest": max(0.0, (seconds or 0.0) - passes - update)}
    if timeline:
        idle = timeline.idle * timeline.length
        measured |= {"computing": timeline.length - idle, "pipeline": idle}
    return (*step_beside(forecast, measured), *memory_beside(forecast, held))


def _averagings(syncs: Sequence[Event], steps: Sequence[Event], seconds: float | None) -> Averagings | None:
    if not syncs:
        return None
    whole = seconds or sum(event["seconds"] for event in steps)
    waited = sum(event["seconds"] for event in syncs) / whole if whole else None
    sent, of = (sum(event[field] for event in syncs) for field in ("bytes", "whole"))
    return Averagings(count=len(syncs), bytes=sent, whole=of, waited=waited)


def _serving(by_name: Mapping[str, Sequence[Event]]) -> Serving | None:
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
