"""The reader of a target's options, and refusals that several targets share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
_SHOWN = ("setup", "sbatch", "patch")  # options whose text others can read
# The value of a variable or an option in a line of shell, unless it is looked up as the line runs
_SET = re.compile(r"""(?:(?<![\w-])([A-Za-z_]\w*)\+?=|--([A-Za-z][\w-]*)(?:=|\s+(?!-)))["']?(?![$`"'\s;&|]|$)""")

NODE_OPTIONS = {
    "nodes": Option(help="nodes, each with an equal part of the plan's processes [1]", example="2", kind="count"),
    "gpus-per-node": Option(
        help="GPUs of each node [one a device of the plan]; 0: none", example="8", kind="count", least=0
    ),
    "device": Option(help="name of these GPUs, by which the planner chooses where no plan is given", example="H100"),
}
"""Options of every queue."""

SAVE_MARGIN = 30
"""Seconds beside those of a save, for the work before it and after it."""


def read_options(table: Mapping[str, Option], options: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of ``options`` by the kinds of ``table``, and the problems in them."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, option in table.items():
        text = options.get(name, "")
        if text or (name in options and option.kind != "file"):
            try:
                values[name] = _value(name, option, text)
                problems += [_secret(name, one) for one in secrets_in(values[name])] if name in _SHOWN else []
            except SpecError as error:
                problems += error.problems
        elif option.needed:
            problems.append(wrong_option(table, name, "none", option.help))
    return values, problems


def _value(name: str, option: Option, text: str) -> Any:
    fix = f"--{name} {option.example}"
    if option.kind == "count":
        if text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) >= option.least:
            return int(text)
        raise SpecError.of(f"--{name}", repr(text), f"a whole number, {option.least} or more", fix)
    if option.kind == "time":
        try:
            return math.ceil(parse_duration(text))
        except ValueError:
            raise SpecError.of(f"--{name}", repr(text), "a time such as 30m, 12h or 2d", fix) from None
    if option.kind == "file":
        path = Path(text).expanduser()
        found = (read_toml if path.suffix == ".toml" else read_json)(path, where=f"--{name}", fix=fix)
        if not isinstance(found, dict):
            raise SpecError.of(f"--{name}", f"{path} with {str(found)[:60]}", "a JSON object", fix)
        return found
    return text


def wrong_option(table: Mapping[str, Option], name: str, given: str, allowed: str, fix: str = "") -> Problem:
    """Return a problem of the option ``name``; ``fix``: instead of its example."""
    return Problem(where=f"--{name}", given=given, allowed=allowed, fix=fix or f"--{name} {table[name].example}")


def secrets_in(value: Any) -> list[str]:
    """Return names of secrets whose values stand in lines of shell, or in a table for a launch.

    Not of a value that is looked up: ``KEY=$(cat file)``, ``KEY=$OTHER``, or an entry with ``valueFrom``.
    """
    parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    names = [name for part in parts if not isinstance(part, str) for name in secrets_in(part)]
    if isinstance(value, str):
        names = [first or second for first, second in _SET.findall(value)]
    elif isinstance(value, dict):
        names += [name for name, text in value.items() if name.isupper() and isinstance(text, str)]
        names += [str(value["name"])] if "name" in value and "value" in value else []
    words = {name: {*re.split("[_-]", name.upper())} for name in names}
    return [name for name, parts in words.items() if parts & _SECRET and not parts & _PLACES]


def _secret(option: str, name: str) -> Problem:
    allowed = "text that all may read who may see the run: no secret"
    fix = f"{name} from a file, this shell or a secret of the target, which the job reads itself"
    return Problem(where=f"--{option}", given=f"{name}, named as a secret", allowed=allowed, fix=fix)


def uneven_nodes(plan: Plan, nodes: int) -> list[Problem]:
    """Return a problem if the processes of ``plan`` do not divide by ``nodes``."""
    if plan.processes % nodes == 0:
        return []
    given = f"{nodes}, for the {show_counted(plan.processes, 'process')} of {plan}"
    allowed = "a number that divides them: each node has equally many"
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
    slow = f"; the slowest checkpoint of this run took {took:.0f} seconds" if took else ""
    if 0 < run.grace < took:
        enough = math.ceil(1.5 * took)
        fix = f"--grace {enough}" if enough <= most_grace else "--grace 0 --checkpoint-every 10m"
        given = f"{run.grace:g} seconds{slow}"
        problems.append(Problem(where="--grace", given=given, allowed="more than that", fix=fix))
    least = max(kept, took, 0 if run.grace else run.save_seconds)
    if limit is not None and limit <= least:
        rare = "" if run.grace else f", with grace = 0 and a checkpoint every {run.checkpoint_every}"
        fix = f"--time {math.ceil((1.5 * least + SAVE_MARGIN) / 60) + 5}m"
        problems.append(Problem(where="--time", given=said + slow + rare, allowed="more than that", fix=fix))
    return problems


def merged(made: Any, patch: Any) -> Any:
    """Return ``made`` with a user's ``patch`` merged in, as Kubernetes merges strategically.

    Objects are merged by key; lists are joined, but objects of one ``name`` are merged; else the patch's value holds.
    """
    if isinstance(made, dict) and isinstance(patch, dict):
        return {**made, **{key: merged(made.get(key), value) for key, value in patch.items()}}
    if not (isinstance(made, list) and isinstance(patch, list)):
        return patch
    found = dict[Any, Any]()
    for number, one in enumerate([*made, *patch]):
        name = one.get("name", number) if isinstance(one, dict) else number
        found[name] = merged(found.get(name), one)
    return [*found.values()]
