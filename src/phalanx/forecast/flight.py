"""How a pipeline fills a rank's memory: the parts that lie on it, and the micro-batches that are under way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.forecast.layouts import SCHEDULES, Layouts
from phalanx.forecast.tables import Array, Mask
from phalanx.profile import Part


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranks:
    """The first, second and last rank of a pipeline, one of which needs most memory.

    Attributes:
        holds: how many of each part lie there: shape (3, parts, N).
        flight: micro-batches for which each part keeps activations at the peak: shape (3, parts, N).
        there: 1 where there is such a rank: shape (3, N).
    """

    holds: Array
    flight: Array
    there: Array


def ranks(parts: Sequence[Part], layouts: Layouts, ahead: float = 1.0) -> Ranks:
    """What lies on the ranks; ``ahead`` is how far zero-bubble schedules run ahead of 1F1B (2: Qi et al., ZB-H2)."""
    pp = layouts.pp
    holds = np.stack([_held(part, parts, layouts) for part in parts], axis=1)
    place = np.stack([np.zeros_like(pp), np.minimum(1.0, pp - 1), pp - 1])
    under_way = _under_way(place, layouts, ahead)
    flight = np.repeat(under_way[:, None, :], len(parts), axis=1)
    gpipe = layouts.schedule == SCHEDULES.index("gpipe")
    for index, part in enumerate(parts):
        if part.role == "after":
            flight[:, index] = np.where(gpipe, flight[:, index], 1.0)
    return Ranks(holds=holds, flight=flight, there=np.stack([np.ones_like(pp), pp > 2, pp > 1]).astype(float))


def _held(part: Part, parts: Sequence[Part], layouts: Layouts) -> Array:
    """How many of ``part`` the first, second and last rank hold; uneven blocks are fewer where the ends are."""
    pp = layouts.pp
    none = np.zeros_like(pp)
    if part.role == "before":
        return np.stack([np.full_like(pp, part.count), none, none])
    if part.role == "after":
        bent = _bent(layouts)
        return np.stack([np.where(bent | (pp == 1), part.count, 0.0), none, np.where(bent, 0.0, part.count)])
    blocks = sum(one.count for one in parts if one.role == "block")
    full = np.ceil(blocks / pp - 1e-9)
    missing = full * pp - blocks
    last = np.where(missing > 0, full - 1, full)
    first = np.where(missing > 1, full - 1, full)
    return np.stack([first, full, last]) * part.count / max(blocks, 1)


def _bent(layouts: Layouts) -> Mask:
    """Whether the way through the stages is a V, which ends on the rank where it began."""
    names = [SCHEDULES.index(name) for name in ("zbv", "dualpipev")]
    return np.isin(layouts.schedule, names) & (layouts.pp > 1)


def _under_way(place: Array, layouts: Layouts, ahead: float) -> Array:
    """Micro-batches, of the whole rank, between forward and backward.

    1F1B: Narayanan et al. 2021, section 2.2.1; interleaved: the warm-up of section 2.2.2, of which each chunk is one
    stage of several; ZB-H1 and H2: Qi et al. 2024, table 1; ZB-V: the same, section 6; DualPipeV: DeepSeek-AI 2025.
    """
    pp, micros, stages = layouts.pp, layouts.micros, np.maximum(layouts.stages, 1.0)
    chunks = 2 * (pp - 1 - place) + (stages - 1) * pp + 1
    interleaved = np.minimum(chunks, micros * stages) / stages
    flat = np.minimum(ahead * pp - (ahead - 1), micros) + 0 * place
    found = {
        "gpipe": micros + 0 * place,
        "1f1b": np.minimum(micros, pp - place),
        "interleaved": interleaved,
        "zero-bubble": flat,
        "zbv": np.minimum(micros, pp) + 0 * place,
        "dualpipev": np.minimum(micros, pp + 0.5) + 0 * place,
    }
    under_way = np.select([layouts.schedule == SCHEDULES.index(name) for name in found], list(found.values()))
    return np.where(pp > 1, under_way, 1.0)
