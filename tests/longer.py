"""Rows of a law that ``make long`` adds to those of every run of the tests."""

from __future__ import annotations

from typing import Any

import pytest


def longer(*rows: Any) -> list[Any]:
    """The rows, of one value or a tuple of them, for ``pytest.mark.parametrize``: only ``make long`` runs them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]
