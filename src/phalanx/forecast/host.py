"""What lies in the memory of the hosts because a plan offloads it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.forecast.habits import Habits
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.stages import held, stages
from phalanx.forecast.tables import Array, table
from phalanx.forecast.work import Work
from phalanx.spec import Cluster, Plan


@dataclass(frozen=True, slots=True, eq=False)
class OnHosts:
    """Bytes in the memory of the host that comes nearest to what it has: shape (N,) each.

    Attributes:
        needed: of all ranks on it.
        room: that it has; infinite where nobody said.
    """

    needed: Array
    room: Array


def on_hosts(work: Work, plans: Sequence[Plan], cluster: Cluster, habits: Habits) -> OnHosts:
    """With ``offload`` a rank keeps values, gradients and the optimizer's state of what it steps on its host.

    On CPUs, whose memory is the host's, that comes to what they hold as devices, which is not counted here.
    """
    layouts = Layouts.of(plans, work.batch, work.tokens)
    costs = table(work.profile)
    stepped = held(costs, layouts, stages(costs, layouts)) / np.where(layouts.zero > 0, layouts.fsdp, 1.0)
    each = np.where(layouts.offload > 0, stepped * (4.0 + habits.sent + work.state), 0.0)
    needed = np.stack([each * np.minimum(layouts.devices, group.per_node) for group in cluster.groups])
    room = np.stack([np.full_like(each, group.host.memory or np.inf) for group in cluster.groups])
    tightest = (room / np.maximum(needed, 1.0)).argmin(axis=0)[None]
    return OnHosts(*(np.take_along_axis(one, tightest, axis=0)[0] for one in (needed, room)))
