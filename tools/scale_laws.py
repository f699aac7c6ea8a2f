"""What grows with the ranks of a run: each law, and how it is counted in a world of so many ranks.

``LAWS`` is the one table of them: ``tools/scale.py`` measures it for ``docs/explanation/scale.md``, and
``tests/unit/test_pages.py`` holds the laws between 1,024 and 8,192 ranks. What is counted are operations of the
interpreter in Phalanx's own files, bytes at their peak, files and calls, never seconds: the same on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import scale_costs as costs
from scale_costs import Cost

WORLDS = (1024, 16384, 131072)
SLACK = 0.15
"""By which a fitted exponent may be above its law's: between 1,024 and 16,384 a factor log n is 0.12."""


Where = Literal["each rank", "one place", "all together"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """How something grows.

    Attributes:
        name: for tests.
        what: in words.
        where: whose cost it is.
        law: as it is written.
        power: of the number of ranks in it, at most.
        counts: what ``count`` of its cost is, such as files.
        cost: in a world of so many ranks.
        above: why it grows faster than the bar allows, and stays so; empty where it does not.
    """

    name: str
    what: str
    where: Where
    law: str
    power: float
    cost: Callable[[int], Cost]
    counts: str = ""
    above: str = ""


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The power of ``sizes`` that ``values`` grow with: the slope of their logarithms by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(max(1.0, value)) for value in values]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - middle_x) ** 2 for a in x)


def broken(law: Law, sizes: Sequence[int], counted: Sequence[Cost]) -> list[str]:
    """What of the costs ``counted`` in worlds of these ``sizes`` grows faster than ``law`` says, in words."""
    found: list[str] = []
    for unit in ("operations", "bytes", "count"):
        values = [getattr(cost, unit) for cost in counted]
        if any(values) and (power := exponent(sizes, values)) > law.power + SLACK:
            name = law.counts if unit == "count" else unit
            found.append(f"{name} of {law.name} grow with the power {power:.2f} of the ranks, not {law.law}: {values}")
    return found


LAWS: tuple[Law, ...] = (
    Law(
        name="placement",
        what="what a rank holds of the model, in shards of one to a rank",
        where="each rank",
        law="O(1)",
        power=0,
        cost=costs.placement,
    ),
    Law(
        name="peers",
        what="ranks that it shares a slice or a stage with",
        where="each rank",
        law="O(group)",
        power=0,
        cost=costs.peers,
    ),
    Law(
        name="process groups",
        what="process groups of `tp=8 pp=4`, and of two stages",
        where="each rank",
        law="O(group)",
        power=0,
        cost=costs.groups,
    ),
    Law(
        name="device mesh",
        what="torch's `DeviceMesh` of a hybrid (`dp` × `fsdp=64`)",
        where="each rank",
        law="O(n)",
        power=1,
        cost=costs.device_mesh,
        above="torch's class lists all ranks: 50 bytes each, once, which are 6 MiB of 131,072",
    ),
    Law(name="batch split", what="its part of a global batch", where="each rank", law="O(1)", power=0, cost=costs.cuts),
    Law(
        name="sampler",
        what="ids of its samples in two steps of 16 a rank",
        where="each rank",
        law="O(batch / n)",
        power=0,
        cost=costs.sampler,
    ),
    Law(
        name="meeting",
        what="calls of the store until all are known to be there",
        where="each rank",
        law="O(1)",
        power=0,
        cost=costs.meeting,
        counts="calls",
    ),
    Law(
        name="ledger files",
        what="files of the sample ledger",
        where="all together",
        law="O(n)",
        power=1,
        cost=costs.ledger_files,
        counts="files",
    ),
    Law(
        name="launch logs",
        what="files of what ranks print, in the folder of a launch",
        where="all together",
        law="O(n)",
        power=1,
        cost=costs.launch_logs,
        counts="files",
    ),
    Law(
        name="ledger bytes",
        what="bytes of the ledger in a step of 4 samples a rank",
        where="all together",
        law="O(n + batch)",
        power=1,
        cost=costs.ledger_bytes,
        counts="bytes",
    ),
    Law(
        name="ledger begun",
        what="a segment of the ledger is begun, beside the files of all",
        where="each rank",
        law="O(1)",
        power=0,
        cost=costs.ledger_begun,
    ),
    Law(
        name="ledger read",
        what="the ledger of a step is read for an audit",
        where="one place",
        law="O(n log n)",
        power=1,
        cost=costs.ledger_read,
    ),
    Law(
        name="checkpoint planned",
        what="who writes what of a checkpoint in shards of one to a rank",
        where="one place",
        law="O(n log n)",
        power=1,
        cost=costs.agreed,
    ),
    Law(
        name="checkpoint of copies planned",
        what="the same of 64 shards in copies",
        where="one place",
        law="O(n)",
        power=1,
        cost=costs.agreed_copies,
    ),
    Law(
        name="checkpoint heard",
        what="bytes that a rank hears of who writes what",
        where="each rank",
        law="O(1)",
        power=0,
        cost=costs.heard,
        counts="bytes",
    ),
    Law(
        name="manifest",
        what="bytes of a checkpoint's manifest, shards of one to a rank",
        where="one place",
        law="O(n)",
        power=1,
        cost=costs.manifest,
        counts="bytes",
    ),
    Law(
        name="manifest of copies",
        what="the same of 64 shards in copies",
        where="one place",
        law="O(shards)",
        power=0,
        cost=costs.manifest_copies,
        counts="bytes",
    ),
    Law(
        name="manifest read",
        what="a manifest is read, shards of one to a rank",
        where="each rank",
        law="O(n)",
        power=1,
        cost=costs.manifest_read,
        above="every rank that goes on from a checkpoint reads all of it, for the model, the optimizer and the state "
        "each; of shards in copies it is as large as the shards are many",
    ),
    Law(
        name="save met",
        what="rank 0 hears that all have written",
        where="one place",
        law="O(n)",
        power=1,
        cost=costs.save_meets,
    ),
    Law(
        name="verdict",
        what="bytes of what all ranks hear of a save that went well",
        where="each rank",
        law="O(1)",
        power=0,
        cost=costs.verdict,
        counts="bytes",
    ),
    Law(
        name="plan search",
        what="plans that the planner prices, a sample a device",
        where="one place",
        law="O(divisors³)",
        power=0.5,
        cost=costs.search,
        counts="plans",
    ),
)
"""Every law that can be counted without processes."""
