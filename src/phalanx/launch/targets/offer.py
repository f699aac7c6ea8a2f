"""The GPUs of a queue's nodes as options name them, the plan that fits there, and calls of an engine's program."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from phalanx.config import Plan
from phalanx.config.elastic import resized
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RunError, SpecError
from phalanx.hardware.catalog import find, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Equal nodes with GPUs.

    Attributes:
        devices: GPUs of each node.
        device: name of a GPU in the catalog.
    """

    nodes: int
    devices: int
    device: str

    def __str__(self) -> str:
        return f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'} with {self.devices} x {self.device}"

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self | None:
        """Return the nodes by ``--nodes``, ``--gpus-per-node`` and ``--device``; ``None`` without the last two.

        Raises:
            SpecError: the catalog does not know that device.
        """
        nodes, devices = (options.get(name, usual) for name, usual in (("nodes", "1"), ("gpus-per-node", "0")))
        if "device" not in options or not (nodes.isdecimal() and devices.isdecimal() and int(nodes) and int(devices)):
            return None
        if not (found := find(options["device"])):
            problem = unknown(options["device"])
            raise SpecError([replace(problem, where="--device", fix=f"--device {problem.fix}")])
        return cls(nodes=int(nodes), devices=int(devices), device=found.device.name)


def nearest_plan(plan: Plan, processes: int) -> Plan:
    """Return ``plan`` with other replicas for so many processes; if it cannot have so many, replicas alone."""
    return resized(plan, (processes - plan.server) * plan.threads) or Plan(dp=processes)


def gpus_of_node(plan: Plan, nodes: int, given: int | None) -> tuple[int, list[Problem]]:
    """Return GPUs to ask for on each node, and a problem if they are too few.

    ``given``: by ``--gpus-per-node``; ``None``: one a device of the plan, unless that is for cores.
    """
    if given is None:
        # parameter servers compute on cores, but which of several nodes they are on is not known before
        each = plan.devices if nodes == 1 else plan.processes // nodes * plan.threads
        return (0 if on_host(plan.device) else each), []
    if on_host(plan.device) or plan.devices <= nodes * given or (plan.device == "auto" and not given):
        return given, []
    there = f"{plan}, for {plan.devices} devices: {nodes} x {given} GPUs are {nodes * given}"
    nearest = resized(plan, nodes * given) or Plan(dp=nodes * given) if given else plan.on_any_device
    allowed, fix = f"a plan for at most {nodes * given} GPUs", f"--plan {shlex.quote(str(nearest))}"
    return given, [Problem(where="--plan", given=there, allowed=allowed, fix=fix)]


def ask_program(words: Sequence[str], of: str, patience: float, lacking: str, helps: str, **how: Any) -> str:
    """Run a program of the engine ``of``; return its output. ``lacking``, ``helps``: advice without it, or else.

    Raises:
        RunError: it is not on this machine, takes more than ``patience`` seconds, or refuses.
    """
    given: Any = how if "input" in how else {"stdin": subprocess.DEVNULL, **how}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=patience, check=False, **given
        )
    except OSError as error:
        lacks = isinstance(error, FileNotFoundError)
        why = "is not on this machine" if lacks else f"cannot be run: {error.strerror}"
        what = f"{words[0]}, which hands runs to {of}, {why}"
        raise RunError(f"{what}\n    try: {lacking}") from None
    except subprocess.TimeoutExpired:
        what = f"{of} does not answer: {words[0]} took more than {patience:.0f} seconds"
        raise RunError(f"{what}\n    try: {helps}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"{words[0]} ended with {done.returncode}"
        raise RunError(f"{of} refuses it: {said}\n    try: {helps}")
    return done.stdout
