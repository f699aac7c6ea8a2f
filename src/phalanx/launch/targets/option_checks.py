"""What several targets refuse of their options, or of a run that has to fit their nodes, in the same words."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.config import Plan, RunSpec
from phalanx.errors import Problem
from phalanx.launch.targets.target import Option

_DIGITS = 7  # more than anything that is counted has


def is_count(text: str, least: int) -> bool:
    """Whether the text is a whole number, ``least`` or more."""
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) >= least


def wrong_option(table: Mapping[str, Option], name: str, given: str, allowed: str, fix: str = "") -> Problem:
    """What is wrong in the option ``name`` of ``table``; its example is the way out where no ``fix`` is said."""
    return Problem(where=f"--{name}", given=given, allowed=allowed, fix=fix or f"--{name} {table[name].example}")


def wrong_counts(table: Mapping[str, Option], options: Mapping[str, str], counts: Mapping[str, int]) -> list[Problem]:
    """What is wrong in the ``options`` that are whole numbers; ``counts``: name → least."""
    return [
        wrong_option(table, name, repr(options[name]), f"a whole number, {least} or more")
        for name, least in counts.items()
        if name in options and not is_count(options[name], least)
    ]


def most_nodes(nodes: int, processes: int) -> int:
    """The most nodes, ``nodes`` at most, that ``processes`` can be laid over in equal parts."""
    return max(number for number in range(1, min(nodes, processes) + 1) if processes % number == 0)


def uneven_nodes(plan: Plan, nodes: int, each: str = "each node") -> list[Problem]:
    """Whether the processes of ``plan`` cannot be laid over so many ``--nodes`` in equal parts."""
    if plan.processes % nodes == 0:
        return []
    given = f"{nodes}, for the {plan.processes} processes of {plan}"
    allowed, fix = (
        f"a number that divides them: {each} has equally many",
        f"--nodes {most_nodes(nodes, plan.processes)}",
    )
    return [Problem(where="--nodes", given=given, allowed=allowed, fix=fix)]


def changing_devices(run: RunSpec, target: str) -> list[Problem]:
    """Whether the run is to have a number of devices that changes, which ``target`` does not offer."""
    if not run.devices:
        return []
    given, allowed = f"{run.devices}, on {target}", "a number of devices that does not change"
    return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}")]
