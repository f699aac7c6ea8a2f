"""What a step takes on a pipeline: from the first forward to the last backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.forecast.layouts import RECOMPUTES, SCHEDULES, Layouts
from phalanx.forecast.schedule import Pipeline, duration
from phalanx.forecast.tables import Array
from phalanx.placement.schedules import in_halves


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lanes:
    """Seconds of one micro-batch on the first rank of a pipeline, on those between and on the last: shape (3, N).

    Attributes:
        forward: of it.
        backward: of it, all.
        weights: of the backward, what yields weights' gradients only.
        there: how many ranks of each kind there are.
        send: to hand something to the next rank: shape (N,).
    """

    forward: Array
    backward: Array
    weights: Array
    there: Array
    send: Array


def pipeline(lanes: Lanes, layouts: Layouts) -> Array:
    """Seconds from the first forward to the last backward, from the times of first, middle and last ranks.

    1F1B and interleaving: Narayanan et al. 2021, section 2.2; zero bubble: Qi et al. 2024, table 2; each with ranks
    that take different times: the slowest is never idle but for the way of one micro-batch through the others.
    """
    forward, backward, weights, there, send = lanes.forward, lanes.backward, lanes.weights, lanes.there, lanes.send
    micros, pp, v = layouts.micros, layouts.pp, np.maximum(layouts.stages, 1)
    there_now = there > 0
    one = forward + backward + 2 * send * np.where(pp > 1, v, 0)
    slowest = np.where(there_now, one, 0).max(axis=0)
    through = (one * there).sum(axis=0)
    plain: Array = micros * slowest + (through - slowest)
    kind = layouts.schedule
    gpipe = (micros - 1) * (
        np.where(there_now, forward + send, 0).max(axis=0) + np.where(there_now, backward + send, 0).max(axis=0)
    ) + ((forward + backward + 2 * send) * there).sum(axis=0)
    found: Array = np.where(kind == SCHEDULES.index("gpipe"), gpipe, plain)
    interleaved = micros * slowest + (through - slowest) / v
    found = np.where(kind == SCHEDULES.index("interleaved"), interleaved, found)
    hidden = (np.maximum(through - slowest - 2 * (weights * there).sum(axis=0) * (pp - 1) / np.maximum(pp, 1), 0)) / v
    zero = micros * slowest + hidden
    for name in ("zero-bubble", "zbv", "dualpipev"):
        found = np.where(kind == SCHEDULES.index(name), zero, found)
    return np.where(pp > 1, found, micros * slowest)


def simulated(lanes: Lanes, layouts: Layouts, *, whole: bool = False, recomputes: bool = False) -> Array:
    """As ``pipeline``, by running every candidate's schedule event by event; what is alike is run once.

    With ``whole`` backwards are done in halves only where the runtime does so; ``recomputes``: the model recomputes
    activations by itself.
    """
    forward, backward, weights, send = lanes.forward, lanes.backward, lanes.weights, lanes.send
    found = np.zeros_like(layouts.pp)
    for at, ranks in enumerate(layouts.pp.astype(int)):
        where = [0, *[1] * (ranks - 2), 2][:ranks]
        chunks, recompute = max(int(layouts.stages[at]), 1), RECOMPUTES[int(layouts.recompute[at])]
        one = Pipeline(
            schedule=SCHEDULES[int(layouts.schedule[at])] if ranks > 1 else "gpipe",
            halves=not whole or in_halves(recompute, int(layouts.zero[at]), recomputes=recomputes),
            ranks=int(ranks),
            chunks=chunks if ranks > 1 else 1,
            micros=int(layouts.micros[at]),
            forward=tuple(float(forward[kind, at] + chunks * send[at]) for kind in where),
            inputs=tuple(float(backward[kind, at] - weights[kind, at] + chunks * send[at]) for kind in where),
            weights=tuple(float(weights[kind, at]) for kind in where),
        )
        found[at] = duration(one)
    return found
