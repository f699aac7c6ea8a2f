"""How a model's parts lie on the ranks of a pipeline, and what each rank then holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.forecast.layouts import Layouts
from phalanx.forecast.tables import Array, Table
from phalanx.profile import Weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """How parts lie on the ranks of ``pp``.

    Attributes:
        each: for every part, how many of it the busiest kind of rank holds: first, middle, last: shape (3, parts, N).
        there: how many ranks of each kind there are: shape (3, N).
    """

    each: Array
    there: Array


def stages(costs: Table, layouts: Layouts) -> Stages:
    """Blocks are dealt evenly; what comes before them lies on the first rank, what comes after on the last."""
    pp, parts = layouts.pp, costs.parts
    each = np.zeros((3, len(parts), len(pp)))
    blocks = sum(part.count for part in parts if part.role == "block")
    share = np.where(pp > 1, np.ceil(blocks / np.maximum(pp, 1) - 1e-9) / max(blocks, 1), 1.0)
    for index, part in enumerate(parts):
        if part.role == "block":
            each[:, index] = part.count * share
        elif part.role == "before":
            each[0, index] = part.count
            each[2, index] = np.where(pp == 1, part.count, 0)
        else:
            each[2, index] = part.count
            each[0, index] = np.where(pp == 1, part.count, 0)
    there = np.stack([np.ones_like(pp), np.maximum(pp - 2, 0), np.where(pp > 1, 1.0, 0.0)])
    return Stages(each=each, there=there)


def held(costs: Table, layouts: Layouts, lie: Stages, *, experts: bool | None = None) -> Array:
    """Parameters on the rank that holds most, before ``fsdp`` shards them; with ``experts`` theirs, or the others."""
    each = np.zeros((len(costs.parts), len(layouts.tp)))
    for index, part in enumerate(costs.parts):
        for one in (one for one in part.weights if experts is None or one.expert is experts):
            each[index] += (one.elements + one.frozen) / divided(one, layouts)
    return np.einsum("kpn,pn->kn", lie.each, each).max(axis=0)


def divided(weights: Weights, layouts: Layouts) -> Array:
    """By how many ranks of ``tp`` and ``ep`` a part's weights are cut."""
    return np.where(weights.share == "inner", layouts.tp, 1.0) * np.where(weights.expert, layouts.ep, 1.0)
