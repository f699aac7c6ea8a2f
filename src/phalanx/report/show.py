"""The content of ``phalanx show``: a plan before any process starts, or the plan of a run beside its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import Job, Plan
from phalanx.errors import SpecError
from phalanx.events import RunLog
from phalanx.launch.side_process import look_ahead
from phalanx.parallel import device_kind
from phalanx.placement.batch_split import micro_batches
from phalanx.placement.ownership import ParameterShard, Survey, TensorPiece
from phalanx.placement.schedules import Timed, order, timed, work
from phalanx.placement.survey_file import MOST_RANKS, stored_survey
from phalanx.report.comparison import LATE, stored
from phalanx.report.drawing import Timeline, samples_of
from phalanx.report.summary import RunSummary, left_out, summarise
from phalanx.train.build_model import without_values
from phalanx.train.look_ahead import preview

MOST_MICROS = 10_000
"""Micro-batches of a step whose schedule is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The schedule of a pipeline.

    Attributes:
        timeline: with each stage's own cost, if it is known.
        even: share of idle time if all stages cost the same.
        micros: micro-batches of each rank in a step.
    """

    timeline: Timeline
    even: float
    micros: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.timeline.to_dict(), "idle_even": self.even, "micro_batches": self.micros}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """The measurements of a run.

    Attributes:
        timeline: one step of the first replica's pipeline.
        free: share of idle time if each action takes its measured mean and messages take no time.
    """

    summary: RunSummary
    timeline: Timeline | None = None
    free: float | None = None

    def to_dict(self) -> dict[str, Any]:
        ranks = zip(self.summary.peak_bytes, self.summary.memory or ({},) * len(self.summary.peak_bytes), strict=True)
        return {
            "memory": [{"rank": rank, "peak_bytes": peak, **held} for rank, (peak, held) in enumerate(ranks)],
            "timeline": self.timeline and self.timeline.to_dict(),
            "idle_without_messages": self.free,
            "forecast": self.summary.forecast,
            "beside": [one.to_dict() for one in self.summary.beside],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Everything that is drawn.

    Attributes:
        folder: of the run; ``None`` for a plan.
        survey: the shards of each rank; ``None`` if a run has not stored it.
        planned: the schedule; ``None`` without a pipeline, or with very many micro-batches.
        notes: differences from one device.
        missing: a sentence for each part that could not be shown.
    """

    name: str
    folder: str | None = None
    plan: Plan
    batch: int
    device: str
    survey: Survey | None
    planned: Planned | None
    measured: MeasuredRun | None = None
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.name,
            "run": self.folder,
            "plan": str(self.plan),
            "exact": self.plan.exactness,
            "batch": self.batch,
            "device": self.device,
            "mesh": self.plan.mesh,
            **_survey_as_dict(self.survey, self.plan, self.batch),
            "planned": self.planned and self.planned.to_dict(),
            "measured": self.measured and self.measured.to_dict(),
            "notes": list(self.notes),
            "missing": list(self.missing),
        }


def of_job(job: Job, plan: Plan) -> Shown:
    """Return ``job`` under ``plan``, on the devices of the plan.

    Raises:
        RefusedError: if the plan cannot serve the job.
    """
    survey, found = preview(without_values(job), plan, lambda: look_ahead(job, plan))
    return Shown(
        name=job.name,
        plan=plan,
        batch=job.batch,
        device=device_kind(plan),
        survey=survey,
        planned=planned(plan, job.batch, survey),
        notes=tuple(found),
    )


def of_run(folder: Path, job: Job | None, foretell: Callable[[Job, Plan], dict[str, Any]]) -> Shown:
    """Return the run in ``folder``, from its files.

    With its ``job``, the model is traced again, and ``foretell`` makes the forecast of a run too short for one.

    Raises:
        SpecError: the folder holds no run.
    """
    log = RunLog(folder)
    start = log.part[0]
    plan, batch, missing = Plan.parse(start["plan"]), start["batch"], list[str]()
    if plan.processes > MOST_RANKS:
        allowed = f"at most {MOST_RANKS} processes"
        raise SpecError.of("run", f"{folder}, a run of {plan.processes} processes", allowed, "phalanx show runs/gpt-1")
    foretold: dict[str, Any] | None = None
    if job:
        job = replace(job, batch=batch)
        survey = preview(without_values(job), plan)[0]
        if (stored(folder) or {}).get("missing") == LATE:
            foretold = foretell(job, plan)
    else:
        survey, why = _stored(folder, plan)
        again = f"phalanx show {folder} --job JOB draws it, and runs the file of JOB"
        missing += [f"the shards of each rank are not shown: {why}: {again}"] if why else []
    if survey and survey.elements != start["parameters"]:
        counts = f"{survey.elements} parameters {'now' if job else 'stored'}, {start['parameters']} then"
        missing.append(f"the job has changed since the run: {counts}")
    measured, laid = _measured(log, plan, summarise(folder, foretold)), planned(plan, batch, survey)
    missing += left_out(log)
    if not measured.summary.peak_bytes:
        missing.append("no memory is shown: the run has not ended")
    elif not measured.summary.memory:
        missing.append("memory is not shown by part: an earlier version wrote the log, which did not measure it")
    if plan.pp > 1 and not laid:
        missing.append(f"no schedule is shown: it has more than {MOST_MICROS} micro-batches")
    if plan.pp > 1 and not measured.timeline:
        missing.append("no timeline is shown: the log has no timeline of a whole step")
    return Shown(
        name=start["job"],
        folder=str(folder),
        plan=plan,
        batch=batch,
        device=start["device"],
        survey=survey and survey.for_batch(batch),
        planned=laid,
        measured=measured,
        notes=tuple(start["notes"]),
        missing=tuple(missing),
    )


def _stored(folder: Path, plan: Plan) -> tuple[Survey | None, str]:
    """Return the stored survey of the run, or why it cannot be shown."""
    try:
        survey = stored_survey(folder)
    except SpecError as error:
        return None, f"{error.problems[0].where} cannot be used (given {error.problems[0].given})"
    if survey is None:
        return None, "the run has not stored it"
    return (survey, "") if survey.plan == plan else (None, f"what is stored is of another plan, {survey.plan}")


def planned(plan: Plan, batch: int, survey: Survey | None) -> Planned | None:
    """Return the schedule of ``plan`` if messages take no time, with the cost of each stage if a survey tells it."""
    if plan.pp == 1 or (micros := micro_batches(plan, batch)) > MOST_MICROS:
        return None
    laid, costs = order(plan.schedule, plan.pp, plan.stages, micros), dict[int, float]()
    if survey is not None:
        whole = sum(stage.cost for stage in survey.stages)
        costs = {at: stage.cost * len(survey.stages) / whole for at, stage in enumerate(survey.stages)}

    def found(costs: Mapping[int, float]) -> Timeline:
        again = survey is not None and survey.recomputes
        title = f"planned: {plan.schedule}, {micros} micro-batch{'es' if micros > 1 else ''}"
        seconds = timed(laid, lambda one: work(plan, one, recomputes=again) * costs.get(one.stage, 1.0))
        return _timeline(title, seconds, plan)

    return Planned(timeline=found(costs), even=found({}).idle, micros=micros)


def ranks_of(plan: Plan) -> tuple[int, ...]:
    """Return the ranks of the first replica's pipeline, by their place along ``pp``."""
    return tuple(range(0, plan.world_size, plan.world_size // plan.pp))


def described(piece: TensorPiece, shape: Sequence[int]) -> str:
    """Return the words for a part of a tensor of this shape, such as ``rows 0:64``."""
    if not piece.elements:
        return "nothing"
    words: list[str] = []
    for dim, (ranges, size) in enumerate(zip(piece.ranges, shape, strict=True)):
        if ranges != ((0, size),):
            runs = [f"{start}:{stop}" for start, stop in ranges]
            told = " ".join(runs if len(runs) <= 3 else [*runs[:2], "...", runs[-1]])
            names = {1: ("",), 2: ("rows ", "columns ")}.get(len(shape))
            words.append(f"{names[dim]}{told}" if names else f"{told} of dimension {dim}")
    return ", ".join(words) or "whole"


def _timeline(title: str, actions: Iterable[Timed], plan: Plan) -> Timeline:
    return Timeline(title=title, actions=tuple(actions), ranks=ranks_of(plan))


def _measured(log: RunLog, plan: Plan, summary: RunSummary) -> MeasuredRun:
    ranks = ranks_of(plan)
    found = Timeline.from_events([one for one in log.part if one["event"] == "timeline" and one["rank"] in ranks])
    if plan.pp == 1 or found is None or found.ranks != ranks or found.micros > MOST_MICROS:
        return MeasuredRun(summary=summary)
    return MeasuredRun(summary=summary, timeline=found, free=_without_messages(found, plan))


def _without_messages(found: Timeline, plan: Plan) -> float:
    """Return the share of idle time if actions take the mean of their kind and stage, and messages take no time."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for one in found.actions:
        seconds.setdefault((one.action.kind, one.action.stage), []).append(one.end - one.begin)
    laid = order(plan.schedule, plan.pp, plan.stages, found.micros)
    means = {key: statistics.fmean(values) for key, values in seconds.items()}
    return _timeline("", timed(laid, lambda action: means.get((action.kind, action.stage), 0.0)), plan).idle


def _survey_as_dict(survey: Survey | None, plan: Plan, batch: int) -> dict[str, Any]:
    if survey is None:
        return dict.fromkeys(("parameters", "stages", "ranks", "holds", "buffers", "tied", "whole"))
    first: dict[tuple[int, ...], int] = {}  # rank of each place
    for rank in range(plan.world_size):
        first.setdefault(survey.place(rank), rank)
    places, ranks = {place: at for at, place in enumerate(first)}, list[dict[str, Any]]()
    for rank in range(plan.world_size):
        held, part = survey.shards_of(rank), plan.part(rank)
        told: dict[str, Any] = {"rank": rank, "at": plan.coordinate(rank), "holds": places[survey.place(rank)]}
        told["samples"] = [samples_of(plan, batch, part)[0], samples_of(plan, batch, part + plan.threads - 1)[1]]
        told["parameter_bytes"] = sum(one.bytes for one in held)
        told["gradient_bytes"] = sum(one.gradient_bytes for one in held)
        ranks.append(told | {"optimizer_elements": sum(one.stepped_elements for one in held)})
    whole = sum(stage.cost for stage in survey.stages)
    return {
        "parameters": survey.elements,
        "stages": [{**asdict(stage), "cost_share": stage.cost / whole} for stage in survey.stages],
        "ranks": ranks,
        "holds": [[_held_as_dict(one) for one in survey.shards_of(rank)] for rank in first.values()],
        "buffers": [asdict(one) for one in survey.buffers],
        "tied": survey.tied,
        "whole": survey.whole,
    }


def _held_as_dict(held: ParameterShard) -> dict[str, Any]:
    pieces = {"parameter": held.parameter, "gradient": held.gradient, "stepped": held.stepped}
    shown = {name: piece and {"shape": piece.shape, "ranges": piece.ranges} for name, piece in pieces.items()}
    return {
        **asdict(held.tensor),
        "cut_over": ["x".join(share.axes) for share in held.shares],
        **shown,
        "bytes": held.bytes,
    }
