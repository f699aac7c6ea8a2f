"""Budgets of the house: files, lines and statements of each package, and files that have a mechanism. Only lowered.

``PYTHONPATH=tests python tests/unit/test_budgets.py`` writes house_budgets.json, where less is counted now.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from parsed_source import nodes_of
from suite_minutes import SuiteMinutes

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
BUDGETS = Path(__file__).with_name("house_budgets.json")
MECHANISMS = {
    "starts processes": r"os\.fork\(|Popen\(|multiprocessing\.Process",
    "starts threads": r"threading\.Thread\(|Thread\(target",
    "handles signals": r"signal\.signal\(",
    "reads a clock": r"time\.(monotonic|time|perf_counter)\(",
    "reads the event log": r"\bEventReader\(",
    "makes digests": r"hashlib\.",
    "intercepts torch": r"Torch(Dispatch|Function)Mode|\breplaced\(",
    "lets ranks agree": r"from_every_rank|all_gather\(|broadcast\(",
    "words a refusal": r"\bProblem\(",
    "runs other programs": r"subprocess\.(run|check_output)\(",
}
"""A pattern of each mechanism; its budget is the number of files in which the pattern stands."""


@cache
def counted() -> dict[str, dict[str, list[int]]]:
    """Return files, lines and statements of each package and of the tests, and the files with each mechanism."""
    packages: dict[str, list[int]] = {}
    mechanisms = dict.fromkeys(MECHANISMS, 0)
    for path in sorted(SOURCE.rglob("*.py")):
        text, parts = path.read_text(), path.relative_to(SOURCE).parts
        statements = sum(isinstance(node, ast.stmt) for node in nodes_of(path))
        row = packages.setdefault(parts[0] if len(parts) > 1 else "top", [0, 0, 0])
        row[:] = (row[0] + 1, row[1] + text.count("\n"), row[2] + statements)
        for name, pattern in MECHANISMS.items():
            mechanisms[name] += re.search(pattern, text) is not None
    files = sorted((ROOT / "tests").rglob("*.py"))
    packages["tests"] = [len(files), sum(path.read_text().count("\n") for path in files), 0]
    return {"packages": packages, "mechanisms": {name: [count] for name, count in mechanisms.items()}}


@pytest.mark.quick
def test_nothing_is_over_its_budget() -> None:
    budgets, over = json.loads(BUDGETS.read_text()), list[str]()
    for kind, rows in counted().items():
        way = "delete as much elsewhere in the package" if kind == "packages" else "let a file with the mechanism do it"
        for name, row in rows.items():
            most = budgets[kind].get(name, [0] * len(row))
            for what, count, limit in zip(("files", "lines", "statements"), row, most, strict=False):
                words = f"{name}: {count} {what}, {count - limit} over its {limit} "
                over += [f"{words}(files, lines and statements may only fall: {way})"] * (count > limit)
    assert not over, "\n".join(over)


@pytest.mark.quick
def test_budgets_follow_what_was_deleted() -> None:
    budgets, now = json.loads(BUDGETS.read_text()), counted()
    assert {kind: set(rows) for kind, rows in budgets.items()} == {kind: set(rows) for kind, rows in now.items()}
    loose = list[str]()
    for kind, share in {"packages": 0.95, "mechanisms": 1.0}.items():
        for name, most in budgets[kind].items():
            row = now[kind][name]
            if any(count < share * limit for count, limit in zip(row, most, strict=True)):
                loose.append(f"{name}: {row}, its budget is {most}")
    assert not loose, "try: PYTHONPATH=tests python tests/unit/test_budgets.py\n" + "\n".join(loose)


@pytest.mark.quick
def test_a_folder_without_a_budget_fails_the_suite() -> None:
    suite = SimpleNamespace(held=True, minutes={"unit": 0.1, "new": 0.1})
    assert [line.split()[0] for line in SuiteMinutes.over(suite)] == ["tests/new"]


def main() -> None:
    """Lower the budgets to the present counts."""
    now = counted()
    had = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    for kind, rows in now.items():
        for name, row in rows.items():
            before = had.get(kind, {}).get(name, row)
            rows[name] = [min(count, limit) for count, limit in zip(row, before, strict=True)]
    lines = [
        f'  "{kind}": {{\n' + ",\n".join(f"    {json.dumps(name)}: {row}" for name, row in rows.items()) + "\n  }"
        for kind, rows in now.items()
    ]
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
