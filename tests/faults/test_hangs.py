"""A rank that does not come to where others wait for it is named in time, with where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from hangs import HANGS, LATE, TIMEOUT, Hang, run_with

_ALWAYS = (0, 2, 4, 9, 17)


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(hang, id=hang.name, marks=() if at in _ALWAYS else pytest.mark.long)
        for at, hang in enumerate(HANGS)
    ],
)
def test_who_does_not_come_is_named(hang: Hang, tmp_path: Path) -> None:
    found = run_with(hang, tmp_path)
    assert found.error.rank == hang.rank
    assert (found.error.kind, found.event["cause"]) == ("hang", hang.cause)
    assert found.event["ranks"] == [hang.rank]
    for word in (f"rank {hang.rank}", *hang.words):
        assert word in str(found.error)
    assert found.seconds < TIMEOUT + LATE
