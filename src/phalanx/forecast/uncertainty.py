"""The uncertainty of a forecast, and its assumptions and unpriced inputs, in words.

The width of an interval comes from measured errors of forecasts, never from a model of errors: the quantile of their
sizes, by technique, as in split conformal prediction (Vovk et al., "Algorithmic Learning in a Random World", 2005; by
group: Vovk, "Conditional validity of inductive conformal predictors", 2012). For a case unlike all measured ones, the
errors are those of cases unseen by the constants: of a published framework, or family of devices, left out of the fit.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from phalanx.config import Cluster, Device, Plan
from phalanx.config.plan import words
from phalanx.device_kinds import all_kinds
from phalanx.forecast.presets import PHALANX, Preset
from phalanx.forecast.rates import family
from phalanx.placement.limits import unread

FILE = Path(__file__).with_name("spread.toml")
"""What was measured; its head says what writes it."""

Evidence = Literal["own", "catalog", "published", "unknown"]
"""``own``: runs of Phalanx on cores that were calibrated; ``catalog``: the same runs, forecast without; ``published``:
runs of a framework that no constant has seen; ``unknown``: on a family of devices that none has."""

_KNOWN = ("ampere", "hopper")

_SHARES = {"memory": 0.54, "exchange": 0.48, "pipeline": 0.22, "replicas": 0.27, "launches": 0.07}
_BASE = 0.027


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The range of four of five outcomes."""

    low: float  # seconds
    high: float  # seconds
    basis: str  # the evidence, in a sentence


def interval(seconds: Mapping[str, float], device: Device, preset: Preset, plan: Plan) -> Interval:
    """Return the interval of a step with these parts (see ``StepTime``)."""
    total = sum(seconds.values())
    if preset.name != PHALANX.name and device.kind != "cpu":
        spread, basis = fitted(seconds, device, preset), f"the published runs that {preset.name} was fitted on"
    else:
        evidence = evidence_of(device)
        spread, basis = quantile(measured()[evidence]["four_of_five"], technique(plan)), in_words(evidence)
    return Interval(low=total * math.exp(-spread), high=total * math.exp(spread), basis=basis)


def evidence_of(device: Device) -> Evidence:
    """Return the kind of evidence for Phalanx's forecasts on ``device``."""
    if device.kind == "cpu":
        return "own" if device.measured else "catalog"
    return "published" if family(device) in _KNOWN else "unknown"


def in_words(evidence: Evidence) -> str:
    """Return the basis of an interval in words."""
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
    """Return the technique whose errors apply to a plan."""
    if plan.server or plan.sync != "each" or plan.compress != "none":
        return "loose"
    if plan.pp > 1:
        return "pipeline"
    if plan.splits_model:
        return "split"
    if plan.fsdp > 1:
        return "sharded"
    return "replicas" if plan.devices > 1 else "single"


def quantile(found: Mapping[str, float], name: str) -> float:
    """Return the quantile of a technique; that of all if it has too little data."""
    return found.get(name, found["all"])


@cache
def measured() -> Mapping[str, Any]:
    """Return the content of ``FILE``."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def fitted(seconds: Mapping[str, float], device: Device, preset: Preset) -> float:
    """Return the spread of published runs around forecasts fitted on half of them.

    Doubts add up like independent errors: a base, and a share of each part that is hard to forecast.
    """
    total = sum(seconds.values())
    doubts = [_BASE, *(share * seconds[name] / total for name, share in _SHARES.items())]
    spread = preset.doubt * math.sqrt(sum(doubt**2 for doubt in doubts))
    return spread if family(device) in _KNOWN else math.hypot(spread, 0.2)


_SPREAD = 0.075
"""Of the logarithm of memory needed over memory forecast: probit regression of having run out of memory on forecast
over room, of 391 published layouts of Llama 13B and 30B, 257 of which ran out."""

CHANCE = 0.1
"""Of running out of memory that a plan may have to be recommended."""

SAFE = math.exp(-NormalDist().inv_cdf(1 - CHANCE) * _SPREAD)
"""Share of the room that a plan fills which has that chance."""


def runs_out(reserved: float, room: float) -> float:
    """Return the chance that a plan forecast to need ``reserved`` bytes needs more than ``room``."""
    return NormalDist().cdf(math.log(reserved / room) / _SPREAD) if reserved > 0 < room else 0.0


def assumed(plan: Plan, cluster: Cluster, samples: Sequence[float]) -> tuple[str, ...]:
    """Return sentences for the reader; ``samples`` are those of a rank of ``dp`` on each kind of device."""
    return tuple(_assumed(plan, cluster, samples))


def _assumed(plan: Plan, cluster: Cluster, samples: Sequence[float]) -> Iterator[str]:
    if plan.exact_note:
        yield plan.exact_note
    if plan.sync != "each":
        yield from _averaged(plan)
    if plan.server:
        yield (
            "Servers are processes on the hosts, spread over the nodes; they take no device, and how fast the hosts' "
            "processors step parameters is assumed. Workers and servers of a node share its adapters."
        )
    if plan.backup:
        yield "Forecasts have no late workers, so not waiting for the slowest saves no time here."
    yield from _by_kind(plan, cluster, samples)


def _averaged(plan: Plan) -> Iterator[str]:
    if plan.every > 1:
        yield (
            f"Averaging parameters, which nothing hides, is spread over {plan.every} steps: that which does it takes "
            "longer, the others less."
        )
    if plan.after:
        yield f"The first {plan.after} steps, which sum gradients, take longer."
    copies = "a copy of the parameters"
    if plan.outer == "nesterov":
        copies += " and the outer momentum"
    yield f"Each rank keeps {copies} in fp32 in host memory."


def _by_kind(plan: Plan, cluster: Cluster, samples: Sequence[float]) -> Iterator[str]:
    unlike = len(samples) > 1
    if plan.shares and unlike:
        each = [
            f"{count:g} on {group.device.name}" for group, count in zip(cluster.groups, samples, strict=True) if count
        ]
        yield f"Samples of a rank of dp: {', '.join(each)}. The step is that of the kind that takes longest."
    elif plan.shares == "auto":
        yield "Devices are alike, so that shares=auto is even."
    elif unlike:
        yield "Shares are even: every device is as slow as the slowest, and holds what the smallest has room for."


_LEARNING = ("outer_lr", "outer_momentum")


def unpriced(plan: Plan, cluster: Cluster, batch: int) -> Iterator[str]:
    """Yield a sentence for each input of ``plan`` and ``cluster`` that changes no number of the forecast."""
    yield from unread(plan, batch, {})
    if plan.compile:
        yield "compile is not priced: kernels are taken to be eager ones."
    if plan.threads > 1:
        yield f"threads={plan.threads} is priced as dp={plan.threads}: what threads save of reductions is left out."
    learning = [name for word in words(str(plan)) if (name := word.partition("=")[0]) in _LEARNING]
    if learning:
        yield f"{', '.join(learning)}: changes what is learnt, not what a step takes."
    yield from _of_cluster(cluster)


def uncut(plan: Plan, heads: int) -> Iterator[str]:
    """Yield a sentence if ``tp`` does not divide the ``heads`` of attention; 0 for a model without attention."""
    if plan.tp > 1 and heads and heads % plan.tp:
        yield (
            f"tp={plan.tp} does not divide {heads} heads: attention is priced in even shares; ranks have some heads "
            "more or fewer, or keys and values whole: phalanx show tells which."
        )


def _of_cluster(cluster: Cluster) -> Iterator[str]:
    hosts = {
        name
        for group in cluster.groups
        for name, value in (("cores", group.host.cores), ("NUMA nodes", group.host.numa))
        if value and (group.device.kind != "cpu" or name != "cores")
    }
    if hosts:
        yield f"Of the hosts, {' and '.join(sorted(hosts))} are not priced: loading data is taken to keep up."
    fitted = [kind for kind in all_kinds() if kind.fitted]
    known = " or ".join(kind.label for kind in fitted if not kind.on_host)
    for kind in sorted({group.device.kind for group in cluster.groups} - {kind.name for kind in fitted}):
        priced = f"priced with the constants of kernels and collectives of {known} devices"
        yield f"Devices of kind {kind} are {priced}, never calibrated on their own."
    measured = [group for group in cluster.groups if group.device.measured]
    if any(name.endswith(".byte") for group in measured for name in group.device.measured):
        yield "Measured exchanges stand in place of the bandwidth and latency of link and network."
    if any(group.device.kind == "cpu" for group in measured):
        yield "Measured cores stand in place of launch and processors of the device."
