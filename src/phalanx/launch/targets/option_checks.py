"""The reader of a target's options, and refusals that several targets share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.config import Plan, RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.files import read_json, read_toml
from phalanx.launch.targets.launch_folder import slowest_save
from phalanx.launch.targets.target import Option
from phalanx.units import parse_duration, show_counted

_DIGITS = 7  # of the longest count
_SECRET = {"KEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH", "APIKEY"}
_PLACES = {"FILE", "FILES", "PATH", "DIR"}  # as of SSL_KEY_FILE
# The value of a variable or an option in a line of shell, unless it is looked up as the line runs
_SET = re.compile(r"""(?:(?<![\w-])([A-Za-z_]\w*)\+?=|--([A-Za-z][\w-]*)(?:=|\s+(?!-)))["']?(?![$`"'\s;&|]|$)""")

SAVE_MARGIN = 30
"""Seconds beside those of a save, for the work before it and after it."""


def read_options(table: Mapping[str, Option], options: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of ``options`` by the kinds of ``table``, and the problems in them."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, option in table.items():
        text = options.get(name, "")
        if not text and option.needed:
            problems.append(wrong_option(table, name, "none", option.help))
        elif option.kind == "file":
            values[name], wrong = read_patch(table, options, name)
            problems += wrong
        elif name in options:
            try:
                values[name] = _value(name, option, text)
            except SpecError as error:
                problems += error.problems
    return values, problems


def read_patch(
    table: Mapping[str, Option], options: Mapping[str, str], name: str = "patch"
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the table in the JSON or TOML file of the option ``name``, {} without one, and the problems with it."""
    if not options.get(name):
        return {}, []
    path, fix = Path(options[name]).expanduser(), f"--{name} {table[name].example}"
    try:
        found = (read_toml if path.suffix == ".toml" else read_json)(path, where=f"--{name}", fix=fix)
    except SpecError as error:
        return {}, [*error.problems]
    if not isinstance(found, dict):
        return {}, [wrong_option(table, name, f"{path} with {str(found)[:60]}", "a JSON object")]
    return found, []


def _value(name: str, option: Option, text: str) -> Any:
    fix = f"--{name} {option.example}"
    if option.kind == "count":
        if is_count(text, option.least):
            return int(text)
        raise SpecError.of(f"--{name}", repr(text), f"a whole number, {option.least} or more", fix)
    if option.kind == "time":
        try:
            return math.ceil(parse_duration(text))
        except ValueError:
            raise SpecError.of(f"--{name}", repr(text), "a time such as 30m, 12h or 2d", fix) from None
    return text


def is_count(text: str, least: int) -> bool:
    """Return True if the text is a whole number, ``least`` or more."""
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) >= least


def to_count(text: str) -> int:
    """Return the whole number of a text; 0 if it is none."""
    return int(text) if is_count(text, 0) else 0


def wrong_option(table: Mapping[str, Option], name: str, given: str, allowed: str, fix: str = "") -> Problem:
    """Return a problem of the option ``name``; ``fix``: instead of its example."""
    return Problem(where=f"--{name}", given=given, allowed=allowed, fix=fix or f"--{name} {table[name].example}")


def secret_names(names: Iterable[str]) -> list[str]:
    """Return those of ``names``, of variables or options, that look like names of secrets."""
    words = {name: {*re.split("[_-]", name.upper())} for name in names}
    return [name for name, parts in words.items() if parts & _SECRET and not parts & _PLACES]


def secrets_set(line: str) -> list[str]:
    """Return names of secrets whose values stand in a line of shell, not ``KEY=$(cat file)`` or ``KEY=$OTHER``."""
    return secret_names(dict.fromkeys(first or second for first, second in _SET.findall(line)))


def uneven_nodes(plan: Plan, nodes: int, each: str = "each node") -> list[Problem]:
    """Return a problem if the processes of ``plan`` do not divide by ``nodes``."""
    if plan.processes % nodes == 0:
        return []
    given = f"{nodes}, for the {show_counted(plan.processes, 'process')} of {plan}"
    allowed = f"a number that divides them: {each} has equally many"
    most = max(number for number in range(1, min(nodes, plan.processes) + 1) if plan.processes % number == 0)
    return [Problem(where="--nodes", given=given, allowed=allowed, fix=f"--nodes {most}")]


def changing_devices(run: RunSpec, target: str) -> list[Problem]:
    """Return a problem if the run has a range of devices, which ``target`` does not offer."""
    if not run.devices:
        return []
    given, allowed = f"{run.devices}, on {target}", "a number of devices that does not change"
    return [Problem(where="-n", given=given, allowed=allowed, fix=f"-n {run.plan.devices}")]


def too_short(run: RunSpec, limit: float | None, kept: float, said: str, most_grace: float = math.inf) -> list[Problem]:
    """Return problems if ``run`` has no time to save, by the slowest checkpoint it has saved.

    ``limit``: seconds, ``kept`` of them to save in, ``said`` in words. ``most_grace``: longest grace of the target.
    """
    took, problems = slowest_save(run.folder), list[Problem]()
    if 0 < run.grace < took:
        given = f"{run.grace:g} seconds, in which no checkpoint is whole: the slowest of this run took {took:.0f}"
        enough = min(math.ceil(1.5 * took), most_grace)
        fix = f"--grace {enough:g}" if enough > took else "--grace 0 --checkpoint-every 10m"
        problems.append(Problem(where="--grace", given=given, allowed="more than that", fix=fix))
    if limit is not None and limit <= max(kept, took):
        slow = f"; the slowest checkpoint of this run took {took:.0f} seconds" if took > kept else ""
        least = math.ceil(max(kept, 0 if run.grace else run.save_seconds, 1.5 * took + SAVE_MARGIN) / 60) + 5
        problems.append(Problem(where="--time", given=said + slow, allowed="more than that", fix=f"--time {least}m"))
    elif limit is not None and not run.grace and run.save_seconds >= limit:
        given = f"{said}, with grace = 0 and a checkpoint every {run.checkpoint_every}"
        problems.append(Problem(where="--time", given=given, allowed="more than that", fix="--grace 30"))
    return problems


def merged(made: Any, patch: Any) -> Any:
    """Return ``made`` with a user's ``patch`` merged in, as Kubernetes merges strategically.

    Objects are merged by key; lists are joined, but objects of one ``name`` are merged; else the patch's value holds.
    """
    if isinstance(made, dict) and isinstance(patch, dict):
        return {**made, **{key: merged(made[key], value) if key in made else value for key, value in patch.items()}}
    if not (isinstance(made, list) and isinstance(patch, list)):
        return patch
    found = list(made)
    names = [one.get("name") if isinstance(one, dict) else None for one in made]
    for value in patch:
        name = value.get("name") if isinstance(value, dict) else None
        if name is not None and name in names:
            found[names.index(name)] = merged(found[names.index(name)], value)
        else:
            found.append(value)
    return found
