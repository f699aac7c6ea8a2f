"""How far off a forecast may be: the interval that holds four of five outcomes, and what is known of that.

Its width is what forecasts were measured to be off by, never what a model of errors says: the quantile of the sizes of
their errors, by technique, as split conformal prediction takes it (Vovk et al., "Algorithmic Learning in a Random
World", 2005; by group: Vovk, "Conditional validity of inductive conformal predictors", 2012). Where nothing like the
case was measured, the errors are those of cases that the constants had not seen: of a published framework, or family of
devices, that was left out of the fit.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from phalanx.forecast.habits import PHALANX, Habits
from phalanx.forecast.rates import family
from phalanx.spec import Device, Plan

FILE = Path(__file__).with_name("spread.toml")
"""What was measured; see ``HEAD`` for what writes it."""

HEAD = """# By how much forecasts were off: of logarithms of measured over forecast the size that 4 of 5 are within.
# Written by `python bench/forecast_here.py --write` (own, catalog) and by
# `phalanx validate measured.csv --left-out --spread src/phalanx/forecast/spread.toml` (published, unknown).

"""

Evidence = Literal["own", "catalog", "published", "unknown"]
"""``own``: runs of Phalanx on cores that were calibrated; ``catalog``: the same runs, forecast without; ``published``:
runs of a framework that no constant has seen; ``unknown``: on a family of devices that none has."""

SHARE = 0.8
_KNOWN = ("ampere", "hopper")
_LEAST = 10  # errors of a technique, from which on it has a quantile of its own

_SHARES = {"memory": 0.54, "exchange": 0.48, "pipeline": 0.22, "replicas": 0.27, "launches": 0.07}
_BASE = 0.027


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Where four of five outcomes lie.

    Attributes:
        low: seconds.
        high: seconds.
        basis: what this rests on, in a sentence.
    """

    low: float
    high: float
    basis: str


def interval(seconds: Mapping[str, float], device: Device, habits: Habits, plan: Plan) -> Interval:
    """The interval of a step with these parts (see ``StepTime``)."""
    total = sum(seconds.values())
    if habits.name != PHALANX.name and device.kind != "cpu":
        spread, basis = fitted(seconds, device, habits), f"the published runs that {habits.name} was fitted on"
    else:
        evidence = evidence_of(device)
        spread, basis = quantile(measured()[evidence]["four_of_five"], technique(plan)), in_words(evidence)
    return Interval(low=total * math.exp(-spread), high=total * math.exp(spread), basis=basis)


def evidence_of(device: Device) -> Evidence:
    """What is known of forecasts of Phalanx on ``device``."""
    if device.kind == "cpu":
        return "own" if device.measured else "catalog"
    return "published" if family(device) in _KNOWN else "unknown"


def in_words(evidence: Evidence) -> str:
    """What an interval rests on."""
    found = measured()[evidence]
    if evidence in ("own", "catalog"):
        runs = f"{found['runs']} runs of Phalanx on {found['cores']} cores"
        if evidence == "own":
            return f"{runs}, forecast as here with constants that phalanx calibrate measured"
        return f"{runs}, forecast as here with constants of the catalog: phalanx calibrate measures this machine's"
    what = "framework" if evidence == "published" else "family of devices"
    return (
        f"{found['runs']:,} published runs of {found['groups']} {what if found['groups'] == 1 else _many(what)}, each "
        f"{what} forecast without any run of it: no run of Phalanx on such devices has been measured yet"
    )


def _many(what: str) -> str:
    return "families of devices" if what.startswith("family") else f"{what}s"


def technique(plan: Plan) -> str:
    """What a plan's errors are counted with."""
    if plan.server or plan.sync != "each" or plan.compress != "none":
        return "loose"
    if plan.pp > 1:
        return "pipeline"
    if plan.splits_model:
        return "split"
    if plan.fsdp > 1:
        return "sharded"
    return "replicas" if plan.devices > 1 else "single"


def quantiles(errors: Sequence[tuple[str, float]]) -> dict[str, float]:
    """For ``all`` and each technique that enough is known of: the size that four of five ``errors`` stay within.

    Errors are logarithms of measured over forecast. The quantile is the one that a further outcome of the same kind
    stays within with that chance: the k-th of n with k = ceil(0.8 (n + 1)).
    """
    groups: dict[str, list[float]] = {"all": [abs(error) for _, error in errors]}
    for name, error in errors:
        groups.setdefault(name, []).append(abs(error))
    return {
        name: sorted(sizes)[min(len(sizes), math.ceil(SHARE * (len(sizes) + 1))) - 1]
        for name, sizes in sorted(groups.items())
        if sizes and (name == "all" or len(sizes) >= _LEAST)
    }


def quantile(found: Mapping[str, float], name: str) -> float:
    """That of a technique; of all where too little is known of it."""
    return found.get(name, found["all"])


@cache
def measured() -> Mapping[str, Any]:
    """What is in ``FILE``."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def fitted(seconds: Mapping[str, float], device: Device, habits: Habits) -> float:
    """The spread of published runs around the forecasts that were fitted on half of them.

    Doubt adds up as independent errors do: a base, and a share of each part that is hard to foretell.
    """
    total = sum(seconds.values())
    doubts = [_BASE, *(share * seconds[name] / total for name, share in _SHARES.items())]
    spread = habits.doubt * math.sqrt(sum(doubt**2 for doubt in doubts))
    return spread if family(device) in _KNOWN else math.hypot(spread, 0.2)
