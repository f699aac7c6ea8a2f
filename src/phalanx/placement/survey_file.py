"""``placement.json`` of a run folder: each rank's part of the model, so that ``show`` draws it without the job.

The file may be a stranger's: a wrong form is refused, and it holds no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.config import Plan
from phalanx.errors import SpecError
from phalanx.files import read_json
from phalanx.placement.ownership import DimensionShare, Ranges, StageSurvey, Survey, Tensor

PLACEMENT = "placement.json"
"""The file of a run folder that holds it."""

MOST_RANKS = 2**16
"""Processes of a run that is drawn."""

_MOST = 2**53


def survey_to_dict(survey: Survey) -> dict[str, Any]:
    """Return a survey as JSON."""
    return {
        "plan": str(survey.plan),
        "parameters": [asdict(one) for one in survey.parameters],
        "buffers": [asdict(one) for one in survey.buffers],
        "stages": [asdict(one) for one in survey.stages],
        "tied": {name: list(stages) for name, stages in survey.tied.items()},
        "whole": list(survey.whole),
        "shares": [{name: asdict(share) for name, share in each.items()} for each in survey.shares],
        "recomputes": survey.recomputes,
        "micros": survey.micros,
    }


def stored_survey(folder: Path) -> Survey | None:
    """Return the survey of the run in ``folder``, or ``None``.

    Raises:
        SpecError: the file cannot be read, or is not in the form of ``survey_to_dict``.
    """
    path = folder / PLACEMENT
    if not path.is_symlink() and not path.exists():
        return None
    fix = f"mv {path} {path}.away"
    value = read_json(path, where=PLACEMENT, fix=fix, below=1)
    try:
        return survey_from_dict(value)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, SpecError) as error:
        said = str(error).partition("\n")[0]
        raise SpecError.of(PLACEMENT, f"{path}: {said}", "the file as a run has written it", fix) from None


def survey_from_dict(value: Mapping[str, Any]) -> Survey:
    """Build a survey from the result of ``survey_to_dict``.

    Raises:
        ValueError: it is of another form. So do ``TypeError``, ``KeyError``, ``AttributeError`` and ``SpecError``.
    """
    plan = Plan.parse(_text(value["plan"]))
    if plan.processes > MOST_RANKS:
        raise ValueError(f"{plan.processes} processes are more than {MOST_RANKS}")
    parameters = tuple(_tensor(one) for one in value["parameters"])
    names = {one.name: one for one in parameters}
    stages = tuple(_stage(one, plan, names) for one in value["stages"])
    if bool(stages) != (plan.pp > 1) or len(stages) > plan.pp * plan.stages:
        raise ValueError(f"{len(stages)} stages with {plan}")
    shares = tuple({name: _share(one, names[name], plan) for name, one in each.items()} for each in value["shares"])
    if shares and len(shares) != plan.pp:
        raise ValueError(f"shares of {len(shares)} places along pp, with {plan}")
    if not isinstance(value["recomputes"], bool):
        raise ValueError("recomputes is no truth value")
    return Survey(
        plan=plan,
        parameters=parameters,
        buffers=tuple(_tensor(one) for one in value["buffers"]),
        stages=stages,
        tied={_text(name): tuple(_whole(one) for one in each) for name, each in value["tied"].items()},
        whole=tuple(_text(one) for one in value["whole"]),
        shares=shares,
        recomputes=value["recomputes"],
        micros=_whole(value["micros"], least=1),
    )


def _tensor(value: Mapping[str, Any]) -> Tensor:
    if not isinstance(value["learns"], bool):
        raise ValueError("learns is no truth value")
    return Tensor(
        name=_text(value["name"]),
        shape=tuple(_whole(size) for size in value["shape"]),
        dtype=_text(value["dtype"]),
        itemsize=_whole(value["itemsize"], least=1),
        learns=value["learns"],
    )


def _stage(value: Mapping[str, Any], plan: Plan, names: Mapping[str, Tensor]) -> StageSurvey:
    cost = value["cost"]
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < _MOST**2:
        raise ValueError(f"a stage of cost {cost!r}")
    parameters = tuple(_text(one) for one in value["parameters"])
    if any(one not in names for one in parameters):
        raise ValueError("a stage with parameters that the model has not")
    return StageSurvey(
        index=_whole(value["index"], most=plan.pp * plan.stages - 1),
        rank=_whole(value["rank"], most=plan.pp - 1),
        units=tuple(_text(one) for one in value["units"]),
        parameters=parameters,
        elements=_whole(value["elements"]),
        cost=float(cost),
    )


def _share(value: Mapping[str, Any], of: Tensor, plan: Plan) -> DimensionShare:
    axes = tuple(_text(one) for one in value["axes"])
    ranks = 1
    for axis in axes:
        ranks *= plan.mesh[axis]
    dim = _whole(value["dim"], most=len(of.shape) - 1)
    ranges = tuple(_ranges(one, of.shape[dim]) for one in value["ranges"])
    if len(ranges) != ranks:
        raise ValueError(f"{of.name} is cut over {len(ranges)} ranks, with {plan}")
    return DimensionShare(axes=axes, dim=dim, ranges=ranges)


def _ranges(value: Any, size: int) -> Ranges:
    found: list[tuple[int, int]] = []
    for start, stop in value:
        least = found[-1][1] if found else 0
        found.append((_whole(start, least=least, most=size), _whole(stop, least=start, most=size)))
    return tuple(found)


def _whole(value: Any, *, least: int = 0, most: int = _MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} for a whole number from {least} to {most}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} for a text")
    return value
