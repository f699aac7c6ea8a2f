"""The step as it would be if all devices were of one kind."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.errors import Problem, RefusedError
from phalanx.forecast.compute import Times, compute
from phalanx.forecast.crowd import on_cores
from phalanx.forecast.habits import PHALANX, Habits
from phalanx.forecast.layouts import Layouts, Whole
from phalanx.forecast.lengths import timed
from phalanx.forecast.links import Fabric
from phalanx.forecast.rates import Rates, rates
from phalanx.forecast.setting import Setting
from phalanx.forecast.step import StepTime, step_time
from phalanx.forecast.tables import table
from phalanx.forecast.work import Work
from phalanx.spec import Cluster, Group

_PROCESSOR = 100e9
"""Bytes/s at which a host steps parameters: about half of eight channels of DDR4-3200 (204.8 GB/s); no figure of the
catalog."""
_NEAR, _FAR = 3.4e-6, 14e-6
"""Seconds of latency, by the catalog, of the links (NVLink) and networks (InfiniBand) that constants were fitted on: by
what a cluster states beyond them each hop takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What layouts are forecast for.

    Attributes:
        work: in each step.
        cluster: on which.
        precision: computed in.
        habits: of the framework.
    """

    work: Work
    cluster: Cluster
    precision: str
    habits: Habits = PHALANX


def alone(scene: Scene, layouts: Layouts, group: Group, events: bool = False) -> StepTime:
    """The step of every candidate of ``layouts`` on devices like those of ``group``; alike ones are priced once.

    With ``events`` pipelines are run event by event, which takes milliseconds each; else they are priced by formula.

    Raises:
        RefusedError: if those devices do not compute in the precision.
    """
    if scene.precision not in group.device.peak:
        given = f"precision={scene.precision} on {group.device.name}"
        allowed = ", ".join(group.device.peak)
        raise RefusedError([Problem(where="plan.precision", given=given, allowed=allowed, fix="precision=fp32")])
    costs, setting = table(scene.work.profile), _setting(scene, group)
    layouts = timed(scene.work.unlike, layouts)
    unlike, alike = _unlike(layouts)
    few = compute(costs, layouts.take(unlike), setting)
    each = Times(**{one.name: getattr(few, one.name)[..., alike] for one in fields(few)})
    step = step_time(costs, each, layouts, setting, events)
    core = setting.rates.core
    if core is None:
        return step
    cores = group.host.cores or group.per_node
    step = on_cores(step, costs, layouts, core, cores=cores, optimizer=scene.work.optimizer)
    return replace(step, update=np.where(layouts.server > 0, 0.0, step.update))


def _setting(scene: Scene, group: Group) -> Setting:
    speeds, link, habits = rates(group.device), group.host.link, scene.habits
    return Setting(
        rates=speeds,
        bus=link.latency if link else 0.0,
        fabric=_fabric(group, scene.cluster, speeds),
        # on cores, what reduces takes them from what computes
        habits=replace(habits, overlap=0.0) if speeds.core else habits,
        precision=scene.precision,
        host=link.bandwidth if link else speeds.bandwidth,
        processor=speeds.bandwidth if group.device.kind == "cpu" else _PROCESSOR,
    )


def _fabric(group: Group, cluster: Cluster, speeds: Rates) -> Fabric:
    wires = speeds.wires
    wires = replace(
        wires,
        hop=max(0.0, wires.hop + (group.link.latency if group.link else _NEAR) - _NEAR),
        hop_between=max(0.0, wires.hop_between + cluster.network.latency - _FAR),
    )
    return Fabric(
        inside=group.link.bandwidth if group.link else group.device.bandwidth / 4,
        node=cluster.network.bandwidth,
        per_node=group.per_node,
        wires=wires,
        socket=max(group.host.slots, group.per_node) // 2 or 1,
    )


def _unlike(layouts: Layouts) -> tuple[Whole, Whole]:
    """One candidate of each kind that ``compute`` tells apart, and for each candidate its kind."""
    shared = (layouts.tp, layouts.sequence, layouts.cp, layouts.ep, layouts.returned)
    keys = (layouts.micro, layouts.length, *shared, layouts.recompute, layouts.attention)
    codes = np.zeros(len(layouts.tp), dtype=np.int64)
    for key in keys:
        values, found = np.unique(key, return_inverse=True)
        codes = codes * len(values) + found
    _, first, alike = np.unique(codes, return_index=True, return_inverse=True)
    return first.astype(np.int64), alike.astype(np.int64)
