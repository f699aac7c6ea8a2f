"""The times of pipeline actions on all ranks, in one step late enough to be warm.

Times are read at the begin and end of actions, in the ranks' own processes. On one machine these share a clock. Clocks
of several machines are aligned at the end, by the times at which their ranks leave a barrier: right to about the
duration of a message between them, so that a shorter wait may show as an overlap.

On a CPU every step is recorded and the latest is kept. On CUDA an action's end is known only once the device has done
it, and waiting for that costs time; one step is recorded, the last, or a warm one if the last is unknown.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.comm import active, from_every_rank
from phalanx.config import Plan
from phalanx.device_kinds import on_host
from phalanx.parallel import RankHoldings

_WARM = 5  # steps of a run
_ROUNDS = 5  # barriers by which clocks are compared

Action = tuple[str, int, int, float, float]
"""Kind, stage, micro-batch, begin and end, as a pipeline's runner tells them."""


Heard = tuple[int, float, list[Action]]
"""One step, when it began, and its actions; by that rank's clock."""


class Listener:
    """A recorder of this rank's part of a pipeline in a step; inactive without a pipeline.

    Ranks of other replicas than the first repeat its actions, and are not recorded.
    """

    def __init__(self, held: RankHoldings, plan: Plan, rank: int, only: int | None) -> None:
        """Record the step ``only``; ``None``: all, with the latest kept."""
        self._pipelined = plan.pp > 1
        self._only = only
        at = plan.coordinate(rank)
        self._runner = held.runner if not any(at[name] for name in at if name != "pp") else None
        self._latest: Heard | None = None

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        """Record a step."""
        if self._runner is None or self._only not in (None, step):
            yield
            return
        heard: Heard = step, time.perf_counter(), []
        self._runner.on_event = lambda *action: heard[2].append(action)  # pyrefly: ignore[bad-argument-type]
        try:
            yield
        finally:
            self._runner.on_event = None
        self._latest = heard

    def events(self) -> list[dict[str, Any]]:
        """Return rank, step and actions of each recorded rank, from the first begin of that step on.

        Collective.
        """
        if not self._pipelined:
            return []
        found = from_every_rank((_machine(), self._latest))
        behind = _behind([machine for machine, _ in found])
        heard = {rank: one for rank, (_, one) in enumerate(found) if one is not None and one[2]}
        return on_one_clock(heard, behind)


def only_step(device: str, first_step: int, total_steps: int | None) -> int | None:
    """Return the one step to record on a kind of device; ``None`` for all."""
    if on_host(device):
        return None
    return first_step + _WARM if total_steps is None else total_steps - 1


def on_one_clock(heard: dict[int, Heard], behind: Sequence[float]) -> list[dict[str, Any]]:
    """Return rank, step and actions for each rank, in seconds since the first rank began the step.

    ``behind``: for each rank the seconds by which its clock is behind that of rank 0.
    """
    if not heard:
        return []

    def shown(action: Action, rank: int) -> list[Any]:
        kind, stage, micro, *moments = action
        return [kind, stage, micro, *(round(moment + behind[rank] - zero, 6) for moment in moments)]

    zero = min(began + behind[rank] for rank, (_, began, _) in heard.items())
    return [
        {"rank": rank, "step": step, "actions": [shown(action, rank) for action in actions]}
        for rank, (step, _, actions) in heard.items()
    ]


def _behind(machines: Sequence[str]) -> list[float]:
    if len(set(machines)) == 1 or not active():
        return [0.0] * len(machines)
    rounds: list[list[float]] = []
    for _ in range(_ROUNDS):
        dist.barrier()
        rounds.append(from_every_rank(time.perf_counter()))
    found: dict[str, float] = {}
    for machine in set(machines):
        differences = [_earliest(one, machines, machines[0]) - _earliest(one, machines, machine) for one in rounds]
        found[machine] = statistics.median(differences)
    return [found[machine] for machine in machines]


def _earliest(times: Sequence[float], machines: Sequence[str], wanted: str) -> float:
    return min(moment for moment, machine in zip(times, machines, strict=True) if machine == wanted)


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()
