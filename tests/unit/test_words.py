"""Budgets of the words in docstrings, by package: plain words only, and fewer of the others. Only lowered.

``PYTHONPATH=tests python tests/unit/test_words.py`` writes word_budgets.json after docstrings were rewritten.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsed_source import nodes_of

SOURCE = Path(__file__).resolve().parents[2] / "src" / "phalanx"
BUDGETS = Path(__file__).with_name("word_budgets.json")
GOALS = {"what": 1.0, "where": 2.0, "that": 10.0, "of": 20.0, "nobody": 0.2, "whoever": 0.2, "whose": 0.2}
"""Most uses among 1,000 words of docstrings; a package that has more may not add any."""
OPENING = re.compile(r"(What|How|Of|Where|Whether|That|Those|As|Why|Who|Whose|Which|By|When)\b")
BEGINS = "first word"  # docstrings of functions and classes that begin with one of these


def docstrings() -> Iterator[tuple[str, str, bool, str]]:
    """Yield package, place, whether it may open as it likes, and text of every docstring."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                place = f"{'/'.join(parts)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}"
                yield parts[0] if len(parts) > 1 else "top", place, isinstance(node, ast.Module), text


def measured() -> tuple[dict[str, dict[str, float]], dict[tuple[str, str], str]]:
    """Return the uses among 1,000 words by package and word, and the docstring with most of each."""
    uses: dict[str, Counter[str]] = {}
    most: dict[tuple[str, str], tuple[int, str]] = {}
    for package, place, free, text in docstrings():
        words = Counter(re.findall(r"[a-z']+", text.lower()))
        here = {word: words[word] for word in GOALS} | {BEGINS: int(not free and bool(OPENING.match(text)))}
        uses.setdefault(package, Counter()).update(here | {"all": words.total()})
        for word, count in here.items():
            most[package, word] = max(most.get((package, word), (0, "")), (count, place), key=lambda one: one[0])
    rates = {
        package: {word: 1000 * one[word] / one["all"] for word in GOALS} | {BEGINS: float(one[BEGINS])}
        for package, one in uses.items()
    }
    return rates, {key: place for key, (_, place) in most.items()}


@pytest.mark.quick
def test_docstrings_keep_to_their_words() -> None:
    budgets, (rates, worst) = json.loads(BUDGETS.read_text()), measured()
    over = [
        f"{package}: {word!r} {rate:.1f}, at most {limit:g}; the most are in {worst[package, word]}"
        for package, row in rates.items()
        for word, rate in row.items()
        if rate > (limit := budgets.get(package, {}).get(word, GOALS.get(word, 0.0)))
    ]
    assert not over, "\n".join(over)


def main() -> None:
    """Lower the budgets to the present rates, rounded up, but not below the goals."""
    had, lines = json.loads(BUDGETS.read_text()), list[str]()
    for package, row in sorted(measured()[0].items()):
        limits = {word: max(GOALS.get(word, 0.0), math.ceil(rate)) for word, rate in row.items()}
        limits |= {word: min(limits[word], most) for word, most in had.get(package, {}).items()}
        lines.append(f'  "{package}": {json.dumps(limits)}')
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
