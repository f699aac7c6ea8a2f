"""Rows of a law: in one test, which is collected once and lists every row that fails; and those of ``make long``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def in_one_test(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Decorate a test as ``pytest.mark.parametrize`` does, for rows that are cheap and need no folder of their own."""
    named, given = [names] if isinstance(names, str) else list(names), list(rows)

    def decorate(test: Test) -> Test:
        @wraps(test)
        def every(*place: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for row in given:
                values = dict(zip(named, [row] if isinstance(names, str) else row, strict=True))
                with subtests.test(**values):
                    test(*place, **values, **({"subtests": subtests} if nested else {}), **fixtures)

        asked = inspect.signature(test)
        nested = "subtests" in asked.parameters
        others = [one for one in asked.parameters.values() if one.name not in {*named, "subtests"}]
        last = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        every.__signature__ = asked.replace(parameters=[*others, last])
        return every

    return decorate


def longer(*rows: Any) -> list[Any]:
    """The rows, of one value or a tuple of them, for ``pytest.mark.parametrize``: only ``make long`` runs them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]
