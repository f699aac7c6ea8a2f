"""Rules that the source keeps: keys of plans are read in few files, names stand once, errors are in the user's words.

``plan_keys.json`` says which files read which key of a plan: the table is to grow shorter, and says what a new key
costs. ``PYTHONPATH=tests python tests/unit/test_plan_keys.py`` writes it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

from law_rows import in_one_test
from parsed_source import nodes_of
from phalanx.cli.checkpoint_verbs import export_command
from phalanx.cli.output import show_error
from phalanx.cli.plan_verbs import forecast_command
from phalanx.cli.train import train_command
from phalanx.cli.trial_verbs import bench_command, prove_command
from phalanx.config import Plan
from phalanx.errors import LossError, PhalanxError, SpecError

pytestmark = pytest.mark.quick
HERE = Path(__file__).resolve()
SOURCE = HERE.parents[2] / "src" / "phalanx"
TABLE = HERE.with_name("plan_keys.json")
KEYS = {field.name for field in fields(Plan)}


def readers(nodes: list[ast.AST]) -> set[str]:
    """The keys that a source reads of something that is a plan: by its name, by its annotation, or made from one."""
    plans = {"plan"}
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            if re.fullmatch(r"(config\.|px\.)?Plan( \| None)?", ast.unparse(node.annotation).strip("'\"")):
                plans.add(node.arg if isinstance(node, ast.arg) else _name(node.target))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            made = ast.unparse(node.value) if name in ("Plan", "parse", "replace", "within") else ""
            if re.match(r"(px\.)?Plan(\.parse)?\(|replace\((\w+\.)*_?plan\b|within\(", made):
                plans.add(_name(node.targets[0]))
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in KEYS and _name(node.value) in plans:
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and _name(node.args[0]) in plans
        ):
            found.update(KEYS & {leaf.value for leaf in ast.walk(node.args[1]) if isinstance(leaf, ast.Constant)})
    return found


def _name(node: ast.expr) -> str:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_")


def table() -> dict[str, list[str]]:
    """For each key the files that read it."""
    by_file = {str(path.relative_to(SOURCE)): readers(nodes_of(path)) for path in sorted(SOURCE.rglob("*.py"))}
    return {key: [name for name, keys in by_file.items() if key in keys] for key in sorted(KEYS)}


def test_keys_are_read_where_the_table_says() -> None:
    allowed, found = json.loads(TABLE.read_text()), table()
    assert sorted(allowed) == sorted(found)
    more = {key: sorted(set(found[key]) - set(allowed[key])) for key in found if set(found[key]) - set(allowed[key])}
    less = {key: sorted(set(allowed[key]) - set(found[key])) for key in found if set(allowed[key]) - set(found[key])}
    assert more == {}, "read where they were not: ask the file where the technique lives instead"
    assert less == {}, "no longer read there: PYTHONPATH=tests python tests/unit/test_plan_keys.py takes it out"


def modules(source: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if not path.stem.startswith("__"):
            found[path.stem].append(str(path.relative_to(source)))
    return found


def classes(source: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(source)}: {node.name}")
    return found


def test_a_name_of_a_module_or_a_class_stands_once() -> None:
    """No two modules share a name, and no two classes, leading underscores left out."""
    places = [*modules(SOURCE).items(), *classes(SOURCE).items()]
    assert {name: where for name, where in places if len(where) > 1} == {}


OF_COMMANDS = (  # what these say is said by commands alone
    "train/batch_scaling.py",
    *("planner/nearest_fit.py", "planner/question.py", "planner/rank.py", "planner/advise.py"),
    *("launch/targets/", "launch/check_findings.py", "preflight/launch_check.py"),  # no call launches elsewhere
)
OPTIONS = [
    name
    for command in (train_command, prove_command, bench_command, forecast_command, export_command)
    for one in command.params
    if isinstance(one, click.Option)
    for name in one.opts
    if name.startswith("--")
]
OPTION = re.compile(rf"(?<![\w-])(?:{'|'.join(OPTIONS)})(?![\w-])")
NO_SUCH_CALL = re.compile(r"(?<![\w.])job\(\w+=")


@cache
def said() -> list[tuple[str, str]]:
    """What the code that trains may say: file and text, docstrings left out."""
    found = list[tuple[str, str]]()
    trains = "config data comm files checkpoint launch parallel train preflight placement planner verify"
    for folder in trains.split():
        for path in sorted((SOURCE / folder).rglob("*.py")):
            alone = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
            for node in nodes_of(path):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                    found.append((str(path.relative_to(SOURCE)), node.value))
    return found


def test_a_run_says_nothing_in_the_words_of_the_command_line() -> None:
    wrong = [
        (path, text)
        for path, text in said()
        if OPTION.search(text) and text.strip() not in OPTIONS and "phalanx " not in text
    ]
    assert [one for one in wrong if not one[0].startswith(OF_COMMANDS)] == []


def test_no_call_is_advised_that_there_is_not() -> None:
    assert [(path, text) for path, text in said() if NO_SUCH_CALL.search(text)] == []


@in_one_test(
    ("error", "shown"),
    [
        (SpecError.of("run.folder", "a", "b", "resume=True"), "try: --resume\n"),
        (SpecError.of("run.folder", "a", "b", 'folder="runs/my run-1"'), "try: --run 'runs/my run-1'\n"),
        (SpecError.of("plan", "a", "b", 'cluster="8xA100-80GB"'), "try: --on 8xA100-80GB\n"),
        (
            SpecError.of("cluster", "8xA100", "b", "batch=8"),
            "--on: given 8xA100; allowed: b\n    try: --batch 8\n",
        ),
        (LossError('a\n    try: resume=True, on_spike="skip"; or b'), "try: --resume --on-spike skip; or b\n"),
        (
            LossError('resume=True\n\nwhat to do: alone: plan="single"'),
            "resume=True\n\nwhat to do: alone: --plan single\n",
        ),
    ],
)
def test_the_command_line_says_it_in_options(
    error: PhalanxError, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_error(error, as_json=False)
    assert capsys.readouterr().err.endswith(shown)


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n")
