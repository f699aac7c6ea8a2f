"""Runs whose number of devices may change, and their plans.

The global batch, the learning rate and the order of the data stay the job's, so a change of devices changes the time of
a step only. The plan of a replica stays too; the number of replicas, and the devices that shard each, change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self, final

from phalanx.config.plan import Plan
from phalanx.errors import Problem, SpecError

_TEXT = re.compile(r"(\d+):(\d+)")
_INNER = ("pp", "ep", "cp", "tp")
_MOST = 10_000


@final
@dataclass(frozen=True, slots=True)
class DeviceRange:
    """The fewest and the most devices of a run, as text ``1:4``."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: object, where: str) -> Self:
        """Return the range of ``text``, or raise a ``SpecError`` at ``where``."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        numbers = [int(number) for number in found.groups()] if found else [0, 0]
        if not 1 <= numbers[0] <= numbers[1] <= _MOST:
            allowed = "LEAST:MOST, whole numbers, the least 1 or more and no more than the most"
            raise SpecError.of(where, repr(text) if where != "-n" else str(text), allowed, _example(where, numbers))
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def _example(where: str, numbers: list[int]) -> str:
    least, most = sorted(max(1, number) for number in numbers)
    least, most = (least, most) if most <= _MOST and most > 1 else (1, 4)
    return f"-n {least}:{most}" if where == "-n" else f'devices="{least}:{most}"'


def resized(plan: Plan, devices: int) -> Plan | None:
    """Return ``plan`` on another number of devices; ``None`` if that is impossible.

    ``tp``, ``pp``, ``cp`` and ``ep`` stay. The other devices are replicas (``dp``; threads with ``threads``), each
    sharded over the next larger divisor of their number, at least ``fsdp``. A single replica has no ``zero``,
    ``compress`` or ``shares=auto``.
    """
    replicas, left = divmod(devices, prod(getattr(plan, name) for name in _INNER))
    if left or not replicas:
        return None
    if plan.threads > 1:
        changes: dict[str, Any] = {"threads": replicas}
    else:
        fsdp = next((size for size in range(plan.fsdp, replicas + 1) if replicas % size == 0), replicas)
        dp = replicas // fsdp
        changes = {"dp": dp, "fsdp": fsdp, "zero": plan.zero if fsdp > 1 else 0}
        if dp == 1:
            changes |= {"compress": "none", "shares": ""}
    try:
        return replace(plan, **changes)
    except SpecError:  # such as parameters in host memory, which only shards have
        return None


def plans_of(plan: Plan, devices: DeviceRange, batch: int, *smaller: int) -> dict[int, Plan]:
    """Return the plan on each possible number of devices, the fewest first.

    With fewer devices ``micro`` keeps the samples of a forward pass, and so the memory, at those with the most devices.
    ``smaller`` are the batches of steps with fewer samples than the global ``batch``.
    """
    least = min((batch, *smaller))
    found = {size: resized(plan, size) for size in range(devices.least, devices.most + 1)}
    plans = {size: one for size, one in found.items() if one is not None and one.replicas <= least}
    if plan.micro is not None or not plans:
        return plans
    fewest = -(-batch // max(one.replicas for one in plans.values()))
    return {
        size: one if -(-batch // one.replicas) <= fewest else replace(one, micro=fewest) for size, one in plans.items()
    }


def elastic_problems(plan: Plan, devices: str) -> list[Problem]:
    """Return the problems of a run under ``plan`` whose number of devices may change within ``devices``."""
    try:
        within = DeviceRange.parse(devices, "run.devices")
    except SpecError as error:
        return list(error.problems)
    why, fix = "", f"-n {plan.devices}"
    if plan.server:
        why = "a number of devices: workers of servers may come and go as it is, while the run goes on"
    elif plan.shares not in ("", "auto"):
        why = "a number of devices: shares says what each of so many ranks takes, and shares=auto finds it out"
    elif plan.exactness == "no":
        why = "a number of devices: with another number of replicas it would learn something else"
    elif not any(resized(plan, size) for size in range(within.least, within.most + 1)):
        inner = prod(getattr(plan, name) for name in _INNER)
        why, fix = f"a range that holds a multiple of {inner}, one replica's devices", f"-n {inner}:{2 * inner}"
    given = f"{within} with plan {plan}"
    return [Problem(where="run.devices", given=given, allowed=why, fix=fix)] if why else []
