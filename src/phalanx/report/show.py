"""What ``phalanx show`` draws: a plan before any process starts, or the plan of a run beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import Job, Plan
from phalanx.errors import SpecError
from phalanx.launch.side_process import look_ahead
from phalanx.parallel import device_kind
from phalanx.placement.batch_split import micro_batches
from phalanx.placement.ownership import ParameterShard, Survey, TensorPiece
from phalanx.placement.schedules import Action, Timed, order, timed, work
from phalanx.placement.survey_file import MOST_RANKS, stored_survey
from phalanx.report.comparison import LATE, stored
from phalanx.report.drawing import Timeline, samples_of
from phalanx.report.summary import RunSummary, left_out, run_log, summary_of
from phalanx.train.build_model import without_values
from phalanx.train.look_ahead import preview

MOST_MICROS = 10_000
"""Micro-batches of a step whose schedule is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The schedule of a pipeline.

    Attributes:
        timeline: with each stage's own cost where it is known.
        even: the share of idle time if all stages cost the same.
        micros: micro-batches of each rank in a step.
    """

    timeline: Timeline
    even: float
    micros: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.timeline.to_dict(), "idle_even": self.even, "micro_batches": self.micros}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """What a run measured.

    Attributes:
        summary: of the run; says what each rank's memory held.
        timeline: of one step of the first replica's pipeline; ``None`` where there is none.
        free: the share of idle time if each action takes its measured mean and messages take none.
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
        folder: of the run; ``None`` for a plan that has not run.
        survey: what each rank holds; ``None`` where a run has not stored it.
        planned: the schedule; ``None`` without a pipeline, or of very many micro-batches.
        notes: what the plan does not keep of one device's result.
        missing: what could not be shown, and why, one sentence each.
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
    """``job`` under ``plan``, on whatever devices the plan is for.

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
    """The run in ``folder``, from what it has stored.

    With its ``job`` the model is looked at anew, and ``foretell`` makes the forecast of a run too short for one.

    Raises:
        SpecError: if it holds no run.
    """
    log = run_log(folder)
    start = log.part[0]
    plan, batch, missing = Plan.parse(start["plan"]), start["batch"], list[str]()
    if plan.processes > MOST_RANKS:
        allowed = f"at most {MOST_RANKS} processes"
        raise SpecError.of("run", f"{folder}, a run of {plan.processes} processes", allowed, "phalanx show runs/gpt-1")
    survey: Survey | None = None
    foretold: dict[str, Any] | None = None
    if job:
        job = replace(job, batch=batch)
        survey, _ = preview(without_values(job), plan)
        if (stored(folder) or {}).get("missing") == LATE:
            foretold = foretell(job, plan)
    else:
        survey, why = _stored(folder, plan)
        missing += [f"{why}: phalanx show {folder} --job JOB draws it, and runs the file of JOB"] if why else []
    if survey and survey.elements != start["parameters"]:
        counts = f"{survey.elements} parameters {'now' if job else 'stored'}, {start['parameters']} then"
        missing.append(f"the job has changed since the run: {counts}")
    missing += left_out(log.skipped)
    measured = _measured(log.part, plan, summary_of(log.events, folder, foretold))
    if not measured.summary.peak_bytes:
        missing.append("no memory is shown: the run has not come to its end")
    elif not measured.summary.memory:
        missing.append("memory is not shown by part: the version that wrote the run's log did not measure it")
    laid = planned(plan, batch, survey)
    if plan.pp > 1 and not laid:
        missing.append(f"no schedule is shown: it has more than {MOST_MICROS} micro-batches")
    if plan.pp > 1 and not measured.timeline:
        missing.append("no timeline is shown: the run's log has none of a whole step")
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
    """What the run has stored of who holds what; or why that cannot be shown."""
    try:
        survey = stored_survey(folder)
    except SpecError as error:
        problem = error.problems[0]
        return None, f"who holds what is not shown, for {problem.where} cannot be used (given {problem.given})"
    if survey is None:
        return None, "who holds what is not shown, for the run has not stored it"
    if survey.plan != plan:
        return None, f"who holds what is not shown, for what is stored is of another plan, {survey.plan}"
    return survey, ""


def planned(plan: Plan, batch: int, survey: Survey | None) -> Planned | None:
    """The schedule of ``plan`` if messages take no time; with the costs of its stages where a survey tells them."""
    if plan.pp == 1 or (micros := micro_batches(plan, batch)) > MOST_MICROS:
        return None
    laid = order(plan.schedule, plan.pp, plan.stages, micros)
    again = survey is not None and survey.recomputes
    even = _timeline("", timed(laid, lambda action: work(plan, action, recomputes=again)), plan)
    many = f"{plan.schedule}, {micros} micro-batch{'es' if micros > 1 else ''}"
    if survey is None:
        return Planned(timeline=replace(even, title=f"planned: {many}"), even=even.idle, micros=micros)
    costs = [stage.cost * len(survey.stages) / sum(one.cost for one in survey.stages) for stage in survey.stages]
    found = timed(laid, lambda action: work(plan, action, recomputes=again) * costs[action.stage])
    return Planned(timeline=_timeline(f"planned: {many}", found, plan), even=even.idle, micros=micros)


def ranks_of(plan: Plan) -> tuple[int, ...]:
    """The ranks of the first replica's pipeline, by their place along ``pp``."""
    return tuple(range(0, plan.world_size, plan.world_size // plan.pp))


def described(piece: TensorPiece, shape: Sequence[int]) -> str:
    """A part of a tensor of this shape in words, such as ``rows 0:64``."""
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


def _measured(events: Sequence[Mapping[str, Any]], plan: Plan, summary: RunSummary) -> MeasuredRun:
    of_ranks = {event["rank"]: event for event in events if event["event"] == "timeline"}
    ranks = ranks_of(plan)
    if plan.pp == 1 or not set(ranks) <= set(of_ranks):
        return MeasuredRun(summary=summary)
    if any(action[2] >= MOST_MICROS for rank in ranks for action in of_ranks[rank]["actions"]):
        return MeasuredRun(summary=summary)
    actions = [
        Timed(place, Action(kind, stage, micro), begin, end)
        for place, rank in enumerate(ranks)
        for kind, stage, micro, begin, end in of_ranks[rank]["actions"]
    ]
    if not actions:
        return MeasuredRun(summary=summary)
    title = f"measured: step {of_ranks[ranks[0]]['step']}"
    in_order = tuple(sorted(actions, key=lambda one: (one.begin, one.rank)))
    found = Timeline(title=title, actions=in_order, ranks=ranks, seconds=True)
    return MeasuredRun(summary=summary, timeline=found, free=_without_messages(found, plan))


def _without_messages(found: Timeline, plan: Plan) -> float:
    """The share of idle time if each kind of action of each stage takes its mean, and messages take no time."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for one in found.actions:
        seconds.setdefault((one.action.kind, one.action.stage), []).append(one.end - one.begin)
    laid = order(plan.schedule, plan.pp, plan.stages, 1 + max(one.action.micro for one in found.actions))
    means = {key: statistics.fmean(values) for key, values in seconds.items()}
    return _timeline("", timed(laid, lambda action: means.get((action.kind, action.stage), 0.0)), plan).idle


def _survey_as_dict(survey: Survey | None, plan: Plan, batch: int) -> dict[str, Any]:
    if survey is None:
        return {"parameters": None, "stages": None, "ranks": None, "holds": None, "tied": None, "whole": None}
    places: dict[tuple[int, ...], int] = {}
    holds: list[list[dict[str, Any]]] = []
    ranks: list[dict[str, Any]] = []
    for rank in range(plan.world_size):
        held = survey.shards_of(rank)
        if survey.place(rank) not in places:
            places[survey.place(rank)] = len(holds)
            holds.append([_held_as_dict(one) for one in held])
        part = plan.part(rank)
        samples = [samples_of(plan, batch, part)[0], samples_of(plan, batch, part + plan.threads - 1)[1]]
        ranks.append(
            {
                "rank": rank,
                "at": plan.coordinate(rank),
                "samples": samples,
                "holds": places[survey.place(rank)],
                "parameter_bytes": sum(one.bytes for one in held),
                "gradient_bytes": sum(one.gradient_bytes for one in held),
                "optimizer_elements": sum(one.stepped_elements for one in held),
            }
        )
    whole = sum(stage.cost for stage in survey.stages)
    return {
        "parameters": survey.elements,
        "stages": [
            {
                "stage": stage.index,
                "pp": stage.rank,
                "units": list(stage.units),
                "parameters": list(stage.parameters),
                "elements": stage.elements,
                "cost_share": stage.cost / whole,
            }
            for stage in survey.stages
        ],
        "ranks": ranks,
        "holds": holds,
        "buffers": [{"name": one.name, "shape": list(one.shape), "bytes": one.bytes} for one in survey.buffers],
        "tied": {name: list(stages) for name, stages in survey.tied.items()},
        "whole": list(survey.whole),
    }


def _held_as_dict(held: ParameterShard) -> dict[str, Any]:
    def part(piece: TensorPiece | None) -> Any:
        return piece and {"shape": list(piece.shape), "ranges": [[list(run) for run in dim] for dim in piece.ranges]}

    return {
        "name": held.tensor.name,
        "shape": list(held.tensor.shape),
        "dtype": held.tensor.dtype,
        "cut_over": ["x".join(share.axes) for share in held.shares],
        "parameter": part(held.parameter),
        "gradient": part(held.gradient),
        "stepped": part(held.stepped),
        "bytes": held.bytes,
    }
