"""What several targets refuse of their options, or of a run that has to fit their nodes, in the same words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import Plan, RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.files import read_json
from phalanx.launch.targets.launch_folder import slowest_save
from phalanx.launch.targets.target import Option
from phalanx.units import show_counted

_DIGITS = 7  # more than anything that is counted has
_SECRET = {"KEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH", "APIKEY"}
_PLACES = {"FILE", "FILES", "PATH", "DIR"}  # as of SSL_KEY_FILE
# What a line of shell sets a variable or an option to, but where that is looked up only as the line runs
_SET = re.compile(r"""(?:(?<![\w-])([A-Za-z_]\w*)\+?=|--([A-Za-z][\w-]*)(?:=|\s+(?!-)))["']?(?![$`"'\s;&|]|$)""")


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


def secret_names(names: Iterable[str]) -> list[str]:
    """Those of ``names``, of variables or options, that are called as secrets are."""
    words = {name: {*re.split("[_-]", name.upper())} for name in names}
    return [name for name, parts in words.items() if parts & _SECRET and not parts & _PLACES]


def secrets_set(line: str) -> list[str]:
    """Variables and options that are called as secrets are and that a line of shell says the value of.

    What the line looks up only as it runs, ``KEY=$(cat file)`` or ``KEY=$OTHER``, is not said.
    """
    return secret_names(dict.fromkeys(first or second for first, second in _SET.findall(line)))


def uneven_nodes(plan: Plan, nodes: int, each: str = "each node") -> list[Problem]:
    """Whether the processes of ``plan`` cannot be laid over so many ``--nodes`` in equal parts."""
    if plan.processes % nodes == 0:
        return []
    given = f"{nodes}, for the {show_counted(plan.processes, 'process')} of {plan}"
    allowed = f"a number that divides them: {each} has equally many"
    most = max(number for number in range(1, min(nodes, plan.processes) + 1) if plan.processes % number == 0)
    return [Problem(where="--nodes", given=given, allowed=allowed, fix=f"--nodes {most}")]


def changing_devices(run: RunSpec, target: str) -> list[Problem]:
    """Whether the run is to have a number of devices that changes, which ``target`` does not offer."""
    if not run.devices:
        return []
    given, allowed = f"{run.devices}, on {target}", "a number of devices that does not change"
    return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}")]


def read_patch(
    table: Mapping[str, Option], options: Mapping[str, str], name: str = "patch"
) -> tuple[dict[str, Any], list[Problem]]:
    """Read the file of ``--patch``, or of the option ``name``. Returns its JSON object, and the problems with it."""
    if not options.get(name):
        return {}, []
    path = Path(options[name]).expanduser()
    try:
        found = read_json(path, where=f"--{name}", fix=f"--{name} {table[name].example}")
    except SpecError as error:
        return {}, [*error.problems]
    if not isinstance(found, dict):
        return {}, [wrong_option(table, name, f"{path} with {str(found)[:60]}", "a JSON object")]
    return found, []


def merged(request: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``request`` with ``patch`` merged in.

    Objects are merged key by key, lists end to end but for objects of the same ``name``; else the patch's value holds.
    """
    made = dict(request)
    for key, value in patch.items():
        before = made.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            made[key] = merged(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            made[key] = _joined(before, value)
        else:
            made[key] = value
    return made


def _joined(before: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    made = list(before)
    for one in more:
        name = one.get("name") if isinstance(one, dict) else None
        same = [at for at, other in enumerate(made) if name and isinstance(other, dict) and other.get("name") == name]
        if same:
            made[same[0]] = merged(made[same[0]], one)
        else:
            made.append(one)
    return made


SAVE_MARGIN = 30
"""Seconds, beside those of a save, for what comes before it and after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """A time limit as a target keeps it.

    Attributes:
        seconds: of it; ``None``: there is none.
        kept: seconds of it that are kept to save in.
        said: the limit and what is kept of it, in words.
        most_grace: seconds that the target itself gives at most to save in.
    """

    seconds: float | None
    kept: float
    said: str
    most_grace: float = math.inf

    def problems(self, run: RunSpec) -> list[Problem]:
        """Whether ``run`` has no time to save, by the slowest checkpoint that it has saved."""
        took, problems = slowest_save(run.folder), list[Problem]()
        if 0 < run.grace < took:
            given = f"{run.grace:g} seconds, in which no checkpoint is whole: the slowest of this run took {took:.0f}"
            enough = min(math.ceil(1.5 * took), self.most_grace)
            fix = f"--grace {enough:g}" if enough > took else "--grace 0 --checkpoint-every 10m"
            problems.append(Problem(where="--grace", given=given, allowed="more than that", fix=fix))
        if self.seconds is None:
            return problems
        if self.seconds <= max(self.kept, took):
            slow = f"; the slowest checkpoint of this run took {took:.0f} seconds" if took > self.kept else ""
            between = 0 if run.grace else run.save_seconds
            least = math.ceil(max(self.kept, between, 1.5 * took + SAVE_MARGIN) / 60) + 5
            given, fix = f"{self.said}{slow}", f"--time {least}m"
            problems.append(Problem(where="--time", given=given, allowed="more than that", fix=fix))
        elif not run.grace and run.save_seconds >= self.seconds:
            given = f"{self.said}, with grace = 0 and a checkpoint every {run.checkpoint_every}"
            allowed = "more than that, or the run never goes on"
            problems.append(Problem(where="--time", given=given, allowed=allowed, fix="--grace 30"))
        return problems
