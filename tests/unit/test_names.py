"""One word, one thing: no two modules share a name, and no two classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
VERBS = SOURCE / "cli"
"""One file a verb, named as it: ``plan`` the verb may stand beside ``plan`` the text."""

MODULES: dict[str, str] = {}
"""Modules that may share a name, each with why."""

CLASSES: dict[str, str] = {}
"""Classes that may share a name, leading underscores left out, each with why."""

pytestmark = pytest.mark.quick


def several(places: dict[str, list[str]], allowed: dict[str, str]) -> dict[str, list[str]]:
    return {name: where for name, where in places.items() if len(where) > 1 and name not in allowed}


def modules(source: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if not path.stem.startswith("__") and VERBS not in path.parents:
            found[path.stem].append(str(path.relative_to(source)))
    return found


def classes(source: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(source)}: {node.name}")
    return found


def test_a_name_of_a_module_stands_once() -> None:
    assert several(modules(SOURCE), MODULES) == {}


def test_a_name_of_a_class_stands_once() -> None:
    assert several(classes(SOURCE), CLASSES) == {}


def test_what_may_share_a_name_does() -> None:
    assert set(MODULES) == set(several(modules(SOURCE), {}))
    assert set(CLASSES) == set(several(classes(SOURCE), {}))


def test_a_second_one_is_found(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "limits.py").write_text("class Limits: ...\n")
    (tmp_path / "one" / "limits.py").write_text("def f():\n    class _Limits: ...\n")
    assert several(modules(tmp_path), MODULES) == {"limits": ["limits.py", "one/limits.py"]}
    assert several(classes(tmp_path), CLASSES) == {"Limits": ["limits.py: Limits", "one/limits.py: _Limits"]}
