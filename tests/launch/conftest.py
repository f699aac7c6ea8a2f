"""No command outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launched import end_all


@pytest.fixture(autouse=True)
def _commands_end(_nothing_left: None) -> Iterator[None]:
    yield
    end_all()
