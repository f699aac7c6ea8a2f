"""The machines a target offers a run before any of them is asked, and the plan that fits there."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from phalanx.config import Plan
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RunError, SpecError

_RESIZED = ("dp", "fsdp", "ep", "cp", "pp", "tp")  # what is given up first stands first


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Equal machines.

    Attributes:
        devices: GPUs of each node, or processes if it has none.
        device: name of a GPU; empty: none.
        cores: of each node for the run; 0: not known.
        memory: bytes of each node; 0: not known.
        by: source of these numbers, in a word or two.
    """

    nodes: int
    devices: int
    device: str = ""
    cores: int = 0
    memory: int = 0
    by: str = ""

    def __str__(self) -> str:
        cores = self.cores or self.devices
        each = f"{self.devices} x {self.device}" if self.device else f"{cores} cores" if cores else "no GPU"
        return f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'} with {each}"


def nearest_plan(plan: Plan, processes: int) -> Plan:
    """Return ``plan`` with one dimension resized to fit so many processes, replicas first; else replicas alone."""
    for other in _resized(plan, processes - plan.server):
        if other.processes == processes:
            return other
    return Plan(dp=processes)


def _resized(plan: Plan, ranks: int) -> Iterator[Plan]:
    for name in _RESIZED:
        rest = prod(size for axis, size in plan.mesh.items() if axis != name)
        if ranks > 0 and ranks % rest == 0 and (name in ("dp", "fsdp") or getattr(plan, name) > 1):
            try:
                yield replace(plan, **{name: ranks // rest})  # pyrefly: ignore[bad-argument-type]
            except SpecError:  # what else the plan says needs that size
                continue


def misfit(plan: Plan, offer: Offer) -> Problem | None:
    """Return a problem if ``plan`` needs more GPUs than ``offer`` has.

    A plan with ``device=auto`` computes on cores if there are no GPUs.
    """
    gpus = offer.nodes * offer.devices if offer.device else 0
    named = plan.device != "auto" and not on_host(plan.device)
    needed = named or (plan.device == "auto" and bool(offer.device))
    if not needed or plan.devices <= gpus:
        return None
    there = f"{offer} ({offer.by})" if offer.by else str(offer)
    if not gpus:
        given = f"{plan}, which computes on GPUs: {there}"
        allowed = f"nodes with GPUs, or a plan without device={plan.device}"
        fix = f"--plan {shlex.quote(str(plan.on_any_device))}"
        return Problem(where="--plan", given=given, allowed=allowed, fix=fix)
    given = f"{plan}, for {plan.devices} devices: {there} have {gpus}"
    nearest = shlex.quote(str(nearest_plan(plan, max(1, gpus // plan.threads))))
    return Problem(where="--plan", given=given, allowed=f"a plan for at most {gpus}", fix=f"--plan {nearest}")


def ask_program(words: Sequence[str], of: str, patience: float, lacking: str, helps: str, **how: Any) -> Any:
    """Run a program of the engine ``of``; return the finished process.

    Raises:
        RunError: it is not on this machine, or takes more than ``patience`` seconds.
    """
    given: Any = {"stdin": subprocess.DEVNULL, **how}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=patience, check=False, **given)
    except FileNotFoundError:
        what = f"{words[0]}, which hands runs to {of}, is not on this machine"
        raise RunError(f"{what}\n    try: {lacking}") from None
    except subprocess.TimeoutExpired:
        what = f"{of} does not answer: {words[0]} took more than {patience:.0f} seconds"
        raise RunError(f"{what}\n    try: {helps}") from None
