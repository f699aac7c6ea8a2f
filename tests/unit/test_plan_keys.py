"""A key of a plan is read where its technique lives, and nowhere else: ``plan_keys.json`` says which files those are.

A file that begins to read a key fails here, and one that no longer does: the table is to grow shorter, and says what a
new key costs. ``python tests/unit/test_plan_keys.py`` writes it.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.config import Plan

HERE = Path(__file__).resolve()
SOURCE = HERE.parents[2] / "src" / "phalanx"
TABLE = HERE.with_name("plan_keys.json")
KEYS = {field.name for field in fields(Plan)}

pytestmark = pytest.mark.quick


def readers(text: str) -> set[str]:
    """The keys that a source reads of something that is a plan: by its name, by its annotation, or made from one."""
    tree = ast.parse(text)
    plans = {"plan"}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            if re.fullmatch(r"(config\.|px\.)?Plan( \| None)?", ast.unparse(node.annotation).strip("'\"")):
                plans.add(node.arg if isinstance(node, ast.arg) else _name(node.target))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = ast.unparse(node.value)
            if re.match(r"(px\.)?Plan(\.parse)?\(|replace\((\w+\.)*_?plan\b|within\(", made):
                plans.add(_name(node.targets[0]))
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in KEYS and _name(node.value) in plans:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and _name(node.args[0]) in plans:
            found.update(KEYS & {leaf.value for leaf in ast.walk(node.args[1]) if isinstance(leaf, ast.Constant)})
    return found


def _name(node: ast.expr) -> str:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_")


def table() -> dict[str, list[str]]:
    """For each key the files that read it."""
    by_file = {str(path.relative_to(SOURCE)): readers(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    return {key: [name for name, keys in by_file.items() if key in keys] for key in sorted(KEYS)}


def test_keys_are_read_where_the_table_says() -> None:
    allowed, found = json.loads(TABLE.read_text()), table()
    assert sorted(allowed) == sorted(found)
    more = {key: sorted(set(found[key]) - set(allowed[key])) for key in found if set(found[key]) - set(allowed[key])}
    less = {key: sorted(set(allowed[key]) - set(found[key])) for key in found if set(allowed[key]) - set(found[key])}
    assert more == {}, "read where they were not: ask the file where the technique lives instead"
    assert less == {}, "no longer read there: python tests/unit/test_plan_keys.py makes the table shorter"


@pytest.mark.parametrize(
    "text",
    [
        "plan.zero",
        "self.plan.zero",
        "self._plan.zero + 1",
        "def f(plan): return plan.zero",
        "def f(inner: Plan): return inner.zero",
        "there = replace(self.plan, dp=1)\nthere.zero",
        "getattr(plan, 'zero')",
    ],
)
def test_a_reader_is_seen(text: str) -> None:
    assert readers(text) == {"zero"}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n")
