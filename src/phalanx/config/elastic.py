"""Runs whose number of devices may change: from how many to how many, and what becomes of their plan.

The global batch, the learning rate and the order of the data are the job's, so that the number of devices changes how
long a step takes and nothing that is learnt. What a plan does about a replica of the model stays as well; only how many
replicas there are, and over how many devices each is sharded, follows the number of devices.
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
    """From how many to how many devices a run may have. As text ``1:4``."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: object, where: str) -> Self:
        """The range that ``text`` says; ``where`` it stands.

        Raises:
            SpecError: it says none.
        """
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
    """``plan`` on another number of devices; ``None`` where it cannot be on so many.

    ``tp``, ``pp``, ``cp`` and ``ep`` stay as they are. The other devices are replicas (``dp``), each sharded over the
    fewest devices that are no fewer than ``fsdp`` says and go into their number, or over all of them where they are
    fewer; under ``threads`` they are threads. What says how several replicas work together (``zero``, ``compress``,
    ``shares=auto``) is left out where there is one.
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
    """The plan on each number of devices that it can be on, the fewest first.

    No forward pass holds more samples of the global ``batch`` than with the most devices: fewer of them take several
    (``micro``), which needs no more memory for activations. ``smaller`` are those of steps that have fewer samples.
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
    """What keeps a run under ``plan`` from changing its number of devices within ``devices``."""
    try:
        within = DeviceRange.parse(devices, "run.devices")
    except SpecError as error:
        return list(error.problems)
    why = ""
    if plan.server:
        why = "workers of servers may come and go as it is, while the run goes on"
    elif plan.shares not in ("", "auto"):
        why = "shares says what each of so many ranks takes, and shares=auto finds it out"
    elif plan.exactness == "no":
        why = "with another number of replicas it would learn something else"
    if why:
        given, allowed = f"{within} with plan {plan}", f"a number of devices: {why}"
        return [Problem(where="run.devices", given=given, allowed=allowed, fix=f"-n {plan.devices}")]
    if not any(resized(plan, size) for size in range(within.least, within.most + 1)):
        inner = prod(getattr(plan, name) for name in _INNER)
        given, allowed = (
            f"{within} with plan {plan}",
            f"a range that holds a multiple of {inner}, one replica's devices",
        )
        return [Problem(where="run.devices", given=given, allowed=allowed, fix=f"-n {inner}:{2 * inner}")]
    return []
