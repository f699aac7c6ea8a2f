"""What a run came to, in numbers, from its event log."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import DataError
from phalanx.events import read
from phalanx.observe.averagings import Averagings, averagings
from phalanx.observe.beside import Beside, memory_beside, step_beside, stored
from phalanx.observe.follow import Event
from phalanx.observe.serving import Serving, serving
from phalanx.spec import Plan

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")  # of a rank's memory

Action = Sequence[Any]  # kind, stage, micro-batch, begin, end

WARM_UP = 3  # first steps that are not timed: allocation, first touch of the data, compilation


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run, or the part of it since it was resumed.

    Attributes:
        folder: the run folder.
        job: name of the job.
        plan: the plan, as one line of text.
        devices: that the plan uses: processes times threads.
        device: kind of device.
        batch: samples in one optimizer step.
        parameters: elements of all parameters.
        first_step: the step it began with.
        step: optimizer steps taken so far, counted from the very beginning.
        step_seconds: median wall time of a step, the first few left out; ``None`` where none was taken.
        samples_per_second: median over the same steps.
        seconds: wall time from the first step to the last.
        loss: of the last step.
        evaluation: ``loss``, ``samples`` and ``metrics`` of the last evaluation.
        peak_bytes: largest memory of each rank: resident set on CPU, allocated on CUDA.
        memory: what each rank's memory holds, part → bytes; empty where the log is older than its schema 1.2.
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
        notes: what the plan does not keep of one device's result.
        warnings: as the run gave them.
        finished: whether it came to its end.
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
    idle: float | None
    averagings: Averagings | None
    serving: Serving | None
    sent: tuple[int, ...]
    whole: tuple[int, ...]
    forecast: dict[str, Any] | None
    beside: tuple[Beside, ...]
    shares: tuple[int, ...]
    moves: int
    checkpoint: str | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    finished: bool

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {**asdict(self), "beside": [one.to_dict() for one in self.beside]}


def summarise(folder: Path) -> RunSummary:
    """The summary of the run in ``folder``, or of its last part where it was resumed.

    Raises:
        DataError: if its log holds no start.
    """
    return summary_of(read(folder / "events.jsonl"), folder)


def summary_of(events: Iterable[Event], folder: Path, foretold: dict[str, Any] | None = None) -> RunSummary:
    """The summary of a run's events; ``summarise`` reads them from its folder.

    ``foretold`` takes the place of what is stored of its forecast.

    Raises:
        DataError: if there is no ``start`` among them.
    """
    part = _last_part(events, folder)
    start = part[0]
    by_name: dict[str, list[Event]] = {}
    for event in part:
        by_name.setdefault(event["event"], []).append(event)
    steps, shares = by_name.get("step", []), by_name.get("shares", [])
    timed = [event for event in (steps[WARM_UP:] or steps[1:] or steps) if event["seconds"] > 0]
    end = by_name.get("end", [{}])[-1]
    evaluation = by_name.get("evaluate", [None])[-1]
    seconds = statistics.median(event["seconds"] for event in timed) if timed else None
    memory = list({event["rank"]: event for event in by_name.get("memory", [])}.values())
    held = tuple(_parts(event) for event in memory if "parameters" in event)
    foretold = foretold or stored(folder)
    return RunSummary(
        folder=str(folder),
        job=start["job"],
        plan=start["plan"],
        devices=Plan.parse(start["plan"]).devices,
        device=start["device"],
        batch=start["batch"],
        parameters=start["parameters"],
        first_step=start["first_step"],
        step=end.get("step", steps[-1]["step"] + 1 if steps else start["first_step"]),
        step_seconds=seconds,
        samples_per_second=statistics.median(event["samples"] / event["seconds"] for event in timed) if timed else None,
        seconds=end.get("seconds"),
        loss=steps[-1]["loss"] if steps else None,
        evaluation=evaluation and {name: evaluation[name] for name in ("step", "loss", "samples", "metrics")},
        peak_bytes=tuple(event["peak_bytes"] for event in memory),
        memory=held,
        idle=idle_share([event["actions"] for event in by_name.get("timeline", [])]),
        averagings=averagings(by_name.get("sync", []), steps, end.get("seconds")),
        serving=serving(by_name),
        sent=tuple(event["sent"] for event in by_name.get("traffic", [])),
        whole=tuple(event["whole"] for event in by_name.get("traffic", [])),
        forecast=foretold,
        beside=beside_of(foretold, part, held, seconds),
        shares=tuple(shares[-1]["shares"]) if shares else (),
        moves=max(0, len(shares) - 1),
        checkpoint=by_name["checkpoint"][-1]["path"] if "checkpoint" in by_name else None,
        notes=tuple(start["notes"]),
        warnings=tuple(event["message"] for event in by_name.get("warning", [])),
        finished="end" in by_name,
    )


def beside_of(
    foretold: dict[str, Any] | None, events: Sequence[Event], held: Sequence[dict[str, int]], seconds: float | None
) -> tuple[Beside, ...]:
    """The forecast of a run beside what it measured.

    Args:
        foretold: what is stored of its forecast.
        events: of the run.
        held: what each rank's memory held, by part.
        seconds: of a step, measured.
    """
    forecast = (foretold or {}).get("forecast")
    if not forecast:
        return ()
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

    Args:
        ranks: for each rank its ``actions`` as a ``timeline`` event has them; ``None`` is given where there are none.
    """
    actions = [action for rank in ranks for action in rank]
    whole = max((end for *_, end in actions), default=0.0) - min((begin for *_, begin, _ in actions), default=0.0)
    busy = sum(end - begin for *_, begin, end in actions)
    return 1.0 - busy / (whole * len(ranks)) if whole > 0 else None


def _parts(event: Event) -> dict[str, int]:
    return {part: event[part] for part in PARTS}


def events_of(folder: Path) -> list[Event]:
    """Events of the run in ``folder``, or of its last part where it was resumed; the first is its ``start``.

    Raises:
        DataError: if its log holds none.
    """
    return _last_part(read(folder / "events.jsonl"), folder)


def _last_part(events: Iterable[Event], folder: Path) -> list[Event]:
    part: list[Event] = []
    for event in events:
        if event["event"] == "start":
            part = []
        part.append(event)
    if not part or part[0]["event"] != "start":
        raise DataError(f"{folder} holds no log of a run\n    try: phalanx train JOB --run {folder}")
    return part
